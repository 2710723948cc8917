"""Data files of a checkpoint on the Hub: produced once for their digests, and again if the Hub lacks them."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

from ckpttools.core.errors import CheckpointError, SourceChangedError, StorageError, UsageError
from ckpttools.core.memory_limit import format_size
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.web.client import FAILURES, attempts_suffix, describe_failure
from ckpttools.stores.web.hub_repository import SAMPLE_BYTES, Blob, BusyError, Repository

if TYPE_CHECKING:
    from ckpttools.stores.web.hub_repository import Blob, CommitTarget, Repository


PIECE_BYTES = 1 << 20
WAITING = 4
# Timeout in seconds.
_PATIENCE = 2.0


class _GivenUpError(Exception):
    """Raised in the sending thread to close the connection in the middle of a body."""


class HubStream:
    """A sequential upload of a large file in parts.

    Errors are kept until `ended` is called, and later writes are ignored. The last piece is held back until
    the digest of the complete file is verified, so the storage never has wrong content under a digest.
    """

    def __init__(self, repository: Repository, path: str, blob: Blob, target: CommitTarget) -> None:
        """Prepare the upload.

        Args:
            repository, path: Location of the future file.
            blob: Expected content of the file.
            target: Upload addresses of the file.
        """
        self._repository, self._path, self._blob, self._target = repository, path, blob, target
        self._hasher = hashlib.sha256()
        self._parts = iter(target.parts)
        self._left = 0
        self._part: _UploadPart | None = None
        self._tags: list[str] = []
        self._held = b""
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def write(self, data: memoryview) -> None:
        """Send the next bytes, or keep the error for `ended`."""
        for start in range(0, len(data), PIECE_BYTES):
            if self._error is not None:
                return
            piece = bytes(data[start : start + PIECE_BYTES])
            self._hasher.update(piece)
            previous, self._held = self._held, piece
            self._record_piece(previous)

    def ended(self) -> Exception | None:
        """Wait until the storage has the file; return the error, or None on success."""
        if self._error is None and self._hasher.hexdigest() != self._blob.sha256:
            self._error = SourceChangedError(
                f"{self._path}: its content changed when it was produced for the second time",
                got=f"SHA-256 {self._hasher.hexdigest()}",
                expected=f"SHA-256 {self._blob.sha256}",
                hint=f"wait until no process writes to the source, then {retry_term()}",
            )
        self._record_piece(self._held)
        if self._error is None:
            try:
                self._repository.complete(self._path, self._blob, self._target, self._tags)
            except CheckpointError as error:
                self._error = error
        self.give_up()
        return self._error

    def give_up(self) -> None:
        """Abort the upload; nothing remains of it."""
        if self._part is not None:
            self._part.give_up()
            self._part = None

    def _record_piece(self, piece: bytes) -> None:
        if self._error is not None:
            return
        try:
            self._send(piece)
        except (*FAILURES, CheckpointError) as error:
            self._error = error

    def _send(self, piece: bytes) -> None:
        while piece:
            if self._part is None:
                url, self._left = next(self._parts)
                self._part = _UploadPart(self._repository, url, self._target, self._left)
            chunk, piece = piece[: self._left], piece[self._left :]
            self._part.write(chunk)
            self._left -= len(chunk)
            if not self._left:
                part, self._part = self._part, None
                self._tags.append(self._repository.checked(self._path, part.answer()))

    def failure(self, attempts: int) -> CheckpointError:
        """Return the error for an upload that failed after a number of attempts."""
        if isinstance(self._error, CheckpointError):
            return self._error.at(got=f"{self._error.raw.got or ''}{attempts_suffix(attempts)}" or None)
        assert self._error is not None
        location = f"{self._repository.location}/{self._path}"
        return StorageError(
            f"cannot upload {location}",
            got=describe_failure(self._error, self._repository.client.patience) + attempts_suffix(attempts),
            hint=f"check the network, then {retry_term()}: uploaded files are not sent again",
        )


class _UploadPart:
    """A request whose body is sent by another thread."""

    def __init__(self, repository: Repository, url: str, target: CommitTarget, nbytes: int) -> None:
        self._pieces: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._done = threading.Event()
        self._answer: object = None
        self._thread = threading.Thread(
            target=self._run,
            args=(repository, url, {**target.headers, "Content-Length": str(nbytes)}, nbytes),
        )
        self._thread.daemon = True
        self._thread.start()

    def write(self, piece: bytes) -> None:
        """Queue the next bytes; raises the error of earlier bytes."""
        while True:
            try:
                self._pieces.put(piece, timeout=0.1)
                return
            except queue.Full:
                if self._done.is_set():
                    self.answer()

    def answer(self) -> object:
        """Wait for the response; raises the error if there is none."""
        self._thread.join()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def give_up(self) -> None:
        """Close the connection, without waiting for a server that does not accept data."""
        until = time.monotonic() + _PATIENCE
        while not self._done.is_set() and time.monotonic() < until:
            try:
                self._pieces.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._thread.join(_PATIENCE)

    def _run(self, repository: Repository, url: str, headers: dict[str, str], nbytes: int) -> None:
        try:
            self._answer = repository.client.send(url, headers, self._body(nbytes))
        except BaseException as error:
            self._answer = error
        self._done.set()

    def _body(self, nbytes: int) -> Iterator[bytes]:
        while nbytes:
            piece = self._pieces.get()
            if piece is None:
                raise _GivenUpError
            nbytes -= len(piece)
            yield piece


# Maximum bytes of small files that a group keeps, so that they are not produced twice.
KEPT_BYTES = 4 << 20
MEMORY = KEPT_BYTES + (WAITING + 4) * PIECE_BYTES
"""Memory of a group of tasks in bytes, in addition to the data being produced."""
_MAX_SMALL_BYTES = 32 << 20
_ZEROS = memoryview(bytes(1 << 20))
# Each attempt produces all bytes of a group again.
_ATTEMPTS = 3


class _Output(Protocol):
    """Receives the bytes of one file in order."""

    def write(self, data: memoryview) -> None: ...


class HubDataFiles:
    """Data files on the Hub; see `ckpttools.stores.publishing.DataFiles`.

    Attributes:
        sizes, heads: Size in bytes and first bytes of files, by name.
        large: Files of the checkpoint in the Hub's storage, by path.
        small: Files to include in the commit.
    """

    def __init__(
        self, repository: Repository, root: str, sizes: Mapping[str, int], heads: Mapping[str, bytes]
    ) -> None:
        """Create the data files.

        Args:
            repository: The repository to write to.
            root: Directory of the files; "" for the root of the repository.
            sizes, heads: As for `Work.data_files`.
        """
        self._repository, self._root = repository, root
        self.sizes, self.heads = sizes, heads
        self.large: dict[str, Blob] = {}
        self.small: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def path(self, name: str) -> str:
        """Return the path of a file in the repository."""
        return f"{self._root}/{name}" if self._root else name

    def write_passes(self, group: int) -> Generator[HubSink]:
        """Yield a sink for digests and, if the Hub lacks any of the files, one that sends those."""
        digests = _Digests()
        sink = HubSink(self, group, digests.begun, lambda: True)
        yield sink
        sink.fill()
        missing = self.take({path: item.blob() for path, item in digests.files.items()})
        for attempt in range(1, _ATTEMPTS + 1):
            if not missing:
                return
            with closing(_UploadStreams(self, missing)) as streams:
                if streams.files:
                    # Each task is reported only once.
                    is_silent = streams.have_failed if attempt == 1 else lambda: True
                    sink = HubSink(self, group, streams.files.get, is_silent)
                    yield sink
                    sink.fill()
                missing = streams.ended(attempt)
            if missing:
                time.sleep(4 * attempt * self._repository.client.patience.first_wait)

    def take(self, files: Mapping[str, Blob]) -> dict[str, Blob]:
        """Register files, and upload those with known content if they are needed.

        Returns:
            The remaining files, whose bytes must be produced again.
        """
        is_large = self._repository.are_large(files) if files else {}
        for path, blob in files.items():
            if is_large[path] and blob.content is not None:
                self._repository.put(path, blob)
        with self._lock:
            self.small |= {path: item.content or b"" for path, item in files.items() if not is_large[path]}
            self.large |= {
                path: item._replace(content=None) for path, item in files.items() if is_large[path]
            }
            self._check_small()
        return {path: item for path, item in files.items() if is_large[path] and item.content is None}

    def _check_small(self) -> None:
        """Raise UsageError if the small files for the commit would take too much memory."""
        nbytes = sum(map(len, self.small.values()))
        if nbytes > _MAX_SMALL_BYTES:
            raise UsageError(
                f"{self._repository.location} would need too large a commit: only large files "
                "go to the Hub's storage",
                got=f"{len(self.small)} small files of {format_size(nbytes)} so far",
                expected=f"at most {format_size(_MAX_SMALL_BYTES)} in small files",
                hint="write fewer and larger files: safetensors, or Orbax with its default "
                "layout, which has no file per chunk",
            )

    def stream(self, path: str, blob: Blob) -> HubStream | None:
        """Return the upload of a large file; None if the Hub already has it."""
        target = self._repository.target(path, blob)
        return target and HubStream(self._repository, path, blob, target)

    def write_heads(self) -> None:
        """See `DataFiles.write_heads`. Writes the files that no task writes."""
        names = [name for name in self.sizes if self.path(name) not in (*self.small, *self.large)]
        contents = {name: self.heads.get(name, b"").ljust(self.sizes[name], b"\0") for name in names}
        self.take({self.path(name): Blob.of(content) for name, content in contents.items()})

    def extend(self, name: str, end: int) -> None:
        """Do nothing, because each group appends to its own files."""

    def sync(self) -> None:
        """Do nothing, because the storage is durable."""

    def close(self) -> None:
        """Do nothing, because no resources are held."""


class HubSink:
    """The files of a group of tasks; see `ckpttools.stores.publishing.Sink`."""

    def __init__(
        self,
        files: HubDataFiles,
        group: int,
        output: Callable[[str], _Output | None],
        is_dry_pass: Callable[[], bool],
    ) -> None:
        """Create the sink.

        Args:
            files: The data files.
            group: Index of the group.
            output: Returns the receiver for the file at a path; None ignores the file.
            is_dry_pass: Whether the tasks should not be reported, because they will probably be repeated or
                were reported before.
        """
        self._files, self._group = files, group
        self._output, self._is_rehearsal = output, is_dry_pass
        self._begun: dict[str, tuple[_Output | None, int]] = {}

    @property
    def is_dry_pass(self) -> bool:
        return self._is_rehearsal()

    def write(self, name: str, offset: int, data: memoryview, address: int, loose: int | None = None) -> None:
        position = self._position(name)
        if offset < position:
            raise RuntimeError(f"{name}: byte {offset} comes after byte {position}")
        self._fill(name, offset)
        self._add(name, data)

    def write_whole(self, name: str, data: bytes) -> None:
        self.write(name, 0, memoryview(data), 0)

    def append(self, name: str, limit: int, data: bytes) -> tuple[str, int]:
        file = f"{name}-{self._group:05d}"
        position = self._position(file)
        self._add(file, memoryview(data))
        return file, position

    def fill(self) -> None:
        """Fill all files to their full sizes."""
        for name in self._begun:
            self._fill(name, self._files.sizes.get(name, 0))

    def _position(self, name: str) -> int:
        if name not in self._begun:
            self._begun[name] = self._output(self._files.path(name)), 0
            self._add(name, memoryview(self._files.heads.get(name, b"")))
        return self._begun[name][1]

    def _fill(self, name: str, until: int) -> None:
        while (missing := until - self._begun[name][1]) > 0:
            self._add(name, _ZEROS[:missing])

    def _add(self, name: str, data: memoryview) -> None:
        output, position = self._begun[name]
        if output is not None:
            output.write(data)
        self._begun[name] = output, position + len(data)


class _FileDigest:
    """The digest, sample and content of a file, collected from its bytes."""

    def __init__(self, group: _Digests) -> None:
        self._group = group
        self._hasher = hashlib.sha256()
        self._size = 0
        self._sample = b""
        self._record_piece: bytearray | None = bytearray()

    def write(self, data: memoryview) -> None:
        self._hasher.update(data)
        self._size += len(data)
        self._sample += bytes(data[: SAMPLE_BYTES - len(self._sample)])
        if self._record_piece is None:
            return
        if len(data) <= self._group.room:
            self._record_piece += data
            self._group.room -= len(data)
        else:
            self._group.room += len(self._record_piece)
            self._record_piece = None

    def blob(self) -> Blob:
        content = None if self._record_piece is None else bytes(self._record_piece)
        return Blob(self._size, self._hasher.hexdigest(), self._sample, content)


class _Digests:
    """Digests of the files of a group.

    Attributes:
        files: The digests, by path.
        room: Number of bytes of content that may still be kept.
    """

    def __init__(self) -> None:
        self.files: dict[str, _FileDigest] = {}
        self.room = KEPT_BYTES

    def begun(self, path: str) -> _FileDigest:
        return self.files.setdefault(path, _FileDigest(self))


class _UploadStreams:
    """Uploads of the files of a group.

    Attributes:
        files: The files that the Hub lacks, by path.
    """

    def __init__(self, files: HubDataFiles, missing: Mapping[str, Blob]) -> None:
        self._missing = missing
        streams = {path: files.stream(path, blob) for path, blob in missing.items()}
        self.files = {path: stream for path, stream in streams.items() if stream}

    def have_failed(self) -> bool:
        return any(file.has_failed for file in self.files.values())

    def ended(self, attempt: int) -> dict[str, Blob]:
        """Wait until the Hub has the files.

        Args:
            attempt: Index of the attempt, at most `_ATTEMPTS`.

        Returns:
            The files that must be sent again.

        Raises:
            CheckpointError: A file is refused.
        """
        failed = {}
        for path, stream in self.files.items():
            error = stream.ended()
            if error is not None and (attempt == _ATTEMPTS or not isinstance(error, (BusyError, *FAILURES))):
                raise stream.failure(attempt) from error
            if error is not None:
                failed[path] = self._missing[path]
        return failed

    def close(self) -> None:
        for file in self.files.values():
            file.give_up()
