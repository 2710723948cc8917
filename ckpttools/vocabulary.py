"""The rows that a model has no place for: zeros that a vocabulary was padded with, or something learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpttools.errors import ConfigError
from ckpttools.ir.array import LazyArray
from ckpttools.region import Region, split_to

_BYTES_AT_ONCE = 4 << 20


@dataclass(frozen=True, slots=True)
class Surplus:
    """What an array has beyond the rows of the model.

    Attributes:
        rows: the rows beyond, lazily.
        axis: the axis of `rows` along which they lie.
        kept: how many rows the model has.
    """

    rows: LazyArray
    axis: int
    kept: int

    @property
    def count(self) -> int:
        """How many rows are beyond those of the model."""
        return self.rows.shape[self.axis]

    def first_learned(self) -> int | None:
        """The first row found that is not zero, None where all are; reads 4 MiB at a time, up to that row."""
        most = max(1, _BYTES_AT_ONCE // self.rows.dtype.itemsize)
        for piece in split_to(Region.whole(self.rows.shape), most):
            learned = (self.rows.read(piece) != 0).nonzero()[self.axis]
            if learned.size:
                return self.kept + piece.start[self.axis] + int(learned.min())
        return None


def refuse_learned(surplus: Mapping[str, Surplus], place: str) -> None:
    """Refuses to cut off rows that are not those of `--pad-vocab`. Reads them, as only their content tells.

    Raises:
        ConfigError: one of them is not zero.
        FormatError, StorageError: they cannot be read.
    """
    for name, each in surplus.items():
        row = each.first_learned()
        if row is not None:
            there = each.kept + each.count
            raise ConfigError(
                f"the last {each.count} rows of the vocabulary would be cut off, and they are not zero",
                place=f"{name} in {place}",
                got=f"{there} rows for a vocabulary of {each.kept}; row {row} is not zero",
                wanted=f"zeros from row {each.kept} on, as --pad-vocab adds them",
                hint=f'take a config.json that says "vocab_size": {there} with --like: it keeps all rows',
            )
