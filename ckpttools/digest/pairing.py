"""Pair the arrays of two checkpoints, and list unpaired arrays and other differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ckpttools.array.lazy import LazyArray
from ckpttools.array.patterns import matches
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape
from ckpttools.core.text import array_count, format_type, matches_any, sort_naturally
from ckpttools.maxtext.tied_embeddings import Head
from ckpttools.maxtext.vocabulary import Surplus
from ckpttools.roles.buffers import is_buffer
from ckpttools.roles.of_tree import Typed

K = TypeVar("K", bound=Typed)
Side = Literal["A", "B"]
_SIDES: tuple[Side, ...] = ("A", "B")


@dataclass(frozen=True, slots=True)
class Remark:
    """A note on how names were matched or what was left out, for one side or both."""

    text: str
    side: Side | None = None

    def __str__(self) -> str:
        return f"{self.side}: {self.text}" if self.side else self.text


@dataclass(frozen=True)
class NamedArrays(Generic[K]):
    """The arrays of one checkpoint, under names that it shares with another.

    Attributes:
        arrays: Arrays by name, with the keys of MaxText's names joined by "/".
        remarks: Arrays that were left out, and other notes for the user.
        naming: How the arrays got their names.
        sizes: Lengths of axes such as `head_dim`, if the configuration defines them.
        extra: For each truncated array, the rows beyond the vocabulary.
        head: Names of the output head and the embedding, if the arrays have the names of a model.
        unused: Patterns of arrays that models of the family do not use in computation.
    """

    arrays: Mapping[str, K]
    remarks: tuple[str, ...] = ()
    naming: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    extra: Mapping[str, Surplus] = field(default_factory=dict)
    head: Head | None = None
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """A leaf whose kind or text differs between the sides.

    Attributes:
        name: Name of the leaf.
        a, b: Description of the leaf on each side, such as "text 'a'" or "Dict"; None if a side has no such
            leaf.
    """

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class Uncompared:
    """A group of arrays that only one side has, reported together.

    Attributes:
        remark: A description, and the reason why they were not compared.
        names: Names of the arrays.
    """

    remark: Remark
    names: tuple[str, ...]


class Pair(NamedTuple, Generic[K]):
    """An array that both sides have; shapes and dtypes may differ."""

    name: str
    a: K
    b: K


@dataclass(frozen=True)
class Pairing(Generic[K]):
    """Two checkpoints whose corresponding arrays have the same names.

    Attributes:
        a, b: Arrays by name.
        remarks: Arrays that were left out, and other notes for the user.
        naming: How names were matched.
        sizes: See `NamedArrays.sizes`.
        maxtext: The MaxText side, if the other side is a Hugging Face checkpoint under MaxText's names.
        extra: See `NamedArrays.extra`; rows of B.
        head: Names of the output head and of the embedding, if one side was converted to the other's names.
        uncompared: Groups of arrays that only one side has. If there are any, the sides differ.
        leaves: Leaves other than arrays, and kinds of arrays, that differ.
        configs: The `config.json` of each side, or None.
    """

    a: Mapping[str, K]
    b: Mapping[str, K]
    remarks: tuple[Remark, ...] = ()
    naming: tuple[Remark, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    maxtext: Side | None = None
    extra: Mapping[str, Surplus] = field(default_factory=dict)
    head: Head | None = None
    uncompared: tuple[Uncompared, ...] = ()
    leaves: tuple[LeafDifference, ...] = ()
    configs: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = (None, None)

    @property
    def pairs(self) -> Iterator[Pair[K]]:
        """Arrays of both sides, in the order of A."""
        return (Pair(name, array, self.b[name]) for name, array in self.a.items() if name in self.b)

    @property
    def only_a(self) -> dict[str, K]:
        """Arrays that B lacks."""
        return {name: array for name, array in self.a.items() if name not in self.b}

    @property
    def only_b(self) -> dict[str, K]:
        """Arrays that A lacks."""
        return {name: array for name, array in self.b.items() if name not in self.a}

    def drop_unused(self, patterns: Sequence[str]) -> Pairing[K]:
        """Leave out arrays that only one side has and that models do not use in computation.

        Args:
            patterns: See `NamedArrays.unused`. Buffers are kept, because their values can be checked.
        """
        result: list[tuple[Side, list[str]]] = [
            (side, [name for name, item in names.items() if _is_unused(name, item, patterns)])
            for side, names in zip(_SIDES, (self.only_a, self.only_b), strict=True)
        ]
        left = {name for _, names in result for name in names}
        if not left:
            return self
        remarks = [
            Remark(f"left out, as no model of the family computes with it: {array_count(names)}", side)
            for side, names in result
            if names
        ]
        a, b = ({name: item[name] for name in item if name not in left} for item in (self.a, self.b))
        return replace(self, a=a, b=b, remarks=(*self.remarks, *remarks))

    def matching(self, pattern: str) -> Pairing[K]:
        """Return the arrays whose names match a shell pattern."""
        a, b = (
            {name: arrays[name] for name in arrays if matches(name, pattern)} for arrays in (self.a, self.b)
        )
        left = [item for item in self.uncompared if any(matches(name, pattern) for name in item.names)]
        leaves = tuple(leaf for leaf in self.leaves if matches(leaf.name, pattern))
        return replace(self, a=a, b=b, uncompared=tuple(left), leaves=leaves)


def _is_unused(name: str, array: Typed, patterns: Sequence[str]) -> bool:
    is_known = isinstance(array, LazyArray) and is_buffer(name.replace("/", "."), array)
    return matches_any(name, patterns) and not is_known


Reason = Literal["missing", "extra", "dtype", "shape", "kind", "values"]
"""The way in which an array differs: it is missing, extra, or differs in this property.

"kind" is for leaves that are not arrays, or arrays of another kind, such as Python numbers.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """An array that differs between the sides.

    Attributes:
        name: Name of the array.
        reason: How the array differs.
        got, expected: Dtype, shape or digest in the checkpoint and in the reference, if they differ.
        first: Coordinates of the first differing element, or of the start of the block that contains it.
        last: Coordinates of the last element of that block; None if `first` is the element itself.
        elements: Number of differing elements; None if only digests were compared.
        file: File that contains the first differing element, if known.
    """

    name: str
    reason: Reason
    got: str | None = None
    expected: str | None = None
    first: Shape | None = None
    last: Shape | None = None
    elements: int | None = None
    file: str | None = None


def sort_by_name(result: Iterable[Difference]) -> tuple[Difference, ...]:
    """Return differences in the natural order of names."""
    by_name = {item.name: item for item in result}
    return tuple(by_name[name] for name in sort_naturally(by_name))


def kind_differences(both: Pairing[K]) -> list[Difference]:
    """Return the arrays that only one side has, and those whose dtypes or shapes differ."""
    extra = [Difference(name, "extra") for name in both.only_a]
    missing = [Difference(name, "missing") for name in both.only_b]
    other = [
        Difference(name, "dtype" if a.dtype != b.dtype else "shape", _type(a), _type(b))
        for name, a, b in both.pairs
        if not have_same_kind(a, b)
    ]
    return extra + missing + other + [*map(_leaf_difference, both.leaves)]


def _leaf_difference(difference: LeafDifference) -> Difference:
    reason: Reason = "missing" if difference.a is None else "extra" if difference.b is None else "kind"
    return Difference(difference.name, reason, difference.a, difference.b)


def have_same_kind(a: Typed, b: Typed) -> bool:
    """Return whether two arrays have the same dtype and shape."""
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _type(array: Typed) -> str:
    return format_type(array.dtype, array.shape)
