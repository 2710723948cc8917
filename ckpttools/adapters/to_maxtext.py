"""Convert a Hugging Face adapter to MaxText."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ckpttools.adapters.bases import Base, other_base_remarks
from ckpttools.adapters.factor_rows import (
    PARTS,
    WEIGHT,
    FactorRow,
    model_factor_rows,
    no_factors_reason,
    required_family,
    weight_names,
)
from ckpttools.adapters.factors import Adapter, FactorPair, finite
from ckpttools.adapters.fitting import fit_adapter
from ckpttools.adapters.peft import skip_remarks
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, elementwise, pad_array
from ckpttools.array.tree import Leaf, Metadata, Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.message_terms import action
from ckpttools.core.notes import Note, Notes
from ckpttools.core.region import Shape
from ckpttools.core.text import plural, sample_names
from ckpttools.formats.adapters import BASE_NAME
from ckpttools.mapping.build import Mapped, notes_of
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import Size
from ckpttools.mapping.table import Table
from ckpttools.mapping.values import Multiply
from ckpttools.maxtext.family_layouts import family_in
from ckpttools.maxtext.versions import LORA_KEY, MODULE_PATH, NEWEST, SCAN_LAYERS, version_called
from ckpttools.maxtext.view import LINEN, NNX, linen_state
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import cast

LoraLayout = Literal["restore", "training", "converter"]
LORA_LAYOUTS: tuple[LoraLayout, ...] = ("restore", "training", "converter")
_FLOAT32 = DTYPES["float32"]
# Qwen3-Next and Gemma 4 stack their layers on two axes.
_NESTED_SCAN_REMARK = (
    "MaxText 0.2.5 does not apply an adapter to layers that are scanned within a scan: qwix fails with "
    '"fold_in accepts a single key"; convert model and adapter unscanned, for scan_layers=false'
)
_LAYER = re.compile(r"layers(_\d+)?")


@dataclass(frozen=True)
class ToMaxTextAdapter:
    """The options for converting an adapter to MaxText.

    Attributes:
        scan: Stack the layers, as in the target model.
        scan_axis: The axis on which they are stacked.
        maxtext: The MaxText version of the layout.
        layout: "restore" as read by `lora.lora_restore_path`, "training" as in training checkpoints,
            "converter" as written by MaxText's converter.
        scale: A factor for the adapter, in addition to its own scale.
    """

    scan: bool = True
    scan_axis: int = 1
    maxtext: str = NEWEST
    layout: LoraLayout = "restore"
    scale: float = 1.0


def to_maxtext_adapter(base: Base, adapter: Adapter, options: ToMaxTextAdapter) -> Transformed:
    """Return an adapter in MaxText's layout, with rank and alpha in its metadata.

    Raises:
        FormatError: The adapter does not match this base, or has parts that MaxText does not support. The
            message lists them with reasons.
        UsageError: The scale is NaN or infinite.
    """
    fit = fit_adapter(base, adapter)
    family = family_in(required_family(base), version_called(options.maxtext))
    if options.scan:
        family.refuse_scanned("convert it like the model that it adapts", has_towers=False)
    known = model_factor_rows(base, options.scan_axis if options.scan else None, family)
    by_weight = {name: row for row in known.rows for name in weight_names(row, known.sizes)}
    _refuse_unsupported(base, fit, by_weight)
    for factor in fit.factors:
        factor.require_fit(base.weights[factor.name].shape)
    rank = max(factor.rank for factor in fit.factors)
    scale, ratios = _scales(fit.factors, options.scale)
    touched = dict.fromkeys(by_weight[factor.name] for factor in fit.factors)
    rows = [known.of(row, number) for number, row in enumerate(touched)]
    sizes = {**known.sizes, **{row.rank: rank for row in rows}}
    arrays = _arrays(fit.factors, rows, sizes, ratios)
    mapped = _map_factors(rows, sizes, base, arrays)
    metadata = _lora_metadata(
        mapped.arrays, rank, finite("scale", options.scale, scale * abs(options.scale) * rank)
    )
    named = {BASE_NAME: name} if isinstance(name := adapter.config.get(BASE_NAME), str) else {}
    tree = _tree(mapped.arrays, options.layout, {SCAN_LAYERS: options.scan, LORA_KEY: metadata, **named})
    is_rslora = bool(adapter.config.get("use_rslora"))
    notes = _notes(mapped, fit.factors, ratios, metadata, rows, sizes, is_rslora=is_rslora)
    nested = (
        [_NESTED_SCAN_REMARK]
        if options.scan and any(len(group.stacked) > 1 for group in family.layers)
        else []
    )
    of_another = other_base_remarks(base, adapter, "converted as one of")
    another = Notes(remarks=(*of_another, *skip_remarks(adapter), *nested))
    return Transformed(tree, notes + another)


def _refuse_unsupported(base: Base, adapter: Adapter, by_weight: Mapping[str, Row]) -> None:
    problems = [f"{name}: it replaces the complete array" for name in adapter.replaced]
    for factor in adapter.factors:
        row = by_weight.get(factor.name)
        if factor.kind != "linear" or factor.has_inputs_first:
            problems.append(f"{factor.name}: its factors do not belong to a linear layer ({factor.kind})")
        elif factor.magnitude is not None:
            problems.append(f"{factor.name}: it sets row norms (DoRA)")
        elif row is None:
            problems.append(f"{factor.name}: MaxText has no such weight")
        elif reason := no_factors_reason(row):
            problems.append(f"{factor.name}: {reason}")
    if problems or not adapter.factors:
        raise FormatError(
            "MaxText does not support parts of this adapter:" + listing(problems or ["it has no factors"]),
            location=adapter.location,
            expected="factors of the dense layers of the decoder",
            hint=f"merge it into its base instead: {_merge_hint(base, adapter)}",
        )


def _merge_hint(base: Base, adapter: Adapter) -> str:
    model, location = base.tree.metadata.location or "BASE", adapter.location
    return action("merge_adapter", model, "DST", adapter=location)


def _scales(factors: Sequence[FactorPair], sign: float) -> tuple[float, dict[str, float]]:
    """Return the most common absolute scale, and the ratios by which B of the other factors is multiplied.

    MaxText refuses a negative alpha, so B takes the sign of the scale.
    """
    signed = {factor.name: math.copysign(1.0, sign) * factor.scale for factor in factors}
    (scale, _), *_ = Counter(map(abs, signed.values())).most_common(1)
    scale = scale or 1.0
    return scale, {name: value / scale for name, value in signed.items() if value != scale}


def _arrays(
    factors: Sequence[FactorPair],
    rows: Sequence[FactorRow],
    sizes: Mapping[str, int],
    ratios: Mapping[str, float],
) -> dict[str, LazyArray]:
    """Return the arrays of all rows: factors padded to the common rank, and zeros for missing layers."""
    by_name = {factor.name: factor for factor in factors}
    arrays: dict[str, LazyArray] = {}
    for row in rows:
        names = list(row.row.right.keys(sizes))
        stacked = [by_name[name] for name in names if name in by_name]
        for side, end, kind in ((row.a.right, PARTS[0], "a"), (row.b.right, PARTS[1], "b")):
            own: list[LazyArray] = [getattr(factor, kind) for factor in stacked]
            dtype = own[0].dtype if len({array.dtype for array in own}) == 1 else _FLOAT32
            shape = side.shape(sizes)
            for name in names:
                factor = by_name.get(name)
                array = None if factor is None else _scale(getattr(factor, kind), ratios.get(name), kind)
                arrays[name.removesuffix(WEIGHT) + end] = _pad(array, shape, dtype)
    return arrays


def _scale(array: LazyArray, ratio: float | None, kind: str) -> LazyArray:
    return array if ratio is None or kind == "a" else elementwise(array, Multiply(ratio))


def _pad(array: LazyArray | None, shape: Shape, dtype: DType) -> LazyArray:
    if array is None:
        return Constant(shape, dtype, bytes(dtype.itemsize))
    return pad_array(cast(array, dtype), shape)


def _map_factors(
    rows: Sequence[FactorRow], sizes: Mapping[str, int], base: Base, arrays: Mapping[str, LazyArray]
) -> Mapped:
    known = {axis: Size(length, "the base") for axis, length in sizes.items()}
    own = tuple(part for row in rows for part in (row.a, row.b))
    return Table(own, known, location=base.tree.metadata.location).to_left(arrays)


def _tree(arrays: Mapping[str, LazyArray], layout: LoraLayout, custom: Mapping[str, object]) -> Tree:
    parameters: dict[Path, LazyArray] = {tuple(key.split(".")): arrays[key] for key in sorted(arrays)}
    if layout == "training":
        return linen_state(parameters, 0, custom)
    outer = LINEN.prefix if layout == "converter" else ()
    leaves: dict[Path, Leaf] = {(*outer, *NNX.wrapped(path)): array for path, array in parameters.items()}
    return Tree(leaves, Metadata(step=0, custom=custom))


def _lora_metadata(factors: Iterable[str], rank: int, alpha: float) -> dict[str, object]:
    """Return the metadata that MaxText stores with an adapter."""
    return {
        "enable_lora": True,
        "lora_rank": rank,
        "lora_alpha": alpha,
        MODULE_PATH: module_path(factors),
        "lora_weight_qtype": None,
        "lora_tile_size": None,
        "lora_restore_path": "",
    }


def module_path(factors: Iterable[str]) -> str:
    """Return a pattern of the adapted modules, for MaxText's `lora.lora_module_path`."""
    modules = (name.rpartition(".")[0].split(".")[1:] for name in factors)
    ends = dict.fromkeys("/".join(_module_keys(keys[-2:])) for keys in modules)
    return f"decoder/.*({'|'.join(ends)})"


