"""The transform protocol: a function from tree to tree that reads no data and reports its effects."""

from __future__ import annotations

from dataclasses import field
from typing import Protocol

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.notes import Notes


@dataclass(frozen=True)
class Transformed:
    """A transformed tree, with notes for the user."""

    tree: Tree
    notes: Notes = field(default_factory=Notes)


class Transform(Protocol):
    """A function from a tree to a tree.

    An implementation is a frozen dataclass whose fields are its options.
    """

    def __call__(self, tree: Tree) -> Transformed:
        """Return the new tree without changing `tree`.

        Raises:
            CheckpointError: The transform does not apply to the tree; the error states where and why.
        """
