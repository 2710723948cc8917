"""Errors for quantized weights where plain weights are required, with hints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpttools.array.tree import Tree
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, UsageError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.quantized.config import (
    FIELD,
    declared_quantization,
    exempt_modules,
    scheme,
    stated_dtypes,
    states_dtype,
)
from ckpttools.quantized.scales import ArrayLike, is_plain
from ckpttools.quantized.view import quantized_view
from ckpttools.quantized.weights import QuantizedWeight, can_be_codes, find_weights, is_scale

_EXPECTED = "weights in bfloat16, float16 or float32 that need no scales"
_IN_TRANSFORMERS = "in transformers, from_pretrained, then dequantize() and save_pretrained"
_FROM_AWQ = (
    "convert the model to compressed-tensors, which is supported here, with convert_checkpoint and "
    "AutoAWQConverter "
    "of that package"
)
_DEQUANTIZING = {
    "bitsandbytes": _IN_TRANSFORMERS,
    "gptq": "with GPTQModel, which quantized it",
    "compressed-tensors": "in transformers, from_pretrained with CompressedTensorsConfig(dequantize=True), "
    "then save_pretrained",
}


def refuse_quantized(
    arrays: Mapping[str, ArrayLike], config: Mapping[str, Any] | None, location: str
) -> None:
    """Refuse quantized weights, with or without their scales.

    Args:
        arrays: All arrays by name, before any are left out.
        config: The model's `config.json`, or None.
        location: The location for messages.

    Raises:
        FormatError: There are quantized weights (the message describes their scheme and lists those without a
            scale), or the configuration declares quantization but the quantized weights cannot be identified.
    """
    result = find_weights(arrays, config)
    if result:
        raise quantized_error(result.values(), config, location)
    refuse_unknown(arrays, config, location)


def signs_of_scheme(arrays: Mapping[str, ArrayLike], config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the arrays that plain weights do not have, if `config` declares quantization."""
    settings = declared_quantization(config)
    exempt = exempt_modules(settings)
    return tuple(
        name
        for name, array in (arrays.items() if settings else ())
        if (is_scale(name) or can_be_codes(name, array)) and not exempt.has(name)
    )


def refuse_unknown(
    arrays: Mapping[str, ArrayLike],
    config: Mapping[str, Any] | None,
    location: str,
    *,
    done: str = "converted",
) -> None:
    """Refuse arrays of an unknown scheme if no quantized weight among them can be identified.

    Args:
        arrays, config, location: As for `refuse_quantized`.
        done: The operation that is not possible.

    Raises:
        FormatError: There are such arrays.
    """
    signs = signs_of_scheme(arrays, config)
    if signs:
        raise FormatError(
            f"these arrays cannot be {done}: config.json declares quantized weights, and these resemble them"
            + listing([f"{name}: {arrays[name].dtype}" for name in signs]),
            location=location or None,
            got=f"{scheme(declared_quantization(config))} ({FIELD})",
            expected=_EXPECTED,
            hint=f"{remedy(declared_quantization(config))}; if it is plain, remove {FIELD} from config.json",
        )


def refuse_unmappable(
    arrays: Mapping[str, ArrayLike], config: Mapping[str, Any] | None, location: str
) -> None:
    """Refuse model weights that are not plain floating-point numbers, under any name.

    Args:
        arrays: The arrays that a family's rows accept, by name.
        config, location: As for `refuse_quantized`.

    Raises:
        FormatError: There are such weights.
    """
    unmappable = [
        QuantizedWeight(name, item.dtype, ())
        for name, item in arrays.items()
        if not (is_plain(item.dtype) or (item.dtype.is_float and states_dtype(config, item.dtype)))
    ]
    if unmappable:
        raise quantized_error(unmappable, config, location)