def _module_keys(keys: Sequence[str]) -> Sequence[str]:
    """Return the last keys of a module, without the key of its layer."""
    return keys[1:] if _LAYER.fullmatch(keys[0]) else keys


def _notes(
    mapped: Mapped,
    factors: Sequence[FactorPair],
    ratios: Mapping[str, float],
    metadata: Mapping[str, object],
    rows: Sequence[FactorRow],
    sizes: Mapping[str, int],
    *,
    is_rslora: bool,
) -> Notes:
    inexact, values = [], []
    negated = sum(ratio == -1.0 for ratio in ratios.values())
    if negated:
        values.append(Note.of_arrays(negated, "B negated, because MaxText does not accept a negative alpha"))
    if other_count := len(ratios) - negated:
        text = "B multiplied, because MaxText has one scale for all factors, and rounded to its dtype"
        inexact.append(Note.of_arrays(other_count, text))
    ranks = {factor.rank for factor in factors}
    if len(ranks) > 1:
        values.append(
            Note("factors", f"with ranks {', '.join(map(str, sorted(ranks)))} are zero-padded to the largest")
        )
    remark = (
        f"the metadata has rank {metadata['lora_rank']} and alpha {metadata['lora_alpha']:g}; pass "
        "lora.lora_rank "
        "and lora.lora_alpha as well, because MaxText's trainers need them before they read the metadata"
    )
    if is_rslora:
        remark += "; the alpha gives the scale of rsLoRA: MaxText divides by the rank, not by its square root"
    remarks = (remark, *_filled_remarks(rows, sizes, factors))
    return notes_of(mapped.values) + Notes(tuple(inexact), tuple(values), remarks=remarks)


def _filled_remarks(
    rows: Iterable[FactorRow], sizes: Mapping[str, int], factors: Iterable[FactorPair]
) -> Iterator[str]:
    """Yield remarks on modules that the adapter changes only in other layers: their factors become zeros."""
    changed = {factor.name for factor in factors}
    names = [name for row in rows for name in row.row.right.keys(sizes)]
    missing = [name.removesuffix(WEIGHT) for name in names if name not in changed]
    if missing:
        yield (
            f"{plural(len(missing), 'module')} without factors: {sample_names(missing)}; MaxText has "
            "factors in all "
            "layers, so theirs are zeros, which changes nothing"
        )
