"""Data files of a checkpoint on the hub: made once for their digests, and once more where it lacks them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Protocol

from ckpttools.core.budget import size_text
from ckpttools.core.errors import UsageError
from ckpttools.stores.web.client import FAILURES
from ckpttools.stores.web.hub_repository import SAMPLE_BYTES, Blob, BusyError, Repository
from ckpttools.stores.web.hub_streams import PIECE_BYTES, WAITING, HubStream

# What a group keeps of small files, which spares making them twice.
KEPT_BYTES = 4 << 20
MEMORY = KEPT_BYTES + (WAITING + 4) * PIECE_BYTES
"""What a group of tasks takes beside the bytes that are being made."""
_MOST_SMALL_BYTES = 32 << 20
_ZEROS = memoryview(bytes(1 << 20))
# Each time all bytes of a group are made anew.
_ATTEMPTS = 3


class _Output(Protocol):
    """What takes the bytes of one file in order."""

    def write(self, data: memoryview) -> None: ...


class HubDataFiles:
    """See `ckpttools.stores.publishing.DataFiles`.

    Attributes:
        sizes, heads: of files by name: their bytes, and the first of them.
        large: what the hub's storage has of this checkpoint, by path.
        small: what goes into the commit itself.
    """

    def __init__(
        self, repository: Repository, root: str, sizes: Mapping[str, int], heads: Mapping[str, bytes]
    ) -> None:
        """
        Args:
            repository: where they go.
            root: what the names of files are below; "" for the repository itself.
            sizes, heads: as `Work.data_files`.
        """
        self._repository, self._root = repository, root
        self.sizes, self.heads = sizes, heads
        self.large: dict[str, Blob] = {}
        self.small: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def path(self, name: str) -> str:
        """Where a file will be in the repository."""
        return f"{self._root}/{name}" if self._root else name

    def passes(self, group: int) -> Generator[HubSink]:
        """First for digests; then, if the hub lacks any of the files, to send those."""
        looked = _Digests()
        sink = HubSink(self, group, looked.begun, lambda: True)
        yield sink
        sink.fill()
        missing = self.take({path: item.blob() for path, item in looked.files.items()})
        for attempt in range(1, _ATTEMPTS + 1):
            if not missing:
                return
            with closing(_UploadStreams(self, missing)) as streams:
                if streams.files:
                    # What was told once is not told again.
                    is_silent = streams.have_failed if attempt == 1 else lambda: True
                    sink = HubSink(self, group, streams.files.get, is_silent)
                    yield sink
                    sink.fill()
                missing = streams.ended(attempt)
            if missing:
                time.sleep(4 * attempt * self._repository.client.patience.first_wait)

    def take(self, files: Mapping[str, Blob]) -> dict[str, Blob]:
        """Takes note of files; those whose content is known are sent, if they are to be.

        Returns:
            The others, whose bytes have to be made once more.
        """
        is_large = self._repository.is_large(files) if files else {}
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
        """Raises UsageError where what waits for the commit would take more memory than anything counts."""
        nbytes = sum(map(len, self.small.values()))
        if nbytes > _MOST_SMALL_BYTES:
            raise UsageError(
                f"{self._repository.location} would take too much into one commit: only large files "
                "go to the "
                "hub's storage",
                got=f"{len(self.small)} small files of {size_text(nbytes)} so far",
                expected=f"at most {size_text(_MOST_SMALL_BYTES)} in small files",
                hint="write fewer and larger files: safetensors, or Orbax as it is by default, without "
                "a file for each chunk",
            )

    def stream(self, path: str, blob: Blob) -> HubStream | None:
        """What sends a large file; None if the hub has it."""
        target = self._repository.target(path, blob)
        return target and HubStream(self._repository, path, blob, target)

    def write_heads(self) -> None:
        """As `DataFiles.write_heads`: of files of which no task writes anything."""
        names = [name for name in self.sizes if self.path(name) not in (*self.small, *self.large)]
        contents = {name: self.heads.get(name, b"").ljust(self.sizes[name], b"\0") for name in names}
        self.take({self.path(name): Blob.of(content) for name, content in contents.items()})

    def extend(self, name: str, end: int) -> None:
        """Each group appends to files of its own."""

    def sync(self) -> None:
        """What storage has is durable."""

    def close(self) -> None:
        """There is nothing to give back."""


class HubSink:
    """The files of one group of tasks; see `ckpttools.stores.publishing.Sink`."""

    def __init__(
        self,
        files: HubDataFiles,
        group: int,
        output: Callable[[str], _Output | None],
        is_rehearsal: Callable[[], bool],
    ) -> None:
        """
        Args:
            files: all files.
            group: its number.
            output: what takes the bytes of a file, by its path; None where nobody wants them.
            is_rehearsal: whether nobody is to be told of them, because they will be asked for once more, as
                far as that is known by now, or have been sent once.
        """
        self._files, self._group = files, group
        self._output, self._is_rehearsal = output, is_rehearsal
        self._begun: dict[str, tuple[_Output | None, int]] = {}

    @property
    def is_rehearsal(self) -> bool:
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
        """Gives all files their lengths."""
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
    """What a file is, found out from its bytes."""

    def __init__(self, group: _Digests) -> None:
        self._group = group
        self._hasher = hashlib.sha256()
        self._size = 0
        self._sample = b""
        self._kept: bytearray | None = bytearray()

    def write(self, data: memoryview) -> None:
        self._hasher.update(data)
        self._size += len(data)
        self._sample += bytes(data[: SAMPLE_BYTES - len(self._sample)])
        if self._kept is None:
            return
        if len(data) <= self._group.room:
            self._kept += data
            self._group.room -= len(data)
        else:
            self._group.room += len(self._kept)
            self._kept = None

    def blob(self) -> Blob:
        content = None if self._kept is None else bytes(self._kept)
        return Blob(self._size, self._hasher.hexdigest(), self._sample, content)


class _Digests:
    """Those of the files of a group.

    Attributes:
        files: by path.
        room: bytes of content that may still be kept.
    """

    def __init__(self) -> None:
        self.files: dict[str, _FileDigest] = {}
        self.room = KEPT_BYTES

    def begun(self, path: str) -> _FileDigest:
        return self.files.setdefault(path, _FileDigest(self))


class _UploadStreams:
    """Files of a group on their way.

    Attributes:
        files: by path, those that the hub lacks.
    """

    def __init__(self, files: HubDataFiles, missing: Mapping[str, Blob]) -> None:
        self._missing = missing
        streams = {path: files.stream(path, blob) for path, blob in missing.items()}
        self.files = {path: stream for path, stream in streams.items() if stream}

    def have_failed(self) -> bool:
        return any(file.has_failed for file in self.files.values())

    def ended(self, attempt: int) -> dict[str, Blob]:
        """Waits until the hub has them.

        Args:
            attempt: the number of this one; there is none after `_ATTEMPTS`.

        Returns:
            Those that have to be sent once more.

        Raises:
            CheckpointError: one is not taken.
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
