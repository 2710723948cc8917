"""The facts of a tree report as labeled lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttools.adapters.summary import AdapterReport
from ckpttools.cli.output import format_labeled, styled
from ckpttools.core.text import first_names, format_count, format_disk, plural, printable
from ckpttools.formats.adapters import LORA
from ckpttools.formats.origin import SOURCE
from ckpttools.inspection.tree import ItemReport, Total, TreeReport
from ckpttools.maxtext.layers import LayerGroup
from ckpttools.maxtext.recognition import FamilyGuess
from ckpttools.quantized.view import Quantization

# Width of the label column.
_COLUMN = 14
# Metadata can be long; --json shows all of it.
_LONGEST_METADATA = 400


def fact_lines(report: TreeReport, room: int | None) -> Iterator[str]:
    """Yield the path, then the known facts, most important first.

    Args:
        report: Report of a checkpoint.
        room: Columns of the terminal; None for no limit.
    """
    yield styled(printable(report.path), bold=True)
    for label, text in _labeled_facts(report):
        style = {"fg": "yellow"} if label == "warning" else {"dim": True}
        yield from format_labeled(f"  {label}", text, _COLUMN, room, **style)


def _labeled_facts(report: TreeReport) -> Iterator[tuple[str, str]]:
    yield "format", _join(report.format, None if report.step is None else f"step {report.step}")
    axis = None if report.scan_axis is None else f"scan axis {report.scan_axis}"
    if kind := _join(report.kind, report.flavor, axis):
        yield "kind", kind
    if report.adapter:
        yield from _adapter(report.adapter)
    if report.layers:
        yield "layers", ", ".join(map(_layers_text, report.layers))
    if report.maxtext:
        others = "ckpt remap --maxtext VERSION writes it for another"
        yield "MaxText", f"as version {' and '.join(report.maxtext)} stores it; {others}"
    if report.families:
        yield "family", _families_text(report.families)
    if report.items:
        yield "items", ", ".join(f"{printable(name)} ({_item_line(of)})" for name, of in report.items.items())
    yield (
        "holds",
        _join(
            plural(report.num_arrays, "array"), format_disk(report.nbytes), _string_lines(report.num_strings)
        ),
    )
    yield "parameters", _parameters_text(report)
    if report.quantization:
        yield "quantized", _quantization_text(report.quantization, is_maxtext=report.flavor is not None)
    if report.scales:
        yield "scales", _join(plural(report.scales.num_arrays, "array"), format_disk(report.scales.nbytes))
    yield from _other_arrays_text(report)
    if mesh := _mesh_text(report):
        yield "mesh", mesh
    if report.sidecars:
        yield "with", ", ".join(map(printable, report.sidecars))
    if source := report.custom_metadata.get(SOURCE):
        yield "made of", printable(str(source))
    if custom := {key: value for key, value in report.custom_metadata.items() if key != SOURCE}:
        yield "metadata", _metadata_text(custom)
    for warning in report.warnings:
        yield "warning", warning.text


def _item_line(item: ItemReport) -> str:
    arrays = _join(plural(item.num_arrays, "array"), format_disk(item.nbytes)) if item.num_arrays else None
    return _join(arrays, _string_lines(item.num_strings)) or "nothing"


def _string_lines(count: int) -> str | None:
    return plural(count, "string") if count else None


def _adapter(result: AdapterReport) -> Iterator[tuple[str, str]]:
    name = "a LoRA" if result.kind == LORA else f"PEFT's {printable(result.kind)}"
    name += " in Tunix's names" * (result.names == "Tunix")
    yield "adapter", f"{name} of {printable(result.base_model) or 'a model that it does not name'}"
    if result.problem:
        yield "warning", f"it is not read: {printable(result.problem)}"
    if result.ranks:
        mixed = len(result.ranks) > 1
        ranks = ", ".join(f"{rank} ({times})" if mixed else str(rank) for rank, times in result.ranks.items())
        alpha = None if result.alpha is None else f"alpha {result.alpha:g}"
        yield "rank", _join(ranks, alpha, *result.features)
        targets = ", ".join(f"{printable(name)} × {times}" for name, times in result.targets.items())
        replaced_text = (
            f"{plural(result.num_replaced, 'array')} replaced as a whole" if result.num_replaced else None
        )
        yield "targets", _join(targets, replaced_text)
    for field, count_skipped in result.skipped.items():
        yield "warning", f"PEFT ignores {plural(count_skipped, 'stored array')}, which {field} leaves out"


def _join(*facts: str | None) -> str:
    return ", ".join(fact for fact in facts if fact)


def _layers_text(group: LayerGroup) -> str:
    """Format `32 in decoder/layers, in cycles of 6, 2 left over`."""
    cycle = f"in cycles of {group.cycle}" if group.layout in ("cycle", "blocks") else None
    rest = f"{group.remainder} left over" if group.remainder else None
    return _join(f"{group.length:,} in {printable(group.path)}", cycle, rest)


def _families_text(guesses: Sequence[FamilyGuess]) -> str:
    """Format `llama or mistral, all 11 names`. Equally good guesses differ only in their names."""
    best = guesses[0]
    names = " or ".join(guess.name for guess in guesses) + (
        " (config.json)" if best.matches_model_type else ""
    )
    if not (best.missing or best.unmatched):
        return f"{names}, all {best.num_expected} names"
    missing = f"missing {printable(first_names(best.missing))}" if best.missing else None
    others = None
    if best.unmatched:
        others = (
            f"{plural(best.num_unmatched, 'array')} of other names: {printable(first_names(best.unmatched))}"
        )
    result = f"{best.num_matched} of {best.num_expected} names"
    likely = names if best.matches_model_type else f"perhaps {names}"
    return _join(likely, result, missing, others)


def _parameters_text(report: TreeReport) -> str:
    number = report.num_parameters
    exact = f"{format_count(number)} ({number:,})" if number >= 1000 else str(number)
    total = report.roles.get("parameter", Total(0, 0, 0))
    dtypes = report.parameter_dtypes
    if len(dtypes) < 2:
        return " in ".join((exact, *dtypes)) + f", {format_disk(total.nbytes)}"
    parts = ", ".join(f"{dtype} {format_disk(item.nbytes)}" for dtype, item in dtypes.items())
    return f"{exact}, {format_disk(total.nbytes)}: {parts}"


def _quantization_text(result: Quantization, *, is_maxtext: bool) -> str:
    """Format `gptq, 4 bits in groups of 128; 224 weights`."""
    scheme = printable(result.scheme)
    if not result.num_weights and is_maxtext:
        return f"none left; the original model was: {scheme}"
    if not result.num_weights:
        return f"{scheme} (config.json), but no weight is quantized"
    without_scales = (
        f", {result.num_without_scales:,} of them without scales" if result.num_without_scales else ""
    )
    return f"{scheme}; {plural(result.num_weights, 'weight')}{without_scales}"


def _other_arrays_text(report: TreeReport) -> Iterator[tuple[str, str]]:
    if total := report.roles.get("optimizer"):
        name = report.optimizer.name if report.optimizer else None
        yield "optimizer", _join(name, plural(total.num_arrays, "array"), format_disk(total.nbytes))
    if total := report.roles.get("other"):
        rng = f"{report.random_states:,} of them RNG state" if report.random_states else None
        yield "other", _join(plural(total.num_arrays, "array"), rng, format_disk(total.nbytes))


def _mesh_text(report: TreeReport) -> str:
    """Format `data 1 × fsdp 4` for each mesh."""
    meshes = {array.sharding.mesh for array in report.arrays if array.sharding and array.sharding.mesh}
    named = (" × ".join(f"{printable(axis)} {length}" for axis, length in mesh) for mesh in sorted(meshes))
    return ", and ".join(named)


def _metadata_text(custom: Mapping[str, Any]) -> str:
    text = printable(json.dumps(custom, default=str, ensure_ascii=False))
    return text if len(text) <= _LONGEST_METADATA else f"{text[:_LONGEST_METADATA]}… (all of it: --json)"
