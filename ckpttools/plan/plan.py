"""Plans: every task of a conversion with its bytes and memory, decided before the first byte is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cached_property
from itertools import chain, islice
from math import prod
from typing import TypedDict

from ckpttools.array.fingerprint import Describer, Identify, fingerprint_once, identity, nodes, sources
from ckpttools.array.gaps import refuse_incomplete
from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.details import log_detail
from ckpttools.core.memory_limit import baseline_bytes, estimate_names_bytes, format_size, memory_error
from ckpttools.core.message_terms import location, option, render
from ckpttools.core.notes import Notes
from ckpttools.core.region import ceil_div
from ckpttools.core.text import array_count, plural
from ckpttools.formats.base import Layout, Writer
from ckpttools.formats.placement import ChunkFiles, Placement, Referenced
from ckpttools.plan.task import (
    LARGEST_TASK,
    Task,
    estimate_groups,
    groups,
    reading_costs,
    sort_by_output,
    split_array,
    split_in_order,
    task_sizes,
)
from ckpttools.stores.costs import Streams

_SMALLEST_TASK = 1 << 20
# Number of task sizes, each half the previous one, that are tried before fewer workers. Smaller tasks cut
# matrices of large models into pieces that are not contiguous.
_GOOD_SIZES = 3
# Number of workers that keep a network busy, each with several concurrent reads.
_MIN_REMOTE_WORKERS = 4
# With fewer tasks per worker, the last task may leave the other workers idle most of the time.
_TASKS_PER_WORKER = 4
_SMALLEST_SHARE = 4 << 20
# Memory for each array's nodes and name, each placement, each task and its region, and each index entry and
# its key, which exist twice (as an object and encoded). Converting small arrays of one chunk and one task
# from safetensors to Orbax took 3.0 KiB per array in total.
BYTES_PER_NODE = 512
_BYTES_PER_ARRAY = 512
_BYTES_PER_TASK = 1024
_BYTES_PER_CHUNK = 1024
# Memory of an encoded chunk's extent and of a file per chunk: 100,000 chunks took up to 0.4 KiB and 0.6 KiB
# more each.
_BYTES_PER_EXTENT, _BYTES_PER_FILE = 640, 896
# Smaller fractions, such as headers and gaps between chunks, need no remark.
_MIN_REMARK_FRACTION = 0.05
# Number of lines of a fingerprint that are encoded as one list. Another number would change all fingerprints,
# so that conversions started by an earlier version could not be resumed.
_LINES_PER_LIST = 1024


class Totals(TypedDict):
    """The size of a plan: arrays, tasks, and bytes read and written."""

    arrays: int
    tasks: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class Division:
    """The division of arrays into tasks, which depends on the memory and the number of workers.

    Attributes:
        max_bytes: Maximum bytes of a task.
        share_bytes: Maximum bytes of a task without encoded chunks, so that every worker gets several tasks.
    """

    max_bytes: int
    share_bytes: int

    def to_text(self) -> str:
        """Encode the division for a journal."""
        return f"{self.max_bytes} {self.share_bytes}"

    @classmethod
    def from_text(cls, text: str) -> Division | None:
        """Decode the result of `to_text`. Return None for any other text."""
        words = text.split(" ")
        if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) < 20 for word in words):
            return None
        division = cls(*map(int, words))
        return division if 0 < division.share_bytes <= division.max_bytes else None


@dataclass(frozen=True, repr=False)
class Plan:
    """The tasks, files and memory of a conversion.

    Attributes:
        tree: The contents of the destination.
        layout: Location of each array in the destination's files.
        tasks: The tasks in the order in which they start: that of the source files.
        jobs: Number of workers.
        memory: Promised peak memory in bytes.
        buffer_bytes: Largest buffer of a task; each worker has one buffer.
        scratch_bytes: Temporary bytes of each worker.
        notes: Notes for the user.
        reserved: Bytes of the memory that are used by something else.
        streams: How files are written that must be written from first to last byte; None if tasks can run in
            any order.
        has_digests: Whether task outputs are hashed, for comparison with other copies of the source.
        division: How arrays are divided into tasks; None for plans that are read from a file.
    """

    tree: Tree
    layout: Layout
    tasks: tuple[Task, ...]
    jobs: int
    memory: int
    buffer_bytes: int
    scratch_bytes: int
    notes: Notes = field(default_factory=Notes)
    reserved: int = 0
    streams: Streams | None = None
    has_digests: bool = False
    division: Division | None = None

    message_fields = ("notes", "layout", "tree")

    def __repr__(self) -> str:
        arrays, tasks = array_count(self.tree.arrays), plural(len(self.tasks), "task")
        peak = format_size(self.projected_peak)
        return f"<Plan of {arrays} in {tasks}: {self.bytes_out:,} bytes, {peak} of memory at most>"

    @property
    def groups(self) -> Iterable[Sequence[int]]:
        """Groups of task indices that one worker does in order: tasks of a streamed file, or one task."""
        if self.streams is None:
            return ((number,) for number in range(len(self.tasks)))
        return groups(self.tasks, self.layout, self.streams.file_bytes)

    @property
    def bytes_in(self) -> int:
        return sum(task.bytes_in for task in self.tasks)

    @property
    def bytes_out(self) -> int:
        return sum(task.bytes_out for task in self.tasks)

    @property
    def totals(self) -> Totals:
        """The size of the plan, with the names that reports use."""
        return Totals(
            arrays=len(self.tree.arrays),
            tasks=len(self.tasks),
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
        )

    @property
    def bytes_referenced(self) -> int:
        """Bytes of chunks that are not copied, because the destination refers to the existing files."""
        return sum(reference.nbytes for reference in self.layout.referenced)

    @property
    def bytes_unreferenced(self) -> int:
        """Bytes of the referenced files that the destination keeps but does not use."""
        used = sum(stop - start for parts in self.layout.used.values() for start, stop in parts)
        return sum(source.size for source in self.layout.links.values()) - used

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for the user, except those about values."""
        return tuple(map(render, self.raw_remarks))

    @property
    def raw_remarks(self) -> tuple[str, ...]:
        """The remarks with unrendered terms."""
        remarks = (*self.notes.remarks, *self.layout.remarks)
        if not self.bytes_unreferenced > _MIN_REMARK_FRACTION * self.bytes_referenced:
            return remarks
        destination, read = location("destination"), location("source")
        return (
            *remarks,
            f"{destination} shares files with {read}: {self.bytes_unreferenced:,} bytes in them are unused "
            f"in {destination}, and take space until both are deleted; {option('reference', False)} copies "
            "the needed bytes instead",
        )

    @property
    def projected_peak(self) -> int:
        """Maximum resident bytes: the interpreter, the plan, and every worker's buffers."""
        return baseline_bytes() + self.held_bytes + self.jobs * (self.buffer_bytes + self.scratch_bytes)

    @property
    def held_bytes(self) -> int:
        """Resident bytes in addition to the interpreter and the workers' buffers."""
        return self.reserved + _base_bytes(self.tree, self.layout, len(self.tasks)) - baseline_bytes()

    @cached_property
    def sources(self) -> tuple[ByteSource, ...]:
        """Every file that will be read or shared, sorted by path."""
        read = sources(_written_arrays(self.tree, self.layout).values())
        result = {source.path: source for source in (*read, *self.layout.links.values())}
        return tuple(result[path] for path in sorted(result))

    def fingerprint(self, identify: Identify = identity) -> str:
        """Return a text that is equal for plans with the same sources, output bytes and locations.

        Args:
            identify: Returns the canonical name and the version of a file.
        """
        digest, text = hashlib.sha256(), json.JSONEncoder(separators=(",", ":")).encode
        described = self._describe(fingerprint_once(identify))
        while lines := list(islice(described, _LINES_PER_LIST)):
            digest.update(text(lines).encode())
        return digest.hexdigest()

    def _describe(self, identify: Identify) -> Iterator[object]:
        identities = [(*identify(item), item.size) for item in self.sources]
        yield sorted((name, size, version) for name, version, size in identities)
        yield [sorted(self.layout.files.items()), sorted(self.tree.metadata.custom.items())]
        yield [
            [render(note.subject), render(note.text)] for note in (*self.notes.inexact, *self.notes.values)
        ]
        yield [[name, identify(source)[0]] for name, source in self.layout.links.items()]
        describer = Describer(identify)
        for path, array in self.tree.arrays.items():
            placement = self.layout.placements[path]
            yield [keystr(path), array.shape, array.dtype.name, placement.described]
            # A placement that refers to existing bytes already describes them.
            if not isinstance(placement.home, Referenced):
                yield from describer.lines(array)
        for task in self.tasks:
            yield [keystr(task.path), task.region.start, task.region.stop]


