"""A checkpoint as a tree: paths in order, each with a lazy array or a leaf without data.

A path is a tuple of keys: `str` for a dictionary key or an attribute, `int` for an index in a sequence.
`Tree.nested()` is the same as dictionaries and lists, a JAX pytree of lazy arrays.
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
from ckpttools.core.errors import FormatError, NoSuchPathError, UsageError, listing, near_names
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count

Path = tuple[str | int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Empty:
    """A leaf that holds no data.

    Attributes:
        kind: "None", "Dict", "List" or "Tuple".
    """

    kind: str


@dataclass(frozen=True, slots=True)
class Text:
    """A leaf that is a string."""

    value: str


Leaf = LazyArray | Empty | Text


@dataclass(frozen=True)
class Metadata:
    """Information in a checkpoint other than its arrays.

    Attributes:
        format: name of the format it was read from, or None.
        step: training step of its directory, or None.
        item: name of the item of that step if the format has several, else None.
        items: names of the items that are its first keys, if it combines several.
        custom: the user's own metadata (`scan_layers` in a MaxText checkpoint).
        config: the model's `config.json`, or None without one.
        scalars: paths of arrays that were Python numbers.
        key_impls: for arrays that are the data of typed JAX PRNG keys, the name of their implementation.
        location: the opened location, for messages.
        notes: the changes by transforms.
        is_other_model: whether it is the model of `config` instead of the model of the files next to it.
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
    """The result of a transform: a tree, and notes for the user."""

    @property
    def tree(self) -> Tree: ...

    @property
    def notes(self) -> Notes: ...


@dataclass(frozen=True, repr=False)
class Tree(Mapping[Path, Leaf]):
    """An ordered map from path to leaf, with metadata. Never changed; transforms make new ones.

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
            NoSuchPathError: the path does not exist; suggests similar paths.
            UsageError: the text matches several paths.
        """
        return self.leaves[self.find_path(path)]

    def find_path(self, name: Path | str) -> Path:
        """Return the path of a name whose keys are joined by "/" or "."; errors as for `tree[name]`."""
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
                "several paths are written like this",
                location=self.metadata.location or None,
                got=path,
                expected=" or ".join(map(str, result)),
                hint="give one of these tuples",
            )
        return result[0] if result else None

    @cached_property
    def _by_name(self) -> Mapping[str, tuple[Path, ...]]:
        """Map names to paths: joined by "/", and by "." unless another path has that name."""
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
            hint = f"glob({name!r}) returns the tree of those"
        else:
            # Names without their prefix are more likely than misspelled ones.
            near = [item for item in known if item.endswith((f"/{name}", f".{name}"))][:3] or near_names(
                name, known
            )
            message, hint = "there is no such path", f"did you mean {' or '.join(near)}?" if near else ""
        return NoSuchPathError(message, location=self.metadata.location or None, got=name, hint=hint or None)

    def glob(self, *patterns: str) -> Tree:
        """Return the tree of the arrays that match any pattern (`ckpttools.array.patterns`); may be empty."""
        from ckpttools.array.patterns import first_match

        result = {path: leaf for path, leaf in self.leaves.items() if first_match(path, patterns)}
        scalars = self.metadata.scalars & result.keys()
        key_impls = {path: impl for path, impl in self.metadata.key_impls.items() if path in result}
        return Tree(result, replace(self.metadata, scalars=scalars, key_impls=key_impls))

    def __repr__(self) -> str:
        """Format the tree and its names; names that differ only in numbers share a line."""
        what = " ".join(filter(None, (self.metadata.format, self.metadata.location)))
        lines = [f"{keystr(path)}: {_format_leaf(leaf)}" for path, leaf in self.leaves.items()]
        head = f"<Tree{f' of {what}' if what else ''}: {array_count(self.arrays)}, {self.nbytes:,} bytes"
        return f"{head}{listing(lines)}>"

    @cached_property
    def arrays(self) -> dict[Path, LazyArray]:
        """Return the leaves that are arrays, in order."""
        return {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, LazyArray)}

    @cached_property
    def _known(self) -> dict[Callable[[Tree], object], object]:
        return {}

    def once(self, work_out: Callable[[Tree], T]) -> T:
        """Return the cached result of a function of the tree alone: a tree never changes."""
        if work_out not in self._known:
            self._known[work_out] = work_out(self)
        return cast(T, self._known[work_out])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def with_metadata(self, **changes: Any) -> Tree:
        """Return the same leaves with some metadata fields changed."""
        return replace(self, metadata=replace(self.metadata, **changes))

    def pipe(self, *transforms: Callable[[Tree], Changed]) -> Tree:
        """Apply `transforms` in order (`ckpttools.transforms.base`); errors as theirs.

        Their notes are added to `metadata.notes`.
        """
        tree, notes = self, self.metadata.notes
        for transform in transforms:
            changed = transform(tree)
            tree, notes = changed.tree, notes + changed.notes
        return tree.with_metadata(notes=notes)

    def nested(self) -> Any:
        """Return the tree as nested dictionaries and lists; empty leaves become empty containers.

        Raises:
            FormatError: a path runs through a leaf, or a sequence has gaps.
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
    """Return the value of a leaf in a nested tree."""
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
    built = {key: _sequences(value, (*path, key)) for key, value in node.items()}
    if not all(isinstance(key, int) for key in built):
        return built
    if sorted(built) != list(range(len(built))):
        raise FormatError("a sequence has gaps", location=keystr(path), got=sorted(built))
    return [built[k] for k in range(len(built))]


def keystr(path: Path) -> str:
    """Return the path joined by "/", as in messages and `--json`."""
    try:
        return "/".join(path)  # type: ignore[arg-type]
    except TypeError:
        return "/".join(map(str, path))


def dotted(path: Path) -> str:
    """Return the path joined by ".", as Orbax names arrays on disk."""
    # Names of formats without a tree are one key, and asked for a dozen times; few paths have a number.
    try:
        return path[0] if len(path) == 1 and isinstance(path[0], str) else ".".join(path)  # type: ignore[arg-type]
    except TypeError:
        return ".".join(map(str, path))


def collision(path: Path) -> FormatError:
    """Create the error for two arrays with the same path."""
    return FormatError("two arrays would get one path", location=keystr(path))


def refuse_collisions(paths: Iterable[Path]) -> None:
    """Raise FormatError if a path occurs twice."""
    twice = next((path for path, count in Counter(paths).items() if count > 1), None)
    if twice is not None:
        raise collision(twice)


def by_name(arrays: Mapping[Path, T]) -> dict[str, T]:
    """Return arrays, or other values, by their paths joined by ".".

    Raises:
        FormatError: two of them would have the same name, so that one would be lost.
    """
    named = {dotted(path): array for path, array in arrays.items()}
    if len(named) < len(arrays):
        paths: dict[str, list[str]] = {}
        for path in arrays:
            paths.setdefault(dotted(path), []).append(keystr(path))
        twice = [f"{name}: {' and '.join(item)}" for name, item in paths.items() if len(item) > 1]
        raise FormatError(
            "several arrays have one name, keys joined by dots:" + listing(twice), hint="rename them"
        )
    return named


def register_where_jax_is_loaded(kind: type[Tree]) -> None:
    """Register trees as pytrees of lazy arrays and strings; does nothing unless jax is loaded."""
    if "jax" in sys.modules and kind not in _registered:
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
        """Return a dictionary rather than a tree, because the values need not be lazy arrays."""
        built = list(children)
        return dict(zip(keys, built, strict=True)) if keys or not built else built[0]

    tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten)
