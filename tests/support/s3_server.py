"""Amazon S3 on loopback: moto's application for S3 alone.

Which of its 190 services a request is for took moto as long as the answer, and each has its line in a log.
What botocore knows of S3 is read once, not by each client anew: 60 ms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import botocore.session
import pytest
from botocore.loaders import create_loader
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


@contextmanager
def running(before: Callable[[Any], Any] = lambda app: app) -> Iterator[str]:
    """The server's address.

    Args:
        before: returns the application that stands before the server's own.
    """
    app = before(create_backend_app("s3"))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(botocore.session, "create_loader", cache(create_loader))
            yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
