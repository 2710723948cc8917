"""Axes in another order in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpttools.codecs.base import CodecSpec
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape


@dataclass(frozen=True)
class Transpose:
    """The codec `transpose` of zarr v3, the `order` of v2.

    Attributes:
        declared: the order as the metadata has it, which may be anything.
        word: the codec in a word.
    """

    declared: object
    word: str

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Transpose:
        declared = settings.get("order")
        return cls(declared, f"transpose{number_list(declared)}")

    @classmethod
    def fortran(cls, rank: int) -> Transpose:
        """The order "F" of zarr v2."""
        return cls(list(reversed(range(rank))), "order F")

    def names(self, chunk: object) -> tuple[str, ...]:
        return (self.word,)

    def order(self, rank: int) -> Shape | None:
        """Axes from the slowest to the fastest in memory; None where it is not an order of so many axes."""
        declared = self.declared
        return (
            tuple(declared) if isinstance(declared, list) and sorted(declared) == list(range(rank)) else None
        )


def transpose_spec(order: Sequence[int]) -> CodecSpec:
    """The codec as `zarr.json` lists it."""
    return {"configuration": {"order": list(order)}, "name": "transpose"}


def number_list(numbers: object) -> str:
    """Numbers as words of codecs have them: without spaces."""
    return str(numbers).replace(" ", "")
