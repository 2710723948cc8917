"""Simulate S3 servers and proxies that do not honor all write conditions."""

from __future__ import annotations

import http
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Application = Callable[..., Iterable[bytes]]
# Header as WSGI names it.
MATCH, NONE_MATCH = "HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"


@dataclass
class Quirks:
    """A WSGI application before that of a real server.

    Attributes:
        app: the server.
        kind: what is odd about it; one of `KINDS`.
        log: methods and paths of requests.
        refuse: called with method and path; a status with which the request is refused, or 0.
    """

    app: Application
    kind: str = "none"
    log: list[tuple[str, str]] = field(default_factory=list)
    refuse: Callable[[str, str], int] = lambda method, path: 0

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        path = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        self.log.append((method, path))
        status = self.refuse(method, path)
        if not status and method in ("PUT", "POST"):
            status = KINDS[self.kind](environ)
        if not status:
            return self.app(environ, start)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(f"{status} {http.HTTPStatus(status).phrase}", [("Content-Length", "0")])
        return [b""]


def _ceph(environ: dict[str, Any]) -> int:
    """Simulate Ceph RGW 16.2, which refuses quoted tags and has no conditions for multipart uploads."""
    if environ["REQUEST_METHOD"] == "POST":
        environ.pop(NONE_MATCH, None)
    tag = environ.get(MATCH, "*")
    if tag.startswith('"'):
        return 412
    if tag != "*":
        environ[MATCH] = f'"{tag}"'
    return 0


def _dropping(*names: str) -> Callable[[dict[str, Any]], int]:
    def drop(environ: dict[str, Any]) -> int:
        for name in names:
            environ.pop(name, None)
        return 0

    return drop


def _refusing(status: int, *names: str) -> Callable[[dict[str, Any]], int]:
    return lambda environ: status if any(name in environ for name in names) else 0


KINDS: dict[str, Callable[[dict[str, Any]], int]] = {
    "none": lambda environ: 0,
    "ceph": _ceph,
    "ignores both": _dropping(MATCH, NONE_MATCH),
    "ignores If-Match": _dropping(MATCH),
    "ignores If-None-Match": _dropping(NONE_MATCH),
    "refuses If-Match": _refusing(412, MATCH),
    "does not know If-Match": _refusing(501, MATCH),
    "does not know either": _refusing(501, MATCH, NONE_MATCH),
}
