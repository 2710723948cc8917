"""The origin of a checkpoint: a Hub model and its commit, in the checkpoint's own metadata.

Only an origin that identifies the bytes on any machine is recorded. A commit does; a path in a bucket or on a
disk does not, because its content may change and equal conversions must produce equal bytes. Receipts record
any source.
"""

from __future__ import annotations

from ckpttools.array.tree import Tree
from ckpttools.stores.abilities import SupportsPinning
from ckpttools.stores.registry import parse

SOURCE = "ckpttools_source"
"""Metadata key for `hf://org/name@commit`, followed by the path in the repository, if any."""


def with_origin(built: Tree, read: Tree) -> Tree:
    """Return a tree that records its origin.

    Args:
        built: the tree to write.
        read: the checkpoint as opened; nothing is recorded if it has no pinned name.
    """
    location = parse(read.metadata.location) if read.metadata.location else None
    if location is None or not isinstance(location.store, SupportsPinning):
        return built
    pinned_uri = location.store.pinned_uri(location.key)
    return built.with_metadata(custom={**built.metadata.custom, SOURCE: pinned_uri}) if pinned_uri else built
