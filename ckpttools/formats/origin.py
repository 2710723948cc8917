"""What a checkpoint says of where it came from: a model of the hub and its commit, in its own metadata.

Only what stands for the bytes that were read is written down, and is the same on whichever machine: a commit
does, a path in a bucket or on a disk does not, as something else may lie there tomorrow, and equal
conversions must give equal bytes. Receipts name any source.
"""

from __future__ import annotations

from ckpttools.array.tree import Tree
from ckpttools.stores.abilities import SupportsPinning
from ckpttools.stores.registry import parse

SOURCE = "ckpttools_source"
"""Key in the metadata: `hf://org/name@commit`, with the path in the repository where there is one."""


def with_origin(built: Tree, read: Tree) -> Tree:
    """Return a tree that says what it was made of.

    Args:
        built: what is written.
        read: the checkpoint as it was opened; of one that has no pinned name nothing is said.
    """
    location = parse(read.metadata.location) if read.metadata.location else None
    if location is None or not isinstance(location.store, SupportsPinning):
        return built
    pinned_uri = location.store.pinned_uri(location.key)
    return built.with_metadata(custom={**built.metadata.custom, SOURCE: pinned_uri}) if pinned_uri else built
