"""Execution of tasks one after the other, with reused buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from ckpttools.array.lazy import require_booleans
from ckpttools.array.scratch import Scratch
from ckpttools.array.tree import Path, keystr
from ckpttools.core.region import Region, Shape
from ckpttools.formats.placement import Appended, ChunkFiles, Placement, Range
from ckpttools.plan.plan import Plan
from ckpttools.plan.task import Task
from ckpttools.run.bindings import BindingSink
from ckpttools.run.events import Watch
from ckpttools.run.finished_tasks import FinishedTask
from ckpttools.stores.publishing import Sink


def run_task(
    plan: Plan,
    task: Task,
    files: Sink,
    buffer: Scratch,
    scratch: Scratch,
    watch: Watch = lambda path, region, values: None,
) -> tuple[Mapping[Shape, Range], str]:
    """Run a task.

    Args:
        plan: The plan of the task.
        task: The task to run.
        files: Writes the output.
        buffer: Memory of `plan.buffer_bytes`.
        scratch: Memory of `plan.scratch_bytes`.
        watch: Receives the output.

    Returns:
        The locations of the encoded chunks, empty if chunks are stored unencoded, and the digest of the
        output, "" unless `plan.has_digests`.

    Raises:
        CheckpointError: The output cannot be written, or `open_task_values` failed.
    """
    placement = plan.layout.placements[task.path]
    with open_task_values(plan, task, buffer, scratch) as (memory, values):
        digest = hash_memory(memory) if plan.has_digests and not files.is_dry_pass else ""
        watch(task.path, task.region, values)
        if placement.codec is None:
            _write_raw(task, placement, memory, files)
            return {}, digest
        return _write_encoded(task, placement, placement.codec.encode, values, files, scratch), digest


@contextmanager
def open_task_values(
    plan: Plan, task: Task, buffer: Scratch, scratch: Scratch
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Compute the elements that a task writes; takes the arguments of `run_task`.

    Yields:
        The elements in stored order, contiguous, and a view of them with the axes of the array.

    Raises:
        CheckpointError: The input is missing, cannot be read, or has values that its dtype does not allow.
    """
    array = plan.tree.arrays[task.path]
    placement = plan.layout.placements[task.path]
    ordered = [task.region.shape[axis] for axis in placement.order]
    with buffer.take(ordered, array.dtype.carrier) as memory:
        values = memory.transpose(np.argsort(placement.order))
        array.read_into(task.region, values, scratch)
        require_booleans(values, array.dtype, keystr(task.path))
        yield memory, values


def hash_memory(memory: np.ndarray) -> str:
    """Hash contiguous memory, at 20 GB/s and without the interpreter's lock."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(memory.reshape(-1).view(np.uint8).data)


def _write_raw(task: Task, placement: Placement, memory: np.ndarray, files: Sink) -> None:
    data = memory.reshape(-1).view(np.uint8).data
    address = memory.ctypes.data
    loose = placement.chunk_nbytes if isinstance(placement.home, ChunkFiles) else None
    for run in placement.runs(task.region):
        part = data[run.position : run.position + run.nbytes]
        files.write(run.file, run.offset, part, address + run.position, loose)


def _write_encoded(
    task: Task,
    placement: Placement,
    encode: Callable[[memoryview], bytes],
    values: np.ndarray,
    files: Sink,
    scratch: Scratch,
) -> Mapping[Shape, Range]:
    """Encode and write every chunk of the region. The region consists of complete chunks."""
    locations: dict[Shape, Range] = {}
    for index in placement.cells(task.region):
        part, inside = placement.part(task.region, index)
        with scratch.take(placement.chunk, values.dtype) as chunk:
            if inside.shape != placement.chunk:
                chunk[...] = 0
            chunk[inside.slices] = values[part.relative_to(task.region).slices]
            encoded = encode(chunk.reshape(-1).view(np.uint8).data)
        locations[index] = _location(placement, index, encoded, files)
    return locations


def _location(placement: Placement, index: Shape, encoded: bytes, files: Sink) -> Range:
    match placement.home:
        case Appended(series, limit):
            return Range(*files.append(series, limit, encoded), len(encoded))
        case ChunkFiles() as home:
            files.write_whole(home.name(index), encoded)
            return Range(home.name(index), 0, len(encoded))
        case _:
            raise TypeError("encoded chunks have no fixed place in a data file")


class TaskRunner(Protocol):
    """A worker that runs tasks one after the other."""

    def __call__(self, number: int, sink: Sink) -> FinishedTask:
        """Run a task.

        Args:
            number: Index of the task in its plan.
            sink: Writes the output of the task.

        Raises:
            CheckpointError: The task failed.
        """


def ignore_output(path: Path, region: Region, values: np.ndarray) -> None:
    """Discard the output."""


class ThreadRunner:
    """Does tasks in the calling thread; see `TaskRunner`."""

    def __init__(self, plan: Plan, watch: Watch = ignore_output) -> None:
        """Allocate the maximum memory of a task.

        Args:
            plan: The plan of the tasks.
            watch: Receives the output, as in `ckpttools.run.executor.execute`.
        """
        self._plan = plan
        self._watch = watch
        self._scratch, self._buffer = Scratch(plan.scratch_bytes), Scratch(plan.buffer_bytes)

    def __call__(self, number: int, sink: Sink) -> FinishedTask:
        """See `TaskRunner`."""
        watch = ignore_output if sink.is_dry_pass else self._watch
        bound = BindingSink(sink)
        task = self._plan.tasks[number]
        chunks, digest = run_task(self._plan, task, bound, self._buffer, self._scratch, watch)
        return FinishedTask(number, chunks, self._scratch.take_counts(), bound.bindings, digest)
