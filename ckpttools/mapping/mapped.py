"""What mapping a model makes: arrays under the names of the other side, and what is to be said of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.notes import Note, Notes


@dataclass(frozen=True, slots=True)
class ValueNote:
    """What a row does to values.

    Attributes:
        key: the target key, axes in braces.
        exact: whether the way back gives the original bits.
        reason: why not, or which values are excepted.
        dtype: the dtype it was judged for.
    """

    key: str
    exact: bool
    reason: str
    dtype: DType


def notes_of(values: Iterable[ValueNote]) -> Notes:
    """The same for the plan and the receipt: what will not come back bit by bit, and what will."""
    result = [(item.exact, Note(item.key, item.reason)) for item in values]
    inexact = tuple(note for exact, note in result if not exact)
    return Notes(inexact, tuple(note for exact, note in result if exact))


@dataclass(frozen=True)
class Mapped:
    """A model in the names and layout of the other side.

    Attributes:
        arrays: target key -> lazy array.
        sizes: length of every axis.
        values: rows that change values.
        dropped: source keys that were left out on purpose.
        changed: target keys whose values were changed.
        altered: source keys from which they were made.
        cut: for each axis that was longer in the source than in the model, both lengths.
        extra: source key -> the axis on which it was longer.
        unused: source keys that made nothing, where only what could be made was asked for.
        whole: target keys of whole numbers, by their rows.
        filled: source key -> array that the target side has none of, and the number it should be full of.
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
        """The arrays that are no whole numbers by their rows."""
        return {key: array for key, array in self.arrays.items() if key not in self.whole}
