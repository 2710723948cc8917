"""The transpose codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpttools.codecs.base import CodecSpec
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape


@dataclass(frozen=True)
class Transpose:
    """The codec `transpose` of zarr v3, or the `order` of v2.

    Attributes:
        declared: The order in the metadata; an unvalidated value of any type.
        word: Name of the codec.
    """

    declared: object
    word: str

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Transpose:
        declared = settings.get("order")
        return cls(declared, f"transpose{number_list(declared)}")

    @classmethod
    def fortran(cls, rank: int) -> Transpose:
        """Return the transposition for order "F" of zarr v2."""
        return cls(list(reversed(range(rank))), "order F")

    def names(self, chunk: object) -> tuple[str, ...]:
        return (self.word,)

    def order(self, rank: int) -> Shape | None:
        """Return the axes from slowest to fastest in memory; None if the order is not a permutation."""
        declared = self.declared
        return (
            tuple(declared) if isinstance(declared, list) and sorted(declared) == list(range(rank)) else None
        )


def transpose_spec(order: Sequence[int]) -> CodecSpec:
    """Return the codec's entry in `zarr.json`."""
    return {"configuration": {"order": list(order)}, "name": "transpose"}


def number_list(numbers: object) -> str:
    """Format numbers for a codec name, without spaces."""
    return str(numbers).replace(" ", "")
