"""A web server on loopback: plain HTTP with ranges, and the Hugging Face Hub, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from support.hub_server import FIRST as COMMIT
from support.hub_server import Hub, taken
from support.line import Line

PAGE_SIZE = 4
_PIECE = 1 << 20


def by_python(names: list[str], path: str) -> tuple[str, str]:
    """A page of names as Python's http.server makes it."""
    links = "".join(f'<li><a href="{quote(name)}">{name}</a></li>' for name in names)
    return "text/html", f"<html><head><title>Directory listing for {path}</title></head><ul>{links}</ul>"


def by_nginx(names: list[str], path: str) -> tuple[str, str]:
    links = "".join(f'<a href="{quote(name)}">{name}</a>  01-Jan-2026 00:00  12\r\n' for name in names)
    page = f'<html><head><title>Index of {path}</title></head><pre><a href="../">../</a>\r\n{links}</pre>'
    return "text/html", page


def by_apache(names: list[str], path: str) -> tuple[str, str]:
    links = "".join(f'<tr><td><a href="{quote(path + name)}">{name}</a></td></tr>' for name in names)
    order = '<a href="?C=N;O=D">Name</a><a href="/">Parent Directory</a><a href="http://x/y">?</a>'
    return "text/html", f"<html><head><title>Index of {path}</title></head><table>{order}{links}</table>"


def by_json(names: list[str], path: str) -> tuple[str, str]:
    kinds = {True: "directory", False: "file"}
    result = [{"name": name.rstrip("/"), "type": kinds[name.endswith("/")]} for name in names]
    return "application/json", json.dumps(result)


LISTINGS = {item.__name__: item for item in (by_python, by_nginx, by_apache, by_json)}


@dataclass
class Fault:
    """What is done in place of an answer, to requests that match, so many times.

    Attributes:
        match: what "METHOD /path" has to match.
        act: does it; what it returns is sent: status, headers, body. None where the answer is sent after all.
        times: how often.
    """

    match: str
    act: Callable[[_Handler], tuple[int, dict[str, str], bytes] | None]
    times: int = 1


def status(code: int, **headers: str) -> Callable[[_Handler], tuple[int, dict[str, str], bytes]]:
    """Answers with a status and headers, `_` in their names for `-`."""
    return lambda handler: (code, {name.replace("_", "-"): text for name, text in headers.items()}, b"no\n")


def cut(nbytes: int) -> Callable[[_Handler], None]:
    """Ends the body after so many bytes."""

    def act(handler: _Handler) -> None:
        handler.cut = nbytes

    return act


def stall(seconds: float, nbytes: int = 0) -> Callable[[_Handler], None]:
    """Sends nothing for a while, after so many bytes of the body."""

    def act(handler: _Handler) -> None:
        handler.stall, handler.cut = seconds, nbytes

    return act


def stating(**headers: str) -> Callable[[_Handler], None]:
    """Answers with other headers."""

    def act(handler: _Handler) -> None:
        handler.stated = {name.replace("_", "-"): text for name, text in headers.items()}

    return act


