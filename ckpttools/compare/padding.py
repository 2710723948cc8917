"""Ignore what only one side has: padding rows, output heads that equal the embedding, and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import pi
from typing import Any

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.core.text import array_count
from ckpttools.digest.pairing import Pairing, Remark, Side
from ckpttools.maxtext.stored_head import StoredHead
from ckpttools.maxtext.tied_embeddings import LEFT_HEAD
from ckpttools.maxtext.vocabulary import count_surplus_rows, drop_vocabulary_padding
from ckpttools.roles.buffers import is_buffer


def drop_implied(both: Pairing[LazyArray], padding_mode: str | None, memory: int) -> Pairing[LazyArray]:
    """Leave out arrays and rows that the other side implies: padding rows, buffers, a tied head.

    For arguments and errors, see `drop_padding`, `drop_computed_buffers` and `drop_equal_head`.
    """
    result = drop_computed_buffers(drop_padding(both, padding_mode, memory), memory)
    return drop_equal_head(result, memory)


def drop_padding(both: Pairing[LazyArray], padding_mode: str | None, memory: int) -> Pairing[LazyArray]:
    """Leave out MaxText's rows beyond Hugging Face's vocabulary if they are zeros. Reads these rows.

    Other rows become an array of their own on that side, as do learned arrays that only MaxText has.

    Args:
        both: The arrays to compare.
        padding_mode: See `ckpttools.maxtext.vocabulary.count_surplus_rows`.
        memory: Maximum resident bytes.

    Raises:
        CheckpointError: The rows cannot be read, or the memory is too small.
    """
    extra = {name: item for name, item in both.extra.items() if name in both.b or item.is_whole}
    rows = count_surplus_rows(extra, padding_mode, memory)
    result = replace(both, b={**both.b, **rows.arrays}, remarks=(*both.remarks, *map(Remark, rows.remarks)))
    if both.maxtext is None:
        return result
    maxtext_side, hf_side = (both.a, both.b) if both.maxtext == "A" else (both.b, both.a)
    less = drop_vocabulary_padding(
        maxtext_side, {name: item.shape for name, item in hf_side.items()}, padding_mode, memory
    )
    remarks = (*result.remarks, *(Remark(text, both.maxtext) for text in less.remarks))
    if both.maxtext == "A":
        return replace(result, a=less.arrays, remarks=remarks)
    return replace(result, b=less.arrays, remarks=remarks)


def drop_equal_head(both: Pairing[LazyArray], memory: int) -> Pairing[LazyArray]:
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
            result = replace(both, a=rest) if side == "A" else replace(both, b=rest)
            return replace(result, remarks=(*both.remarks, Remark(text, side)))
    return both


# Larger buffers are not computed. A causal mask of 8,192 positions has 64 MiB.
_MAX_BYTES = 64 << 20
# A buffer takes up to 16 times its size in float64, and the computed one takes the same.
_MEMORY_SHARE = 64
# Trainers compute powers, angles and their cosines in float32.
_RELATIVE, _ANGLES = 1e-5, 2e-3
# Additive masks have at most this value at masked positions.
_FORBIDDEN = -1e4


def drop_computed_buffers(both: Pairing[LazyArray], memory: int) -> Pairing[LazyArray]:
    """Leave out buffers that only one side has if they have the values that a model computes.

    Reads the buffers.

    Rotary frequencies and tables, causal masks and positions are recognized. A buffer with other values, or
    for an unknown rotary embedding, counts as missing on the other side.

    Args:
        both: The arrays to compare.
        memory: Peak memory limit in bytes.

    Raises:
        CheckpointError: A buffer cannot be read.
    """
    max_bytes = min(_MAX_BYTES, memory // _MEMORY_SHARE)
    sides: tuple[tuple[Side, Mapping[str, LazyArray]], ...] = ("A", both.only_a), ("B", both.only_b)
    left: list[str] = []
    remarks = list(both.remarks)
    for number, (side, arrays) in enumerate(sides):
        config = both.configs[number] or both.configs[1 - number] or {}
        result = [
            name
            for name, array in arrays.items()
            if is_buffer(name.replace("/", "."), array)
            and array.nbytes <= max_bytes
            and _is_computed(name.replace("/", "."), array, config)
        ]
        if result:
            text = f"left out, as models compute these values themselves: {array_count(result)}"
            remarks.append(Remark(text, side))
        left += result
    if not left:
        return both
    a, b = ({name: own[name] for name in own if name not in left} for own in (both.a, both.b))
    return replace(both, a=a, b=b, remarks=tuple(remarks))


def _is_computed(name: str, array: LazyArray, config: Mapping[str, Any]) -> bool:
    """Return whether a buffer has the values that a model with this configuration computes."""
    last = name.rpartition(".")[2]
    values = np.asarray(array.read())
    values = values.astype(np.complex128 if array.dtype.kind == "complex" else np.float64)
    if last in ("inv_freq", "original_inv_freq", "freqs"):
        rounding = 2.0 ** -_mantissa_bits(array)
        return any(
            values.shape == known.shape and np.allclose(values, known, max(_RELATIVE, rounding), 1e-7)
            for known in _frequencies(config, values.size)
        )
    if last == "freqs_cis":
        return _is_table(values, config)
    if last == "masked_bias":
        return bool(values <= _FORBIDDEN)
    if last == "position_ids":
        return bool(np.all(values == np.arange(values.shape[-1]) if values.ndim else values == 0))
    return values.ndim >= 2 and _is_causal(values.reshape(values.shape[-2:]))


def _mantissa_bits(array: LazyArray) -> int:
    return {"float16": 10, "bfloat16": 7}.get(array.dtype.name, 23)


def _is_causal(mask: np.ndarray) -> bool:
    """Return whether a mask has one value up to the diagonal and another above it, like that of GPT-2."""
    count = mask.shape[0]
    before = np.tri(count, dtype=bool)
    allowed, forbidden = mask[before], mask[~before]
    is_boolean = bool(np.all(allowed == 1) and np.all(forbidden == 0))
    return is_boolean or bool(np.all(allowed == 0) and np.all(forbidden <= _FORBIDDEN))


def _is_table(values: np.ndarray, config: Mapping[str, Any]) -> bool:
    """Return whether a table contains exp(i t f) for each position t and frequency f, as in torchtitan."""
    if not np.iscomplexobj(values):
        if values.ndim != 3 or values.shape[-1] != 2:
            return False
        values = values[..., 0] + 1j * values[..., 1]
    if values.ndim != 2:
        return False
    positions = np.arange(values.shape[0])[:, None]
    tables = (np.exp(1j * positions * known) for known in _frequencies(config, values.shape[1]))
    return any(bool(np.allclose(values, table, 0, _ANGLES)) for table in tables)


def _frequencies(config: Mapping[str, Any], count: int) -> Iterator[np.ndarray]:
    """Yield the rotary frequencies that a model may have, one set per kind of layer; none if unknown."""
    from ckpttools.maxtext.config.model_facts import ModelFacts
    from ckpttools.model_families.hf_defaults import default_values

    facts = ModelFacts(config, silent=default_values(config))
    for prefix in ("", "local_"):
        theta, kind = (facts.field(f"rope.{prefix}{name}") for name in ("theta", "type"))
        if not isinstance(theta, int | float) or theta <= 0:
            continue
        plain = float(theta) ** -(np.arange(count) / count)
        scale = {name: facts.field(f"rope.{prefix}{name}") for name in _LLAMA3}
        factor = scale["factor"]
        if kind in (None, "default", "dynamic"):
            yield plain
        elif isinstance(factor, int | float) and factor > 0:
            if kind == "linear":
                yield plain / factor
            elif kind == "llama3" and all(isinstance(item, int | float) for item in scale.values()):
                yield _llama3_frequencies(plain, *(float(scale[name]) for name in _LLAMA3))


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _llama3_frequencies(
    plain: np.ndarray, factor: float, low: float, high: float, length: float
) -> np.ndarray:
    """Return frequencies as scaled in Llama 3.1: long waves by the factor, with a smooth transition."""
    turns = length * plain / (2 * pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    built: np.ndarray = (1 - smooth) * plain / factor + smooth * plain
    return built