def quantized_error(
    result: Iterable[QuantizedWeight],
    config: Mapping[str, Any] | None,
    location: str,
    *,
    done: str = "converted",
) -> FormatError:
    """Return the error that lists quantized weights and their scheme, with a hint.

    Args:
        result: The quantized weights.
        config: The model's `config.json`, or None.
        location: The location for messages.
        done: The operation that is not possible.
    """
    weights = sorted(result, key=lambda item: not item.is_bare)
    settings = declared_quantization(config)
    if not settings and all(weight.dtype.is_float and not weight.sides for weight in weights):
        return _unclear_error(weights, config, location, done)
    num_without_scales = sum(weight.is_bare for weight in weights)
    scheme_text = f"{scheme(settings)} ({FIELD})" if settings else _dtypes(weights)
    return FormatError(
        f"quantized weights cannot be {done}: their values are meaningless without their scales"
        + listing([str(weight) for weight in weights]),
        location=location or None,
        got=f"{scheme_text}; {num_without_scales} of {len(weights)} without scales"
        if num_without_scales
        else scheme_text,
        expected=_EXPECTED,
        hint=_missing_scales_text(num_without_scales) + remedy(settings, location=location or "SRC"),
    )


def _unclear_error(
    weights: list[QuantizedWeight], config: Mapping[str, Any] | None, location: str, done: str
) -> FormatError:
    """Return the error for narrow numbers without scales that no configuration declares as the weights."""
    stated = " and ".join(stated_dtypes(config))
    return FormatError(
        f"these arrays cannot be {done}: their values may be the weights themselves, or meaningless "
        "without their scales"
        + listing([f"{weight.name}: {weight.dtype}, without a scale" for weight in weights]),
        location=location or None,
        got=_dtypes(weights) + (f", but config.json has {stated}" if stated else ""),
        expected=_EXPECTED,
        hint="if a plain cast made them, cast them back first: "
        f"{action('cast', 'SRC', 'DST', dtype='bfloat16', force=True)}; if scales were lost, download the "
        "checkpoint with all of its scales",
    )


def _dtypes(weights: Iterable[QuantizedWeight]) -> str:
    return ", ".join(sorted({str(weight.dtype) for weight in weights}))


def _missing_scales_text(num_without_scales: int) -> str:
    return "download the checkpoint with all of its scales; " if num_without_scales else ""


def remedy(settings: Mapping[str, Any] | None, *, is_read: bool = True, location: str = "SRC") -> str:
    """Return a hint for quantized weights where plain weights are required.

    Args:
        settings: The `quantization_config`.
        is_read: Whether the weights are readable if their method is supported.
        location: Location of the checkpoint.
    """
    from ckpttools.quantized.schemes.registry import read_methods

    release = "use a release of the model in bfloat16"
    method = str((settings or {}).get("quant_method"))
    if is_read and method in read_methods():
        return f"dequantize the model: {action('cast', location, 'DST', dtype='bfloat16')}"
    if method == "awq":
        return f"{_FROM_AWQ}; or {release}"
    tool = _DEQUANTIZING.get(method, "with the tool that quantized it")
    return f"dequantize the model to bfloat16 {tool}; or {release}"


def refuse_few_bits(dtype: DType | None, location: str, hint: str | None = None) -> None:
    """Refuse to store a model with quantized weights in a narrow dtype without scales.

    Args:
        dtype: The dtype of the values; None keeps each dtype.
        location: The location of the model.
        hint: The hint of the error; None suggests how to keep FP8 in a conversion.

    Raises:
        UsageError: `dtype` is too narrow.
    """
    if dtype is not None and not is_plain(dtype):
        raise UsageError(
            f"{dtype} has too few bits for dequantized weights without scales",
            location=location or None,
            got=option("dtype", dtype),
            expected="bfloat16, float16 or float32",
            hint=hint or f"{option('quantized', 'keep')} alone keeps FP8, if MaxText supports it",
        )


def require_numbers(tree: Tree, reason: str) -> None:
    """Refuse quantized weights that could be dequantized.

    Args:
        tree: Any checkpoint.
        reason: The reason why plain numbers are needed, as a sentence.

    Raises:
        FormatError: The tree has such weights.
    """
    view = quantized_view(tree)
    if view.is_supported:
        raise FormatError(
            f"{reason}, but these weights are quantized",
            location=tree.metadata.location or None,
            got=view.scheme or next(map(str, view.weights.values()), None),
            expected="plain weights",
            hint=f"{option('dtype', 'bfloat16')} dequantizes them first, like {action('cast')}",
        )
