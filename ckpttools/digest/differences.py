"""Differences between two checkpoints that should be equal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape
from ckpttools.core.text import format_type, sort_naturally
from ckpttools.digest.pairing import K, LeafDifference, Pairing
from ckpttools.roles.of_tree import Typed

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


def sorted_by_name(result: Iterable[Difference]) -> tuple[Difference, ...]:
    """Return differences in the natural order of names."""
    by_name = {item.name: item for item in result}
    return tuple(by_name[name] for name in sort_naturally(by_name))


def of_kinds(both: Pairing[K]) -> list[Difference]:
    """Return the arrays that only one side has, and those whose dtypes or shapes differ."""
    extra = [Difference(name, "extra") for name in both.only_a]
    missing = [Difference(name, "missing") for name in both.only_b]
    other = [
        Difference(name, "dtype" if a.dtype != b.dtype else "shape", _type(a), _type(b))
        for name, a, b in both.pairs
        if not same_kind(a, b)
    ]
    return extra + missing + other + [*map(_of_leaf, both.leaves)]


def _of_leaf(each: LeafDifference) -> Difference:
    reason: Reason = "missing" if each.a is None else "extra" if each.b is None else "kind"
    return Difference(each.name, reason, each.a, each.b)


def same_kind(a: Typed, b: Typed) -> bool:
    """Return whether two arrays have the same dtype and shape."""
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _type(each: Typed) -> str:
    return format_type(each.dtype, each.shape)
