"""Restore the dtypes that arrays had before a conversion to MaxText changed their values.

Changed values may be stored in a wider dtype. The reverse conversion rounds them to the most common dtype of
the model, or to their original dtype if that is different and was recorded. Arrays that training stored in a
wider dtype than the original model keep it, with a note about the size in the narrower one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.message_terms import option
from ckpttools.core.text import array_count, format_disk
from ckpttools.maxtext.config.run_settings import read_settings
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


# transformers writes `dtype` since version 5, and `torch_dtype` before; composite models have it in a part.
_FIELDS, _PARTS = ("dtype", "torch_dtype"), ("text_config", "thinker_config", "llm_config")
# MaxText settings of the weights and of the computation. Weights are float32 by default, whatever the model.
_SETTINGS, _MASTER_WEIGHTS = ("weight_dtype", "dtype"), ("weight_dtype", "float32")
_DEFAULT = "bfloat16"


def narrower_dtype_advice(
    arrays: Mapping[str, LazyArray], config: Mapping[str, Any] | None, settings: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return advice if float32 weights belong to a model in a narrower dtype, with both sizes.

    Args:
        arrays: Hugging Face arrays that are written.
        config: The `config.json` of the original model, if known.
        settings: The MaxText settings of the run, if passed by the user.
    """
    main = main_dtype(arrays, ())
    name, reason = _declared_dtype(config or {}, settings)
    dtype = DTYPES.get(name)
    if main is not DTYPES[_WIDE] or dtype is None or not (dtype.is_float and is_wider(main, dtype)):
        return ()
    if any(array.dtype.is_float and is_wider(dtype, array.dtype) for array in arrays.values()):
        return ()  # Quantized weights are kept, which this option would dequantize.
    size = sum(array.nbytes for array in arrays.values())
    narrow = sum(
        array.size * dtype.itemsize if array.dtype.is_float else array.nbytes for array in arrays.values()
    )
    return (
        f"the weights are {main}, {format_disk(size)}; {reason}, in which they take {format_disk(narrow)}: "
        f"{option('dtype', dtype.name)}",
    )


def _declared_dtype(config: Mapping[str, Any], settings: Sequence[str]) -> tuple[str, str]:
    """Return the dtype of the original model, and a clause with its origin."""
    for part in (config, *(config[name] for name in _PARTS if isinstance(config.get(name), Mapping))):
        for field in _FIELDS:
            if isinstance(declared := part.get(field), str):
                name = declared.removeprefix("torch.")
                return name, f"the model is {name} (config.json)"
    given = {item.name: item.value for item in read_settings(settings).declared} if settings else {}
    for field in _SETTINGS:
        declared = given.get(field)
        if isinstance(declared, str) and (field, declared) != _MASTER_WEIGHTS:
            return declared, f"the run has {field}={declared}"
    return _DEFAULT, f"MaxText computes in {_DEFAULT} by default"
