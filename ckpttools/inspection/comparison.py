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
    """An array without its values; `shape` is None if unknown, `dtype` if any will do."""

    path: str
    shape: Shape | None
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Different:
    """An array that differs from its expected state; `why` says what requires it, if known."""

    path: str
    got: ArraySpec
    expected: ArraySpec
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Missing, unexpected and different arrays of a tree.

    Attributes:
        against: description of the reference.
        num_compared: arrays of the tree that were compared.
        missing: arrays that should be there.
        extra: arrays that should not.
        different: arrays of another shape or dtype.
        reasons: sentences on why some of them are expected or not, and on unknowns.
        shapes_compared: False if only names could be.
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
        """Return the part about these names; `num_compared` and `reasons` are unchanged."""
        return replace(
            self,
            missing=tuple(item for item in self.missing if item.path in names),
            extra=tuple(item for item in self.extra if item.path in names),
            different=tuple(item for item in self.different if item.path in names),
        )


def arranged(comparison: Comparison, by: str) -> Comparison:
    """Return the same with each list sorted by "size", largest first, or by "name", in natural order.

    Where no dtype is known elements count instead of bytes, and unknown shapes go last. What is of another
    shape is as large as it was found.
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