def build(
    tree: Tree,
    writer: Writer,
    *,
    memory: int,
    jobs: int,
    notes: Notes | None = None,
    reserved: int = 0,
    streams: Streams | None = None,
    division: Division | None = None,
) -> Plan:
    """Plan writing `tree` with `writer`.

    Args:
        tree: The contents to write.
        writer: The format and its options.
        memory: Maximum resident bytes.
        jobs: Maximum number of workers; fewer are planned if the memory is too small.
        notes: Notes for the user.
        reserved: Bytes of the memory that are used by something else.
        streams: How files are written; None if they can be written at any offset.
        division: How arrays are divided into tasks; None to choose it.

    Raises:
        MemoryBudgetError: The memory is too small for one worker with the smallest tasks.
        FormatError: Chunks of the source are missing.
    """
    refuse_incomplete(tree.arrays.values(), tree.metadata.location)
    jobs, limit, layout = _fit_memory(tree, writer, memory, jobs, reserved, streams, division)
    share = (
        division.share_bytes if division else min(limit, _share(_written_arrays(tree, layout).values(), jobs))
    )
    division = Division(limit, share)
    tasks = _streamed_tasks(tree, layout, limit) if streams else _unordered_tasks(tree, layout, division)
    buffer = max((task.bytes_out for task in tasks), default=0)
    scratch = _scratch_bytes(tree, layout)
    reserved += jobs * streams.memory if streams else 0
    log_detail(
        "planned %s tasks of at most %s, for %s workers within %s of memory",
        len(tasks),
        format_size(buffer),
        jobs,
        format_size(memory),
    )
    return Plan(
        *(tree, layout, tuple(tasks), jobs, memory, buffer, scratch, notes or Notes(), reserved, streams),
        division=division,
    )


