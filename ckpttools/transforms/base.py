"""What a transform is: a function from tree to tree that reads nothing, and says what it does to values."""

from __future__ import annotations

from dataclasses import field
from typing import Protocol

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.notes import Notes


@dataclass(frozen=True)
class Transformed:
    """A tree that a transform made, and what the user should know of it."""

    tree: Tree
    notes: Notes = field(default_factory=Notes)


class Transform(Protocol):
    """Tree -> Tree. An implementation is a frozen dataclass whose fields are its options."""

    def __call__(self, tree: Tree) -> Transformed:
        """The new tree; `tree` is left as it is.

        Raises:
            CheckpointError: the tree is not what this transform is for; says where and why.
        """
