"""Plan files: after one process has written the plan, any process can run any part without planning again.

A plan file has lines of JSON. The first line has the header and the number of lines of each kind; the
last line is a checksum of all others. A part parses only its own lines: a plan of 23,636 tasks over
89,939 arrays is read in a fraction of a second.

If an array has no text form, such as the result of a user's function, the plan is stored without tasks.
Each part then plans everything again, and compares the fingerprint.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from ckpttools.array.lazy import ByteSource
from ckpttools.array.nodes import Stored, distinct_arrays
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, SourceChangedError, UsageError
from ckpttools.core.message_terms import action, option
from ckpttools.core.region import Region, ceil_div
from ckpttools.core.text import first_names
from ckpttools.formats.base import Layout
from ckpttools.plan.array_lines import (
    NodeLines,
    Nodes,
    NotInLinesError,
    decode_placement,
    encode_placement,
    texts,
)
from ckpttools.plan.plan import Plan
from ckpttools.plan.task import Task
from ckpttools.stores.base import File, is_inside
from ckpttools.stores.checksums import BLOCK_BYTES, MAX_BLOCKS, compute_sample_digests, sample_starts
from ckpttools.stores.location import Location
from ckpttools.stores.memory import Bytes
from ckpttools.stores.publishing import PLAN_KINDS
from ckpttools.stores.registry import parse
from ckpttools.stores.shares import describe_this_process

# Maximum number of arrays named in a message.
_MAX_NAMES = 4
KIND = f"{PLAN_KINDS}5"


@dataclass(frozen=True)
class Header:
    """The summary of a plan.

    Attributes:
        version: Version of this package.
        call: Name and arguments of the `ckpttools` call that makes the plan; None if they have no text form.
        directory: Working directory of that call.
        jobs: Maximum number of workers of the plan.
        source, destination: Absolute paths of the source, for messages, and of the destination.
        plan: Fingerprint of the plan.
        overwrite: Whether the contents of the destination may be replaced.
        memory: Maximum resident bytes of a process.
        requests: Concurrent reads; None to choose the number automatically.
        nbytes: Bytes that will certainly be written.
        arrays, tasks, bytes_in, bytes_out: Totals of the full plan.
        buffer_bytes, scratch_bytes: Memory of each worker.
        has_tasks: Whether the tasks are in the file.
        built: Creation time in seconds since 1970, which distinguishes repeated plans.
        replaced: Contents of the destination at planning time that may be replaced: size and version of a few
            files by name; empty if there were none.
        sidecars: Name and version of each file next to the arrays, such as config.json
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
    """A source file as it was at planning time.

    Attributes:
        path: Absolute path.
        real: Canonical path, with links resolved.
        size, version: See `ckpttools.stores.base.File`.
        sample: A digest of some of its bytes; "" if its version suffices.
        is_inline: Whether the plan contains its bytes, because it is not a file.
    """

    path: str
    real: str
    size: int
    version: str
    sample: str = ""
    is_inline: bool = False

    def opened(
        self, relocate: Callable[[str], str], owners: Callable[[int], str] = lambda offset: ""
    ) -> File:
        """Open the file in this process.

        Args:
            relocate: Maps a planned path to the path in this process.
            owners: Describes the arrays at an offset of the file, for messages.

        Raises:
            SourceChangedError: The file differs from the planned one.
            CheckpointError: The file cannot be opened.
        """
        path = relocate(self.path)
        try:
            file = parse(path).open()
        except CheckpointError as error:
            if parse(path).exists():
                raise
            hint = f"if paths differ on this machine, give {option('root', 'OLD=NEW')}"
            raise error.at(hint=hint) from error
        # A copy may have another modification time, and another model may have a file with the same time.
        is_known = file.version == self.version or (path != self.path and bool(self.sample))
        is_alike = file.size == self.size and is_known
        differs = self._differing_byte(file) if is_alike else None
        if not is_alike or differs is not None:
            file.close()
            difference = "" if differs is None else f", other bytes at {differs:,}{owners(differs)}"
            raise SourceChangedError(
                f"{file.path} is not the file that was planned",
                got=f"{file.size} bytes, version {file.version}{difference}, "
                f"read by {describe_this_process()}",
                expected=f"{self.size} bytes, version {self.version}",
                hint="make the plan again; if the file was copied here, keep its modification time"
                if differs is None
                else "replace it with a copy of the planned model, or make the plan again",
            )
        return file

    def _differing_byte(self, file: File) -> int | None:
        """Return the offset of the first block that differs from the plan's sample; None if none does."""
        if not self.sample:
            return None
        planned = self.sample.split(":")
        current = compute_sample_digests(file, len(planned)).split(":")
        starts = sample_starts(self.size, len(planned))
        differing = (start for start, a, b in zip(starts, planned, current, strict=True) if a != b)
        return next(differing, None)