@dataclass
class WebServer:
    """What a server has, does and did.

    Attributes:
        files: content by path, without the slash before it.
        address: host and port.
        listing: makes the page of a directory; None where there is none.
        ranges: whether it knows them.
        etags: whether it has them.
        versions: whether it has anything by which a file can be told from another state of it.
        faults: see `Fault`; those that are used up go.
        log: "METHOD /path", with the range where one was asked for.
        stored: what the hub sends in place of what it lists, by repository and path.
        gated, secret: repositories that are read with the token alone.
        hub: what uploads change, beside files.
        signed: how often addresses were signed; those signed before `expired` are no more of use.
        delay: seconds before each answer.
        down: what answers go over.
        nbytes: that were sent as bodies.
        most_at_once: requests that waited together.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    address: str = ""
    listing: Callable[[list[str], str], tuple[str, str]] | None = by_python
    ranges: bool = True
    etags: bool = True
    versions: bool = True
    faults: list[Fault] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    gated: set[str] = field(default_factory=set)
    hub: Hub = field(default_factory=Hub)
    stored: dict[str, bytes] = field(default_factory=dict)
    secret: str = "hf_secret"
    signed: int = 0
    expired: int = 0
    delay: float = 0
    down: Line = field(default_factory=Line)
    nbytes: int = 0
    waiting: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, root: str, directory: Path) -> None:
        """Serves all files of a directory."""
        for path in directory.rglob("*"):
            if path.is_file():
                self.files[f"{root}/{path.relative_to(directory).as_posix()}"] = path.read_bytes()

    def fault(self, match: str, act: Callable, times: int = 1) -> None:
        self.faults.append(Fault(match, act, times))

    def asked(self, match: str = "") -> list[str]:
        """What of the log matches."""
        return [item for item in self.log if re.search(match, item)]

    def names(self, path: str) -> list[str]:
        """What is directly in a directory; directories end in a slash."""
        start = f"{path}/" if path else ""
        below = [name[len(start) :].partition("/") for name in self.files if name.startswith(start)]
        return sorted({first + slash for first, slash, _ in below})

    def wait(self) -> None:
        if not self.delay:
            return
        with self.lock:
            self.waiting += 1
            self.most_at_once = max(self.most_at_once, self.waiting)
        time.sleep(self.delay)
        with self.lock:
            self.waiting -= 1

    def take(self, line: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and re.search(fault.match, line):
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Else the body waits 40 ms for the header to be confirmed.
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server
    cut: int | None
    stall: float
    stated: dict[str, str]
    sent: bytes | None

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        web, asked = self.server.web, self.headers.get("Range", "")
        self.cut, self.stall, self.stated, self.sent = None, 0, {}, None
        line = f"{self.command} {unquote(self.path)}"
        web.log.append(f"{line} {asked}".strip())
        web.wait()
        fault = web.take(line)
        answer = fault.act(self) if fault else None
        if answer:
            self.body()
        self.send(*(answer or self.answer()))

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def body(self) -> bytes:
        """What was sent, as far as it came."""
        if self.sent is None:
            self.sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return self.sent

    def send(self, code: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(code)
        for name, text in ({"Content-Length": str(len(body))} | headers | self.stated).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        with self.server.web.lock:
            self.server.web.nbytes += len(body)
        # In pieces: a whole file would arrive at once, after a silence that clients do not wait for.
        shown = memoryview(body)[: self.cut]
        for start in range(0, len(shown), _PIECE):
            self.server.web.down.carry(len(shown[start : start + _PIECE]))
            self.wfile.write(shown[start : start + _PIECE])
        self.wfile.flush()
        if self.stall:
            time.sleep(self.stall)
        if self.cut is not None:
            self.close_connection = True

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        web, url = self.server.web, urlsplit(self.path)
        path = unquote(url.path).lstrip("/")
        if self.command in ("POST", "PUT"):
            body = self.body()
            if len(body) < int(self.headers.get("Content-Length", 0)):
                return 400, {}, b"cut"
            return taken(web, self.command, path, self.headers, body)
        if path.startswith("api/models/"):
            return self.hub_api(path.removeprefix("api/models/"), parse_qs(url.query))
        if match := re.fullmatch(r"([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolved(match[1], match[2], match[3])
        if match := re.fullmatch(r"signed/(\d+)/(.+)", path):
            if int(match[1]) <= web.expired:
                return 403, {}, b"expired"
            assert "Authorization" not in self.headers
            return self.file(f"hub/{match[2]}", web.stored.get(match[2]))
        return self.file(path) if path in web.files else self.directory(path)

    def file(self, path: str, stored: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        web = self.server.web
        content = web.files[path] if stored is None else stored
        etag = f'"{digest("md5", content)}"'
        headers = {"Last-Modified": formatdate(len(content), usegmt=True)} | (
            {"ETag": etag} if web.etags else {}
        )
        headers = headers if web.versions else {}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        condition = self.headers.get("If-Range", etag)
        if not match or not web.ranges or (condition not in headers.values() and condition != etag):
            return 200, headers, content
        start, stop = int(match[1]), min(int(match[2]) + 1, len(content))
        if start >= stop:
            return 416, {"Content-Range": f"bytes */{len(content)}"}, b""
        return (
            206,
            headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"},
            content[start:stop],
        )

    def directory(self, path: str) -> tuple[int, dict[str, str], bytes]:
        web, named = self.server.web, path.rstrip("/")
        names = web.names(named)
        if not names or web.listing is None:
            return 404, {}, b"nothing"
        if path and not path.endswith("/"):
            return 301, {"Location": f"/{quote(path)}/"}, b""
        kind, page = web.listing(names, f"/{named}/" if named else "/")
        return 200, {"Content-Type": kind}, page.encode()

    # -- the hub

    def hub_refusal(self, repo: str) -> tuple[int, dict[str, str], bytes] | None:
        web = self.server.web
        if not web.names(f"hub/{repo}"):
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repo in web.gated and self.headers.get("Authorization") != f"Bearer {web.secret}":
            code = 403 if "Authorization" in self.headers else 401
            return code, {"X-Error-Code": "GatedRepo"}, b"{}"
        return None

    def hub_api(self, path: str, query: dict[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        web = self.server.web
        owner, name, kind, revision = path.split("/", 3)
        repo = f"{owner}/{name}"
        if not web.names(f"hub/{repo}") and repo not in web.hub.private:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if revision not in web.hub.names(repo):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if kind == "revision":
            declared = {"id": repo, "sha": web.hub.head(repo), "private": web.hub.private.get(repo, False)}
            return 200, {}, json.dumps(declared).encode()
        if kind == "commits":
            commits = [(COMMIT, "initial commit", ""), *web.hub.commits.get(repo, ())]
            declared = [
                dict(zip(("id", "title", "message"), commit, strict=True)) for commit in commits[::-1]
            ]
            return 200, {}, json.dumps(declared[:1]).encode()
        entries = [self.entry(repo, name) for name in sorted(web.files) if name.startswith(f"hub/{repo}/")]
        entries.insert(0, {"type": "directory", "oid": "0", "size": 0, "path": "sub"})
        start = int(query.get("cursor", ["0"])[0])
        more = f"http://{web.address}/api/models/{path}?recursive=true&cursor={start + PAGE_SIZE}"
        link = {"Link": f'<{more}>; rel="next"'} if start + PAGE_SIZE < len(entries) else {}
        return 200, link, json.dumps(entries[start : start + PAGE_SIZE]).encode()

    def entry(self, repo: str, name: str) -> dict:
        content = self.server.web.files[name]
        path = name.removeprefix(f"hub/{repo}/")
        entry = {"type": "file", "oid": git_name(content), "size": len(content), "path": path}
        if path.endswith(".safetensors") or name in self.server.web.hub.large:
            entry["lfs"] = {"oid": digest("sha256", content), "size": len(content)}
        return entry

    def resolved(self, repo: str, commit: str, path: str) -> tuple[int, dict[str, str], bytes]:
        web = self.server.web
        if refusal := self.hub_refusal(repo):
            return refusal
        if commit not in web.hub.names(repo) or f"hub/{repo}/{path}" not in web.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        entry = self.entry(repo, f"hub/{repo}/{path}")
        if "lfs" not in entry:
            code, headers, body = self.file(f"hub/{repo}/{path}", web.stored.get(f"{repo}/{path}"))
            return code, headers | {"ETag": f'"{entry["oid"]}"', "X-Repo-Commit": COMMIT}, body
        with web.lock:
            web.signed += 1
        # Another host than the hub, as far as a token is concerned.
        there = (
            f"http://localhost:{web.address.partition(':')[2]}/signed/{web.signed}/{quote(f'{repo}/{path}')}"
        )
        linked = {"X-Linked-Etag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(entry["lfs"]["size"])}
        return 302, {"Location": there, "X-Repo-Commit": COMMIT, **linked}, b""


def hub_name(path: str, content: bytes) -> str:
    """What the hub, and its cache, call a content."""
    return digest("sha256", content) if path.endswith(".safetensors") else git_name(content)


@cache
def git_name(content: bytes) -> str:
    """What git calls a file."""
    result = hashlib.sha1(b"blob %d\0" % len(content))
    result.update(content)
    return result.hexdigest()


@cache
def digest(algorithm: str, content: bytes) -> str:
    return hashlib.new(algorithm, content).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    web: WebServer

    def handle_error(self, *request: object) -> None:
        """Clients that close connections are no defects."""


@contextmanager
def web_server() -> Iterator[WebServer]:
    """A server, until the `with` ends."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.web = WebServer(address=f"127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.web
        finally:
            server.shutdown()
            thread.join()
