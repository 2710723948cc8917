"""What ties an entry of a journal to the files that its bytes are in.

A data file can be lost, cut short or replaced after an entry was made. Another process then makes a file of
full length with that name: zeros, where the entry promises data. So an entry has, for each file, its
identity, the end of what was written, and samples of that. Data after the last sample is zeros: wherever a
file was cut, either a sample is lost or only zeros are.

An entry that fails is void, and that is entered before anything is written: no later process counts it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.stores.at_once import at_once
from ckpttools.stores.base import File, FileKind, Status
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import IdentifiesFiles, Record, Sink, file_identity

_Bound: TypeAlias = tuple[int, str, bool]
"""The index of a record, a binding of it as text, and whether its samples are compared."""

_VOID = -1
"""In the place of a task's number: a record that voids others."""

_SAMPLE_BYTES = 16
_SCANNED_AT_ONCE = 1 << 20


class _ResumedWork(Protocol):
    @property
    def content(self) -> Place: ...
    @property
    def records(self) -> Sequence[Record]: ...
    def enter(self, records: Iterable[Record]) -> None: ...


@dataclass(frozen=True, slots=True)
class FileBinding:
    """Bytes of one file that an entry promises.

    Attributes:
        file: its name, below the checkpoint's root.
        identity: tells it from another file that gets its name.
        end: offset after the last byte written.
        samples: offset and bytes of some of the data; none where all of it is zeros.
    """

    file: str
    identity: str
    end: int
    samples: tuple[tuple[int, bytes], ...] = ()

    def to_text(self) -> str:
        """One string: a journal with 100,000 entries is in memory as a whole."""
        samples = ",".join(f"{offset}:{data.hex()}" for offset, data in self.samples)
        return f"{self.identity} {self.end} {samples} {self.file}"

    @classmethod
    def from_text(cls, text: str) -> FileBinding:
        """The inverse of `to_text`. Raises ValueError if this is not such a string."""
        identity, end, samples, file = text.split(" ", 3)
        pairs = (each.split(":") for each in samples.split(",") if each)
        found = tuple((int(offset), bytes.fromhex(data)) for offset, data in pairs)
        return cls(file, identity, int(end), found)


def new_run() -> str:
    """A name for one run of a process: with the number of a task, it names an entry."""
    import secrets

    return secrets.token_hex(6)


# -- while bytes are written


@dataclass(slots=True)
class _Written:
    """What was written to one file."""

    end: int = 0
    first: tuple[int, bytes] | None = None
    last: tuple[int, bytes] | None = None

    def add(self, offset: int, data: memoryview) -> None:
        self.end = max(self.end, offset + len(data))
        if self.first is None and any(head := bytes(data[:_SAMPLE_BYTES])):
            self.first = offset, head
        if self.last is None or offset + len(data) > self.last[0] + len(self.last[1]):
            self.last = _last_sample(offset, data) or self.last

    @property
    def samples(self) -> tuple[tuple[int, bytes], ...]:
        return tuple(each for each in dict.fromkeys((self.first, self.last)) if each is not None)


def _last_sample(offset: int, data: memoryview) -> tuple[int, bytes] | None:
    """The last bytes of data that are not all zeros; None where all of it is zeros."""
    tail = bytes(data[-_SAMPLE_BYTES:])
    if any(tail):
        return offset + len(data) - len(tail), tail
    values = np.frombuffer(data, np.uint8)
    for stop in range(len(values), 0, -_SCANNED_AT_ONCE):
        start = max(0, stop - _SCANNED_AT_ONCE)
        if (nonzero := np.flatnonzero(values[start:stop])).size:
            end = start + int(nonzero[-1]) + 1
            begin = max(0, end - _SAMPLE_BYTES)
            return offset + begin, values[begin:end].tobytes()
    return None


