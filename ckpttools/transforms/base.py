"""The transform protocol: a function from tree to tree that reads no data, and the moves of its leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Protocol

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Leaf, Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, MappingError, listing
from ckpttools.core.notes import Notes
from ckpttools.quantized.view import quantized_view


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


_RENAME = "give them different names, or drop one of them"


@dataclass(frozen=True, slots=True)
class Move:
    """A leaf and its new path.

    Attributes:
        source: Old path, or None for an array built from several leaves.
        target: New path.
        leaf: Leaf at the new path.
        made_by: Creator of the leaf, for messages, if `source` is None.
    """

    source: Path | None
    target: Path
    leaf: Leaf
    made_by: str = ""

    @property
    def origin(self) -> str:
        return self.made_by if self.source is None else keystr(self.source)


def path_like(keys: Iterable[str], source: Path) -> Path:
    """Convert keys to a path; numbers that are list indices in `source` remain list indices."""
    locations = {str(key): key for key in source if isinstance(key, int)}
    return tuple(locations.get(key, key) for key in keys)


def move_leaves(tree: Tree, moves: Iterable[Move]) -> Tree:
    """Build the tree that `moves` describe, with the metadata of `tree`.

    Raises:
        MappingError: Two leaves get the same path, a leaf is below another leaf, no array is left, or a
            quantized weight would lose its scale.
        FormatError: A list would have gaps that it does not have in `tree`.
    """
    all_moves = list(moves)
    _check_paths(all_moves, tree.metadata.location)
    new_tree = Tree({move.target: move.leaf for move in all_moves}, tree.metadata)
    if tree.arrays and not new_tree.arrays:
        raise MappingError("no array is left", location=tree.metadata.location or None)
    _check_lists(new_tree, tree)
    kept = {move.source: move for move in all_moves if move.source is not None}
    if quantized_view(tree).weights:
        # Few checkpoints are quantized.
        from ckpttools.quantized.protection import refuse_separation

        sources = {m.target: path for path, m in kept.items() if _keeps_dtype(tree[path], m.leaf)}
        refuse_separation(tree, new_tree, sources)
    scalars = (kept[path] for path in tree.metadata.scalars if path in kept)
    return new_tree.with_metadata(
        scalars=frozenset(move.target for move in scalars if _is_scalar(move.leaf)),
        key_impls={
            kept[path].target: impl
            for path, impl in tree.metadata.key_impls.items()
            if path in kept and kept[path].leaf is tree[path]
        },
    )


def _keeps_dtype(before: Leaf, after: Leaf) -> bool:
    return isinstance(before, LazyArray) and isinstance(after, LazyArray) and before.dtype == after.dtype


def _is_scalar(leaf: Leaf) -> bool:
    return isinstance(leaf, LazyArray) and leaf.shape == ()


def _check_paths(moves: Iterable[Move], location: str) -> None:
    placed: dict[Path, Move] = {}
    invalid: list[str] = []
    for move in moves:
        other = placed.setdefault(move.target, move)
        if other is not move:
            invalid.append(f"{other.origin} and {move.origin} both become {keystr(move.target)}")
    for path, move in placed.items():
        above = next((path[:depth] for depth in range(len(path)) if path[:depth] in placed), None)
        if above is not None:
            other = placed[above]
            invalid.append(
                f"{other.origin} becomes {keystr(above)}, {move.origin} {keystr(path)}, which is below it"
            )
    if invalid:
        raise MappingError(
            "several leaves would have the same path:" + listing(invalid),
            location=location or None,
            hint=_RENAME,
        )


def _check_lists(new_tree: Tree, tree: Tree) -> None:
    """Reject gaps in lists, except those that exist because a format left out unreadable entries."""
    fault = _list_fault(new_tree)
    if fault is not None and _list_fault(tree) is None:
        raise fault.at(
            hint="leave out the complete list or its last elements, or rename the remaining ones",
        ) from fault


def _list_fault(tree: Tree) -> FormatError | None:
    """Explain why a tree does not consist of dictionaries and complete lists; None if it does."""
    try:
        tree.nested()
    except FormatError as error:
        return error
    return None
