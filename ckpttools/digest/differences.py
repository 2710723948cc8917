"""What is different between two checkpoints that should be the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpttools.core.region import Shape
from ckpttools.core.text import in_natural_order


@dataclass(frozen=True, slots=True)
class Difference:
    """One array that is not the same on both sides.

    Attributes:
        name: of the array.
        reason: "missing" (only the reference has it), "extra" (the reference lacks it), "dtype", "shape" or
            "values".
        got, wanted: dtype, shape or digest here and in the reference, where these differ.
        first: coordinates of the first element that differs, or of the block that has it.
        last: coordinates of the last element of that block; None where `first` is the element itself.
        elements: how many differ; None where only digests were compared.
        file: where the first of them is stored, as far as it can be told.
    """

    name: str
    reason: str
    got: str | None = None
    wanted: str | None = None
    first: Shape | None = None
    last: Shape | None = None
    elements: int | None = None
    file: str | None = None


def in_order(found: Iterable[Difference]) -> tuple[Difference, ...]:
    """Differences in the order of names, numbers in those counted as such."""
    by_name = {each.name: each for each in found}
    return tuple(by_name[name] for name in in_natural_order(by_name))


def only_in_one(name: str, *, extra: bool) -> Difference:
    """An array that one side lacks."""
    return Difference(name, "extra" if extra else "missing")


def kinds_differ(
    name: str, dtype: str, shape: Sequence[int], wanted_dtype: str, wanted_shape: Sequence[int]
) -> Difference:
    """Arrays of one name that cannot be the same, as they have not one type."""
    reason = "dtype" if dtype != wanted_dtype else "shape"
    return Difference(name, reason, _type(dtype, shape), _type(wanted_dtype, wanted_shape))


def _type(dtype: str, shape: Sequence[int]) -> str:
    """`bfloat16[4096,14336]`, as JAX writes it."""
    return f"{dtype}[{','.join(map(str, shape))}]"
