"""Bind journal records to the files that hold their bytes.

After a record was written, its data file can be lost, truncated or replaced. Another process would then
create a file of full length with that name: zeros where the record promises data. So for each file, a record
holds the file's identity, the end of the data, and samples of the data. All data after the last sample is
zeros: if a file was truncated, either a sample is lost or only zeros are lost. Every byte was written, so a
hole means lost data. File systems that store zeros as holes, such as ZFS with compression, only cause
repeated tasks.

A record that fails the check is voided in the journal before any file is opened for writing, so no later
process counts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from functools import partial
from typing import Protocol

import numpy as np

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.stores.abilities import SupportsHoleDetection
from ckpttools.stores.base import File, FileKind, Status
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import (
    Record,
    Sink,
    SupportsChangedFiles,
    SupportsFileIdentity,
    SupportsKeepFiles,
    file_identity,
)

_VOID = -1
"""Replaces the task index in a record that voids other records, and in an entry that voids all of a run."""

_SAMPLE_BYTES = 16
_MAX_RANGES = 16
_SCAN_BYTES = 1 << 20


class _ResumedWork(Protocol):
    @property
    def content(self) -> Location: ...
    @property
    def records(self) -> Sequence[Record]: ...
    def record(self, records: Iterable[Record]) -> None: ...


@dataclass(frozen=True, slots=True)
class FileBinding:
    """The bytes of one file that a record promises.

    Attributes:
        file: The file's name below the checkpoint's root.
        identity: Distinguishes the file from a later file with the same name.
        end: Offset after the last byte written.
        samples: Offset and bytes of some of the data; empty if all of it is zeros.
        ranges: Start and end of each range that was written; empty if there are many.
    """

    file: str
    identity: str
    end: int
    samples: tuple[tuple[int, bytes], ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()

    def to_text(self) -> str:
        """Encode the binding as one string: a journal with 100,000 records stays in memory."""
        samples = ",".join(f"{offset}:{data.hex()}" for offset, data in self.samples)
        ranges = ",".join(f"{start}-{stop}" for start, stop in self.ranges)
        return f"{self.identity} {self.end} {samples} {ranges} {self.file}"

    @classmethod
    def from_text(cls, text: str) -> FileBinding:
        """Decode the result of `to_text`. Raises ValueError for any other string."""
        identity, end, encoded, encoded_ranges, file = text.split(" ", 4)
        pairs = (sample.split(":") for sample in encoded.split(",") if sample)
        samples = tuple((int(offset), bytes.fromhex(data)) for offset, data in pairs)
        pairs = (item.split("-") for item in encoded_ranges.split(",") if item)
        ranges = tuple((int(start), int(stop)) for start, stop in pairs)
        return cls(file, identity, int(end), samples, ranges)

    @staticmethod
    def file_of(text: str) -> str:
        """Return the file's name, without decoding the rest."""
        return text.split(" ", 4)[-1]


@dataclass(frozen=True, slots=True)
class _BoundRecord:
    """A journal record that ends with bindings and a run ID."""

    record: Record
    task: int
    bindings: Sequence[str]
    run: str

    @classmethod
    def parse(cls, record: Record) -> _BoundRecord | None:
        """Parse a record. Returns None for records of versions that wrote no bindings."""
        match record:
            case [int(task), _, *_, list(bindings), str(run)]:
                return cls(record, task, [str(binding) for binding in bindings], run)
        return None


def new_run_id() -> str:
    """Create a unique ID for one run of a process. Together with a task index, it identifies a record."""
    import secrets

    return secrets.token_hex(6)


# Classes that record bindings while bytes are written.


