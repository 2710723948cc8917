"""A plan: every task of a conversion, its bytes and memory, decided before the first byte is read."""

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
from ckpttools.core.budget import baseline_bytes, estimate_names_bytes, format_size, memory_error
from ckpttools.core.dataclass import dataclass
from ckpttools.core.message_terms import location, option
from ckpttools.core.notes import Notes
from ckpttools.core.region import ceil_div
from ckpttools.core.text import array_count, plural
from ckpttools.formats.base import Layout, Writer
from ckpttools.formats.placement import ChunkFiles, Placement, Referenced
from ckpttools.plan.streamed import cut_in_order, groups, in_write_order, most_groups, task_sizes
from ckpttools.plan.task import LARGEST_TASK, Task, cut, reading_costs
from ckpttools.stores.costs import Streams

_SMALLEST_TASK = 1 << 20
# Sizes of a task, each half the one before, that are tried before fewer workers: smaller tasks cut matrices
# of large models into pieces that are no longer contiguous.
_GOOD_SIZES = 3
# So many workers keep a network busy, each with several reads at a time.
_FEWEST_FROM_FAR = 4
# With fewer tasks for each worker the last one may leave the others idle for most of the time.
_TASKS_PER_WORKER = 4
_SMALLEST_SHARE = 4 << 20
# What an array is made of, with its name; its place in the destination; a task with its region and place;
# an index entry with its key, twice (as an object and encoded). Small arrays, of one chunk and one task
# each, took 3.0 KiB each in all to convert from safetensors to Orbax.
BYTES_PER_NODE = 512
_BYTES_PER_ARRAY = 512
_BYTES_PER_TASK = 1024
_BYTES_PER_CHUNK = 1024
# Where an encoded chunk went, and a file of its own: 100,000 of them took up to 0.4 and 0.6 KiB each
# beside that.
_BYTES_PER_EXTENT, _BYTES_PER_FILE = 640, 896
# Headers and gaps between chunks are no reason to say something.
_WORTH_A_REMARK = 0.05
# Lines of a fingerprint that are encoded at once, as one list: another number gives other fingerprints, with
# which nobody goes on with what an earlier version has begun.
_TOGETHER = 1024


class Totals(TypedDict):
    """How much a plan is: arrays, tasks, and the bytes that these read and write."""

    arrays: int
    tasks: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class Division:
    """How arrays are cut into tasks. It follows from the memory and the number of workers.

    Attributes:
        max_bytes: Maximum bytes of a task.
        share_bytes: The same for tasks without encoded chunks, so that every worker gets several tasks.
    """

    max_bytes: int
    share_bytes: int

    def to_text(self) -> str:
        """Encode the division for a journal."""
        return f"{self.max_bytes} {self.share_bytes}"

    @classmethod
    def from_text(cls, text: str) -> Division | None:
        """Decode the result of `to_text`. Returns None for any other text."""
        words = text.split(" ")
        if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) < 20 for word in words):
            return None
        division = cls(*map(int, words))
        return division if 0 < division.share_bytes <= division.max_bytes else None