class BindingSink:
    """A sink that takes note of what is written: it takes 16 bytes of each write, and nothing is read."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._is_noted = isinstance(sink, IdentifiesFiles)
        self._written: dict[str, _Written] = defaultdict(_Written)

    @property
    def is_rehearsal(self) -> bool:
        return self._sink.is_rehearsal

    def write(self, name: str, offset: int, data: memoryview, address: int, loose: int | None = None) -> None:
        """As `Sink.write`."""
        self._sink.write(name, offset, data, address, loose)
        if self._is_noted:
            self._written[name].add(offset, data)

    def write_whole(self, name: str, data: bytes) -> None:
        """As `Sink.write_whole`."""
        self._sink.write_whole(name, data)
        if self._is_noted:
            self._written[name].add(0, memoryview(data))

    def append(self, name: str, most: int, data: bytes) -> tuple[str, int]:
        """As `Sink.append`."""
        file, offset = self._sink.append(name, most, data)
        if self._is_noted:
            self._written[file].add(offset, memoryview(data))
        return file, offset

    @property
    def bindings(self) -> tuple[str, ...]:
        """What an entry for all that was written is bound to, as text."""
        if not isinstance(self._sink, IdentifiesFiles):
            return ()
        return tuple(
            FileBinding(name, self._sink.identity(name), found.end, found.samples).to_text()
            for name, found in self._written.items()
        )


# -- when work is taken up again


def unvoided(records: Iterable[Record]) -> list[Record]:
    """The records that no other record voids."""
    listed = list(records)
    void = {tuple(each) for record in listed if record[0] == _VOID for each in record[1]}  # type: ignore
    if not void:
        return listed
    return [
        record
        for record in listed
        if record[0] != _VOID and not void & {(record[-1], record[0]), (record[-1], _VOID)}
    ]


def void_run(run: str) -> Record:
    """A record that voids all that a run has entered."""
    return [_VOID, [[run, _VOID]]]


def sound_records(
    work: _ResumedWork, is_sampled: Callable[[int], bool] = lambda number: True
) -> tuple[list[Record], bool]:
    """What earlier runs have entered and their files still hold.

    Entries for what is lost are voided for good. Call it before any data file is opened for writing.

    Args:
        work: what they have worked on.
        is_sampled: whether the data of a task is looked at, too. Of others only files and their lengths are.

    Returns:
        The records, and whether others were voided.

    Raises:
        StorageError: files cannot be read, or what is void cannot be entered.
    """
    records = unvoided(work.records)
    if work.content.store.streams is not None:
        return records, False  # an object is complete, or it does not exist
    # Records of versions that bound them to nothing never count.
    bound = [record for record in records if _is_bound(record)]
    # As text until it is looked at: there may be 100,000.
    files: dict[str, list[_Bound]] = defaultdict(list)
    for index, record in enumerate(bound):
        for text in record[-2]:  # type: ignore[attr-defined]
            files[str(text).split(" ", 3)[-1]].append((index, text, is_sampled(record[0])))  # type: ignore
    look = partial(_lost, work.content, work.content.status())
    void = {index for each in at_once(work.content.store, look, list(files.items())) for index in each}
    if void:
        work.enter([[_VOID, [[bound[index][-1], bound[index][0]] for index in sorted(void)]]])
    return [record for index, record in enumerate(bound) if index not in void], bool(void)


def _is_bound(record: Record) -> bool:
    return len(record) > 3 and isinstance(record[-1], str) and isinstance(record[-2], list)


def _lost(content: Place, root: Status | None, listed: tuple[str, list[_Bound]]) -> list[int]:
    """Indexes of the records whose data a file does not hold."""
    name, bindings = listed
    place = content / name
    found = place.status()
    if root is None or found is None or found.kind is not FileKind.FILE:
        return [index for index, _, _ in bindings]
    identity = file_identity(root.identity, found.identity)
    with place.open(found) as file:
        return [
            index
            for index, text, is_sampled in bindings
            if not _is_held(text, file, identity, is_sampled=is_sampled)
        ]


def _is_held(text: str, file: File, identity: str, *, is_sampled: bool) -> bool:
    """Whether a file holds what a binding promises."""
    try:
        binding = FileBinding.from_text(text)
    except ValueError:
        return False
    if file.size < binding.end or not _is_same_file(binding.identity, identity):
        return False
    samples = binding.samples if is_sampled else ()
    try:
        return all(file.read(offset, len(data)) == data for offset, data in samples)
    except FormatError:
        return False


def _is_same_file(then: str, now: str) -> bool:
    """Whether two identities may be of one file. Where the directory is another one, so is every file in it:
    it was moved to another disk, or a file system numbers files anew at each mount; then samples decide."""
    return then.partition(":")[0] != now.partition(":")[0] or then == now
