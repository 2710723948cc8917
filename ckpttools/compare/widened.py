"""Arrays stored losslessly in float32 where 16 bits would round."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpttools.array.lazy import LazyArray


def as_wide_as(
    there: Mapping[str, LazyArray],
    built: Mapping[str, LazyArray],
    exactly: Callable[[], Mapping[str, LazyArray]],
) -> Mapping[str, LazyArray]:
    """Return the arrays of a conversion, without rounding those that are stored with 32 bits instead of 16.

    All of them are where the conversion was to cast them, which rounds first.

    Args:
        there: the stored arrays.
        built: arrays of a conversion that may round, by the same names.
        exactly: arrays of a conversion without rounding.
    """
    short = [name for name, array in built.items() if _has_bits(array, 16)]
    wide = {name for name in short if name in there and _has_bits(there[name], 32)}
    if not wide or all(name in wide for name in short if name in there):
        return built
    exact = exactly()
    return {name: exact[name] if name in wide else array for name, array in built.items()}


def _has_bits(array: LazyArray, bits: int) -> bool:
    return array.dtype.is_float and array.dtype.bits == bits
