"""A plan in a file: written once, then any process does any part of it without planning again.

Lines of JSON. The first says what is done and how many lines of each kind follow; the last is a checksum of
all before it. Of what a part does not do nothing but its size is looked at: a plan of 23,636 tasks over
89,939 arrays is read in a fraction of a second.

An array that lines cannot describe, such as one that a function of the user makes, leaves the plan without
tasks: whoever does a part then plans all of it again, and compares the fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from itertools import accumulate
from typing import Any

from ckpttools.array.lazy import ByteSource
from ckpttools.array.nodes import Stored, distinct_arrays
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, SourceChangedError
from ckpttools.core.message_terms import option
from ckpttools.core.region import Region
from ckpttools.core.text import first_names
from ckpttools.formats.base import Layout
from ckpttools.plan.node_lines import Nodes
from ckpttools.plan.plan import Plan
from ckpttools.plan.task import Task
from ckpttools.plan.value_lines import placement_of
from ckpttools.stores.base import File
from ckpttools.stores.location import Location
from ckpttools.stores.memory import Bytes
from ckpttools.stores.registry import parse
from ckpttools.stores.samples import BLOCK_BYTES, sample_digests, sample_starts
from ckpttools.stores.shares import this_process

# Arrays named in a message.
_MAX_NAMES = 4
KINDS = "ckpttools-plan-"
KIND = f"{KINDS}4"


@dataclass(frozen=True)
class Header:
    """What a plan does, in a few words.

    Attributes:
        version: of this package.
        call: name and arguments of the call of `ckpttools` that plans it again; None where text says neither.
        directory: where it was made.
        jobs: workers at a time that it was planned for, at most.
        source, destination: what is read, for messages, and what is written, wherever the process is.
        plan: fingerprint.
        overwrite: whether what is at the destination may be replaced.
        memory: bytes that a process may have resident.
        requests: reads under way at once; None for as many as are found good.
        nbytes: bytes that will certainly be written.
        arrays, tasks, bytes_in, bytes_out: of all of it.
        buffer_bytes, scratch_bytes: that each worker has.
        has_tasks: whether the tasks are in the file.
        built: when, in seconds since 1970: a plan that is made again is another one.
        replaced: what was at the destination when the plan was made, and may be replaced: size and version of
            a few files by name; empty where nothing was.
        sidecars: name and version of each file next to the arrays, such as config.json
            (`ckpttools.formats.sidecar.sidecar_versions`).
    """

    version: str
    call: Mapping[str, Any] | None
    directory: str
    jobs: int
    source: str
    destination: str
    plan: str
    overwrite: bool
    memory: int
    requests: int | None
    nbytes: int
    arrays: int
    tasks: int
    bytes_in: int
    bytes_out: int
    buffer_bytes: int
    scratch_bytes: int
    has_tasks: bool = True
    built: float = 0.0
    replaced: Mapping[str, Any] = field(default_factory=dict)
    sidecars: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """A file as it was when the plan was made.

    Attributes:
        path: wherever the process is.
        real: the one name of it.
        size, version: see `ckpttools.stores.base.File`.
        sample: a digest of some of its bytes; "" where its version is enough.
        is_inline: whether it is no file: its bytes are in the plan.
    """

    path: str
    real: str
    size: int
    version: str
    sample: str = ""
    is_inline: bool = False

    def opened(self, there: Callable[[str], str], owners: Callable[[int], str] = lambda offset: "") -> File:
        """The file as it is here.

        Args:
            there: where what had a path has it here.
            owners: describes the arrays at an offset of the file, for messages.

        Raises:
            SourceChangedError: it is another one.
            CheckpointError: it cannot be opened.
        """
        path = there(self.path)
        try:
            file = parse(path).open()
        except CheckpointError as error:
            if parse(path).exists():
                raise
            hint = f"where paths are others here, say so with {option('root', 'OLD=NEW')}"
            raise error.at(hint=hint) from error
        # A copy elsewhere need not have the time of change, and what has it may be another model.
        is_known = file.version == self.version or (path != self.path and bool(self.sample))
        is_alike = file.size == self.size and is_known
        differs = self._differing_byte(file) if is_alike else None
        if not is_alike or differs is not None:
            file.close()
            difference = "" if differs is None else f", other bytes at {differs:,}{owners(differs)}"
            raise SourceChangedError(
                f"{file.path} is not the file that the plan was made of",
                got=f"{file.size} bytes, version {file.version}{difference}, read by {this_process()}",
                expected=f"{self.size} bytes, version {self.version}",
                hint="make the plan again; if the file was copied here, copy it with its time of change"
                if differs is None
                else "replace it with a copy of the planned model, or make the plan again",
            )
        return file

    def _differing_byte(self, file: File) -> int | None:
        """Return the offset of the first block that differs from the plan's sample; None if none does."""
        if not self.sample:
            return None
        planned = self.sample.split(":")
        current = sample_digests(file, len(planned)).split(":")
        starts = sample_starts(self.size, len(planned))
        differing = (start for start, a, b in zip(starts, planned, current, strict=True) if a != b)
        return next(differing, None)


