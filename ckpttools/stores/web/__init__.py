"""Files that lie behind HTTP, read by ranges: `http.py` and `hub.py` over one client and one kind of file."""
