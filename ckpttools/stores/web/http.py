"""Files on any web server: http://host/path. Keys are URLs without the scheme.

HTTP has no directories. A path counts as a directory if the server has a listing page for it, or if files
with the usual names of a model exist below it.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Container, Iterable, Mapping
from email.utils import parsedate_to_datetime
from typing import ClassVar, NamedTuple
from urllib.parse import quote, urlsplit

from urllib3.response import BaseHTTPResponse

from ckpttools.core.errors import CheckpointError, FormatError, StorageError, UsageError
from ckpttools.stores.base import DirEntry, FileKind, Status, is_inside
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.web.client import Logins, discard, status_text
from ckpttools.stores.web.file import HEAD, Validator, WebFile, WebStore, length_in
from ckpttools.stores.web.listing import names_in

_WEIGHTS = ".safetensors"
# Minimum bytes to read from weight files, to detect a web page that is sent instead.
_SHORTEST = 1024
_INDEX = "model.safetensors.index.json"
# Names to look for on servers without listings: files of models and of Orbax items.
MODEL_NAMES = (
    _INDEX,
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "quantization_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.json",
    "chat_template.jinja",
    "manifest.ocdbt",
    "_METADATA",
    "_CHECKPOINT_METADATA",
)
# How long results are cached, in seconds. Opening a checkpoint requests the same names again and again.
# Opened files are always checked again after they have been read.
_STATE_SECONDS = 60.0
_LARGEST_PAGE = 64 << 20
_FILE_SUFFIX = re.compile(r".\.[A-Za-z]{2,}$")
_HUB = frozenset(("huggingface.co", "www.huggingface.co", "hf.co"))
# Response statuses of servers that do not support HEAD.
_NO_HEAD = frozenset((400, 403, 405, 501))
_FOUND_STATUSES = frozenset((200, 206, 416))
_MISSING_STATUSES = frozenset((401, 403, 404, 410))


class _KeyState(NamedTuple):
    """The state of a key when it was requested.

    Attributes:
        status: Status of the key; None if it does not exist.
        validator: Validator of a file.
        time: Time of the request, by the monotonic clock.
    """

    status: Status | None
    validator: Validator
    time: float


class _DirectoryListing(NamedTuple):
    """The names in a directory.

    Attributes:
        kinds: Types of the entries, by name.
        is_complete: Whether there are no other names.
        time: As for `_KeyState`.
    """

    kinds: Mapping[str, FileKind]
    is_complete: bool
    time: float


class HttpStore(WebStore):
    """Files on web servers, read by range."""

    scheme: ClassVar[str] = "http"

    def __init__(self) -> None:
        super().__init__()
        self._logins = Logins()
        self._looked: dict[str, _KeyState] = {}
        self._directories: dict[str, _DirectoryListing] = {}

    def url(self, key: str) -> str:
        host, _, path = key.partition("/")
        return f"{self.scheme}://{host}/{quote(path, safe=_SAFE)}"

    def headers(self, url: str) -> Mapping[str, str]:
        return self._logins(url)

    def uri(self, key: str) -> str:
        """Return the URL; for refused addresses, without possible secrets."""
        host, slash, path = key.partition("/")
        login, _, host = host.rpartition("@")
        path, query, _ = path.partition("?")
        return f"{self.scheme}://{'…@' * bool(login)}{host}{slash}{path}{'?…' * bool(query)}"

    def stat(self, key: str) -> Status | None:
        return self._key_state(key).status

    def list(self, key: str) -> Iterable[DirEntry]:
        result = self.stat(key)
        if result is None or result.kind is not FileKind.DIRECTORY:
            got = "a file" if result else "it does not exist"
            raise StorageError(f"cannot list {self.uri(key)}", got=got)
        kinds = self._directory(key).kinds
        if not kinds:
            raise StorageError(
                f"cannot list {self.uri(key)}",
                got="no directory listing, and no file with a usual model name",
                expected=f"a directory listing, or {_INDEX} or config.json in it",
                hint=f"name a file in it, such as {self.uri(key)}/model.safetensors",
            )
        return [DirEntry(name, kind) for name, kind in kinds.items()]

    def lists_all(self, key: str) -> bool:
        return self._directory(key).is_complete

    def open(self, key: str, status: Status | None = None) -> WebFile:
        state = self._key_state(key)
        current = state.status
        if current is None or current.kind is not FileKind.FILE:
            got = "a directory" if current else "it does not exist"
            raise FormatError(f"cannot inspect {self.uri(key)}", got=got)
        return WebFile(self, key, current.size, current.version, state.validator)

    def write_alternative(self, key: str) -> str:
        return "write to a local directory, and copy that to the server"

    def is_unchanged(self, file: WebFile) -> bool:
        status, validator, _ = self._request_state(file.key)
        is_told = bool(file.has_version or validator.version)
        return (
            status is not None
            and status.size == file.size
            and (status.version == file.version or not is_told)
        )

    def forget(self, key: str) -> None:
        self._looked.pop(key, None)
        self._directories.pop(_parent_key(key), None)

    def refusal(self, key: str, response: BaseHTTPResponse) -> CheckpointError:
        location, got = self.uri(key), status_text(response)
        if response.status == 407:
            failure, hint = (
                "the proxy refuses the request",
                "export HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT",
            )
            return StorageError(
                failure, location=location, got=got, expected="valid credentials for the proxy", hint=hint
            )
        if response.status not in (401, 403):
            return StorageError(f"cannot read {location}", got=got)
        host, login = urlsplit(self.url(key)).hostname, self._logins.name(self.url(key))
        hint = f"if it needs a login, add it to ~/.netrc: machine {host} login NAME password WORD"
        if login and response.status == 401:
            hint = f"check the name and the password of the login {login} with the owner of {host}"
        elif login:
            hint = f"ask the owner of {host} to let the login {login} read it"
        known = f"with the stored login {login}" if login else f"without a login for {host}"
        return StorageError(f"access to {location} is denied", got=f"{got}, {known}", hint=hint)

    def _key_state(self, key: str) -> _KeyState:
        """Return the state of a key, from the listing of its parent directory if possible."""
        result = self._looked.get(key)
        if result is None or result.time + _STATE_SECONDS < time.monotonic():
            _check(key, self.uri(key))
            result = self._request_found(key)
            self._looked[key] = result
        return result

    def _request_found(self, key: str) -> _KeyState:
        above = self._looked.get(_parent_key(key))
        if "/" not in key or above is None:
            return self._request_state(key)
        if above.status is None or above.status.kind is not FileKind.DIRECTORY:
            return _missing_state()
        directory = self._directory(_parent_key(key))
        kind = directory.kinds.get(key.rpartition("/")[2])
        if kind is FileKind.DIRECTORY:
            return _state_from_status(Status(kind))
        if kind is FileKind.FILE:
            return self._read_weights_head(key) or self._request_state(key, is_file=True)
        return _missing_state() if directory.is_complete else self._probe(key)

    def _read_weights_head(self, key: str) -> _KeyState | None:
        """Request the start of a weights file, which returns length, version and header in one request.

        Returns:
            The state; None if another kind of request is needed.
        """
        if not key.endswith(_WEIGHTS):
            return None
        attempts, ranged = self.client.attempts(self.uri(key)), {"Range": f"bytes=0-{HEAD - 1}"}
        response, _ = self.client.follow(
            "GET", self.url(key), lambda url: {**ranged, **self.headers(url)}, attempts
        )
        is_begun = response.headers.get("Content-Range", "").startswith("bytes 0-")
        if response.status != 206 or not is_begun or _size(response) is None:
            response.close()
            return None
        file, start = self._file(key, response), self.client.start_of(response, HEAD)
        if file.status and file.validator.version:
            self.kept.put((key, file.status.version), _header(start))
        return file

    def _request_state(self, key: str, is_file: bool = False) -> _KeyState:
        """Request the state of a key that the user named.

        Raises:
            StorageError: The server does not report the state.
        """
        response, url = self._request_headers(key, _NO_HEAD)
        if "/" not in key or (url.endswith("/") and response.status in (200, 401, 403)):
            return _state_from_status(Status(FileKind.DIRECTORY))
        if response.status in _FOUND_STATUSES:
            if is_file or not _is_page(response, key):
                return self._file(key, response)
            if self._directory(key).kinds or self._directory(key).is_complete:
                return _state_from_status(Status(FileKind.DIRECTORY))
            raise self._page_error(key, response)
        # Buckets respond with 403 for missing files if the client may not list them.
        may_be = not is_file and not _FILE_SUFFIX.search(key.rpartition("/")[2])
        if response.status in _MISSING_STATUSES and may_be and self._directory(key).kinds:
            return _state_from_status(Status(FileKind.DIRECTORY))
        if response.status in (404, 410):
            return _missing_state()
        raise self.refusal(key, response)

    def _page_error(self, key: str, response: BaseHTTPResponse) -> StorageError:
        """Return the error for a page that is not a listing, such as that of a login service or a portal."""
        return StorageError(
            f"cannot read {self.uri(key)}",
            got=f"{status_text(response)} with a web page ({response.headers['Content-Type']})",
            expected="a file, or a directory listing",
            hint=f"open {self.uri(key)} in a browser: it may need a login, be behind a portal, or not exist",
        )

    def _probe(self, key: str) -> _KeyState:
        """Request the state of a key that the user did not name; same errors as `_request_headers`."""
        response, _ = self._request_headers(key, frozenset((405, 501)))
        # Applications and login services return a page for every name.
        is_page = _is_page(response, key)
        if response.status in _FOUND_STATUSES and not is_page:
            return self._file(key, response)
        if response.status in _MISSING_STATUSES or is_page:
            return _missing_state()
        raise self.refusal(key, response)

    def _request_headers(self, key: str, no_head: Container[int]) -> tuple[BaseHTTPResponse, str]:
        """Request the headers of a file; return the response and its final URL.

        Args:
            key: Key of the file.
            no_head: Statuses after which the first byte is requested instead, which also returns length and
                version.
        """
        attempts = self.client.attempts(self.uri(key))
        response, url = self.client.follow("HEAD", self.url(key), self.headers, attempts)
        discard(response)
        is_told = response.status != 200 or _size(response) is not None
        if url.endswith("/") or (response.status not in no_head and is_told):
            return response, url
        ranged = {"Range": "bytes=0-0"}
        response, url = self.client.follow(
            "GET", self.url(key), lambda url: {**ranged, **self.headers(url)}, attempts
        )
        response.close()
        return response, url

    def _file(self, key: str, response: BaseHTTPResponse) -> _KeyState:
        size, validator = _size(response), Validator.of(response)
        if size is None or response.headers.get("Content-Encoding"):
            raise StorageError(
                f"{self.uri(key)} cannot be read by ranges",
                got="a response without a length",
                expected="a server that sends files unchanged (`Content-Length`, `Accept-Ranges: bytes`)",
                hint="download the file and pass the copy, or use another server",
            )
        # Without a version from the server, later requests cannot show whether the file is unchanged, so an
        # interrupted conversion starts over.
        version = validator.version or f"unknown version ({secrets.token_hex(4)})"
        status = Status(FileKind.FILE, size, version, modified=_nanoseconds(validator.modified))
        return _state_from_status(status, validator)

    def _directory(self, key: str) -> _DirectoryListing:
        result = self._directories.get(key)
        if result is not None and result.time + _STATE_SECONDS >= time.monotonic():
            return result
        if self._listing_names(key) is None:
            self._directories[key] = _DirectoryListing(self._find_model_names(key), False, time.monotonic())
        return self._directories[key]

    def _listing_names(self, key: str) -> Mapping[str, FileKind] | None:
        """Return the names on the server's listing page for a directory, cached; None without such a page."""
        url, attempts = self.url(key), self.client.attempts(self.uri(key))
        wants = {"Accept": "application/json, text/html;q=0.9, */*;q=0.1"}
        response, result, page = self.client.whole(
            url if url.endswith("/") else f"{url}/",
            lambda url: {**wants, **self.headers(url)},
            attempts,
            _LARGEST_PAGE,
        )
        kinds = names_in(page.decode(errors="replace"), result) if response.status == 200 else None
        if kinds is not None:
            self._directories[key] = _DirectoryListing(kinds, True, time.monotonic())
        return kinds

    def _find_model_names(self, key: str) -> Mapping[str, FileKind]:
        """Return the usual names of model files that exist, and the shards in their index."""
        start = f"{key}/"
        result = map_concurrently(self, lambda name: self._probe(start + name), MODEL_NAMES)
        found = {name: state for name, state in zip(MODEL_NAMES, result, strict=True) if state.status}
        self._looked |= {start + name: state for name, state in found.items()}
        shards = self._shards(start + _INDEX) if _INDEX in found else []
        return dict.fromkeys((*found, *shards), FileKind.FILE)

    def _shards(self, key: str) -> Iterable[str]:
        """Return the names in an index; empty if it is malformed, which its reader reports."""
        try:
            shards = set(json.loads(self.read(key))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return []
        return sorted(
            name for name in shards if isinstance(name, str) and is_inside(name) and "/" not in name
        )


# Keys are written like URLs, with percent-encoding.
_SAFE = "/%:@!$&'()*+,;=~"


def _header(start: bytes) -> bytes:
    """Return the header at the start of a weights file; more bytes would displace other cache entries."""
    return start[: max(_SHORTEST, 8 + int.from_bytes(start[:8], "little"))]


def _state_from_status(status: Status | None, validator: Validator | None = None) -> _KeyState:
    return _KeyState(status, validator or Validator(), time.monotonic())


def _missing_state() -> _KeyState:
    return _state_from_status(None)


def _check(key: str, location: str) -> None:
    """Raise UsageError if a key is not the address of a file."""
    host, _, path = key.partition("/")
    if not host or "@" in host or "?" in key or "#" in key:
        raise UsageError(
            f"{location.partition('?')[0]} is not the address of a file",
            expected="https://host/path, without a query, a fragment or a login",
            hint="download the file and pass the copy; a login is read from ~/.netrc",
        )
    parts = path.split("/")
    if host in _HUB and len(parts) >= 2 and "resolve" not in parts:
        raise UsageError(
            f"{location} is a page of the Hugging Face Hub, not a directory",
            hint=f"pass the model: hf://{'/'.join(parts[:2])}",
        )


def _parent_key(key: str) -> str:
    return key.rpartition("/")[0]


def _is_page(response: BaseHTTPResponse, key: str) -> bool:
    is_html = response.headers.get("Content-Type", "").startswith("text/html")
    return is_html and not key.endswith((".html", ".htm"))


def _size(response: BaseHTTPResponse) -> int | None:
    """Return the file size that a response reports; None if it does not."""
    text = response.headers.get("Content-Length", "")
    if response.status in (206, 416):
        text = response.headers.get("Content-Range", "").rpartition("/")[2]
    return length_in(text)


def _nanoseconds(date: str) -> int | None:
    try:
        return int(parsedate_to_datetime(date).timestamp()) * 10**9
    except (TypeError, ValueError):
        return None


STORE = HttpStore()
