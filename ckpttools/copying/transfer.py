"""Copy the files of a part to a staging area with a few threads, each with its own buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import field
from functools import partial
from typing import TypeAlias

import numpy as np

from ckpttools.array.scratch import Scratch
from ckpttools.copying.part import FileGroup
from ckpttools.copying.pieces import (
    PIECE_BYTES,
    CopyRoom,
    FileRange,
    PieceDigester,
    digest_of,
    parts_of,
    split_files,
)
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import StorageError
from ckpttools.core.message_terms import retry_term
from ckpttools.run.bindings import BindingSink, new_run_id, select_sound_records
from ckpttools.run.threads import JournaledThreads, WorkerThread, start_threads
from ckpttools.stores.abilities import LinkTrials, SupportsLinks
from ckpttools.stores.base import File, Store
from ckpttools.stores.evidence import get_stamp_text
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import DataFiles, Published, Record, Sink, Work
from ckpttools.stores.sharing import is_of_repository

# Smaller files are written at once, and no disk space is reserved for them.
_SMALL = 1 << 20
# Used instead of a digest: the store copied the file, and no data was read.
_NO_DIGEST = ""

_Act: TypeAlias = Callable[[FileRange, np.ndarray], None]


@dataclass(frozen=True, slots=True)
class Transferred:
    """The result of a transfer.

    Attributes:
        bytes_resumed: Bytes copied by an earlier run.
        bytes_by_store: Bytes copied within the store.
        bytes_verified: Bytes that were read again after writing and found equal.
        published: The commit in a Hub repository; None elsewhere.
        pieces: The pieces that were read, with their digests.
        stamps: Stamps of written files by name, recorded when their last byte was written; see
            `ckpttools.stores.evidence`. Objects have none.
    """

    bytes_resumed: int = 0
    bytes_by_store: int = 0
    bytes_verified: int = 0
    published: Published | None = None
    pieces: Sequence[tuple[FileRange, str]] = ()
    stamps: Mapping[str, str] = field(default_factory=dict)


def transfer(
    part: FileGroup,
    work: Work,
    destination: Store,
    room: CopyRoom,
    *,
    verify: bool,
    observe: Callable[[int], None],
) -> Transferred:
    """Copy all files of a part, except those that must be written last.

    Args:
        part: The part.
        work: The unpublished output.
        destination: Store of the destination.
        room: Memory and workers.
        verify: Whether to read written data again.
        observe: Called with numbers of bytes as they are copied, from several threads but one at a time.

    Raises:
        SourceChangedError: A file has changed since the copy was planned.
        CheckpointError: Reading or writing fails, or the copy differs from the source.
    """
    last = set(part.last)
    sizes = {name: result.size for name, result in part.files.items() if name not in last}
    pieces = split_files(sizes, None if destination.streams else PIECE_BYTES)
    large = {name: size for name, size in sizes.items() if size > _SMALL}
    # Call this before the files are opened, because opening recreates lost files.
    records, _ = select_sound_records(work)
    with closing(work.data_files(large, {})) as files:
        run = _TransferState(part, work, files, destination, room, observe, records)
        return run.done(pieces, verify)


@dataclass
class _TransferState:
    """The mutable state of one transfer."""

    part: FileGroup
    work: Work
    files: DataFiles
    destination: Store
    room: CopyRoom
    observe: Callable[[int], None]
    records: Sequence[Record]
    threads: JournaledThreads = field(init=False)
    digests: dict[int, str] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    unwritten: Counter[str] = field(default_factory=Counter)
    stamps: dict[str, str] = field(default_factory=dict)
    run: str = field(default_factory=new_run_id)

    def done(self, pieces: Sequence[FileRange], verify: bool) -> Transferred:
        """Copy the pieces that earlier runs did not copy, and read everything back if requested."""
        self._keep_recorded(pieces)
        resumed = sum(piece.stop - piece.start for piece in pieces if piece.number in self.digests)
        self.observe(resumed)
        copy = partial(self._copy, link_trials=self._trials())
        todo = [piece for piece in pieces if piece.number not in self.digests]
        self.unwritten.update(piece.name for piece in todo)
        self._work(todo, copy)
        by_store = [piece for piece in pieces if self.digests[piece.number] == _NO_DIGEST]
        verified = self._verify_all(pieces) if verify else 0
        read = [
            (piece, self.digests[piece.number])
            for piece in pieces
            if self.digests[piece.number] != _NO_DIGEST
        ]
        by_store_bytes = sum(piece.size for piece in by_store)
        return Transferred(resumed, by_store_bytes, verified, pieces=read, stamps=self.stamps)

    def _keep_recorded(self, pieces: Sequence[FileRange]) -> None:
        """Keep the pieces that an earlier run copied, if source and copy still have their digests."""
        recorded: dict[int, tuple[str, str]] = {}
        for record in self.records:
            match record:
                case [int(number), str(digest), str(evidence), *_] if 0 <= number < len(pieces):
                    recorded[number] = digest, evidence
        content = self.work.content
        sizes = dict.fromkeys((pieces[number].name for number in recorded), -1)
        for name in sizes:
            self.stamps[name] = get_stamp_text(content / name)
            status = (content / name).status()
            sizes[name] = -1 if status is None else status.size

        def check(piece: FileRange, buffer: np.ndarray) -> None:
            digest, evidence = recorded[piece.number]
            if self._is_unchanged(piece, digest, evidence, buffer):
                with self.threads.lock:
                    self.digests[piece.number] = digest

        kept = [pieces[number] for number in recorded if sizes[pieces[number].name] == pieces[number].size]
        if kept:
            self._work(kept, check)

    def _is_unchanged(self, piece: FileRange, digest: str, evidence: str, buffer: np.ndarray) -> bool:
        """Return whether the source of a recorded piece is unchanged and the copy has its digest.

        A disk can lose data in the middle of a file, such as the blocks of a thin volume.
        """
        is_unchanged = evidence == self.part.stamps[piece.name].evidence != ""
        if digest == _NO_DIGEST:
            return is_unchanged
        if not is_unchanged:
            # Without evidence, only the content shows whether the source is unchanged.
            with self._open(piece.name) as source:
                if digest_of(piece, source.read_into, buffer.data) != digest:
                    return False
        if self.destination.streams is not None:
            return True  # An object always has the bytes that were sent.
        with (self.work.content / piece.name).open() as copy:
            return digest_of(piece, copy.read_into, buffer.data) == digest

    # Methods that start threads.

    def _work(self, pieces: Sequence[FileRange], act: _Act) -> None:
        todo = iter(pieces)
        self.threads = JournaledThreads(self.files, self.work)
        with self.threads.running_threads() as workers:
            if jobs := min(self.room.jobs, len(pieces)):
                start_threads(lambda: self._worker(todo, act), jobs, workers)
        if self.threads.error is not None:
            raise self.threads.error

    def _worker(self, todo: Iterator[FileRange], act: _Act) -> WorkerThread:
        scratch = Scratch(self.room.buffer_bytes)

        def work() -> None:
            with scratch.take((self.room.buffer_bytes,), np.dtype(np.uint8)) as buffer:
                while not self.threads.stop.is_set():
                    with self.threads.lock:
                        piece = next(todo, None)
                    if piece is None:
                        return
                    act(piece, buffer)

        return self.threads.thread(work)

    # Methods that copy one piece.

    def _trials(self) -> LinkTrials | None:
        """Return the test for copies within the store; None if the store cannot copy."""
        store = self.destination
        return (
            store.link_trials(self.work.content.key)
            if isinstance(store, SupportsLinks) and store.link_copies
            else None
        )

    def _open(self, name: str) -> File:
        return (self.part.source / name).open(self.part.files[name])

    def _copy(self, piece: FileRange, buffer: np.ndarray, link_trials: LinkTrials | None) -> None:
        with self._open(piece.name) as source:
            if (
                link_trials is not None
                and link_trials.refusal(source) is None
                and self._try_link(source, piece.name)
            ):
                self._record_digest(piece, _NO_DIGEST)
                return
            digester, bindings = PieceDigester(), tuple[str, ...]()
            with closing(self.files.write_passes(piece.number)) as sinks:
                for sink in sinks:
                    # Each sink receives the complete piece.
                    digester, bound = PieceDigester(), BindingSink(sink)
                    if not self._write_range(piece, source, bound, buffer, digester):
                        return
                    bindings = bound.bindings
        self._report_progress(piece, piece.stop)
        self._take_stamp(piece)
        self._record_digest(piece, digester.text, bindings)

    def _take_stamp(self, piece: FileRange) -> None:
        """Record the stamp of a file after its last piece, before another process can change the file."""
        with self.threads.lock:
            self.unwritten[piece.name] -= 1
            is_written = self.unwritten[piece.name] == 0
        if is_written:
            self.stamps[piece.name] = get_stamp_text(self.work.content / piece.name)

    def _try_link(self, source: File, name: str) -> bool:
        content = self.work.content
        assert isinstance(content.store, SupportsLinks)
        if not content.store.link(source, (content / name).key):
            return False
        with self.threads.lock:
            self.observe(source.size)
        return True

    def _write_range(
        self, piece: FileRange, source: File, sink: Sink, buffer: np.ndarray, digester: PieceDigester
    ) -> bool:
        """Write a piece. Returns False if it was not completed, because another worker failed."""
        address, is_small = buffer.ctypes.data, piece.size <= _SMALL
        if is_small:
            part = buffer.data[: piece.size]
            source.read_into(0, part)
            sink.write_whole(piece.name, bytes(part))
            digester.add(part)
            return True
        for offset, part in parts_of(piece, buffer.data):
            if self.threads.stop.is_set():
                return False
            source.read_into(offset, part)
            sink.write(piece.name, offset, part, address)
            digester.add(part)
            if not sink.is_dry_pass:
                self._report_progress(piece, offset + len(part))
        return True

    def _report_progress(self, piece: FileRange, stop: int) -> None:
        """Report the progress of a piece; retransmitted bytes are not counted twice."""
        with self.threads.lock:
            before = self.told.get(piece.number, piece.start)
            if stop > before:
                self.told[piece.number] = stop
                self.observe(stop - before)

    def _record_digest(self, piece: FileRange, digest: str, bindings: tuple[str, ...] = ()) -> None:
        with self.threads.lock:
            self.digests[piece.number] = digest
            evidence = self.part.stamps[piece.name].evidence
            self.threads.note([[piece.number, digest, evidence, list(bindings), self.run]])

    # Methods that read the data back.

    def _verify_all(self, pieces: Sequence[FileRange]) -> int:
        """Read the written data back, check that it is equal, and return the number of bytes."""
        self._work(pieces, self._verify)
        return sum(piece.stop - piece.start for piece in pieces)

    def _verify(self, piece: FileRange, buffer: np.ndarray) -> None:
        location, view = self.work.content / piece.name, buffer.data
        digest = self.digests[piece.number]
        if digest == _NO_DIGEST:
            with self._open(piece.name) as source:
                digest = digest_of(piece, source.read_into, view)
        with location.open() as copy:
            if digest_of(piece, copy.read_into, view) != digest:
                raise WrittenWrongError(
                    f"{location} differs from what was written",
                    got=f"different bytes between byte {piece.start} and byte {piece.stop}",
                    hint=f"the disk, the network or the store has changed them: {retry_term()}",
                )


class WrittenWrongError(StorageError):
    """A file that was read back differs from the data that was written."""


def check_files(part: FileGroup, sizes: Mapping[str, int], location: Location) -> None:
    """Compare the names and sizes of the files at a location with those of the copied files.

    Raises:
        WrittenWrongError: A file is missing, has another size, or was not written by this command.
    """
    for name, result in part.files.items():
        if sizes.get(name) != result.size:
            got = f"{sizes[name]} bytes" if name in sizes else "it does not exist"
            raise WrittenWrongError(
                f"{location}/{name} is not what was written", got=got, expected=f"{result.size} bytes"
            )
    extra = sizes.keys() - part.files.keys() - set(part.commits)
    unknown = sorted(name for name in extra if not is_of_repository(location, name))
    if unknown:
        raise WrittenWrongError(
            f"{location}/{unknown[0]} was not written by this command",
            got="a file of another process in the copy",
            expected="only the files that are copied",
            hint=f"move it away; then {retry_term()}",
        )