@dataclass(frozen=True, repr=False)
class Plan:
    """What will be done.

    Attributes:
        tree: what the destination will hold.
        layout: where in the destination's files.
        tasks: in the order in which they start, sources in file order.
        jobs: workers at a time.
        memory: the promised peak in bytes.
        buffer_bytes: largest buffer of a task; each worker owns one.
        scratch_bytes: temporary bytes that each worker owns.
        notes: what the user should know.
        reserved: bytes of the memory that something else takes meanwhile.
        streams: how files are written where that goes from the first byte to the last; None where tasks may
            be done in any order.
        has_digests: whether task outputs are hashed, for comparison with other copies of the source.
        division: how arrays are cut into tasks; None for plans that are read from a file.
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

    def __repr__(self) -> str:
        arrays, tasks = array_count(self.tree.arrays), plural(len(self.tasks), "task")
        peak = format_size(self.projected_peak)
        return f"<Plan of {arrays} in {tasks}: {self.bytes_out:,} bytes, {peak} of memory at most>"

    @property
    def groups(self) -> Iterable[Sequence[int]]:
        """The numbers of tasks that one worker does, in order: those of a file that is streamed, else one."""
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
        """How much it is, under the names that reports have for that."""
        return Totals(
            arrays=len(self.tree.arrays),
            tasks=len(self.tasks),
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
        )

    @property
    def bytes_referenced(self) -> int:
        """Bytes of chunks that are not moved: they stay in the files in which they are."""
        return sum(home.nbytes for home in self.layout.referenced)

    @property
    def bytes_dead(self) -> int:
        """Bytes of those files that belong to nothing in the destination, which keeps them all the same."""
        used = sum(stop - start for parts in self.layout.used.values() for start, stop in parts)
        return sum(source.size for source in self.layout.links.values()) - used

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know beside what becomes of values."""
        remarks = (*self.notes.remarks, *self.layout.remarks)
        if not self.bytes_dead > _WORTH_A_REMARK * self.bytes_referenced:
            return remarks
        written, read = location("destination"), location("source")
        return (
            *remarks,
            f"{written} shares files with {read}: {self.bytes_dead:,} bytes in them are of no use to "
            f"{written}, and take room until both are deleted; {option('reference', False)} copies what it "
            "needs instead",
        )

    @property
    def projected_peak(self) -> int:
        """Bytes resident at most: the interpreter, the plan, and every worker's buffers."""
        return baseline_bytes() + self.held_bytes + self.jobs * (self.buffer_bytes + self.scratch_bytes)

    @property
    def held_bytes(self) -> int:
        """What is resident beside the interpreter and the workers' buffers."""
        return self.reserved + _base_bytes(self.tree, self.layout, len(self.tasks)) - baseline_bytes()

    @cached_property
    def sources(self) -> tuple[ByteSource, ...]:
        """Every file that will be read or shared, by path."""
        read = sources(_written(self.tree, self.layout).values())
        result = {source.path: source for source in (*read, *self.layout.links.values())}
        return tuple(result[path] for path in sorted(result))

    def fingerprint(self, identify: Identify = identity) -> str:
        """The same for two plans that put the same bytes of the same files in the same places.

        Args:
            identify: the one name of a file, and its version.
        """
        digest, text = hashlib.sha256(), json.JSONEncoder(separators=(",", ":")).encode
        described = self._described(fingerprint_once(identify))
        while lines := list(islice(described, _TOGETHER)):
            digest.update(text(lines).encode())
        return digest.hexdigest()

    def _described(self, identify: Identify) -> Iterator[object]:
        identities = [(*identify(item), item.size) for item in self.sources]
        yield sorted((name, size, version) for name, version, size in identities)
        yield [sorted(self.layout.files.items()), sorted(self.tree.metadata.custom.items())]
        yield [[note.subject, note.text] for note in (*self.notes.inexact, *self.notes.values)]
        yield [[name, identify(source)[0]] for name, source in self.layout.links.items()]
        describer = Describer(identify)
        for path, array in self.tree.arrays.items():
            placement = self.layout.placements[path]
            yield [keystr(path), array.shape, array.dtype.name, placement.described]
            # A placement that refers to bytes says which.
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
    """Plans writing `tree` with `writer`.

    Args:
        tree: what to write.
        writer: the format and its options.
        memory: bytes that may be resident at most.
        jobs: workers at a time; fewer are planned where the memory is too small for so many.
        notes: what the user should know.
        reserved: bytes of the memory that something else takes meanwhile.
        streams: how files are written; None where they are written at any offset.
        division: how arrays are cut into tasks; None to choose it.

    Raises:
        MemoryBudgetError: the memory is too small even for one worker with the smallest tasks.
        FormatError: chunks of the source are missing.
    """
    refuse_incomplete(tree.arrays.values(), tree.metadata.location)
    jobs, limit, layout = _fitted(tree, writer, memory, jobs, reserved, streams, division)
    share = division.share_bytes if division else min(limit, _share(_written(tree, layout).values(), jobs))
    division = Division(limit, share)
    tasks = _in_order(tree, layout, limit) if streams else _in_any_order(tree, layout, division)
    buffer = max((task.bytes_out for task in tasks), default=0)
    scratch = _scratch_bytes(tree, layout)
    reserved += jobs * streams.memory if streams else 0
    return Plan(
        *(tree, layout, tuple(tasks), jobs, memory, buffer, scratch, notes or Notes(), reserved, streams),
        division=division,
    )


def _in_order(tree: Tree, layout: Layout, limit: int) -> list[Task]:
    """Tasks for files that are streamed."""
    written = _written(tree, layout)
    sizes = task_sizes(written, layout, limit)
    cuts = (cut_in_order(path, written[path], layout.placements[path], size) for path, size in sizes.items())
    return in_write_order(chain.from_iterable(cuts), layout)


def _in_any_order(tree: Tree, layout: Layout, division: Division) -> list[Task]:
    """Tasks for files that are written at any offset, sources in file order."""
    tasks = (
        task
        for path, array in _written(tree, layout).items()
        for placement in (layout.placements[path],)
        for task in cut(
            path, array, placement, division.max_bytes if placement.codec else division.share_bytes
        )
    )
    return sorted(tasks, key=lambda task: task.locality)