@dataclass(slots=True)
class _WrittenData:
    """The ranges and samples of the data that was written to one file."""

    end: int = 0
    first: tuple[int, bytes] | None = None
    last: tuple[int, bytes] | None = None
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def add(self, offset: int, data: memoryview) -> None:
        self.end = max(self.end, offset + len(data))
        if self.ranges and self.ranges[-1][1] == offset:
            self.ranges[-1] = self.ranges[-1][0], offset + len(data)
        elif len(self.ranges) <= _MAX_RANGES:
            self.ranges.append((offset, offset + len(data)))
        if self.first is None and any(head := bytes(data[:_SAMPLE_BYTES])):
            self.first = offset, head
        if self.last is None or offset + len(data) > self.last[0] + len(self.last[1]):
            self.last = _last_sample(offset, data) or self.last

    @property
    def samples(self) -> tuple[tuple[int, bytes], ...]:
        return tuple(sample for sample in dict.fromkeys((self.first, self.last)) if sample is not None)

    @property
    def known_ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.ranges) if len(self.ranges) <= _MAX_RANGES else ()


def _last_sample(offset: int, data: memoryview) -> tuple[int, bytes] | None:
    """Return the last bytes of data that are not all zeros, or None if all of it is zeros."""
    tail = bytes(data[-_SAMPLE_BYTES:])
    if any(tail):
        return offset + len(data) - len(tail), tail
    values = np.frombuffer(data, np.uint8)
    for stop in range(len(values), 0, -_SCAN_BYTES):
        start = max(0, stop - _SCAN_BYTES)
        if (nonzero := np.flatnonzero(values[start:stop])).size:
            end = start + int(nonzero[-1]) + 1
            begin = max(0, end - _SAMPLE_BYTES)
            return offset + begin, values[begin:end].tobytes()
    return None