def _streamed_tasks(tree: Tree, layout: Layout, limit: int) -> list[Task]:
    """Return the tasks for streamed files."""
    arrays = _written_arrays(tree, layout)
    sizes = task_sizes(arrays, layout, limit)
    cuts = (split_in_order(path, arrays[path], layout.placements[path], size) for path, size in sizes.items())
    return sort_by_output(chain.from_iterable(cuts), layout)


def _unordered_tasks(tree: Tree, layout: Layout, division: Division) -> list[Task]:
    """Return the tasks for files that are written at any offset, sources in file order."""
    tasks = (
        task
        for path, array in _written_arrays(tree, layout).items()
        for placement in (layout.placements[path],)
        for task in split_array(
            path, array, placement, division.max_bytes if placement.codec else division.share_bytes
        )
    )
    return sorted(tasks, key=lambda task: task.locality)


def _share(arrays: Collection[LazyArray], jobs: int) -> int:
    """Return the maximum bytes of a task such that every worker gets several, even for little data."""
    # A part of a transposed matrix is either written in pieces or requires reading the full matrix. Over a
    # network, this costs more than idle workers.
    if reading_costs(arrays).requests:
        return 2 * LARGEST_TASK
    nbytes = sum(array.nbytes for array in arrays)
    return max(_SMALLEST_SHARE, ceil_div(nbytes, _TASKS_PER_WORKER * jobs))


