"""Differences between two checkpoints that should be the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape
from ckpttools.core.text import format_type, sort_naturally
from ckpttools.digest.pairing import K, LeafDifference, Pairing
from ckpttools.roles.of_tree import Typed

Reason = Literal["missing", "extra", "dtype", "shape", "kind", "values"]
"""Only the reference has the array, only the checkpoint has it, or this differs.

"kind" is for leaves that are not arrays, or arrays of another kind, such as Python numbers.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """One array that is not the same on both sides.

    Attributes:
        name: of the array.
        reason: why it differs.
        got, expected: dtype, shape or digest here and in the reference, where these differ.
        first: coordinates of the first element that differs, or of the block that has it.
        last: coordinates of the last element of that block; None where `first` is the element itself.
        elements: how many differ; None if only digests were compared.
        file: where the first of them is stored, if that is known.
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
    """Return arrays that one side lacks, and those whose dtypes or shapes differ."""
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
    """Return whether two arrays have one dtype and shape."""
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _type(each: Typed) -> str:
    return format_type(each.dtype, each.shape)
