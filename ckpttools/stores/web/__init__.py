"""Files over HTTP, read by ranges: `http.py` and `hub.py` share one client and one file class."""
