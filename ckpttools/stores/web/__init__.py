"""Files over HTTP, read by range. `http.py` and `hub.py` share one client and one file class."""
