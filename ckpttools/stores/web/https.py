"""The same as `http.py`, over TLS."""

from ckpttools.stores.web.http import HttpStore

STORE = HttpStore("https")
