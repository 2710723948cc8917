"""Files over HTTP, read by range, without mixing bytes from different versions of a file."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from urllib3 import exceptions as failures
from urllib3.response import BaseHTTPResponse

from ckpttools.core.errors import CheckpointError, FormatError, SourceChangedError, StorageError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.base import File, Store
from ckpttools.stores.block_cache import BlockCache, ByteCache, is_document
from ckpttools.stores.concurrency import DEFAULT_CONCURRENCY, MAX_CONCURRENCY, requested_concurrency
from ckpttools.stores.contents import WrongLengthError
from ckpttools.stores.costs import REMOTE_COST, Costs, Traffic
from ckpttools.stores.web.client import (
    Attempts,
    Client,
    describe_failure,
    discard,
    release_connection,
    status_text,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Size of the first read: the header of a shard with two thousand tensors, together with its 8-byte length.
HEAD = 256 << 10
_CACHE_BYTES = 32 << 20
# Maximum bytes to receive from a server that sends only complete files.
_MAX_WASTED = 1 << 20
# Size of a read call to urllib3, which allocates a buffer of this size.
_READ_BYTES = 256 << 10
# Number of bytes that 100 MB/s transfer in 20 ms.
GAP = 2 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_LENGTH = re.compile(r"[0-9]{1,18}")
_EXPIRED = frozenset((400, 401, 403, 404, 410))


class Validator(NamedTuple):
    """A server's identification of the version of a file.

    Attributes:
        etag: The `ETag` header; "" if there is none.
        modified: The `Last-Modified` header; "" if there is none.
    """

    etag: str = ""
    modified: str = ""

    @classmethod
    def of(cls, response: BaseHTTPResponse) -> Validator:
        headers = response.headers
        return cls(headers.get("ETag") or "", headers.get("Last-Modified") or "")

    @property
    def version(self) -> str:
        """Return both headers as one text; "" if there are none."""
        return self.etag or self.modified

    def is_confirmed_by(self, later: Validator) -> bool:
        """Return whether a later response has the same validator, so that it is the same version.

        A response without the validator may come from another server that has another version. A weak ETag
        may stay the same when the content changes. If the first response has no validator, nothing can be
        compared.
        """
        if self.etag:
            return later.etag == self.etag
        return not self.modified or later.modified == self.modified

    def condition(self) -> Mapping[str, str]:
        """Return the header that requests a range only of this version, which must not have weak ETags."""
        condition = self.modified if self.etag.startswith("W/") else self.etag or self.modified
        return {"If-Range": condition} if condition else {}


def length_in(text: str) -> int | None:
    """Parse a number of bytes from a header; return None if it is missing."""
    return int(text) if _LENGTH.fullmatch(text.strip()) else None


class _Pinned(NamedTuple):
    """The address for the next request, and the version that the response must have.

    Attributes:
        address: Target of the last redirects, which may be signed and valid for only a few minutes.
        validator: Version of the file at this address, or at any address if the file is not named by its
            content.
    """

    address: str | None
    validator: Validator | None


class WebStore(Store):
    """A store over HTTP.

    Attributes:
        client: Sends the requests.
        kept: LRU cache of heads and small files, by key and version.
        blocks: Cache of other short reads, which shares this memory.
        is_named_by_content: Whether an address always has the same bytes, regardless of a mirror's ETag.
    """

    is_named_by_content: ClassVar[bool] = False

    def __init__(self) -> None:
        self.client = Client()
        self.kept: ByteCache[tuple[str, str]] = ByteCache(_CACHE_BYTES)
        self.blocks = BlockCache(self.kept)

    @property
    def costs(self) -> Costs:
        requests = max(requested_concurrency() or 0, MAX_CONCURRENCY)
        return Costs(
            requested_concurrency() or DEFAULT_CONCURRENCY,
            self.client.reads.memory + _CACHE_BYTES + requests * _READ_BYTES,
        )

    @property
    def traffic(self) -> Traffic:
        return self.client.meter.total

    @abstractmethod
    def url(self, key: str) -> str:
        """Return the URL of a file; the server may redirect it."""

    @abstractmethod
    def headers(self, url: str) -> Mapping[str, str]:
        """Return the authorization headers for a URL."""

    @abstractmethod
    def refusal(self, key: str, response: BaseHTTPResponse) -> CheckpointError:
        """Return the error for an unsuccessful response."""

    def check_response(self, file: WebFile, response: BaseHTTPResponse) -> None:
        """Raise SourceChangedError if a response or redirect shows that the file has changed."""
        return

    def is_unchanged(self, file: WebFile) -> bool:
        """Return whether a file is unchanged; same errors as `Store.stat`."""
        return True

    def forget(self, key: str) -> None:
        """Discard the cached status of a changed file."""
        return


class WebFile(File):
    """A file over HTTP at one version; see `File`.

    Attributes:
        has_version: Whether the server identifies the version of the file.
    """

    gap: ClassVar[int] = GAP
    price: ClassVar[int] = REMOTE_COST
    __slots__ = ("_pinned", "has_version", "key", "path", "size", "store", "version")

    def __init__(
        self, store: WebStore, key: str, size: int, version: str, validator: Validator | None = None
    ) -> None:
        """Create the file object without a request.

        Args:
            store: Store of the file.
            key: Key of the file in the store.
            size: Size of the file in bytes.
            version: See `Status`.
            validator: The validator that every response must have; None uses that of the first response.
        """
        self.path = store.uri(key)
        self.store, self.key = store, key
        self.size, self.version = size, version
        self.has_version = bool(version if validator is None else validator.version)
        self._pinned = _Pinned(None, validator)

    def __repr__(self) -> str:
        return f"WebFile({self.path!r})"

    @property
    def costs(self) -> Costs:
        return self.store.costs

    def read_into(self, offset: int, out: Buffer) -> None:
        target = memoryview(out).cast("B")
        stop = offset + len(target)
        if stop > self.size:
            expected = f"{len(target)} bytes that end at byte {stop}"
            raise FormatError(f"{self.path} ends too early", got=f"{self.size} bytes", expected=expected)
        if not target:
            return
        head = self._head(offset, stop)
        if stop <= len(head):
            target[:] = memoryview(head)[offset:stop]
        elif self.has_version and self.store.blocks.takes(self.key, self.size, len(target)):
            self.store.blocks.read_into((self.key, self.version), self.size, offset, target, self._fill)
        else:
            self._fill(offset, target)

    def check_unchanged(self) -> None:
        if not self.store.is_unchanged(self):
            self.store.forget(self.key)
            raise self.changed("another version of it")

    def changed(self, got: str) -> SourceChangedError:
        """Return the error for a changed file."""
        return SourceChangedError(
            f"{self.path} was changed while it was read",
            got=got,
            expected=f"the file as it was first inspected: {self.size} bytes, {self.version}",
            hint=f"wait until no process writes to it, then {retry_term()}",
        )

    def _head(self, offset: int, stop: int) -> bytes:
        """Return the cached head of the file, reading it first if a header or a document is requested."""
        name = self.key, self.version
        head = self.store.kept.get(name)
        if stop <= len(head):
            return head
        is_read_whole = is_document(self.key, self.size)
        length = self.size if is_read_whole else min(self.size, HEAD)
        if len(head) < length and stop <= length and (offset == 0 or is_read_whole):
            result = bytearray(length)
            self._fill(0, memoryview(result))
            head = bytes(result)
            # Without a version, a change of the file would not be noticed.
            if self.has_version:
                self.store.kept.put(name, head)
        return head

    def _fill(self, offset: int, target: memoryview) -> None:
        self.store.client.reads.read_into(offset, target, self._fetch)

    def _fetch(self, offset: int, length: int) -> bytearray:
        """Read a range, continuing truncated responses with further requests."""
        client, done = self.store.client, 0
        result = bytearray(length)
        attempts, target = client.attempts(self.path), memoryview(result)
        while done < length:
            response, skipped = self._request_bytes(offset + done, offset + length, attempts)
            before, got = done, "a truncated response"
            try:
                with release_connection(response):
                    _skip(response, skipped)
                    while done < length and (count := response.readinto(target[done:][:_READ_BYTES])):
                        done += count
            except (failures.HTTPError, OSError) as error:
                got = describe_failure(error, client.patience)
            client.meter.add(nbytes=done - before)
            if done < length:
                attempts.cut(done - before, got)
        return result

    def _request_bytes(self, start: int, stop: int, attempts: Attempts) -> tuple[BaseHTTPResponse, int]:
        """Return a response whose body contains the bytes from `start`, and the number of preceding bytes."""
        response, pinned = self._request_range(start, stop, attempts)
        try:
            if response.status == 206:
                self._check_range(response, start, pinned)
                return response, 0
            if response.status == 200:
                self._check_complete_response(response, start, stop, pinned)
                return response, start
            if response.status in (412, 416):
                raise self._changed_error(response)
            raise self._error_of(response)
        except CheckpointError:
            response.close()
            raise

    def _request_range(self, start: int, stop: int, attempts: Attempts) -> tuple[BaseHTTPResponse, _Pinned]:
        """Send a GET for a range to the last known address or, if necessary, to a new one."""
        client, store, pinned = self.store.client, self.store, self._pinned
        if pinned.address is not None:
            headers = self._headers(pinned.address, start, stop, pinned)
            response = client.request("GET", pinned.address, headers, attempts)
            if response.status not in _EXPIRED:
                return response, pinned
            discard(response)
        renewed = _Pinned(None, None if store.is_named_by_content else pinned.validator)
        response, address = client.follow(
            "GET",
            store.url(self.key),
            lambda url: self._headers(url, start, stop, renewed),
            attempts,
            lambda answer: store.check_response(self, answer),
        )
        return response, renewed._replace(address=address)

    def _headers(self, url: str, start: int, stop: int, pinned: _Pinned) -> Mapping[str, str]:
        condition = pinned.validator.condition() if pinned.validator else {}
        return {"Range": f"bytes={start}-{stop - 1}", **condition, **self.store.headers(url)}

    def _check_range(self, response: BaseHTTPResponse, start: int, pinned: _Pinned) -> None:
        stated = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(stated.strip())
        if match is None or int(match[1]) != start or response.headers.get("Content-Encoding"):
            raise StorageError(
                f"{self.path}: the server sent another range than requested",
                got=f"Content-Range: {stated}",
                expected=f"bytes {start}-…/{self.size}",
                hint="a proxy may have changed it; download the file and pass the copy",
            )
        self._check_same(response, int(match[3]) if match[3] != "*" else self.size, pinned)

    def _check_complete_response(
        self, response: BaseHTTPResponse, start: int, stop: int, pinned: _Pinned
    ) -> None:
        """Check a response without a range: the file has changed, or the server does not support ranges."""
        length = length_in(response.headers.get("Content-Length", ""))
        self._check_same(response, self.size if length is None else length, pinned)
        if start + self.size - stop > _MAX_WASTED or response.headers.get("Content-Encoding"):
            raise StorageError(
                f"{self.path} cannot be read by ranges",
                got="the complete file in response to a range request",
                expected="a server with range requests (`Accept-Ranges: bytes`), such as nginx or Caddy",
                hint="download the file and pass the copy, or use another server",
            )

    def _check_same(self, response: BaseHTTPResponse, size: int, pinned: _Pinned) -> None:
        result = Validator.of(response)
        first = pinned.validator if pinned.validator and pinned.validator.version else result
        if not first.is_confirmed_by(result):
            raise self._changed_error(response)
        if size != self.size:
            if not (first.version and result.version):
                raise self._changed_error(response)
            raise WrongLengthError(
                f"{self.path}: the server reports different lengths for the file",
                got=f"{size} bytes",
                expected=f"{self.size} bytes, as reported before for the same version",
                hint="a proxy may have changed the file; download it and pass the copy",
            )
        self._pinned = _Pinned(pinned.address, first)

    def _changed_error(self, response: BaseHTTPResponse) -> SourceChangedError:
        self.store.forget(self.key)
        stated = response.headers.get("Content-Range", "").rpartition("/")[2]
        size = stated if response.status != 200 else response.headers.get("Content-Length", "")
        version = Validator.of(response).version
        return self.changed(", ".join(filter(None, (f"{size} bytes" if size else "", version))) or "another")

    def _error_of(self, response: BaseHTTPResponse) -> CheckpointError:
        if response.status in (404, 410):
            self.store.forget(self.key)
            hint = "it was removed during the command; list its directory"
            return FormatError(f"{self.path} does not exist anymore", got=status_text(response), hint=hint)
        return self.store.refusal(self.key, response)


def _skip(response: BaseHTTPResponse, nbytes: int) -> None:
    while nbytes > 0 and (data := response.read(min(nbytes, _READ_BYTES))):
        nbytes -= len(data)
