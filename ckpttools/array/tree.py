"""A checkpoint as a tree: an ordered map from paths to lazy arrays and to leaves without data.

A path is a tuple of keys: `str` for a dictionary key or an attribute, `int` for an index in a sequence.
`Tree.nested()` returns the same tree as dictionaries and lists: a JAX pytree of lazy arrays.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, NoSuchPathError, UsageError, listing, similar_names
from ckpttools.core.message_terms import action
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count

Path = tuple[str | int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Empty:
    """A leaf that has no data.

    Attributes:
        kind: "None", "Dict", "List" or "Tuple".
    """

    kind: str


@dataclass(frozen=True, slots=True)
class Text:
    """A leaf that contains a string."""

    value: str


Leaf = LazyArray | Empty | Text


@dataclass(frozen=True)
class Metadata:
    """Information about a checkpoint besides its arrays.

    Attributes:
        format: Name of the format that the checkpoint was read from, or None.
        step: Training step in the name of its directory, or None.
        item: Name of the item within the step if the format has several, else None.
        items: Names of the items, which are the first keys, if the tree combines several.
        custom: The user's own metadata (`scan_layers` in a MaxText checkpoint).
        config: The model's `config.json`, or None without one.
        scalars: Paths of the arrays that were Python numbers.
        key_impls: The PRNG implementation of each array that holds the data of typed JAX keys.
        location: The opened location, for messages.
        notes: The changes made by transforms.
        is_other_model: Whether the tree is a different model from the files next to it, described by
            `config`.
    """

    format: str | None = None
    step: int | None = None
    item: str | None = None
    items: tuple[str, ...] = ()
    custom: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    scalars: frozenset[Path] = frozenset()
    key_impls: Mapping[Path, str] = field(default_factory=dict)
    location: str = ""
    notes: Notes = field(default_factory=Notes)

    message_fields = ("notes",)
    is_other_model: bool = False


class Changed(Protocol):
    """The result of a transform: a tree and notes for the user."""

    @property
    def tree(self) -> Tree: ...

    @property
    def notes(self) -> Notes: ...


@dataclass(frozen=True, repr=False)
class Tree(Mapping[Path, Leaf]):
    """An ordered map from paths to leaves, with metadata. Trees are immutable; transforms return new ones.

    tree["params/params/decoder/decoder_norm/scale"]         # a path as text, or as a tuple of keys
    tree.glob("*/mlp/*").nbytes                              # the tree of matching leaves
    jax.tree.map(lambda array: array.shape, tree)            # a pytree of lazy arrays
    """

    leaves: Mapping[Path, Leaf]
    metadata: Metadata = field(default_factory=Metadata)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", MappingProxyType(dict(self.leaves)))
        register_where_jax_is_loaded(Tree)

    def __getitem__(self, path: Path | str) -> Leaf:
        """Return the leaf at a path, whose keys may be joined by "/" or by ".".

        Raises:
            NoSuchPathError: The path does not exist. The message suggests similar paths.
            UsageError: The text matches several paths.
        """
        return self.leaves[self.find_path(path)]

    def find_path(self, name: Path | str) -> Path:
        """Return the path for a name whose keys are joined by "/" or "."; same errors as `tree[name]`."""
        result = self._find(name)
        if result is None:
            raise self._no_such_path(name)
        return result

    def get(self, path: Path | str, default: Any = None) -> Any:
        result = self._find(path)
        return default if result is None else self.leaves[result]

    def __contains__(self, path: object) -> bool:
        return isinstance(path, tuple | str) and self._find(path) is not None

    def __iter__(self) -> Iterator[Path]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def _find(self, path: Path | str) -> Path | None:
        if not isinstance(path, str):
            return path if path in self.leaves else None
        result = self._by_name.get(path, ())
        if len(result) > 1:
            raise UsageError(
                "several paths have this name",
                location=self.metadata.location or None,
                got=path,
                expected=" or ".join(map(str, result)),
                hint="pass one of these tuples",
            )
        return result[0] if result else None

    @cached_property
    def _by_name(self) -> Mapping[str, tuple[Path, ...]]:
        """Map names to paths. Keys are joined by "/", and by "." unless another path has that name."""
        result: dict[str, tuple[Path, ...]] = {}
        for path in self.leaves:
            result[keystr(path)] = (*result.get(keystr(path), ()), path)
        with_dots: dict[str, tuple[Path, ...]] = {}
        for path in self.leaves:
            with_dots[dotted(path)] = (*with_dots.get(dotted(path), ()), path)
        return {**with_dots, **result}

    def _no_such_path(self, path: Path | str) -> NoSuchPathError:
        name = keystr(path) if isinstance(path, tuple) else str(path)
        known = [keystr(leaf) for leaf in self.leaves]
        below = [item for item in known if item.startswith((f"{name}/", f"{name}."))]
        if below:
            message = f"this path has {len(below):,} arrays below it, such as {below[0]}"
            pattern = f"{name}{below[0][len(name)]}*"
            hint = f"{action('inspect.names', self.metadata.location or 'PATH', filter=pattern)} lists them"
        else:
            # A name without its prefix is more likely than a misspelled one.
            near = [item for item in known if item.endswith((f"/{name}", f".{name}"))][:3] or similar_names(
                name, known
            )
            message, hint = "no array has this name", f"did you mean {' or '.join(near)}?" if near else ""
            hint = hint or f"{action('inspect.names', self.metadata.location or 'PATH')} lists the names"
        return NoSuchPathError(message, location=self.metadata.location or None, got=name, hint=hint or None)

    def glob(self, *patterns: str) -> Tree:
        """Return the tree of the arrays that match any pattern (`ckpttools.array.patterns`); may be empty."""
        from ckpttools.array.patterns import first_match

        result = {path: leaf for path, leaf in self.leaves.items() if first_match(path, patterns)}
        scalars = self.metadata.scalars & result.keys()
        key_impls = {path: impl for path, impl in self.metadata.key_impls.items() if path in result}
        return Tree(result, replace(self.metadata, scalars=scalars, key_impls=key_impls))

    def __repr__(self) -> str:
        """Format the names, shapes and dtypes; names that differ only in numbers share a line."""
        lines = [f"{keystr(path)}: {_format_leaf(leaf)}" for path, leaf in self.leaves.items()]
        return f"<{self.head()}{listing(lines)}>"

    def head(self) -> str:
        """Return a one-line summary: the format, the location, and the number of leaves and bytes."""
        text = " ".join(filter(None, (self.metadata.format, self.metadata.location)))
        others = len(self) - len(self.arrays)
        counts = array_count(self.arrays)
        if others:
            counts += f" and {others:,} other {'leaf' if others == 1 else 'leaves'}"
        return f"Tree{f' of {text}' if text else ''}: {counts}, {self.nbytes:,} bytes"

    def _repr_html_(self) -> str:
        from ckpttools.array.tree_html import tree_html

        return tree_html(self)

    def _ipython_key_completions_(self) -> list[str]:
        return [keystr(path) for path in self.leaves]

    @cached_property
    def arrays(self) -> dict[Path, LazyArray]:
        """Return the leaves that are arrays, in tree order."""
        return {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, LazyArray)}

    @cached_property
    def _known(self) -> dict[Callable[[Tree], object], object]:
        return {}

    def once(self, work_out: Callable[[Tree], T]) -> T:
        """Compute a function of the tree once and cache the result; a tree never changes."""
        if work_out not in self._known:
            self._known[work_out] = work_out(self)
        return cast(T, self._known[work_out])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def with_metadata(self, **changes: Any) -> Tree:
        """Return a tree with the same leaves and some changed metadata fields."""
        return replace(self, metadata=replace(self.metadata, **changes))

    def pipe(self, *transforms: Callable[[Tree], Changed]) -> Tree:
        """Apply `transforms` in order (see `ckpttools.transforms.base`); raises their errors.

        Adds their notes to `metadata.notes`.
        """
        tree, notes = self, self.metadata.notes
        for transform in transforms:
            changed = transform(tree)
            tree, notes = changed.tree, notes + changed.notes
        return tree.with_metadata(notes=notes)

    def nested(self) -> Any:
        """Convert the tree to nested dictionaries and lists; empty leaves become empty containers.

        Raises:
            FormatError: A path runs through a leaf, or a sequence has gaps.
        """
        root: dict[str | int, Any] = {}
        for path, leaf in self.leaves.items():
            if not path:
                return _value(leaf)
            _insert(root, path, leaf)
        return _sequences(root, ())


def _format_leaf(leaf: Leaf) -> str:
    """Format a leaf in a few characters."""
    if isinstance(leaf, LazyArray):
        return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
    return leaf.kind if isinstance(leaf, Empty) else repr(leaf.value)


def _value(leaf: Leaf) -> Any:
    """Return the value that represents a leaf in a nested tree."""
    if isinstance(leaf, Empty):
        empties: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": ()}
        return empties[leaf.kind]
    return leaf.value if isinstance(leaf, Text) else leaf


def _insert(node: dict[str | int, Any], path: Path, leaf: Leaf) -> None:
    for depth, key in enumerate(path[:-1]):
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise FormatError("a path runs through a leaf", location=keystr(path[: depth + 1]))
    if path[-1] in node:
        raise FormatError("a path runs through a leaf", location=keystr(path))
    node[path[-1]] = leaf


def _sequences(node: Any, path: Path) -> Any:
    """Convert dictionaries whose keys are all sequence indices into lists."""
    if not isinstance(node, dict):
        return _value(node)
    if not node:
        return node
    result = {key: _sequences(value, (*path, key)) for key, value in node.items()}
    if not all(isinstance(key, int) for key in result):
        return result
    if sorted(result) != list(range(len(result))):
        raise FormatError("a sequence has gaps", location=keystr(path), got=sorted(result))
    return [result[k] for k in range(len(result))]


def keystr(path: Path) -> str:
    """Join the keys of a path by "/", as in messages and `--json`."""
    try:
        return "/".join(path)  # type: ignore[arg-type]
    except TypeError:
        return "/".join(map(str, path))


def dotted(path: Path) -> str:
    """Join the keys of a path by ".", as Orbax names arrays on disk."""
    # In formats without a tree, names are a single key and are joined many times; few paths have an integer
    # key.
    try:
        return path[0] if len(path) == 1 and isinstance(path[0], str) else ".".join(path)  # type: ignore[arg-type]
    except TypeError:
        return ".".join(map(str, path))


def collision(path: Path) -> FormatError:
    """Create the error for two arrays with the same path."""
    return FormatError("two arrays would have the same path", location=keystr(path))


def refuse_collisions(paths: Iterable[Path]) -> None:
    """Raise FormatError if a path occurs twice."""
    duplicates = next((path for path, count in Counter(paths).items() if count > 1), None)
    if duplicates is not None:
        raise collision(duplicates)


def by_name(arrays: Mapping[Path, T]) -> dict[str, T]:
    """Map names to the given values, with the keys of each path joined by ".".

    Raises:
        FormatError: Two paths would have the same name.
    """
    named = {dotted(path): array for path, array in arrays.items()}
    if len(named) < len(arrays):
        paths: dict[str, list[str]] = {}
        for path in arrays:
            paths.setdefault(dotted(path), []).append(keystr(path))
        duplicates = [f"{name}: {' and '.join(item)}" for name, item in paths.items() if len(item) > 1]
        raise FormatError(
            "several arrays have one name, keys joined by dots:" + listing(duplicates), hint="rename them"
        )
    return named


def register_where_jax_is_loaded(kind: type[Tree]) -> None:
    """Register trees as pytrees of lazy arrays and strings; does nothing unless jax is loaded."""
    if sys.modules.get("jax") is not None and kind not in _registered:
        with _lock:
            if kind not in _registered:
                _register(kind)
                _registered.add(kind)


_lock = threading.Lock()
_registered: set[type] = set()


def _register(kind: type[Tree]) -> None:
    from jax import tree_util

    def flatten_with_keys(tree: Tree) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        nested = tree.nested()
        if isinstance(nested, dict):
            return [(tree_util.DictKey(key), item) for key, item in nested.items()], tuple(nested)
        return [(tree_util.SequenceKey(0), nested)], ()

    def unflatten(keys: tuple[Any, ...], children: Any) -> Any:
        """Return a dictionary rather than a tree, because the values may not be lazy arrays."""
        result = list(children)
        return dict(zip(keys, result, strict=True)) if keys or not result else result[0]

    tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten)