class BindingSink:
    """A sink that records bindings for its writes. It samples 16 bytes of each write and does not read."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._has_identities = isinstance(sink, SupportsFileIdentity)
        self._written: dict[str, _WrittenData] = defaultdict(_WrittenData)

    @property
    def is_dry_pass(self) -> bool:
        return self._sink.is_dry_pass

    def write(self, name: str, offset: int, data: memoryview, address: int, loose: int | None = None) -> None:
        """Write data; see `Sink.write`."""
        self._sink.write(name, offset, data, address, loose)
        self._add(name, offset, data)

    def write_whole(self, name: str, data: bytes) -> None:
        """Write a complete file; see `Sink.write_whole`."""
        self._sink.write_whole(name, data)
        self._add(name, 0, memoryview(data))

    def append(self, name: str, limit: int, data: bytes) -> tuple[str, int]:
        """Append data; see `Sink.append`."""
        file, offset = self._sink.append(name, limit, data)
        self._add(file, offset, memoryview(data))
        return file, offset

    def _add(self, name: str, offset: int, data: memoryview) -> None:
        if self._has_identities:
            self._written[name].add(offset, data)

    @property
    def bindings(self) -> tuple[str, ...]:
        """The bindings of everything that was written, as text."""
        if not isinstance(self._sink, SupportsFileIdentity):
            return ()
        return tuple(
            FileBinding(name, self._sink.identity(name), data.end, data.samples, data.known_ranges).to_text()
            for name, data in self._written.items()
        )


# Functions that check bindings when work is resumed.


def drop_voided_records(records: Iterable[Record]) -> list[Record]:
    """Return the records that no other record voids."""
    all_records = list(records)
    void = {tuple(entry) for record in all_records for entry in _voided_entries(record)}
    if not void:
        return all_records

    def is_sound(record: Record) -> bool:
        match record:
            case [int(task), *_, str(run)]:
                return not void & {(run, task), (run, _VOID)}
        return record[0] != _VOID

    return [record for record in all_records if is_sound(record)]


def _voided_entries(record: Record) -> Iterator[Sequence[object]]:
    """Iterate over the entries, run ID and task index, that a record voids."""
    match record:
        case [int(task), list(entries)] if task == _VOID:
            yield from entries


def void_run(run: str) -> Record:
    """Return a record that voids all records of a run."""
    return [_VOID, [[run, _VOID]]]


def select_sound_records(
    work: _ResumedWork, is_sampled: Callable[[int], bool] = lambda task: True
) -> tuple[list[Record], bool]:
    """Select the records of earlier runs whose files still hold the promised bytes.

    The other records are voided for good. Call this before any data file is opened for writing.

    Args:
        work: The work to resume.
        is_sampled: Whether the data of a task is compared, too. For other tasks, only the identities and
            lengths of files are checked.

    Returns:
        The sound records, and whether any record was voided.

    Raises:
        StorageError: Files cannot be read, or the void records cannot be written.
    """
    records = drop_voided_records(work.records)
    if work.content.store.streams is not None:
        return records, False  # An object is either complete or does not exist.
    # Records without bindings, from earlier versions, never count.
    bound = [parsed for record in records if (parsed := _BoundRecord.parse(record)) is not None]
    if isinstance(work, SupportsChangedFiles):
        changed = set(work.changed_files())
        names = [[FileBinding.file_of(text) for text in record.bindings] for record in bound]
        void = {index for index, item in enumerate(names) if not changed.isdisjoint(item)}
    else:
        void = _find_void_records(work, bound, is_sampled)
    if void:
        work.record([[_VOID, [[bound[index].run, bound[index].task] for index in sorted(void)]]])
    valid = [record for index, record in enumerate(bound) if index not in void]
    if isinstance(work, SupportsKeepFiles):
        work.keep_files(FileBinding.file_of(text) for record in valid for text in record.bindings)
    return [record.record for record in valid], bool(void)


def _find_void_records(
    work: _ResumedWork, bound: Sequence[_BoundRecord], is_sampled: Callable[[int], bool]
) -> set[int]:
    """Return the indexes of the records whose files do not hold the promised bytes."""
    # Bindings stay text until they are compared: there may be 100,000.
    files: dict[str, list[tuple[int, str, bool]]] = defaultdict(list)
    for index, record in enumerate(bound):
        for text in record.bindings:
            files[FileBinding.file_of(text)].append((index, text, is_sampled(record.task)))
    find_lost = partial(_find_lost_records, work.content, work.content.status())
    results = map_concurrently(work.content.store, find_lost, list(files.items()))
    return {index for indexes in results for index in indexes}


def _find_lost_records(
    content: Location, root: Status | None, item: tuple[str, list[tuple[int, str, bool]]]
) -> list[int]:
    """Return the indexes of the records whose data a file does not hold.

    Args:
        content: The directory in which the checkpoint is written.
        root: Its status; None if it does not exist.
        item: The file's name, and for each binding: the record's index, the text, and whether samples are
            compared.
    """
    name, bindings = item
    location = content / name
    status = location.status()
    if root is None or status is None or status.kind is not FileKind.FILE:
        return [index for index, _, _ in bindings]
    identity = file_identity(root.identity, status.identity)
    with location.open(status) as file:
        return [
            index
            for index, text, is_sampled in bindings
            if not _is_held(text, file, identity, is_sampled=is_sampled)
        ]


def _is_held(text: str, file: File, identity: str, *, is_sampled: bool) -> bool:
    """Return whether a file has the bytes that a binding promises."""
    try:
        binding = FileBinding.from_text(text)
    except ValueError:
        return False
    if file.size < binding.end or not _is_same_file(binding.identity, identity):
        return False
    samples = binding.samples if is_sampled else ()
    if (
        is_sampled
        and isinstance(file, SupportsHoleDetection)
        and any(file.has_hole(*span) for span in binding.ranges)
    ):
        return False
    try:
        return all(file.read(offset, len(data)) == data for offset, data in samples)
    except FormatError:
        return False


def _is_same_file(recorded: str, current: str) -> bool:
    """Return whether two identities may belong to one file.

    If the identity of the directory changed, so did that of every file in it: either the directory was moved
    to another disk, or the file system assigns new inodes at each mount. Then the samples decide.
    """
    return recorded.partition(":")[0] != current.partition(":")[0] or recorded == current
