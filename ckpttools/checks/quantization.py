"""Report quantized weights: scheme, missing or unsound scales, and contradictions with `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import action
from ckpttools.core.text import plural_with_verb
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.quantized.config import FIELD, scheme
from ckpttools.quantized.unsupported_errors import remedy
from ckpttools.quantized.view import QuantizedView
from ckpttools.quantized.weights import QuantizedWeight

_FETCH = "fetch the checkpoint again, or restore it from another copy"


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    if model.config is None or model.tree is None or not model.is_complete_model:
        return
    view = model.quantized
    result, declared = view.candidates, view.declared or {}
    if not result and not declared:
        return
    read = view.weights_from_headers
    facts = [*_findings(model, list(result.values()), is_read=not read.is_whole)]
    faults = list[ModelFinding]()
    if view.has_supported_method and not any(item.is_bare for item in result.values()):
        if not read.is_whole and read.faults:
            faults.append(_unreadable(model, read.faults, declared))
        elif model.is_examined:
            # Other checks report arrays that cannot be read.
            with suppress(CheckpointError):
                faults += value_findings(view, model.location)
    # Advice about sound weights does not apply to damaged ones.
    is_sound = all(fault.level != "error" for fault in faults)
    yield from (fact for fact in facts if is_sound or fact.level != "info")
    yield from faults


def value_findings(view: QuantizedView, location: str) -> Iterator[ModelFinding]:
    """Check the shapes of quantized weights, and the values of scales that are on this machine.

    Raises:
        CheckpointError: An array cannot be read.
    """
    result = view.scale_faults()
    # The check of the headers has already reported the other faults.
    shapes = [fault for fault in view.shaped.faults if fault not in view.faults]
    damaged = (*shapes, *result.damaged)
    if damaged:
        yield ModelFinding(
            "error",
            CHECK.name,
            location,
            f"quantized weights are damaged: {first_of_lines(damaged)}",
            "the values of the weights are unknown; a program that multiplies them anyway computes nonsense",
            _FETCH,
        )
    if result.not_positive:
        yield ModelFinding(
            "warning",
            CHECK.name,
            location,
            f"scales are zero or negative: {first_of_lines(result.not_positive)}",
            "the values of their blocks become zero or change sign; quantizers write positive scales",
            _FETCH,
        )


def first_of_lines(lines: Sequence[str]) -> str:
    """Return the first line and the number of other lines."""
    return lines[0] + (f", and {len(lines) - 1} more" if len(lines) > 1 else "")


def _findings(
    model: ModelDirectory, weights: list[QuantizedWeight], *, is_read: bool
) -> Iterator[ModelFinding]:
    declared = model.quantized.declared
    is_scaled = bool(declared) or any(item.scales for item in weights)
    without_scales = [item for item in weights if item.is_bare] if is_scaled else []
    if without_scales:
        yield _missing_scales_finding(model, without_scales, len(weights))
    if weights and not declared:
        yield _undeclared_finding(model, weights)
    elif declared and not weights:
        yield _not_quantized(model, declared)
    elif declared and not without_scales:
        yield _supported_finding(model, weights, declared, is_read=is_read)


def _missing_scales_finding(
    model: ModelDirectory, without_scales: list[QuantizedWeight], count: int
) -> ModelFinding:
    return ModelFinding(
        "error",
        CHECK.name,
        model.location,
        f"{len(without_scales)} of {count} quantized weights have no scale, such as "
        f"{without_scales[0].name} ({without_scales[0].dtype})",
        "without scales their values are unknown; a program that loads them anyway computes nonsense",
        "fetch the checkpoint again, with all of its shards",
    )


def _undeclared_finding(model: ModelDirectory, weights: list[QuantizedWeight]) -> ModelFinding:
    scales = sum(bool(item.scales) for item in weights)
    return ModelFinding(
        "error" if scales else "warning",
        CHECK.name,
        model.path(CONFIG),
        f"there {plural_with_verb(len(weights), 'quantized weight')}, {scales} with scales, such as "
        f"{weights[0]}, "
        f"and {CONFIG} has no {FIELD}",
        "transformers and others use the stored numbers as the weights themselves",
        f"fetch {CONFIG} again, which declares the scheme",
    )


def _not_quantized(model: ModelDirectory, settings: Mapping[str, Any]) -> ModelFinding:
    return ModelFinding(
        "warning",
        CHECK.name,
        model.path(CONFIG),
        f"{CONFIG} declares {scheme(settings)}, but no weight is quantized",
        "transformers and others look for scales that do not exist, or quantize the weights themselves",
        f"if the weights were dequantized, remove {FIELD} from {CONFIG}; "
        f"{action('convert', format='safetensors')} does",
    )


def _supported_finding(
    model: ModelDirectory, weights: list[QuantizedWeight], settings: Mapping[str, Any], *, is_read: bool
) -> ModelFinding:
    reason = "their values are products with scales: conversions to MaxText multiply them"
    hint = remedy(settings, is_read=False)
    if is_read and model.quantized.has_supported_method:
        hint = f"{action('cast', model.location, 'DST', dtype='bfloat16')} writes a model of plain weights"
        if _can_stay_quantized(weights, settings):
            keep = action("hf_to_maxtext", model.location, "DST", quantized="keep")
            hint += f"; {keep} keeps it in FP8 if its blocks fit the kernels"
    else:
        reason = (
            "their values are products with scales: conversions to MaxText refuse weights of this scheme, "
            "and casts do not change them"
        )
    return ModelFinding(
        "info",
        CHECK.name,
        model.location,
        f"the weights are quantized: {scheme(settings)}; {len(weights)} weight{'s' * (len(weights) != 1)}, "
        "each with its scales",
        reason,
        hint,
    )


def _can_stay_quantized(weights: list[QuantizedWeight], settings: Mapping[str, Any]) -> bool:
    """Return whether the weights are in FP8 with one scale per block, a form that MaxText supports."""
    is_fp8 = all(item.dtype.name.startswith("float8_") for item in weights)
    return is_fp8 and settings.get("quant_method") == "fp8" and bool(settings.get("weight_block_size"))


def _unreadable(model: ModelDirectory, faults: Sequence[str], settings: Mapping[str, Any]) -> ModelFinding:
    return ModelFinding(
        "error",
        CHECK.name,
        model.location,
        f"quantized weights do not match {CONFIG} ({scheme(settings)}): {first_of_lines(faults)}",
        "without matching scales, the values of the weights are unknown",
        f"fetch the checkpoint and its {CONFIG} again",
    )


CHECK = ModelCheck(
    "quantization",
    f"quantized weights without sound scales, or that do not match {CONFIG}",
    _check,
)
