"""Compare the reads of a mesh's devices before and after resharding."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ckpttools.array.storage import Storage, StoredArray
from ckpttools.array.tree import Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import grid_shape
from ckpttools.formats.base import Layout, ReadOptions
from ckpttools.formats.registry import storage_of
from ckpttools.inspection.chunks import LoadCost, PathSpecs, inspect_chunks
from ckpttools.sharding.rules import AppliedRules

_NOTICED = 1.01


@dataclass(frozen=True, slots=True)
class MeshGain:
    """Predicted reads of the devices of a mesh, each of which loads its part of a checkpoint.

    Attributes:
        before: Reads from the source.
        after: Reads from the output, in uncompressed bytes even if codecs reduce them.
    """

    before: LoadCost
    after: LoadCost

    @property
    def is_loss(self) -> bool:
        """Return whether devices will fetch at least 1 % more than before."""
        before, after = self.before, self.after
        return (
            after.fetched > _NOTICED * before.fetched or after.total_fetched > _NOTICED * before.total_fetched
        )

    @property
    def is_any(self) -> bool:
        """Return whether devices will fetch fewer bytes or make fewer reads."""
        before, after = self.before, self.after
        return (
            after.fetched < before.fetched
            or after.total_fetched < before.total_fetched
            or after.reads < before.reads
        )


def mesh_gain(asked: AppliedRules, reading: ReadOptions, built: Tree, layout: Layout) -> MeshGain:
    """Predict the reads of the same arrays in two layouts. Reads only indexes of the source.

    Args:
        asked: The source, mesh and rules.
        reading: How the source was opened.
        built: The tree to write; `layout` has the locations of its arrays.

    Raises:
        CheckpointError: An index of the source is damaged or cannot be read.
    """
    stored = storage_of(asked.tree, reading), Storage("", (), (), tuple(_planned(built, layout)))
    specs = rule_specs(asked)
    return MeshGain(*(_loading(asked, specs, item) for item in stored))


def rule_specs(asked: AppliedRules) -> PathSpecs:
    """Return the partition spec of each array according to rules."""
    specs = {keystr(path): spec for path, spec in asked.specs()}
    return PathSpecs(f"rules {asked.rules.name}", specs)


def _loading(asked: AppliedRules, specs: PathSpecs, storage: Storage) -> LoadCost:
    result = inspect_chunks(asked.tree, storage, "*", asked.mesh, specs).loading
    assert result is not None  # A mesh is given.
    return result


def _planned(tree: Tree, layout: Layout) -> Iterator[StoredArray]:
    """Yield the arrays with the chunks planned by the layout."""
    for path, array in tree.arrays.items():
        chunk = layout.placements[path].chunk
        chunks = prod(grid_shape(array.shape, chunk))
        yield StoredArray(keystr(path), array.shape, array.dtype, chunk, chunk, (), chunks, 0, array.nbytes)
