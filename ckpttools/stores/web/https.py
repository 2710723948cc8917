"""The store of `http.py` over TLS."""

from typing import ClassVar

from ckpttools.stores.web.http import HttpStore


class HttpsStore(HttpStore):
    """The store for the scheme `https`."""

    scheme: ClassVar[str] = "https"


STORE = HttpsStore()
