"""Leaves other than arrays, and kinds of arrays, that differ between two checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from ckpttools.array.tree import Empty, Leaf, Path, Text, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import sort_naturally
from ckpttools.digest.pairing import LeafDifference
from ckpttools.maxtext.view import view_of
from ckpttools.roles.of_tree import roles

# Formats whose files contain only named arrays, unless our own description of the tree has the rest.
_FLAT_FORMATS = frozenset(("safetensors",))


_EMPTY = "empty node"


class _LeafKind(NamedTuple):
    what: Literal["array", "number", "empty", "text"]
    text: str


@dataclass(frozen=True, slots=True)
class LeafKinds:
    """Kinds of leaves of a tree, as a manifest records them.

    Attributes:
        layout: Name of the MaxText flavor; None for others.
        is_stacked: Whether layers are stacked.
        has_state: Whether there is optimizer state.
        is_read: Whether the tree was read from files. Only such trees distinguish Python numbers from arrays.
        kinds: Descriptions of empty nodes, Python numbers and typed random keys, by name. Other leaves are
            arrays or texts.
    """

    layout: str | None
    is_stacked: bool
    has_state: bool
    is_read: bool
    kinds: Mapping[str, str]

    def comparable(self, other: LeafKinds) -> bool:
        """Return whether equal checkpoints have equal leaves in both layouts."""
        mine = self.layout, self.is_stacked, self.has_state
        return mine == (other.layout, other.is_stacked, other.has_state)

    def differing(self, other: LeafKinds) -> Iterator[LeafDifference]:
        """Yield the leaves whose kinds differ between comparable layouts; None stands for any other leaf."""
        has_numbers = self.is_read and other.is_read
        for name in sort_naturally({**self.kinds, **other.kinds}):
            kinds = self.kinds.get(name), other.kinds.get(name)
            is_empty = any(kind is not None and kind.startswith(_EMPTY) for kind in kinds)
            if kinds[0] != kinds[1] and (is_empty or has_numbers):
                yield LeafDifference(name, *kinds)


def nodes_of(tree: Tree) -> LeafKinds | None:
    """Return the kinds of leaves that a manifest records; None if the tree's format has only arrays."""
    if not _has_empties(tree):
        return None
    homes = {home: inner for inner, home in view_of(tree).homes.items()}
    scalars, keys = tree.metadata.scalars, tree.metadata.key_impls
    kinds = ((path, _kind(path, leaf, scalars, keys)) for path, leaf in tree.items())
    return LeafKinds(
        *_layout(tree),
        has_state=_has_state(tree),
        is_read=tree.metadata.format is not None,
        kinds={
            keystr(homes.get(path, path)): kind.text
            for path, kind in kinds
            if kind.text != "array" and kind.what != "text"
        },
    )


def differing_leaves(
    a: Tree, b: Tree, parameters: bool = False, *, is_conversion: bool = False
) -> tuple[LeafDifference, ...]:
    """Return the leaves whose kinds or texts differ. Reads nothing.

    Texts always count. Empty nodes count between two checkpoints of the same layout whose formats can store
    them. Python numbers and typed random keys count if, in addition, both checkpoints were read from files.

    Args:
        a, b: The checkpoints.
        parameters: Compare only parameters, which are all arrays, so that no leaf differs.
        is_conversion: Whether one side is a Hugging Face checkpoint and the other is MaxText's.
    """
    if parameters:
        return ()
    has_empties = not is_conversion and _layout(a) == _layout(b) and _has_empties(a) and _has_empties(b)
    # Steps of models are Python numbers, and steps in training states are arrays.
    is_read = None not in (a.metadata.format, b.metadata.format)
    has_numbers = has_empties and is_read and _has_state(a) == _has_state(b)
    counts = {"text": True, "empty": has_empties, "number": has_numbers, "array": has_numbers}
    mine, theirs = _kinds(a), _kinds(b)
    one_sided = {*_nodes_of_state(a, b), *_nodes_of_state(b, a)}
    result: list[LeafDifference] = []
    for name in sort_naturally({**mine, **theirs}):
        kinds = mine.get(name), theirs.get(name)
        there = [kind for kind in kinds if kind is not None]
        is_array = [item.what in ("array", "number") for item in there]
        # The comparison of arrays reports arrays that only one side has.
        if kinds[0] == kinds[1] or (any(is_array) and not (len(there) == 2 and all(is_array))):
            continue
        if name not in one_sided and any(counts[item.what] for item in there):
            result.append(LeafDifference(name, *(None if kind is None else kind.text for kind in kinds)))
    return tuple(result)


def _layout(tree: Tree) -> tuple[str | None, bool]:
    view = view_of(tree)
    return view.flavour.name, view.is_stacked


def _has_empties(tree: Tree) -> bool:
    return tree.metadata.format not in _FLAT_FORMATS or any(len(path) > 1 for path in tree)


def _nodes_of_state(tree: Tree, other: Tree) -> Iterator[str]:
    """Find empty nodes for which the other tree has arrays, or no training state."""
    above = {path[:length] for path in other for length in range(len(path))}
    is_lost = view_of(tree).is_training and not _has_state(other)
    known = roles(tree)
    for path, leaf in tree.items():
        if isinstance(leaf, Empty) and (path in above or (is_lost and known.of(path) != "parameter")):
            yield dotted(path)


def _has_state(tree: Tree) -> bool:
    known = roles(tree)
    return any(known.of(path) == "optimizer" for path in tree.arrays)


def _kinds(tree: Tree) -> dict[str, _LeafKind]:
    scalars, keys = tree.metadata.scalars, tree.metadata.key_impls
    return {dotted(path): _kind(path, leaf, scalars, keys) for path, leaf in tree.items()}


def _kind(path: Path, leaf: Leaf, scalars: Collection[Path], keys: Collection[Path]) -> _LeafKind:
    if isinstance(leaf, Text):
        return _LeafKind("text", f"text {leaf.value!r}")
    if isinstance(leaf, Empty):
        return _LeafKind("empty", f"{_EMPTY} ({leaf.kind})")
    if path in scalars:
        return _LeafKind("number", "Python number")
    return _LeafKind("array", "typed random key" if path in keys else "array")
