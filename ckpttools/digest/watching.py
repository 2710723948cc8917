"""The manifest of a conversion's output, computed while the data is in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ckpttools.array.tree import Tree
from ckpttools.core.budget import memory_error
from ckpttools.digest.canonical import Selection
from ckpttools.digest.digest import DEFAULT_ALGORITHM
from ckpttools.digest.digester import Digester
from ckpttools.digest.manifest import Manifest
from ckpttools.plan.plan import Plan
from ckpttools.run.events import Receipt, Watch
from ckpttools.stores.location import Location


class CarriesOut(Protocol):
    """Executes a plan."""

    def __call__(self, *, watch: Watch, finalize: Callable[[], None]) -> Receipt: ...


def hashing_bytes(tree: Tree) -> int:
    """Return the bytes that `run_hashing` needs in addition to the plan of a tree."""
    return Digester(Selection().arrays(tree), DEFAULT_ALGORITHM).nbytes


def run_hashing(plan: Plan, run: CarriesOut, path: Location, *, overwrite: bool) -> Receipt:
    """Execute a plan and write the manifest of its arrays.

    Output is hashed while it is written, in the memory that the plan leaves. All other data (written by an
    earlier run, only referenced, or without room) is read once more from the sources.

    Args:
        plan: The plan.
        run: Executes the plan.
        path: Location of the manifest, already checked.
        overwrite: Whether an existing file may be replaced.

    Raises:
        MemoryBudgetError: The plan leaves no memory for the digests.
        CheckpointError: The error of `run`, or the manifest cannot be written, or arrays have no names in it.
    """
    everything = Selection()
    room = plan.memory - plan.projected_peak
    digester = Digester(everything.arrays(plan.tree), DEFAULT_ALGORITHM, room)
    lacking = digester.nbytes - plan.reserved - room
    if lacking > 0 and digester.nbytes > plan.reserved:
        raise memory_error(
            "the digests do not fit into the memory allowed", plan.memory, plan.memory + lacking
        )

    texts, nodes = everything.texts(plan.tree), everything.nodes(plan.tree)

    def finalize() -> None:
        digests = digester.digests(memory=plan.memory, jobs=plan.jobs)
        manifest = Manifest(DEFAULT_ALGORITHM, everything, digests, texts=texts, nodes=nodes)
        manifest.write(path, overwrite=overwrite)

    return run(watch=digester.watching(plan.tree), finalize=finalize)
