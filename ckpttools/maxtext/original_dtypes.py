"""Restore the dtypes that arrays had before a conversion to MaxText changed their values.

Changed values may be stored in a wider dtype. The reverse conversion rounds them to the most common dtype of
the model, or to their original dtype if that is different and was recorded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.text import array_count
from ckpttools.transforms.cast import cast

_WIDEST, _WIDE = "float64", "float32"
_DIGITS = str.maketrans("", "", "0123456789")


def main_dtype(arrays: Mapping[str, LazyArray], changed: Collection[str]) -> DType | None:
    """Return the dtype of most elements of unchanged float arrays; None if there are no such arrays.

    Args:
        arrays: Arrays by name.
        changed: Names of the arrays whose values changed.
    """
    count: Counter[DType] = Counter()
    for key, array in arrays.items():
        if key not in changed and array.dtype.is_float:
            count[array.dtype] += array.size
    return count.most_common(1)[0][0] if count else None


def recorded_dtypes(
    arrays: Mapping[str, LazyArray], changed: Collection[str], plain: Callable[[str], str]
) -> dict[str, str]:
    """Return the dtypes of changed arrays that differ from the main dtype and must be recorded.

    Args:
        arrays, changed: As for `main_dtype`.
        plain: Returns the name under which an array is recorded.
    """
    main = main_dtype(arrays, changed)
    floats = (key for key in sorted(changed) if key in arrays and arrays[key].dtype.is_float)
    return {plain(key): arrays[key].dtype.name for key in floats if main not in (None, arrays[key].dtype)}


def restore_dtype(array: LazyArray, main: DType | None, recorded: str | None) -> LazyArray:
    """Cast a changed array back to its original dtype.

    Args:
        array: The stored array, possibly wider than the original.
        main: The most common dtype.
        recorded: The name of the recorded dtype; None for the main dtype.
    """
    if main is None or not is_wider(array.dtype, main):
        return array
    dtype = DTYPES.get(recorded, main) if recorded else main
    return cast(array, dtype) if is_wider(array.dtype, dtype) else array


def is_wider(dtype: DType, main: DType) -> bool:
    """Return whether a float dtype has more bits than another."""
    return dtype.is_float and dtype.bits > main.bits


def with_uniform_dtypes(arrays: Mapping[str, LazyArray]) -> tuple[dict[str, LazyArray], tuple[str, ...]]:
    """Widen arrays whose names differ only in numbers to one common dtype.

    Values with fewer than 16 bits are not changed, because they are not weights without their scales.
    """
    names_by_group: dict[str, list[str]] = defaultdict(list)
    for key in arrays:
        names_by_group[key.translate(_DIGITS)].append(key)
    result = dict(arrays)
    for keys in names_by_group.values():
        kinds = {arrays[key].dtype.name for key in keys}
        if len(kinds) > 1 and all(arrays[key].dtype.is_float and arrays[key].dtype.bits > 8 for key in keys):
            wide = DTYPES[_WIDEST if _WIDEST in kinds else _WIDE]
            result |= {key: cast(arrays[key], wide) for key in keys}
    widened = [key for key in result if result[key] is not arrays[key]]
    text = f"{array_count(widened)} differ in dtype from other layers, and are widened first"
    return result, (text,) if widened else ()
