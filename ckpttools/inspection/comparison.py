"""The comparison of a tree with its expected arrays: missing, unexpected and different arrays."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.region import Shape
from ckpttools.core.text import natural_key


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array without its values. `shape` is None if it is unknown, `dtype` if any dtype is accepted."""

    path: str
    shape: Shape | None
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Different:
    """An array that differs from its expected state. `reason` states what requires that state, if known."""

    path: str
    got: ArraySpec
    expected: ArraySpec
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Missing, unexpected and different arrays of a tree.

    Attributes:
        against: Description of the reference.
        num_compared: Number of arrays of the tree that were compared.
        missing: Arrays that are expected but missing.
        extra: Arrays that are unexpected.
        different: Arrays with another shape or dtype than expected.
        reasons: Sentences on why some arrays are expected or unexpected, and on unknown facts.
        shapes_compared: Whether shapes were compared, and not only names.
    """

    against: str
    num_compared: int
    missing: tuple[ArraySpec, ...] = ()
    extra: tuple[ArraySpec, ...] = ()
    different: tuple[Different, ...] = ()
    reasons: tuple[str, ...] = ()
    shapes_compared: bool = True

    @property
    def is_same(self) -> bool:
        return not (self.missing or self.extra or self.different)

    def of(self, names: Collection[str]) -> Comparison:
        """Return the part of the comparison for these names; `num_compared` and `reasons` are unchanged."""
        return replace(
            self,
            missing=tuple(item for item in self.missing if item.path in names),
            extra=tuple(item for item in self.extra if item.path in names),
            different=tuple(item for item in self.different if item.path in names),
        )


def sort_comparison(comparison: Comparison, by: str) -> Comparison:
    """Return the comparison with each list sorted by "size", largest first, or by "name", in natural order.

    If no dtype is known, elements count instead of bytes; unknown shapes come last. Arrays of another shape
    are sorted by their actual size.
    """

    def key(spec: ArraySpec) -> tuple[int, bytes]:
        return _negative_size(spec) if by == "size" else 0, natural_key(spec.path)

    return replace(
        comparison,
        missing=tuple(sorted(comparison.missing, key=key)),
        extra=tuple(sorted(comparison.extra, key=key)),
        different=tuple(sorted(comparison.different, key=lambda item: key(item.got))),
    )


def _negative_size(spec: ArraySpec) -> int:
    bits = DTYPES[spec.dtype].bits if spec.dtype else 1
    return 1 if spec.shape is None else -prod(spec.shape) * bits
