"""Hash a checkpoint that is read or being written, and check it against a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from ckpttools.array.tree import Tree
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.memory_limit import memory_error
from ckpttools.digest.canonical import Selection
from ckpttools.digest.digest import DEFAULT_ALGORITHM, Digest, block_ends
from ckpttools.digest.digester import Digester
from ckpttools.digest.manifest import Manifest, first_bad_block
from ckpttools.digest.pairing import (
    Difference,
    LeafDifference,
    Pairing,
    Reason,
    have_same_kind,
    kind_differences,
    sort_by_name,
)
from ckpttools.plan.plan import Plan
from ckpttools.run.events import Receipt, Watch
from ckpttools.stores.location import Location


def hash_tree(
    tree: Tree,
    selection: Selection | None = None,
    *,
    algorithm: str = DEFAULT_ALGORITHM,
    memory: int,
    jobs: int | None,
    observe: Callable[[int], None] = lambda nbytes: None,
) -> Manifest:
    """Return the digests of a tree's arrays. Reads every array once.

    Args:
        tree: Any checkpoint.
        selection: Selected arrays; None for all.
        algorithm: One of `ckpttools.digest.digest.ALGORITHMS`.
        memory: Maximum resident bytes. An array that is stored in encoded columns is read again if it does
            not fit.
        jobs: Number of workers.
        observe: Called with the bytes of each piece that was read.

    Raises:
        CheckpointError: An array cannot be read, or the memory is too small.
    """
    selection = selection or Selection()
    digester = Digester(selection.arrays(tree), algorithm)
    digests = digester.digests(memory=memory, jobs=jobs, observe=observe)
    return Manifest(algorithm, selection, digests, texts=selection.texts(tree), nodes=selection.nodes(tree))


def differences(got: Manifest, expected: Manifest) -> tuple[Difference, ...]:
    """Return the differences between a manifest and a checkpoint hashed in the same way, sorted by name.

    If the manifest does not record texts, each text of the checkpoint counts as a difference. Empty nodes and
    kinds of arrays count if both record them for the same layout.
    """
    both = Pairing(got.arrays, expected.arrays)
    values = [
        _bad_block(name, own, other, got.algorithm)
        for name, own, other in both.pairs
        if have_same_kind(own, other) and own.digest != other.digest
    ]
    texts = _text_differences(got.texts or {}, expected.texts or {})
    return sort_by_name([*_node_differences(got, expected), *kind_differences(both), *values, *texts])


def _node_differences(got: Manifest, expected: Manifest) -> list[Difference]:
    nodes, expected_nodes = got.nodes, expected.nodes
    if nodes is None or expected_nodes is None or not nodes.comparable(expected_nodes):
        return []
    named = [
        LeafDifference(
            item.name,
            item.a or ("array" if item.name in got.arrays else None),
            item.b or ("array" if item.name in expected.arrays else None),
        )
        for item in nodes.differing(expected_nodes)
    ]
    return kind_differences(Pairing[Digest]({}, {}, leaves=tuple(named)))


def _text_differences(own_texts: Mapping[str, str], other: Mapping[str, str]) -> Iterator[Difference]:
    for name in {**own_texts, **other}:
        got, expected = (
            None if name not in texts else f"text {texts[name]!r}" for texts in (own_texts, other)
        )
        if got != expected:
            reason: Reason = "extra" if expected is None else "missing" if got is None else "kind"
            yield Difference(name, reason, got, expected)


def _bad_block(name: str, got: Digest, expected: Digest, algorithm: str) -> Difference:
    block = first_bad_block(got, expected, algorithm)
    first, last = block_ends(got.shape, DTYPES[got.dtype].itemsize, block)
    return Difference(name, "values", got.digest, expected.digest, first=first, last=last)


class SupportsRun(Protocol):
    """Executes a plan."""

    def __call__(self, *, watch: Watch, finalize: Callable[[], None]) -> Receipt: ...


def hashing_bytes(tree: Tree) -> int:
    """Return the memory in bytes that `run_hashing` needs in addition to the plan of a tree."""
    return Digester(Selection().arrays(tree), DEFAULT_ALGORITHM).nbytes


def run_hashing(plan: Plan, run: SupportsRun, path: Location, *, overwrite: bool) -> Receipt:
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
    shortage = digester.nbytes - plan.reserved - room
    if shortage > 0 and digester.nbytes > plan.reserved:
        raise memory_error(
            "the digests do not fit into the memory allowed", plan.memory, plan.memory + shortage
        )

    texts, nodes = everything.texts(plan.tree), everything.nodes(plan.tree)

    def finalize() -> None:
        digests = digester.digests(memory=plan.memory, jobs=plan.jobs)
        manifest = Manifest(DEFAULT_ALGORITHM, everything, digests, texts=texts, nodes=nodes)
        manifest.write(path, overwrite=overwrite)

    return run(watch=digester.watching(plan.tree), finalize=finalize)
