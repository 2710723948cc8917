"""Rows beyond a vocabulary that one side of a pairing has."""

from __future__ import annotations

from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.digest.pairing import Pairing, Remark
from ckpttools.maxtext.vocabulary import less_padding, rows_that_count


def without_padding(both: Pairing[LazyArray], way: str | None, memory: int) -> Pairing[LazyArray]:
    """Leaves out rows that MaxText has beyond Hugging Face's vocabulary, if they are zeros.

    Other rows become an array of their own on that side, as do arrays that MaxText alone has, and learned
    something in. Reads them.

    Args:
        both: the arrays that are compared.
        way: as `ckpttools.maxtext.vocabulary.rows_that_count` takes it.
        memory: bytes that may be resident at most.

    Raises:
        CheckpointError: they cannot be read, or the memory is too small.
    """
    surplus = {name: each for name, each in both.surplus.items() if name in both.b or each.is_whole}
    rows = rows_that_count(surplus, way, memory)
    made = replace(both, b={**both.b, **rows.arrays}, remarks=(*both.remarks, *map(Remark, rows.remarks)))
    if both.maxtext is None:
        return made
    mine, theirs = (both.a, both.b) if both.maxtext == "A" else (both.b, both.a)
    less = less_padding(mine, {name: each.shape for name, each in theirs.items()}, way, memory)
    remarks = (*made.remarks, *(Remark(text, both.maxtext) for text in less.remarks))
    if both.maxtext == "A":
        return replace(made, a=less.arrays, remarks=remarks)
    return replace(made, b=less.arrays, remarks=remarks)
