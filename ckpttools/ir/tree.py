"""A checkpoint as a tree: paths in order, each with a lazy array or a leaf without data.

A path is a tuple of keys: `str` for a dictionary key or an attribute, `int` for a place in a sequence.
`Tree.nested()` is the same as dictionaries and lists, a JAX pytree of lazy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

from ckpttools.errors import FormatError
from ckpttools.ir.array import LazyArray
from ckpttools.notes import Notes

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
    """What a checkpoint says of itself beside its arrays.

    Attributes:
        format: name of the format it was read from, or None.
        step: training step of the directory it lies in, or None.
        item: name of the item of that step, where the format has several, or None.
        custom: the user's own metadata (`scan_layers` in a MaxText checkpoint).
        config: the model's `config.json`, or None where there is none.
        scalars: paths of arrays that were Python numbers.
        key_impls: for arrays that are the data of typed JAX PRNG keys, the name of their implementation.
        place: what was opened, for messages.
        notes: what transforms did to it since.
    """

    format: str | None = None
    step: int | None = None
    item: str | None = None
    custom: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    scalars: frozenset[Path] = frozenset()
    key_impls: Mapping[Path, str] = field(default_factory=dict)
    place: str = ""
    notes: Notes = field(default_factory=Notes)


class Changed(Protocol):
    """What a transform gives: the tree it made, and what the user should know of it."""

    @property
    def tree(self) -> Tree: ...

    @property
    def notes(self) -> Notes: ...


@dataclass(frozen=True)
class Tree(Mapping[Path, Leaf]):
    """An ordered map from path to leaf, with metadata. Never changed; transforms make new ones."""

    leaves: Mapping[Path, Leaf]
    metadata: Metadata = field(default_factory=Metadata)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", MappingProxyType(dict(self.leaves)))

    def __getitem__(self, path: Path) -> Leaf:
        return self.leaves[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    @cached_property
    def arrays(self) -> dict[Path, LazyArray]:
        """The leaves that are arrays, in order."""
        return {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, LazyArray)}

    @cached_property
    def _known(self) -> dict[Callable[[Tree], object], object]:
        return {}

    def once(self, work_out: Callable[[Tree], T]) -> T:
        """What a function of the tree alone gives, worked out at the first call: a tree never changes."""
        if work_out not in self._known:
            self._known[work_out] = work_out(self)
        return cast(T, self._known[work_out])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def with_metadata(self, **changes: Any) -> Tree:
        """The same leaves with some metadata fields changed."""
        return replace(self, metadata=replace(self.metadata, **changes))

    def pipe(self, *transforms: Callable[[Tree], Changed]) -> Tree:
        """The tree through `transforms` (`ckpttools.transforms.base`), first to last; errors as theirs.

        What they say of it is added to `metadata.notes`.
        """
        tree, notes = self, self.metadata.notes
        for transform in transforms:
            changed = transform(tree)
            tree, notes = changed.tree, notes + changed.notes
        return tree.with_metadata(notes=notes)

    def nested(self) -> Any:
        """The tree as dictionaries and lists with the leaves in them; empty leaves become what they name.

        Raises:
            FormatError: a path runs through a leaf, or a sequence has gaps.
        """
        root: dict[str | int, Any] = {}
        for path, leaf in self.leaves.items():
            if not path:
                return _value(leaf)
            _insert(root, path, leaf)
        return _sequences(root, ())


def _value(leaf: Leaf) -> Any:
    """What stands for a leaf in a nested tree."""
    if isinstance(leaf, Empty):
        empties: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": ()}
        return empties[leaf.kind]
    return leaf.value if isinstance(leaf, Text) else leaf


def _insert(node: dict[str | int, Any], path: Path, leaf: Leaf) -> None:
    for depth, key in enumerate(path[:-1]):
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise FormatError("a path runs through a leaf", place=spelled(path[: depth + 1]))
    if path[-1] in node:
        raise FormatError("a path runs through a leaf", place=spelled(path))
    node[path[-1]] = leaf


def _sequences(node: Any, path: Path) -> Any:
    """Turns dictionaries whose keys are all places in a sequence into lists."""
    if not isinstance(node, dict):
        return _value(node)
    if not node:
        return node
    made = {key: _sequences(value, (*path, key)) for key, value in node.items()}
    if not all(isinstance(key, int) for key in made):
        return made
    if sorted(made) != list(range(len(made))):
        raise FormatError("a sequence has gaps", place=spelled(path), got=sorted(made))
    return [made[k] for k in range(len(made))]


def spelled(path: Path) -> str:
    """The path joined by "/", as messages and `--json` show it."""
    return "/".join(map(str, path))


def dotted(path: Path) -> str:
    """The path joined by ".", as Orbax names arrays on disk."""
    return ".".join(map(str, path))
