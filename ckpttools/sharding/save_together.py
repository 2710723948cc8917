"""One checkpoint of arrays that several processes have: each writes its shards, process 0 all that is left.

All make the same plan. Its tasks are cut where shards end, and put in the order of the processes that can do
them: each process does a stretch of them, as a part of the plan (`ckpttools.run.parts`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from ckpttools.array.nodes import Held
from ckpttools.array.tree import Tree, spelled
from ckpttools.core.errors import UsageError
from ckpttools.core.region import Region
from ckpttools.formats.base import Writer
from ckpttools.plan.plan import Plan
from ckpttools.plan.task import Task
from ckpttools.run.events import Observer, Receipt
from ckpttools.run.executor import fingerprint
from ckpttools.run.parts import PartReceipt, execute_part
from ckpttools.sharding.save_leaves import holders
from ckpttools.sharding.save_processes import Processes
from ckpttools.sharding.save_shards import Shards
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import Purpose
from ckpttools.stores.shares import Share


def is_shared(tree: Tree) -> bool:
    """Whether other processes have parts of the arrays."""
    return any(isinstance(each, Shards) and each.owners for each in holders(tree))


def save_together(
    plan: Plan,
    writer: Writer,
    destination: Place,
    *,
    overwrite: bool,
    observe: Observer,
    publish: Callable[[Plan, str], Receipt],
    processes: Processes,
) -> Receipt:
    """Writes what this process has, and waits until all is written and has its name.

    Args:
        plan: of all arrays, the same in all processes.
        writer: the one it was planned with.
        destination: final name, which means the same in all processes.
        overwrite: as of `ckpttools.run.executor.execute`.
        observe: called with every event of this process.
        publish: does the last steps of a plan of this fingerprint, in process 0.
        processes: those that save.

    Returns:
        Of the whole checkpoint; the bytes that were written and the seconds are those of this process, but
        for process 0.

    Raises:
        UsageError: the processes do not save the same tree, or in the same way.
        OtherProcessError: another one could not do its part.
        CheckpointError: as `execute`.
    """
    started = time.monotonic()
    _agree_on_versions(plan.tree, processes)
    plan, starts = _dealt(plan, processes.count)
    own = fingerprint(plan, writer)
    _check_same(own, processes)
    error: BaseException | None = None
    try:
        made = _part(plan, starts, own, destination, overwrite, observe, processes)
    except BaseException as raised:
        error = raised
    processes.all_well("written", error)
    error = None
    receipt: Receipt | None = None
    if processes.number == 0:
        try:
            receipt = publish(plan, own)
        except BaseException as raised:
            error = raised
    processes.all_well("published", error)
    return receipt or _receipt(plan, made, destination, time.monotonic() - started)


def _agree_on_versions(tree: Tree, processes: Processes) -> None:
    """Gives arrays the same version in all processes: the same one for the same objects in process 0."""
    held = list(holders(tree))

    def token() -> str:
        return hashlib.sha256("\n".join(each.version for each in held).encode()).hexdigest()

    agreed = processes.told("version", token)
    for number, each in enumerate(held):
        if isinstance(each, Shards):
            each.version = f"{agreed} {number}"


def _check_same(own: str, processes: Processes) -> None:
    said = processes.gathered("plan", own)
    others = processes.told(
        "same plan", lambda: ", ".join(str(number) for number, each in enumerate(said) if each != own)
    )
    if others:
        raise UsageError(
            "the processes do not save the same arrays, in the same way, to the same place",
            got=f"another plan in process {others} than in process 0",
            wanted="the same call in the same order in all processes, with the same tree of arrays",
            hint="where machines differ, say memory and jobs",
        )


def _dealt(plan: Plan, count: int) -> tuple[Plan, list[int]]:
    """The plan with tasks in the order of the processes that do them, and where those of each begin."""
    tasks: list[list[Task]] = [[] for _ in range(count)]
    for task in plan.tasks:
        array = plan.tree.arrays[task.path]
        for owner, region in _owners(array.holder if isinstance(array, Held) else None, task.region):
            nbytes = region.size * array.dtype.itemsize
            placement = plan.layout.placements[task.path]
            if region != task.region and placement.codec is not None:
                raise UsageError(
                    "a chunk that is compressed lies in shards of several processes",
                    place=spelled(task.path),
                    hint="save without compression",
                )
            tasks[owner].append(replace(task, region=region, bytes_in=nbytes, bytes_out=nbytes))
    starts = [0]
    for each in tasks:
        starts.append(starts[-1] + len(each))
    return replace(plan, tasks=tuple(task for each in tasks for task in each)), starts


def _owners(holder: object, region: Region) -> Iterator[tuple[int, Region]]:
    """The processes that can make parts of a region, with these parts."""
    owners = holder.owners if isinstance(holder, Shards) else ()
    if not owners:
        # What all processes have, or can read.
        yield 0, region
        return
    for process, box in owners:
        part = region.intersect(box)
        if part is not None:
            yield process, part


def _part(
    plan: Plan,
    starts: list[int],
    own: str,
    destination: Place,
    overwrite: bool,
    observe: Observer,
    processes: Processes,
) -> PartReceipt:
    first, stop = starts[processes.number], starts[processes.number + 1]
    return execute_part(
        replace(plan, tasks=plan.tasks[first:stop]),
        first,
        Share(f"{processes.number}/{processes.count}", first, stop),
        destination,
        Purpose(own),
        nbytes=plan.layout.nbytes,
        overwrite=overwrite,
        sources=lambda: (),
        observe=observe,
    )


def _receipt(plan: Plan, made: PartReceipt, destination: Place, seconds: float) -> Receipt:
    return Receipt(
        destination,
        len(plan.tree.arrays),
        len(plan.tasks),
        made.tasks_resumed,
        made.bytes_out,
        made.bytes_out,
        made.bytes_resumed,
        seconds,
        made.peak_bytes,
        traffic=made.traffic,
    )
