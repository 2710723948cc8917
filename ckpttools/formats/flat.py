"""Trees in formats that store only named arrays: array names, and a text that restores the tree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ckpttools.array.tree import Empty, Leaf, Path, Text, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, list_with_count, listing
from ckpttools.core.message_terms import option
from ckpttools.formats.json_file import DEEPEST, parse_json

# Metadata key of the text that describes the tree.
ENTRY = "ckpttools.tree"
_VERSION = 1
_ARRAY = "array"
_REMOVE_HINT = "remove it from the metadata to open the arrays by name"


def flat_name(path: Path, separator: str) -> str:
    """Return the name of the array at `path`."""
    return separator.join(map(str, path))


def names(tree: Tree, separator: str) -> dict[Path, str]:
    """Return the array names by path, in order.

    Raises:
        FormatError: Two arrays would have the same name. The message lists all such pairs.
    """
    named = {path: flat_name(path, separator) for path in tree.arrays}
    firsts: dict[str, Path] = {}
    duplicates = [
        f"{_keys(firsts[name])} and {_keys(path)}: {name!r}"
        for path, name in named.items()
        if firsts.setdefault(name, path) != path
    ]
    if duplicates:
        raise FormatError(
            f"different paths become the same name when their keys are joined with {separator!r}:"
            + listing(duplicates),
            location=tree.metadata.location,
            hint=f"join them with another {option('separator')}, or rename them",
        )
    return named


def _keys(path: Path) -> str:
    """Format a path key by key, for messages about names that collide when keys are joined."""
    return json.dumps(path, ensure_ascii=False)


def is_flat(tree: Tree) -> bool:
    """Return whether the tree has only named arrays, so that storing these alone loses nothing."""
    named = all(len(path) == 1 and isinstance(path[0], str) for path in tree)
    plain = all(_kind(path, leaf, tree) == (_ARRAY,) for path, leaf in tree.items())
    return named and plain and tree.metadata.step is None


def describe(tree: Tree, separator: str) -> str:
    """Serialize everything about the tree except its arrays as JSON; see `restore`.

    Raises:
        FormatError: The custom metadata cannot be written as JSON, or a text or name cannot be encoded as
            UTF-8.
    """
    _check_custom(tree)
    _check_texts(tree)
    document = {
        "version": _VERSION,
        "separator": separator,
        "step": tree.metadata.step,
        "custom_metadata": dict(tree.metadata.custom),
        "leaves": [[path, *_kind(path, leaf, tree)] for path, leaf in tree.items()],
    }
    return json.dumps(document, separators=(",", ":"))


def _check_custom(tree: Tree) -> None:
    for key, value in tree.metadata.custom.items():
        try:
            _utf8({key: value})
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"custom metadata {key!r} cannot be written as JSON",
                location=tree.metadata.location,
                got=error,
                hint="leave it out, or turn it into numbers, strings, lists and dictionaries",
            ) from error


def _check_texts(tree: Tree) -> None:
    """Reject unpaired surrogates: they would be written as escapes that cannot be read again."""
    for path, leaf in tree.items():
        try:
            _utf8([path, *_kind(path, leaf, tree)])
        except UnicodeEncodeError as error:
            raise FormatError(
                f"{json.dumps(path)} contains text that is not valid Unicode",
                location=tree.metadata.location,
                got=error,
                hint="rename it, or replace the text",
            ) from error


def _utf8(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _kind(path: Path, leaf: Leaf, tree: Tree) -> tuple[str, ...]:
    """Return the kind of a leaf, followed by its value unless the value is in an array."""
    if isinstance(leaf, Empty):
        return "empty", leaf.kind
    if isinstance(leaf, Text):
        return "text", leaf.value
    if path in tree.metadata.key_impls:
        return "key", tree.metadata.key_impls[path]
    return ("scalar" if path in tree.metadata.scalars else _ARRAY,)


def restore(flat: Tree, text: str) -> Tree:
    """Restore the tree that `describe` serialized.

    Args:
        flat: The arrays, each under a path of a single key (its name).
        text: The text that `describe` returned.

    Raises:
        FormatError: The text is invalid, or it and `flat` do not name the same arrays.
    """
    location = f"{flat.metadata.location}: {ENTRY} in the metadata"
    saved = _parse(text, location)
    _check_same(saved, flat, location)
    leaves = {item.path: item.leaf or flat[(flat_name(item.path, saved.separator),)] for item in saved.leaves}
    return Tree(leaves, flat.metadata).with_metadata(
        custom=saved.custom,
        step=saved.step,
        scalars=frozenset(item.path for item in saved.leaves if item.kind == "scalar"),
        key_impls={item.path: item.value for item in saved.leaves if item.kind == "key"},
    )


@dataclass(frozen=True, slots=True)
class _DescribedLeaf:
    """A leaf in the serialized tree; see `_kind`."""

    path: Path
    kind: str
    value: str

    @property
    def leaf(self) -> Leaf | None:
        """The leaf itself, or None if it is an array."""
        match self.kind:
            case "empty":
                return Empty(self.value)
            case "text":
                return Text(self.value)
            case _:
                return None


@dataclass(frozen=True, slots=True)
class _Saved:
    separator: str
    step: int | None
    custom: Mapping[str, Any]
    leaves: tuple[_DescribedLeaf, ...]


def _parse(text: str, location: str) -> _Saved:
    try:
        document = parse_json(text)
        version = document["version"]
        if version == _VERSION:
            return _convert_document(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            "the description of the tree is damaged",
            location=location,
            got=f"{type(error).__name__}: {error}",
            hint=_REMOVE_HINT,
        ) from error
    raise FormatError(
        "the tree has a description of an unknown version",
        location=location,
        got=f"version {version}",
        expected=f"version {_VERSION}",
        hint="update ckpttools",
    )


def _convert_document(document: Mapping[str, Any]) -> _Saved:
    """Convert the parsed document to our types; raises TypeError or ValueError if it has other types."""
    step, separator, custom = document["step"], document["separator"], document["custom_metadata"]
    if not (step is None or type(step) is int) or type(separator) is not str or type(custom) is not dict:
        raise TypeError("step, separator or custom_metadata is of another type")
    return _Saved(separator, step, custom, tuple(_described_leaf(*leaf) for leaf in document["leaves"]))


def _described_leaf(keys: list[object], kind: str, value: str = "") -> _DescribedLeaf:
    path = tuple(key for key in keys if type(key) in (str, int))
    if len(path) != len(keys) or len(path) > DEEPEST or type(value) is not str:
        raise TypeError(f"not a path and a value: {keys!r}, {value!r}")
    if kind not in (_ARRAY, "scalar", "key", "empty", "text"):
        raise ValueError(f"unknown kind of leaf: {kind!r}")
    return _DescribedLeaf(path, kind, value)  # type: ignore[arg-type]


def _check_same(saved: _Saved, flat: Tree, location: str) -> None:
    paths = Counter(item.path for item in saved.leaves)
    duplicates = [_keys(path) for path, count in paths.items() if count > 1]
    declared = {flat_name(item.path, saved.separator) for item in saved.leaves if item.leaf is None}
    names = {str(name) for (name,) in flat}
    if not duplicates and declared == names:
        return
    raise FormatError(
        "the description of the tree contradicts the arrays in the file"
        + list_with_count("described, but missing", sorted(declared - names))
        + list_with_count("present, but not described", sorted(names - declared))
        + list_with_count("described twice", sorted(duplicates)),
        location=location,
        expected="every array described once",
        hint=f"another program changed the arrays but kept this entry: {_REMOVE_HINT}",
    )
