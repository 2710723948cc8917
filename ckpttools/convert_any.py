"""From any format to any: the same tree, or what transforms make of it, in other files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpttools.convert import Conversion, Resources
from ckpttools.formats.base import ReadOptions, Writer
from ckpttools.formats.registry import open_tree
from ckpttools.plan.plan import build
from ckpttools.transforms.base import Transform, piped


def plan_any(
    source: str | Path,
    writer: Writer,
    *,
    read: ReadOptions | None = None,
    resources: Resources | None = None,
    transforms: Sequence[Transform] = (),
) -> Conversion:
    """Plans writing the checkpoint at `source` with `writer`; reads headers and indexes, no array.

    Args:
        source: a file, an item, a step or a run directory of any format.
        writer: the format to write and its options.
        read: how to open the source.
        resources: what the conversion may take.
        transforms: what to make of the tree on the way, first to last.

    Raises:
        CheckpointError: the source cannot be read, a transform does not take it, the format cannot hold
            it, or the work does not fit into the memory.
    """
    resources = resources or Resources()
    done = piped(open_tree(Path(source), read), transforms)
    plan = build(done.tree, writer, memory=resources.memory, jobs=resources.workers, notes=done.notes)
    return Conversion(plan, writer)