def _fit_memory(
    tree: Tree,
    writer: Writer,
    memory: int,
    jobs: int,
    reserved: int,
    streams: Streams | None,
    division: Division | None,
) -> tuple[int, int, Layout]:
    """Choose workers, task size and a layout that fit the memory; few, large tasks are tried first."""
    layout = writer.layout(tree, LARGEST_TASK)
    encodes = any(placement.codec for placement in layout.placements.values())
    if streams:
        jobs = max(1, min(jobs, estimate_groups(layout, streams.file_bytes)))
    least = 0
    is_far = bool(reading_costs(_written_arrays(tree, layout).values()).requests)
    choices = _remote_choices(jobs) if streams and is_far else _choices(jobs)
    if division:
        choices = ((count, division.max_bytes) for count in range(jobs, 0, -1))
    for count, limit in choices:
        # Each encoded chunk is made by one task, so smaller tasks mean smaller chunks.
        layout = writer.layout(tree, limit) if encodes else layout
        needed = reserved + _estimate_memory(tree, layout, count, limit, streams)
        if needed <= memory:
            return count, limit, layout
        # Many small tasks can take more than a few large ones.
        least = min(least or needed, needed)
    raise memory_error("the conversion does not fit into the memory allowed", memory, least)


def _choices(jobs: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of workers and task sizes, best first: smaller tasks, then fewer workers, then both."""
    sizes = [LARGEST_TASK]
    while sizes[-1] // 2 >= _SMALLEST_TASK:
        sizes.append(sizes[-1] // 2)
    yield from ((jobs, limit) for limit in sizes[:_GOOD_SIZES])
    yield from ((count, sizes[:_GOOD_SIZES][-1]) for count in range(jobs - 1, 0, -1))
    yield from ((1, limit) for limit in sizes[_GOOD_SIZES:])


def _remote_choices(jobs: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of workers and task sizes in bytes for streamed files with remote sources, best first.

    Each task of a transposed matrix reads the full matrix, so large tasks come before many workers.
    """
    for limit in (2 * LARGEST_TASK, LARGEST_TASK, LARGEST_TASK // 2):
        yield from ((count, limit) for count in range(jobs, min(jobs, _MIN_REMOTE_WORKERS) - 1, -1))
    yield from _choices(jobs)


def _estimate_memory(tree: Tree, layout: Layout, jobs: int, limit: int, streams: Streams | None) -> int:
    """Return the maximum resident bytes with tasks of this size."""
    arrays = _written_arrays(tree, layout)
    sizes = task_sizes(arrays, layout, limit) if streams else dict.fromkeys(arrays, limit)
    # Halving an axis may leave tasks slightly larger than half the size.
    tasks = sum(max(1, ceil_div(2 * array.nbytes, sizes[path])) for path, array in arrays.items())
    largest = max(sizes.values(), default=0) if streams else limit
    worker = largest + _scratch_bytes(tree, layout) + (streams.memory if streams else 0)
    return _base_bytes(tree, layout, tasks) + jobs * worker


def _scratch_bytes(tree: Tree, layout: Layout) -> int:
    """Return the maximum temporary bytes of a worker."""
    own = tree.once(_scratch_of_arrays)
    needs = (own[path] + layout.placements[path].scratch_bytes for path in _written_arrays(tree, layout))
    return max(needs, default=0)


def _scratch_of_arrays(tree: Tree) -> dict[Path, int]:
    return {path: array.scratch_bytes for path, array in tree.arrays.items()}


def _nodes(tree: Tree) -> int:
    return nodes(tree.arrays.values())


def _written_arrays(tree: Tree, layout: Layout) -> dict[Path, LazyArray]:
    """Return the arrays whose bytes move."""
    arrays = tree.arrays.items()
    return {p: array for p, array in arrays if not isinstance(layout.placements[p].home, Referenced)}


def _base_bytes(tree: Tree, layout: Layout, tasks: int) -> int:
    """Return the resident bytes in addition to the workers' buffers."""
    chunks = sum(
        prod(placement.grid) * _bytes_per_chunk(placement) for placement in layout.placements.values()
    )
    return (
        baseline_bytes()
        + estimate_names_bytes(map(keystr, tree))
        + tree.once(_nodes) * BYTES_PER_NODE
        + len(tree) * _BYTES_PER_ARRAY
        + tasks * _BYTES_PER_TASK
        + chunks
    )


def _bytes_per_chunk(placement: Placement) -> int:
    files = _BYTES_PER_FILE if isinstance(placement.home, ChunkFiles) else 0
    return _BYTES_PER_CHUNK + files + (_BYTES_PER_EXTENT if placement.codec else 0)