@dataclass(frozen=True)
class PlanFile:
    """What a file says; arrays and tasks are made when they are asked for.

    Attributes:
        header: of it.
        sources: the files that are read.
        groups: bytes of each group of tasks, read and written.
        nbytes: of the file.
        checksum: of the file: no other plan has the same.
        location: of the file; None where it was not read from one.
    """

    header: Header
    sources: tuple[PlannedSource, ...]
    groups: tuple[int, ...]
    nbytes: int
    checksum: str
    location: Location | None
    _counts: tuple[int, ...] | None
    _files: Mapping[str, int]
    _heads: Mapping[str, bytes]
    _inline: Mapping[int, bytes]
    _sizes: tuple[int, int, int]
    _lines: Sequence[bytes]

    def tasks_of(self, first: int, stop: int) -> range:
        """The numbers of the tasks of groups."""
        return range(self._starts[first], self._starts[stop])

    def opened_source(self, number: int, there: Callable[[str], str]) -> File:
        """Open a source file by index. Errors name the arrays that differ.

        Raises:
            SourceChangedError: the file differs from the planned one.
            CheckpointError: it cannot be opened.
        """
        return self.sources[number].opened(there, lambda offset: self._owners(number, offset))

    def _owners(self, number: int, offset: int) -> str:
        """Describe the arrays with bytes in a block of a file; "" if the plan has no tasks."""
        files = [Bytes(source.path, b"") for source in self.sources]
        nodes = Nodes(self._lines[self._sizes[0] : self._sizes[0] + self._sizes[1]], files.__getitem__)
        names = []
        for line in self._lines[: self._sizes[0]]:
            path, node, _ = json.loads(line)
            parts = distinct_arrays([nodes.array(node)])
            if any(
                isinstance(part, Stored)
                and part.source is files[number]
                and part.offset < offset + BLOCK_BYTES
                and offset < part.offset + part.stored_nbytes
                for part in parts
            ):
                names.append(keystr(tuple(path)))
        return f" (in {first_names(names, _MAX_NAMES)})" if names else ""

    @cached_property
    def _starts(self) -> Sequence[int]:
        if self._counts is None:
            return range(len(self.groups) + 1)
        return list(accumulate(self._counts, initial=0))

    def bytes_of_tasks(self, numbers: Iterable[int]) -> int:
        """Bytes that are read and written for tasks, those of a group shared out evenly among its tasks."""
        total = 0.0
        per_task = self._per_task
        for number in numbers:
            total += per_task(number)
        return round(total)

    @cached_property
    def _per_task(self) -> Callable[[int], float]:
        if self._counts is None:
            return self.groups.__getitem__
        shares = [
            nbytes / count
            for nbytes, count in zip(self.groups, self._counts, strict=True)
            for _ in range(count)
        ]
        return shares.__getitem__

    def part(self, first: int, stop: int, jobs: int, there: Callable[[str], str]) -> tuple[Plan, Opened]:
        """The plan of some groups, their tasks alone, and the files that they read.

        Args:
            first, stop: numbers of groups.
            jobs: workers at a time.
            there: where what had a path has it here.

        Raises:
            FormatError: the file is damaged.
        """
        arrays_at, nodes_at, tasks_at = 0, self._sizes[0], self._sizes[0] + self._sizes[1]
        opened = Opened(self, self._inline, there)
        nodes = Nodes(self._lines[nodes_at:tasks_at], opened)
        declared = [json.loads(self._lines[tasks_at + number]) for number in self.tasks_of(first, stop)]
        paths: dict[int, Path] = {}
        placements, arrays = {}, {}
        for number in dict.fromkeys(item[0] for item in declared):
            path, node, placement = json.loads(self._lines[arrays_at + number])
            paths[number] = tuple(path)
            placements[tuple(path)] = placement_of(placement)
            arrays[tuple(path)] = nodes.array(node)
        tasks = tuple(
            Task(paths[number], Region(tuple(start), tuple(end)), bytes_in, bytes_out, ("", 0))
            for number, start, end, bytes_in, bytes_out in declared
        )
        layout = Layout(placements, self._files, heads=self._heads)
        header = self.header
        streams = parse(there(header.destination)).store.streams
        return (
            Plan(
                Tree(arrays), layout, tasks, jobs, header.memory, header.buffer_bytes, header.scratch_bytes,
                streams=streams,
            ),
            opened,
        )  # fmt: skip


class Opened:
    """The files that a part reads, each opened when it is needed for the first time."""

    def __init__(self, plan: PlanFile, inline: Mapping[int, bytes], there: Callable[[str], str]) -> None:
        self._plan, self._inline, self._there = plan, inline, there
        self._files: dict[int, File] = {}

    def __call__(self, number: int) -> ByteSource:
        """Raises SourceChangedError where it is not what it was."""
        result = self._files.get(number)
        if result is None:
            content = self._inline.get(number)
            built = (
                self._plan.opened_source(number, self._there)
                if content is None
                else Bytes(self._plan.sources[number].path, content)
            )
            # Another thread may have been quicker.
            result = self._files.setdefault(number, built)
            if result is not built and isinstance(built, File):
                built.close()
        return result

    @property
    def files(self) -> list[File]:
        """Those that were."""
        return list(self._files.values())

    def close(self) -> None:
        """Closes them."""
        for file in self._files.values():
            if isinstance(file, File):
                file.close()
