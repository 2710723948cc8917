"""Save arrays that several processes share: each process writes its shards, and process 0 everything else.

All processes make the same plan. Its tasks are divided at shard boundaries and sorted by the process that can
do them, so that each process does a contiguous part of the plan (`ckpttools.run.parts`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import InMemoryArray, rebuild_arrays
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.region import Region, Shape, grid_cell, split_evenly
from ckpttools.formats.base import Writer
from ckpttools.formats.placement import Placement
from ckpttools.plan.plan import Plan
from ckpttools.plan.task import Task, sort_by_output
from ckpttools.run.events import Observer, Receipt
from ckpttools.run.finished_tasks import UnfinishedError
from ckpttools.run.parts import PartReceipt, execute_part
from ckpttools.run.source_copies import fingerprint
from ckpttools.sharding.processes import Processes
from ckpttools.sharding.save_layout import owned_chunks, owners_of
from ckpttools.sharding.save_leaves import has_remote_parts, holders
from ckpttools.sharding.save_shards import CONVERT_LATER_HINT, ShardHolder
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import JobInfo, staging_of
from ckpttools.stores.shares import Share

if TYPE_CHECKING:
    import numpy as np


T = TypeVar("T")


def check_chunk_owners(plan: Plan) -> None:
    """Raise UsageError if a chunk must be written by one process but no process has all its elements."""
    single_writer_paths = _single_writer_paths(plan)
    for path, array in plan.tree.arrays.items():
        if (
            path in single_writer_paths
            and _is_elsewhere(array)
            and not _is_cut_within(array, plan.layout.placements[path])
        ):
            raise UsageError(
                "no process has all elements of a chunk of an array that several processes share",
                location=keystr(path),
                expected="a conversion into a directory, without compression",
                hint=CONVERT_LATER_HINT,
            )


def _is_elsewhere(array: LazyArray) -> bool:
    return has_remote_parts(Tree({(): array}))


def _is_cut_within(array: LazyArray, placement: Placement) -> bool:
    """Return whether every chunk is within one shard."""
    if not isinstance(array, InMemoryArray):
        return False
    boxes = {box.shape for box in owners_of(array)}
    if array.shape in boxes or not array.size:
        return True
    cuts = (zip(box, placement.chunk, strict=True) for box in boxes)
    return len(boxes) == 1 and all(length % chunk == 0 for cut in cuts for length, chunk in cut)


@dataclass(frozen=True, slots=True)
class DistributedSave:
    """A save that several processes have started. A process that cannot continue must report it.

    Attributes:
        plan: Plan of all arrays, the same in all processes.
        writer: The plan's writer.
        destination: Final location, which must mean the same in all processes.
        overwrite: See `ckpttools.run.executor.execute`.
        observe: Called with every event of this process.
        check: Raises the error that prevents the save, before anything is written; called in process 0.
        publish: Performs the last steps for a plan and its fingerprint, in process 0.
        processes: All processes of the save.
    """

    plan: Plan
    writer: Writer
    destination: Location
    overwrite: bool
    observe: Observer
    check: Callable[[], None]
    publish: Callable[[Plan, str], Receipt]
    processes: Processes

    def abort(self, error: BaseException) -> None:
        """Report to the other processes that the save failed, and raise the error.

        Call it instead of `run`.
        """
        self.processes.check_all("begun", error)

    def run(self) -> Receipt:
        """Write the data of this process, and wait until the checkpoint is complete and published.

        Returns:
            The receipt of the complete checkpoint. Except in process 0, written bytes and seconds are those
            of this process.

        Raises:
            UsageError: The processes do not save the same tree in the same way.
            OtherProcessError: Another process failed.
            CheckpointError: See `execute`.
        """
        started = time.monotonic()
        processes = self.processes
        processes.run_in_all("begun", self._only_in_process_0(self.check))
        _agree_on_versions(self.plan.tree, processes)
        assigned = _assign_tasks(self.plan, processes.count)
        own = fingerprint(assigned.plan, self.writer)
        _check_same(f"{own} {self.destination.absolute()}", processes)
        processes.run_in_all(
            "prepared", self._only_in_process_0(lambda: self._prepare(own, assigned.plan.layout.nbytes))
        )
        result = processes.run_in_all("written", lambda: self._part(assigned, own))
        receipt = processes.run_in_all(
            "published", self._only_in_process_0(lambda: self._publish(assigned.plan, own))
        )
        if receipt is None:
            return _receipt(assigned.plan, result, self.destination, time.monotonic() - started)
        # The last steps count all tasks as resumed, including those of this save.
        return replace(receipt, tasks_resumed=result.tasks_resumed, bytes_resumed=result.bytes_resumed)

    def _only_in_process_0(self, do: Callable[[], T]) -> Callable[[], T | None]:
        """Return the function in process 0, and a function without effect in other processes."""
        return do if self.processes.number == 0 else lambda: None

    def _prepare(self, own: str, nbytes: int) -> None:
        """Prepare the destination for the parts of this plan."""
        with staging_of(self.destination, self.overwrite).opened(JobInfo(own), nbytes):
            pass

    def _publish(self, plan: Plan, own: str) -> Receipt:
        try:
            return self.publish(plan, own)
        except UnfinishedError as error:
            raise error.at(
                hint="save to a bucket, or to a directory that all processes share: files that others "
                "reported as written do not exist"
            ) from error

    def _part(self, assigned: _ProcessTasks, own: str) -> PartReceipt:
        number = self.processes.number
        return execute_part(
            assigned.part(number),
            assigned.tasks[number],
            Share(f"{number}/{self.processes.count}", assigned.groups[number], assigned.groups[number + 1]),
            self.destination,
            JobInfo(own),
            nbytes=assigned.plan.layout.nbytes,
            overwrite=self.overwrite,
            sources=lambda: (),
            observe=self.observe,
        )


def _agree_on_versions(tree: Tree, processes: Processes) -> None:
    """Give arrays the same versions in all processes; the versions follow from those of process 0."""
    local_holders = list(holders(tree))

    def token() -> str:
        return hashlib.sha256("\n".join(item.version for item in local_holders).encode()).hexdigest()

    agreed = processes.from_first("version", token)
    for number, item in enumerate(local_holders):
        if isinstance(item, ShardHolder):
            item.version = f"{agreed} {number}"


def _check_same(own: str, processes: Processes) -> None:
    declared = processes.gather("plan", own)
    others = processes.from_first(
        "same plan", lambda: ", ".join(str(number) for number, item in enumerate(declared) if item != own)
    )
    if others:
        raise UsageError(
            "the processes do not save the same arrays to the same destination in the same way",
            got=f"the plan or destination of process {others} differs from process 0",
            expected="the same call in the same order in all processes, with the same tree of arrays",
            hint="if the machines differ, give memory and jobs",
        )


@dataclass(frozen=True, slots=True)
class _ProcessTasks:
    """A plan whose tasks are sorted by the process that does them.

    Attributes:
        plan: The plan, with its tasks in that order.
        tasks, groups: Index of the first task or group of each process, followed by the total.
    """

    plan: Plan
    tasks: Sequence[int]
    groups: Sequence[int]

    def part(self, number: int) -> Plan:
        """Return the plan with the tasks of one process."""
        return replace(self.plan, tasks=self.plan.tasks[self.tasks[number] : self.tasks[number + 1]])


def _assign_tasks(plan: Plan, count: int) -> _ProcessTasks:
    tasks: list[list[Task]] = [[] for _ in range(count)]
    for owner, task in _owned_tasks(plan):
        tasks[owner].append(task)
    if plan.streams is not None:
        tasks = [sort_by_output(item, plan.layout) for item in tasks]
    groups = [sum(1 for _ in replace(plan, tasks=tuple(item)).groups) for item in tasks]
    return _ProcessTasks(
        replace(plan, tasks=tuple(chain.from_iterable(tasks))),
        [*accumulate(map(len, tasks), initial=0)],
        [*accumulate(groups, initial=0)],
    )


def _owned_tasks(plan: Plan) -> Iterator[tuple[int, Task]]:
    """Yield the tasks of all arrays, each with a process that has its complete input."""
    single_writer_paths, assigner = _single_writer_paths(plan), RegionAssigner()
    for task in plan.tasks:
        if task.path not in single_writer_paths:
            array = plan.tree.arrays[task.path]
            pieces = _owned_boxes if isinstance(array, InMemoryArray) else assigner.pieces
            for owner, region in pieces(task.path, array, task.region):
                yield owner, _task(task.path, array, region)
    for path in plan.tree.arrays:
        if path in single_writer_paths:
            yield from _chunk_tasks(plan, path)


def _owned_boxes(path: Path, array: LazyArray, region: Region) -> Iterable[tuple[int, Region]]:
    for box, owner in owners_of(array).items():
        part = region.intersect(box)
        if part is not None:
            yield owner, part


def _single_writer_paths(plan: Plan) -> set[Path]:
    """Return the arrays whose chunks must each be written by one process, from first to last byte."""
    return {path for path, item in plan.layout.placements.items() if plan.streams or item.codec}


def _chunk_tasks(plan: Plan, path: Path) -> Iterator[tuple[int, Task]]:
    """Yield a task for each chunk, or for each block of a large raw chunk, in the order of bytes."""
    array, placement = plan.tree.arrays[path], plan.layout.placements[path]
    for owner, index in owned_chunks(array, placement):
        cell = grid_cell(array.shape, placement.chunk, index)
        blocks = [cell] if placement.codec else split_evenly(cell, plan.buffer_bytes // placement.itemsize)
        yield from ((owner, _task(path, array, block)) for block in blocks)


def _task(path: Path, array: LazyArray, region: Region) -> Task:
    nbytes = region.size * array.dtype.itemsize
    return Task(path, region, nbytes, nbytes, array.first_byte(region))


def _receipt(plan: Plan, receipt: PartReceipt, destination: Location, seconds: float) -> Receipt:
    return Receipt(
        destination,
        len(plan.tree.arrays),
        len(plan.tasks),
        receipt.tasks_resumed,
        receipt.bytes_out,
        receipt.bytes_out,
        receipt.bytes_resumed,
        seconds,
        receipt.peak_bytes,
        traffic=receipt.traffic,
    )


# Decide which process computes each region of an array that depends on shared arrays.
#
# A process computes a region if it has all inputs. Otherwise the region is halved until one process has all
# of them.
#
# This limit applies per task. Shards of 64 processes along one axis give 64 regions, and some more if shard
# boundaries are not at multiples of a half.
_MAX_PIECES = 1024
Piece: TypeAlias = tuple[int, Region]


@dataclass
class RegionAssigner:
    """Assigns regions of arrays to processes.

    The result for one layer is tried first for the next one, which is five times as fast as computing it
    again.
    """

    _known_pieces: dict[tuple[Shape, Region], Sequence[Piece]] = field(default_factory=dict)

    def pieces(self, path: Path, array: LazyArray, region: Region) -> Sequence[Piece]:
        """Divide a region so that one process has all inputs of each piece; process 0 if all have them.

        Raises:
            UsageError: There would be too many pieces.
        """
        owners = _Owners(array)
        result = self._known_pieces.get((array.shape, region), ())
        if not result or any(owners.owner(piece) != process for process, piece in result):
            result = _split_region(path, owners, region)
            self._known_pieces[array.shape, region] = result
        return result


def _split_region(path: Path, owners: _Owners, region: Region) -> Sequence[Piece]:
    result: list[Piece] = []
    rest = [region]
    while rest:
        piece = rest.pop()
        process = owners.owner(piece)
        if process is not None:
            result.append((process, piece))
        else:
            rest.extend(reversed(owners.halves(piece)))
        if (process is None and piece.size == 1) or len(result) + len(rest) > _MAX_PIECES:
            raise UsageError(
                "no process has enough of an array's inputs",
                location=keystr(path),
                got=f"elements of {len(owners.of(region))} processes, interleaved over {region}",
                hint=CONVERT_LATER_HINT,
            )
    return result


class _Owners:
    """The processes that have the inputs of an array's regions."""

    def __init__(self, array: LazyArray) -> None:
        self._recorded: set[int] = set()
        self._array = rebuild_arrays({"": array}, self._record_reads)[""]

    def of(self, region: Region) -> frozenset[int]:
        """Return the processes with inputs of a region that other processes lack."""
        self._recorded.clear()
        self._array.read_cost(region)
        return frozenset(self._recorded)

    def owner(self, region: Region) -> int | None:
        """Return the process that has all inputs; 0 if every process has them; None if no process does."""
        processes = self.of(region)
        return min(processes, default=0) if len(processes) <= 1 else None

    def halves(self, region: Region) -> Sequence[Region]:
        """Halve the region along the axis that separates processes best, or the first of equal axes."""
        cuts = [
            [*region.pieces(axis, (length + 1) // 2)]
            for axis, length in enumerate(region.shape)
            if length > 1
        ]
        return min(cuts, key=lambda halves: sum(len(self.of(half)) for half in halves), default=[])

    def _record_reads(self, array: LazyArray) -> LazyArray:
        holder = array.holder if isinstance(array, InMemoryArray) else None
        if not isinstance(array, InMemoryArray) or not isinstance(holder, ShardHolder):
            return array
        if not holder.owners:
            return array
        return replace(array, holder=_RecordingHolder(holder, self._recorded, *_limits(holder.owners)))


@dataclass(frozen=True, eq=False, slots=True)
class _RecordingHolder:
    """A holder of the same elements that records the processes whose regions are read.

    Attributes:
        holder: Holder of the elements.
        recorded: The recorded processes.
        processes, start, stop: Owners of elements, and the limits of their regions.
    """

    holder: ShardHolder
    recorded: set[int]
    processes: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def version(self) -> str:
        return self.holder.version

    @property
    def scratch_bytes(self) -> int:
        return self.holder.scratch_bytes

    def pieces(self, region: Region) -> int:
        meet = ((self.start < region.stop) & (self.stop > region.start)).all(axis=1)
        self.recorded.update(self.processes[meet].tolist())
        return 1

    def read_into(self, region: Region, out: np.ndarray) -> None:
        self.holder.read_into(region, out)


@lru_cache(maxsize=256)
def _limits(owners: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the owners and the limits of their regions as arrays."""
    import numpy as np

    processes = np.array([process for process, _ in owners])
    start, stop = (np.array([getattr(box, end) for _, box in owners]) for end in ("start", "stop"))
    return processes, start, stop
