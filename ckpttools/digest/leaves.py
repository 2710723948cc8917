"""Leaves other than arrays, and kinds of arrays, that differ between two checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from ckpttools.array.tree import Empty, Leaf, Path, Text, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
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
        key = self.layout, self.is_stacked, self.has_state
        return key == (other.layout, other.is_stacked, other.has_state)

    def differing(self, other: LeafKinds) -> Iterator[LeafDifference]:
        """Yield the leaves whose kinds differ between comparable layouts; None stands for any other leaf."""
        has_numbers = self.is_read and other.is_read
        for name in sort_naturally({**self.kinds, **other.kinds}):
            kinds = self.kinds.get(name), other.kinds.get(name)
            is_empty = any(kind is not None and kind.startswith(_EMPTY) for kind in kinds)
            if kinds[0] != kinds[1] and (is_empty or has_numbers):
                yield LeafDifference(name, *kinds)


def nodes_of(tree: Tree) -> LeafKinds | None:
    """Return the kinds of leaves that a manifest records; None if the tree's format has only arrays.

    Raises:
        FormatError: Two leaves have the same name.
    """
    if not _has_empties(tree):
        return None
    return LeafKinds(
        *_layout(tree),
        has_state=_has_state(tree),
        is_read=tree.metadata.format is not None,
        kinds=_by_name(
            (path, kind.text)
            for path, kind in _kinds(tree).items()
            if kind.text != "array" and kind.what != "text"
        ),
    )


def texts_of(tree: Tree) -> dict[str, str]:
    """Return the leaves of a tree that are strings, by name.

    Raises:
        FormatError: Two strings have the same name.
    """
    inner = _inner_paths(tree)
    texts = ((path, leaf.value) for path, leaf in tree.items() if isinstance(leaf, Text))
    return _by_name((inner.get(path, path), text) for path, text in texts)


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

    Raises:
        FormatError: Two leaves of a checkpoint have the same path.
    """
    if parameters:
        return ()
    has_empties = not is_conversion and _layout(a) == _layout(b) and _has_empties(a) and _has_empties(b)
    # Steps of models are Python numbers, and steps in training states are arrays.
    is_read = None not in (a.metadata.format, b.metadata.format)
    has_numbers = has_empties and is_read and _has_state(a) == _has_state(b)
    counts = {"text": True, "empty": has_empties, "number": has_numbers, "array": has_numbers}
    kinds_a = _kinds(a, {*_nodes_of_state(a, b)})
    kinds_b = _with_joints_of(_kinds(b, {*_nodes_of_state(b, a)}), kinds_a)
    result: list[LeafDifference] = []
    for path in {**kinds_a, **kinds_b}:
        kinds = kinds_a.get(path), kinds_b.get(path)
        present = [kind for kind in kinds if kind is not None]
        is_array = [item.what in ("array", "number") for item in present]
        # The comparison of arrays reports arrays that only one side has.
        if kinds[0] == kinds[1] or (any(is_array) and not (len(present) == 2 and all(is_array))):
            continue
        if any(counts[item.what] for item in present):
            name, texts = keystr(path), [None if kind is None else kind.text for kind in kinds]
            result.append(LeafDifference(name, *texts))
    order = {name: place for place, name in enumerate(sort_naturally({item.name for item in result}))}
    return tuple(sorted(result, key=lambda item: order[item.name]))


def _inner_paths(tree: Tree) -> dict[Path, Path]:
    """Map the paths of a tree to those under which arrays are compared, without the flavor's wrapping."""
    return {tree_path: inner for inner, tree_path in view_of(tree).homes.items()}


def _by_name(leaves: Iterable[tuple[Path, str]]) -> dict[str, str]:
    result: dict[str, str] = {}
    for path, text in leaves:
        name = keystr(path)
        if name in result:
            raise FormatError("two leaves would get one name", location=name)
        result[name] = text
    return result


def _with_joints_of(
    leaves: Mapping[Path, _LeafKind], others: Mapping[Path, _LeafKind]
) -> dict[Path, _LeafKind]:
    """Give leaves the paths of others that differ only in the separators of keys."""
    only = leaves.keys() - others.keys()
    known = {dotted(path): path for path in others if path not in leaves} if only else {}
    result: dict[Path, _LeafKind] = {}
    for path, kind in leaves.items():
        # Several paths may have the same dotted name.
        other = known.pop(dotted(path), path) if path in only else path
        result[other] = kind
    return result


def _layout(tree: Tree) -> tuple[str | None, bool]:
    view = view_of(tree)
    return view.flavor.name, view.is_stacked


def _has_empties(tree: Tree) -> bool:
    return tree.metadata.format not in _FLAT_FORMATS or any(len(path) > 1 for path in tree)


def _nodes_of_state(tree: Tree, other: Tree) -> Iterator[Path]:
    """Find empty nodes for which the other tree has arrays, or no training state."""
    above = {path[:length] for path in other for length in range(len(path))}
    is_lost = view_of(tree).is_training and not _has_state(other)
    known = roles(tree)
    for path, leaf in tree.items():
        if isinstance(leaf, Empty) and (path in above or (is_lost and known.of(path) != "parameter")):
            yield path


def _has_state(tree: Tree) -> bool:
    known = roles(tree)
    return any(known.of(path) == "optimizer" for path in tree.arrays)


def _kinds(tree: Tree, without: Collection[Path] = ()) -> dict[Path, _LeafKind]:
    """Return the kinds of leaves, by the paths under which they are compared."""
    scalars, keys, inner = tree.metadata.scalars, tree.metadata.key_impls, _inner_paths(tree)
    result: dict[Path, _LeafKind] = {}
    for path, leaf in tree.items():
        name = inner.get(path, path)
        if name in result:
            raise FormatError("two leaves would get one name", location=keystr(name))
        if path not in without:
            result[name] = _kind(path, leaf, scalars, keys)
    return result


def _kind(path: Path, leaf: Leaf, scalars: Collection[Path], keys: Mapping[Path, str]) -> _LeafKind:
    if isinstance(leaf, Text):
        return _LeafKind("text", f"text {leaf.value!r}")
    if isinstance(leaf, Empty):
        return _LeafKind("empty", f"{_EMPTY} ({leaf.kind})")
    if path in scalars:
        return _LeafKind("number", "Python number")
    return _LeafKind("array", f"typed random key ({keys[path]})" if path in keys else "array")
