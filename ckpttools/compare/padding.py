"""Ignore padding rows, and output heads that equal the embedding, if only one side has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.compare.buffers import without_computed_buffers
from ckpttools.digest.pairing import Pairing, Remark, Side
from ckpttools.maxtext.stored_head import StoredHead
from ckpttools.maxtext.tied_embeddings import LEFT_HEAD
from ckpttools.maxtext.vocabulary import counted_rows, without_vocabulary_padding


def settled(both: Pairing[LazyArray], way: str | None, memory: int) -> Pairing[LazyArray]:
    """Leave out arrays and rows that the other side implies: padding rows, buffers, a tied head.

    For arguments and errors, see `without_padding`, `without_computed_buffers` and `without_equal_head`.
    """
    built = without_computed_buffers(without_padding(both, way, memory), memory)
    return without_equal_head(built, memory)


def without_padding(both: Pairing[LazyArray], way: str | None, memory: int) -> Pairing[LazyArray]:
    """Leave out MaxText's rows beyond Hugging Face's vocabulary if they are zeros. Reads these rows.

    Other rows become an array of their own on that side, as do learned arrays that only MaxText has.

    Args:
        both: The arrays to compare.
        way: See `ckpttools.maxtext.vocabulary.counted_rows`.
        memory: Maximum resident bytes.

    Raises:
        CheckpointError: The rows cannot be read, or the memory is too small.
    """
    extra = {name: item for name, item in both.extra.items() if name in both.b or item.is_whole}
    rows = counted_rows(extra, way, memory)
    built = replace(both, b={**both.b, **rows.arrays}, remarks=(*both.remarks, *map(Remark, rows.remarks)))
    if both.maxtext is None:
        return built
    mine, theirs = (both.a, both.b) if both.maxtext == "A" else (both.b, both.a)
    less = without_vocabulary_padding(mine, {name: item.shape for name, item in theirs.items()}, way, memory)
    remarks = (*built.remarks, *(Remark(text, both.maxtext) for text in less.remarks))
    if both.maxtext == "A":
        return replace(built, a=less.arrays, remarks=remarks)
    return replace(built, b=less.arrays, remarks=remarks)


def without_equal_head(both: Pairing[LazyArray], memory: int) -> Pairing[LazyArray]:
    """Leave out an output head that only one side stores, if it equals the embedding. Reads both arrays.

    A model without a head uses the embedding instead. A head that differs from the embedding counts as
    missing on the other side, with a remark about the deviation.

    Args:
        both: The arrays to compare.
        memory: Peak memory limit in bytes.

    Raises:
        CheckpointError: An array cannot be read, or the memory is too small.
    """
    names = both.head
    if names is None:
        return both
    sides: tuple[tuple[Side, Mapping[str, LazyArray], Mapping[str, LazyArray]], ...]
    sides = ("A", both.a, both.b), ("B", both.b, both.a)
    for side, own, other in sides:
        if names.head in own and names.head not in other and names.embedding in own:
            head = StoredHead(names, own[names.head], own[names.embedding], names == LEFT_HEAD)
            deviation = head.deviation(memory=memory)
            if deviation is not None:
                text = f"the output head differs from the embedding: {deviation}"
                return replace(both, remarks=(*both.remarks, Remark(text, side)))
            text = f"the output head equals the embedding, which the other side stores once: {names.head}"
            rest = {name: array for name, array in own.items() if name != names.head}
            built = replace(both, a=rest) if side == "A" else replace(both, b=rest)
            return replace(built, remarks=(*both.remarks, Remark(text, side)))
    return both
