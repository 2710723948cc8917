"""The origin of a checkpoint: a Hub model and its commit, recorded in the checkpoint's metadata.

Only origins that identify the bytes on any machine are recorded. A commit does; a path in a bucket or on a
disk does not, because its content may change, and identical conversions must produce identical bytes.
Receipts record any source.
"""

from __future__ import annotations

from ckpttools.array.tree import Tree
from ckpttools.stores.abilities import SupportsPinning
from ckpttools.stores.registry import parse

SOURCE = "ckpttools_source"
"""Metadata key for `hf://org/name@commit`, followed by the path in the repository, if any."""


def with_origin(tree: Tree, read: Tree) -> Tree:
    """Return a tree that records the origin of its source.

    Args:
        tree: The tree to write.
        read: The source as opened; nothing is recorded if its location is not pinned to a commit.
    """
    location = parse(read.metadata.location) if read.metadata.location else None
    if location is None or not isinstance(location.store, SupportsPinning):
        return tree
    pinned_uri = location.store.pinned_uri(location.key)
    return tree.with_metadata(custom={**tree.metadata.custom, SOURCE: pinned_uri}) if pinned_uri else tree
