"""A small Google Cloud Storage on loopback: its APIs, XML here and in `gcs_writes`, JSON in `gcs_json`.

Below `/azure` it answers as Azure Blob Storage does, whose listings are other ones.
Objects are bytes in a dictionary, each with a generation and an ETag that change with every `put`. Requests
are logged, so that tests can count them, and go wrong on demand.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from support import gcs_json
from support.gcs_writes import Upload, written
from support.line import Line

_GENERATIONS = count(1_700_000_000_000_000)


class Request(NamedTuple):
    """One request: method, path with query, and the `Range` that was asked for."""

    method: str
    path: str
    range: str = ""


class Object(NamedTuple):
    """What a key holds."""

    content: bytes
    generation: int
    meta: Mapping[str, str] = {}
    changed: float = 0

    @property
    def etag(self) -> str:
        return f'"{self.generation:x}"'


@dataclass
class Fault:
    """What goes wrong with the next requests whose `METHOD path` matches.

    Attributes:
        match: regular expression.
        count: requests that it happens to.
        status: the answer's status; 0 for the true one.
        headers: of the answer.
        body: of the answer.
        cut: bytes of the body after which the connection is closed.
        is_dropped: whether it is closed before the answer, when what was asked is done.
        stall: seconds without a byte, in the middle of the body.
        then: called once the answer has been sent, or cut.
    """

    match: str = "."
    count: int = 1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    cut: int | None = None
    is_dropped: bool = False
    stall: float = 0
    then: Callable[[], object] | None = None


class Server:
    """The server, in threads of this process.

    Attributes:
        url: where it answers.
        buckets: bucket -> key -> object.
        log: all requests.
        faults: what goes wrong.
        page: names in one page of a listing.
        latency: seconds before each answer.
        down, up: what answers go over, and what is written.
        heeds_conditions: whether `If-Match` is looked at.
        most_at_once: the most requests that were answered at the same time.
        uploads: those in parts that are not complete.
        pieces: what came of those that the JSON API takes in pieces, by bucket and key.
        writing: held while something is written.
    """

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, Object]] = {}
        self.uploads: dict[str, Upload] = {}
        self.pieces: dict[tuple[str, str], bytearray] = {}
        self.writing = threading.Lock()
        self.reset()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def reset(self) -> None:
        """No faults and no log; what is stored stays."""
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.page = 1000
        self.latency = 0.0
        self.down, self.up = Line(), Line()
        self.heeds_conditions = True
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[Server]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def put(
        self, bucket: str, key: str, content: bytes, meta: Mapping[str, str] = MappingProxyType({})
    ) -> Object:
        built = Object(content, next(_GENERATIONS), meta, time.time())
        self.buckets.setdefault(bucket, {})[key] = built
        return built

    @contextmanager
    def answering(self) -> Iterator[None]:
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1

    def fault(self, method_and_path: str) -> Fault | None:
        for item in self.faults:
            if item.count > 0 and re.search(item.match, method_and_path):
                item.count -= 1
                return item
        return None

    @contextmanager
    def refusing_writes(self, after: int) -> Iterator[None]:
        """Within it so many requests that write are answered, and each later one is refused."""
        left, before = [after], self.fault

        def fault(method_and_path: str) -> Fault | None:
            if method_and_path.split(" ")[0] in ("PUT", "POST", "DELETE"):
                left[0] -= 1
                if left[0] < 0:
                    return Fault(status=400, body="<Error><Message>no more</Message></Error>")
            return before(method_and_path)

        self.fault = fault  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.fault


class _Handler(BaseHTTPRequestHandler):
    owner: Server
    protocol_version = "HTTP/1.1"
    # Else each answer waits for the acknowledgement of its headers: 40 ms.
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """The log is the owner's."""

    def do_GET(self) -> None:
        self.owner.log.append(Request(self.command, self.path, self.headers.get("Range", "")))
        with self.owner.answering():
            time.sleep(self.owner.latency)
            self.owner.up.carry(int(self.headers.get("Content-Length") or 0))
            self._answer()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path).lstrip("/")
        in_azure = path.startswith("azure/")
        bucket, _, key = path.removeprefix("azure/").partition("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        fault = self.owner.fault(f"{self.command} {unquote(self.path)}") or Fault()
        objects = self.owner.buckets.get(bucket)
        if fault.status:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._send(fault.status, fault.body.encode(), fault.headers, fault)
        elif gcs_json.is_asked(url.path):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            which = self.headers.get("Content-Range", "")
            status, content, headers = gcs_json.answer(self.owner, self.command, url.path, query, body, which)
            self._send_part(status, content, headers, fault)
        elif self.command not in ("GET", "HEAD"):
            answer = written(self.owner, self, bucket, key, query)
            self._send(answer.status, answer.body.encode(), answer.headers, fault)
        elif objects is None:
            self._refuse(404, "NoSuchBucket", "The specified bucket does not exist.")
        elif "uploads" in query:
            self._send(200, _uploads(self.owner.uploads, bucket, query), {}, fault)
        elif key:
            self._send_object(objects.get(key), fault)
        else:
            page = _page(objects, query, self.owner.page)
            self._send(200, (_azure_listing if in_azure else _listing)(*page), {}, fault)

    def _vendor(self) -> str:
        return "ms" if self.path.startswith("/azure/") else "goog"

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        self._send(status, body.encode(), {}, Fault())

    def _send_object(self, result: Object | None, fault: Fault) -> None:
        if result is None:
            self._refuse(404, "NoSuchKey", "The specified key does not exist.")
            return
        expected = self.headers.get("If-Match", result.etag)
        if self.owner.heeds_conditions and expected != result.etag:
            self._refuse(412, "PreconditionFailed", "At least one of the pre-conditions did not hold.")
            return
        headers = {
            "ETag": result.etag,
            "x-goog-generation": str(result.generation),
            "Last-Modified": _date(result),
            **{f"x-{self._vendor()}-meta-{name}": value for name, value in result.meta.items()},
        }
        self._send_part(200, result.content, headers, fault)

    def _send_part(self, status: int, content: bytes, headers: dict[str, str], fault: Fault) -> None:
        """An answer, or the range of it that was asked for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not match or status != 200:
            self._send(status, content, headers, fault)
            return
        size = len(content)
        start, stop = int(match[1]), min(size, int(match[2] or size) + 1)
        if start >= size:
            self._refuse(416, "InvalidRange", "The requested range cannot be satisfied.")
            return
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._send(206, content[start:stop], headers, fault)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], fault: Fault) -> None:
        if fault.is_dropped:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        sent = len(body) if fault.cut is None and not fault.stall else fault.cut or 0
        if self.command != "HEAD":
            self.owner.down.carry(sent)
            self.wfile.write(body[:sent])
            if fault.stall:
                self.wfile.flush()
                time.sleep(fault.stall)
                self.close_connection = True
        if fault.cut is not None:
            self.close_connection = True
        if fault.then:
            fault.then()


def _page(
    objects: Mapping[str, Object], query: Mapping[str, str], limit: int
) -> tuple[dict[str, Object], list[str], str]:
    """Objects and what keys have in common before a delimiter; where the next page begins, "" for nowhere."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("marker") or query.get("start-after", "")
    names = {_entry(key, prefix, delimiter): key for key in sorted(objects) if key.startswith(prefix)}
    rest = [name for name in names if name > after]
    shown = rest[:limit]
    result = {name: objects[name] for name in shown if names[name] == name}
    return result, [name for name in shown if name not in result], shown[-1] if rest[limit:] else ""


def _listing(objects: Mapping[str, Object], prefixes: Sequence[str], more: str) -> bytes:
    parts = [
        *(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in prefixes),
        *(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{_iso(item.changed)}</LastModified>"
            f"<ETag>{escape(item.etag)}</ETag><Size>{len(item.content)}</Size></Contents>"
            for name, item in objects.items()
        ),
        f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>",
        f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else "",
    ]
    return f"<?xml version='1.0'?><ListBucketResult>{''.join(parts)}</ListBucketResult>".encode()


def _uploads(uploads: Mapping[str, Upload], bucket: str, query: Mapping[str, str]) -> bytes:
    parts = (
        f"<Upload><Key>{escape(item.key)}</Key><UploadId>{name}</UploadId>"
        f"<Initiated>{_iso(item.begun)}</Initiated></Upload>"
        for name, item in list(uploads.items())
        if item.bucket == bucket and item.key.startswith(query.get("prefix", ""))
    )
    return f"<ListMultipartUploadsResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'>{''.join(parts)}<IsTruncated>false</IsTruncated></ListMultipartUploadsResult>".encode()


def _azure_listing(objects: Mapping[str, Object], prefixes: Sequence[str], more: str) -> bytes:
    parts = [
        *(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in prefixes),
        *(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{_date(item)}</Last-Modified>"
            f"<Etag>{item.etag.strip(chr(34))}</Etag><Content-Length>{len(item.content)}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for name, item in objects.items()
        ),
    ]
    return (
        f"<?xml version='1.0'?><EnumerationResults><Blobs>{''.join(parts)}</Blobs>"
        f"<NextMarker>{escape(more)}</NextMarker></EnumerationResults>"
    ).encode()


def _date(result: Object) -> str:
    return formatdate(result.changed, usegmt=True)


def _iso(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(moment))


def _entry(key: str, prefix: str, delimiter: str) -> str:
    """What a listing names instead of a key: itself, or what it begins with."""
    rest = key[len(prefix) :]
    return prefix + rest.partition(delimiter)[0] + delimiter if delimiter and delimiter in rest else key
