"""From any format to any: the same tree in other files, without knowing the model."""

from __future__ import annotations

from pathlib import Path

from ckpttools.convert import Conversion, Resources, cast_notes
from ckpttools.dtypes import DType
from ckpttools.formats.base import ReadOptions, Writer
from ckpttools.formats.registry import open_tree
from ckpttools.ir.array import LazyArray
from ckpttools.ir.tree import Tree, spelled
from ckpttools.plan.plan import Notes, build
from ckpttools.transforms.cast import cast


def plan_any(
    source: str | Path,
    writer: Writer,
    *,
    read: ReadOptions | None = None,
    resources: Resources | None = None,
    dtype: DType | None = None,
) -> Conversion:
    """Plans writing the checkpoint at `source` with `writer`; reads headers and indexes, no array.

    Args:
        source: a file, an item, a step or a run directory of any format.
        writer: the format to write and its options.
        read: how to open the source.
        resources: what the conversion may take.
        dtype: dtype of all floating-point arrays; None keeps those stored.

    Raises:
        CheckpointError: the source cannot be read, the format cannot hold it, or the work does not fit
            into the memory.
    """
    resources = resources or Resources()
    tree, notes = _cast(open_tree(Path(source), read), dtype)
    plan = build(tree, writer, memory=resources.memory, jobs=resources.workers, notes=notes)
    return Conversion(plan, writer)


def _cast(tree: Tree, dtype: DType | None) -> tuple[Tree, Notes]:
    """The tree with its floating-point arrays in `dtype`, and what that loses."""
    if dtype is None:
        return tree, Notes()
    notes = cast_notes({spelled(path): array for path, array in tree.arrays.items()}, dtype)
    leaves = {path: cast(leaf, dtype) if isinstance(leaf, LazyArray) else leaf for path, leaf in tree.items()}
    return Tree(leaves, tree.metadata), Notes(tuple(notes))