def _share(arrays: Collection[LazyArray], jobs: int) -> int:
    """Bytes of a task at most so that every worker gets several, where there is little to do."""
    # A part of a matrix that is transposed is written in pieces, or takes reading all of it. Behind a network
    # that costs more than workers do that have nothing to do.
    if reading_costs(arrays).requests:
        return 2 * LARGEST_TASK
    nbytes = sum(array.nbytes for array in arrays)
    return max(_SMALLEST_SHARE, ceil_div(nbytes, _TASKS_PER_WORKER * jobs))


def _fitted(
    tree: Tree,
    writer: Writer,
    memory: int,
    jobs: int,
    reserved: int,
    streams: Streams | None,
    division: Division | None,
) -> tuple[int, int, Layout]:
    """Workers, bytes of a task and a layout that stay within the memory; few, large tasks first."""
    layout = writer.layout(tree, LARGEST_TASK)
    encodes = any(placement.codec for placement in layout.placements.values())
    if streams:
        jobs = max(1, min(jobs, most_groups(layout, streams.file_bytes)))
    least = 0
    is_far = bool(reading_costs(_written(tree, layout).values()).requests)
    choices = _in_order_from_far(jobs) if streams and is_far else _choices(jobs)
    if division:
        choices = ((count, division.max_bytes) for count in range(jobs, 0, -1))
    for count, limit in choices:
        # Chunks that are encoded are made whole: a smaller task then means smaller chunks.
        layout = writer.layout(tree, limit) if encodes else layout
        needed = reserved + _needed(tree, layout, count, limit, streams)
        if needed <= memory:
            return count, limit, layout
        # Many small tasks can take more than a few large ones.
        least = min(least or needed, needed)
    raise memory_error("the conversion does not fit into the memory allowed", memory, least)


def _choices(jobs: int) -> Iterator[tuple[int, int]]:
    """Workers and bytes of a task, best first: tasks a little smaller, then fewer workers, then both."""
    sizes = [LARGEST_TASK]
    while sizes[-1] // 2 >= _SMALLEST_TASK:
        sizes.append(sizes[-1] // 2)
    yield from ((jobs, limit) for limit in sizes[:_GOOD_SIZES])
    yield from ((count, sizes[:_GOOD_SIZES][-1]) for count in range(jobs - 1, 0, -1))
    yield from ((1, limit) for limit in sizes[_GOOD_SIZES:])


def _in_order_from_far(jobs: int) -> Iterator[tuple[int, int]]:
    """The same where what is written in order is read behind a network: of a transposed matrix each task
    reads all, so large tasks come before many workers."""
    for limit in (2 * LARGEST_TASK, LARGEST_TASK, LARGEST_TASK // 2):
        yield from ((count, limit) for count in range(jobs, min(jobs, _FEWEST_FROM_FAR) - 1, -1))
    yield from _choices(jobs)


def _needed(tree: Tree, layout: Layout, jobs: int, limit: int, streams: Streams | None) -> int:
    """Bytes resident at most with tasks of this size."""
    written = _written(tree, layout)
    sizes = task_sizes(written, layout, limit) if streams else dict.fromkeys(written, limit)
    # Halving an axis may leave tasks of little more than half the size.
    tasks = sum(max(1, ceil_div(2 * array.nbytes, sizes[path])) for path, array in written.items())
    largest = max(sizes.values(), default=0) if streams else limit
    worker = largest + _scratch_bytes(tree, layout) + (streams.memory if streams else 0)
    return _base_bytes(tree, layout, tasks) + jobs * worker


def _scratch_bytes(tree: Tree, layout: Layout) -> int:
    """Temporary bytes of a worker at most."""
    own = tree.once(_scratch_of_arrays)
    needs = (own[path] + layout.placements[path].scratch_bytes for path in _written(tree, layout))
    return max(needs, default=0)


def _scratch_of_arrays(tree: Tree) -> dict[Path, int]:
    return {path: array.scratch_bytes for path, array in tree.arrays.items()}


def _nodes(tree: Tree) -> int:
    return nodes(tree.arrays.values())


def _written(tree: Tree, layout: Layout) -> dict[Path, LazyArray]:
    """The arrays whose bytes move."""
    arrays = tree.arrays.items()
    return {p: array for p, array in arrays if not isinstance(layout.placements[p].home, Referenced)}


def _base_bytes(tree: Tree, layout: Layout, tasks: int) -> int:
    """What is resident beside the workers' buffers."""
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
