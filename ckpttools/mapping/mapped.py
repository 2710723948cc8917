"""The result of mapping a model: arrays under the names of the other side, and notes about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.notes import Note, Notes


@dataclass(frozen=True, slots=True)
class ValueNote:
    """The effect of a row on values.

    Attributes:
        key: The target key, with axes in braces.
        exact: Whether the reverse conversion restores the original bits.
        reason: Why the bits are not restored, or the exceptions.
        dtype: The dtype that this applies to.
    """

    key: str
    exact: bool
    reason: str
    dtype: DType


def notes_of(values: Iterable[ValueNote]) -> Notes:
    """Return notes for the plan and the receipt on whether values convert back exactly."""
    notes = [(item.exact, Note(item.key, item.reason)) for item in values]
    inexact = tuple(note for exact, note in notes if not exact)
    return Notes(inexact, tuple(note for exact, note in notes if exact))


@dataclass(frozen=True)
class Mapped:
    """A model with the names and layout of the other side.

    Attributes:
        arrays: Target key -> lazy array.
        sizes: The length of every axis.
        values: Rows that change values.
        dropped: Source keys that were left out on purpose.
        changed: Target keys whose values were changed.
        altered: Source keys of the changed arrays.
        cut: Axis that was longer in the source than in the model -> both lengths.
        extra: Source key -> the axis on which its array was longer.
        unused: Source keys that no target uses, in a partial conversion.
        whole: Target keys of integer arrays, according to their rows.
        filled: Source key -> its array without a counterpart on the target side, and the expected value of
            its elements.
    """

    arrays: Mapping[str, LazyArray]
    sizes: Mapping[str, int]
    values: tuple[ValueNote, ...]
    dropped: tuple[str, ...]
    changed: frozenset[str] = frozenset()
    altered: frozenset[str] = frozenset()
    cut: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    extra: Mapping[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    filled: Mapping[str, tuple[LazyArray, float]] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, LazyArray]:
        """Return the arrays except those that are integer arrays according to their rows."""
        return {key: array for key, array in self.arrays.items() if key not in self.whole}