@dataclass(frozen=True)
class PlanFile:
    """The contents of a plan file; arrays and tasks are created on demand.

    Attributes:
        header: Summary of the plan.
        sources: The files to read.
        groups: Bytes of each group of tasks, read and written.
        nbytes: Size of the file in bytes.
        checksum: Checksum of the file, unique to the plan.
        location: Location of the file; None if the plan was not read from a file.
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
        """Return the indices of the tasks in a range of groups."""
        return range(self._starts[first], self._starts[stop])

    def opened_source(self, number: int, relocate: Callable[[str], str]) -> File:
        """Open a source file by index. Errors name the arrays that differ.

        Raises:
            SourceChangedError: The file differs from the planned one.
            CheckpointError: The file cannot be opened.
        """
        return self.sources[number].opened(relocate, lambda offset: self._owners(number, offset))

    def _owners(self, number: int, offset: int) -> str:
        """Describe the arrays with bytes in a block of a file. Returns "" if the plan has no tasks."""
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
        """Return the number of bytes that tasks read and write.

        The bytes of a group are divided evenly among its tasks.
        """
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

    def part(self, first: int, stop: int, jobs: int, relocate: Callable[[str], str]) -> tuple[Plan, Opened]:
        """Return the plan of some groups with only their tasks, and the files that those tasks read.

        Args:
            first, stop: Range of group indices.
            jobs: Number of workers.
            relocate: Maps a planned path to the path in this process.

        Raises:
            FormatError: The file is damaged.
        """
        arrays_at, nodes_at, tasks_at = 0, self._sizes[0], self._sizes[0] + self._sizes[1]
        opened = Opened(self, self._inline, relocate)
        nodes = Nodes(self._lines[nodes_at:tasks_at], opened)
        values = [json.loads(self._lines[tasks_at + number]) for number in self.tasks_of(first, stop)]
        paths: dict[int, Path] = {}
        placements, arrays = {}, {}
        for number in dict.fromkeys(item[0] for item in values):
            path, node, placement = json.loads(self._lines[arrays_at + number])
            paths[number] = tuple(path)
            placements[tuple(path)] = decode_placement(placement)
            arrays[tuple(path)] = nodes.array(node)
        tasks = tuple(
            Task(paths[number], Region(tuple(start), tuple(end)), bytes_in, bytes_out, ("", 0))
            for number, start, end, bytes_in, bytes_out in values
        )
        layout = Layout(placements, self._files, heads=self._heads)
        header = self.header
        streams = parse(relocate(header.destination)).store.streams
        return (
            Plan(
                Tree(arrays), layout, tasks, jobs, header.memory, header.buffer_bytes, header.scratch_bytes,
                streams=streams,
            ),
            opened,
        )  # fmt: skip


class Opened:
    """The files that a part reads, opened on first use."""

    def __init__(self, plan: PlanFile, inline: Mapping[int, bytes], relocate: Callable[[str], str]) -> None:
        self._plan, self._inline, self._there = plan, inline, relocate
        self._files: dict[int, File] = {}

    def __call__(self, number: int) -> ByteSource:
        """Return the file with an index. Raise SourceChangedError if it differs from the planned one."""
        result = self._files.get(number)
        if result is None:
            content = self._inline.get(number)
            built = (
                self._plan.opened_source(number, self._there)
                if content is None
                else Bytes(self._plan.sources[number].path, content)
            )
            # Another thread may have opened it first.
            result = self._files.setdefault(number, built)
            if result is not built and isinstance(built, File):
                built.close()
        return result

    @property
    def files(self) -> list[File]:
        """The files opened so far."""
        return list(self._files.values())

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            if isinstance(file, File):
                file.close()


# Limits on sampled blocks of all local files together. The minimum is that of 128 files, and a few files
# share it. Reading the minimum takes 10 ms from the page cache, and 5 s from a disk with a seek time of 5 ms.
_MAX_SAMPLES, _MIN_SAMPLES = 20_000, 1024
# Sources in memory up to this size are stored in the plan.
_LARGEST_INLINE = 1 << 16


def encode_plan(plan: Plan, header: Header) -> bytes:
    """Return the content of a plan file.

    Args:
        plan: The full plan.
        header: Its header; `has_tasks` is set here.
    """
    sources = _Sources()
    nodes = NodeLines(sources.number)
    for source in plan.sources:
        sources.number(source)
    try:
        arrays = list(_arrays(plan, nodes))
    except (NotInLinesError, RecursionError):
        arrays, nodes, header = [], NodeLines(sources.number), replace(header, has_tasks=False)
    groups = [list(group) for group in plan.groups]
    sizes = [sum(plan.tasks[n].bytes_in + plan.tasks[n].bytes_out for n in group) for group in groups]
    counts = None if plan.streams is None else [len(group) for group in groups]
    heads = {name: base64.b64encode(head).decode() for name, head in plan.layout.heads.items()}
    numbers = {path: number for number, (path, _, _) in enumerate(arrays)}
    tasks = [
        [numbers[task.path], task.region.start, task.region.stop, task.bytes_in, task.bytes_out]
        for task in (plan.tasks if header.has_tasks else ())
    ]
    first: list[object] = [KIND, asdict(header), [len(arrays), len(nodes.lines), len(tasks)]]
    declared = [
        *texts([first]),
        *_compact_json([sources.declared(), sources.inline, sizes, counts, plan.layout.files, heads]),
    ]
    text = "\n".join([*declared, *texts(arrays), *nodes.lines, *texts(tasks), ""]).encode()
    return text + f"{hashlib.sha256(text).hexdigest()}\n".encode()


def _compact_json(values: Iterable[object]) -> Iterator[str]:
    return (json.dumps(value, separators=(",", ":")) for value in values)


def _arrays(plan: Plan, nodes: NodeLines) -> Iterator[list[object]]:
    for path in dict.fromkeys(task.path for task in plan.tasks):
        yield [path, nodes.number(plan.tree.arrays[path]), encode_placement(plan.layout.placements[path])]


class _Sources:
    """Numbering of source files."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._listed: list[ByteSource] = []
        self._inline_indices: dict[int, int] = {}
        self.inline: dict[int, str] = {}

    def number(self, source: ByteSource) -> int:
        """Return a source's index. Raise NotInLinesError if other processes cannot open it."""
        if isinstance(source, Bytes):
            return self._inline_number(source)
        if not isinstance(source, File):
            raise NotInLinesError(f"{source!r:.80}")
        result = self._numbers.get(source.path)
        if result is None:
            result = self._numbers[source.path] = len(self._listed)
            self._listed.append(source)
        return result

    def _inline_number(self, source: Bytes) -> int:
        result = self._inline_indices.get(id(source))
        if result is None:
            if source.size > _LARGEST_INLINE:
                raise NotInLinesError(f"{source!r:.80}")
            result = self._inline_indices[id(source)] = len(self._listed)
            self._listed.append(source)
            self.inline[result] = base64.b64encode(source.read(0, source.size)).decode()
        return result

    def declared(self) -> list[list[object]]:
        """Return the sources in the order of their indices."""
        count = max(1, len(self._listed))
        samples = max(2, min(MAX_BLOCKS, _MAX_SAMPLES // count), _MIN_SAMPLES // count)
        return [list(asdict(_plan_source(item, samples)).values()) for item in self._listed]


def _plan_source(source: ByteSource, samples: int) -> PlannedSource:
    if isinstance(source, Bytes) or not isinstance(source, File):
        return PlannedSource(source.path, source.path, source.size, source.version, is_inline=True)
    location = parse(source.path)
    blocks = min(samples, ceil_div(source.size, BLOCK_BYTES) or 1)
    if blocks > MAX_BLOCKS:
        # These samples include those of the fingerprint, so that the error can name the file that differs.
        blocks += (1 - blocks) % (MAX_BLOCKS - 1)
    sample = compute_sample_digests(source, blocks) if location.store.scheme == "file" else ""
    return PlannedSource(
        str(location.absolute()), str(location.resolve()), source.size, source.version, sample
    )


def read_plan(location: Location) -> PlanFile:
    """Read a plan from its file.

    Raises:
        FormatError: The file is not a plan, or is damaged.
        StorageError: The file cannot be read.
    """
    location = location.absolute()
    if location.is_dir():
        raise UsageError(
            f"{location} is a directory, not a plan",
            expected=f"a file that {_writing_command()} wrote",
            hint=f"{action('summary', str(location))} identifies it",
        )
    return decode_plan(location.require_exists().read_bytes(), location)


def decode_plan(data: bytes, location: object) -> PlanFile:
    """Decode the content of a plan file. `location` is its origin, for messages; errors as in `read_plan`."""
    *lines, checksum, rest = data.split(b"\n") if data.count(b"\n") > 1 else (b"", b"", b"")
    payload_end = len(data) - len(checksum) - 1
    if not lines[0].startswith(f'["{KIND}"'.encode()):
        raise _not_a_plan_error(lines[0], location)
    if rest or hashlib.sha256(data[:payload_end]).hexdigest().encode() != checksum:
        raise FormatError(
            "the plan is damaged or incomplete",
            location=location,
            got=f"{len(data)} bytes with another checksum",
            hint=f"copy it again, or recreate it with {_writing_command()}",
        )
    try:
        return _parse_lines(
            lines, len(data), checksum.decode(), location if isinstance(location, Location) else None
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise FormatError(
            "the plan has invalid contents",
            location=location,
            got=f"{type(error).__name__}: {error}",
            hint=f"recreate it with {_writing_command()}",
        ) from error


def _not_a_plan_error(line: bytes, location: object) -> FormatError:
    """Return the error for a file that does not begin like a plan."""
    if line.startswith(f'["{PLAN_KINDS}'.encode()):
        return FormatError(
            "the plan was written by another version of ckpttools",
            location=location,
            got=line[2:].partition(b'"')[0].decode(errors="replace"),
            expected=KIND,
            hint="use that version for all parts, or recreate the plan",
        )
    return FormatError(
        f"the file is not a plan of {_writing_command()}",
        location=location,
        got=repr(line[:40].decode(errors="replace")) if line else None,
        hint=f"pass a file that {_writing_command()} wrote",
    )


def _writing_command() -> str:
    return action("write_plan")


def _parse_lines(lines: Sequence[bytes], size: int, checksum: str, location: Location | None) -> PlanFile:
    _, header, sizes = json.loads(lines[0])
    sources, inline, groups, counts, files, heads = map(json.loads, lines[1:7])
    for name in (*files, *heads):
        if not is_inside(name):
            raise ValueError(f"a file outside the destination, {name!r}")
    return PlanFile(
        _header(header),
        tuple(PlannedSource(*source) for source in sources),
        tuple(groups),
        size,
        checksum,
        location,
        None if counts is None else tuple(counts),
        files,
        {name: base64.b64decode(head) for name, head in heads.items()},
        {int(number): base64.b64decode(content) for number, content in inline.items()},
        tuple(sizes),
        lines[7:],
    )


def _header(declared: Mapping[str, Any]) -> Header:
    """Decode the header. Raise TypeError if fields are missing, unknown or of another type."""
    for item in fields(Header):
        none = type(None)
        kinds: Any = {
            "Mapping[str, Any] | None": (dict, none),
            "Mapping[str, Any]": dict,
            "int | None": (int, none),
            "float": (int, float),
        }
        kind = kinds.get(item.type, {"str": str, "int": int, "bool": bool}.get(str(item.type)))
        if kind is not None and not isinstance(declared[item.name], kind):
            raise TypeError(f"{item.name} is {declared[item.name]!r}")
    return Header(**declared)
