"""Select, rename, cast, strip or stack the arrays of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from ckpttools.api.convert import ChangedRun, renaming_of, write_changed
from ckpttools.api.options.convert import CHANGING
from ckpttools.api.options.edit import CAST, REMAP, SELECT, STACK, STRIP_OPTIMIZER, UNSTACK
from ckpttools.api.prepared import Prepared, command
from ckpttools.api.sources import Patterns, Source, dtype_of, patterns_of, text_of
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.options import Option, declare
from ckpttools.formats.registry import writer_options
from ckpttools.maxtext.cycles import CycleNames
from ckpttools.maxtext.scan_axis import KeepScanAxis
from ckpttools.maxtext.stacking import ForceUnroll, StackAsModel, UnstackLayers
from ckpttools.maxtext.strip import NewFlavor, StripOptimizer
from ckpttools.maxtext.to_version import ForVersion
from ckpttools.quantized.config import Like
from ckpttools.stores.registry import LocationLike
from ckpttools.transforms.base import Transform
from ckpttools.transforms.cast import CastMap
from ckpttools.transforms.functions import Mapper
from ckpttools.transforms.registry import options_of, transform_named, transforms
from ckpttools.transforms.select import Select


@command(ChangedRun, more=writer_options)
@declare(*SELECT, *CHANGING)
def select(
    source: Source,
    destination: LocationLike,
    *,
    keep: Patterns = (),
    drop: Patterns = (),
    prefix: str | None = None,
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Write the arrays that match `keep` (default: all), except those that match `drop`.

    Args:
        source: A file, item, step or run directory, or a tree.
        destination: The directory to create. It appears only when everything is written.

    Raises:
        UsageError: No pattern is given, a pattern matches nothing, or no array is left.
        CheckpointError: See `ckpttools.convert`.
    """
    selection = Select(patterns_of(keep), patterns_of(drop), prefix or "")
    if not (selection.keep or selection.drop or selection.prefix):
        hint = f"give {option('keep', 'PATTERN')} or {option('drop', 'PATTERN')}"
        raise UsageError("no option selects arrays", hint=hint)
    return write_changed([KeepScanAxis(selection)], source, destination, common)


@command(ChangedRun, more=writer_options)
@declare(*REMAP, *CHANGING)
def remap(
    source: Source,
    destination: LocationLike,
    *,
    rename: Mapping[str, str] | None = None,
    map: Mapper | None = None,
    drop: Patterns = (),
    strict: bool = False,
    maxtext: str | None = None,
    family: LocationLike | None = None,
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Rename or rearrange arrays by rules, a function, or for a MaxText version.

    Args:
        source: A file, item, step or run directory, or a tree.
        destination: The directory to create. It appears only when everything is written.

    Raises:
        UsageError: None or several of `rename`, `map` and `maxtext` are given, or a name of `rename` is
            invalid or matches nothing.
        CheckpointError: See `ckpttools.mapped_by`, `ckpttools.ForVersion` and `ckpttools.convert`.
    """
    dropping = [Select(drop=patterns_of(drop))] if drop else []
    renaming = _remap(rename or None, map, strict, maxtext, family)
    return write_changed([*dropping, renaming], source, destination, common)


def _remap(
    rename: Mapping[str, str] | None,
    map: Mapper | None,
    strict: bool,
    maxtext: str | None,
    family: LocationLike | None,
) -> Transform:
    given = [item for item in (rename, map, maxtext) if item is not None]
    if len(given) != 1:
        ways = (
            option("rename", {"OLD": "NEW"}),
            option("map", "FILE.toml"),
            option("map", "FILE.py:function"),
            option("maxtext", "VERSION"),
        )
        raise UsageError(
            "several renamings are given" if given else "no renaming is given",
            hint=f"give one of {', '.join(ways)}" if given else f"give {', '.join(ways[:-1])} or {ways[-1]}",
        )
    if maxtext is None:
        if family is not None:
            raise UsageError(f"{option('family')} applies only with {option('maxtext')}", hint="leave it out")
        return renaming_of(rename, map, strict=strict)
    if strict:
        raise UsageError(
            f"{option('strict', True)} applies only with {option('map')} or {option('rename')}",
            hint="leave it out",
        )
    return ForVersion(maxtext, text_of(family))


@command(ChangedRun, more=writer_options)
@declare(*CAST, *CHANGING)
def cast(
    source: Source,
    destination: LocationLike,
    *,
    dtype: DType | str | None = None,
    dtype_map: Mapping[str, DType | str] | None = None,
    force: bool = False,
    dequantize_like: Like = "float32",
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Cast a checkpoint to other dtypes, rounding to nearest even and keeping NaN and infinity.

    Quantized weights are dequantized if `dtype` has 16 bits or more. Values that a dtype cannot represent are
    counted in `Receipt.counts`.

    Args:
        source: A file, item, step or run directory, or a tree.
        destination: The directory to create. It appears only when everything is written.

    Raises:
        UsageError: No dtype is given, or a pattern matches nothing.
        CheckpointError: See `ckpttools.CastMap` and `ckpttools.convert`.
    """
    if dtype is None and not dtype_map:
        by_pattern = option("dtype_map", {"PATTERN": "DTYPE"})
        hint = f"give {option('dtype', 'DTYPE')} or {by_pattern}"
        raise UsageError("no dtype is given", hint=hint)
    casts = CastMap(dict(dtype_map or {}), dtype_of(dtype), force, dequantize_like)
    return write_changed([casts], source, destination, common)


@command(ChangedRun, more=writer_options)
@declare(*STRIP_OPTIMIZER, *CHANGING)
def strip_optimizer(
    source: Source,
    destination: LocationLike,
    *,
    keep_step: bool = False,
    flavor: NewFlavor = "same",
    keep: Patterns = (),
    drop: Patterns = (),
    dtype: DType | str | None = None,
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Write only the parameters of a training checkpoint.

    Args:
        source: A run directory, step or item, or a tree.
        destination: The directory to create. It appears only when everything is written.

    Raises:
        CheckpointError: See `ckpttools.StripOptimizer` and `ckpttools.convert`.
    """
    stripped = KeepScanAxis(StripOptimizer(keep_step, flavor, patterns_of(keep), patterns_of(drop)))
    return write_changed([stripped, *_casts(dtype)], source, destination, common)


@command(ChangedRun, more=writer_options)
@declare(*STACK, *CHANGING)
def stack(
    source: Source,
    destination: LocationLike,
    *,
    scan_axis: int | None = None,
    cycle: int | None = None,
    cycle_names: CycleNames | None = None,
    family: LocationLike | None = None,
    maxtext: str | None = None,
    dtype: DType | str | None = None,
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Stack separate layers (layers_0, layers_1, …) for MaxText's `scan_layers=true`.

    Args:
        source: A run directory, step or item, or a tree.
        destination: The directory to create. It appears only when everything is written.

    Raises:
        CheckpointError: See `ckpttools.StackLayers` and `ckpttools.convert`; or several layouts fit.
    """
    stacked = StackAsModel(scan_axis, cycle, cycle_names, text_of(family), maxtext)
    return write_changed([stacked, *_casts(dtype)], source, destination, common)


@command(ChangedRun, more=writer_options)
@declare(*UNSTACK, *CHANGING)
def unstack(
    source: Source,
    destination: LocationLike,
    *,
    scan_axis: int | None = None,
    force_unroll: bool = False,
    keep_step: bool = False,
    flavor: NewFlavor = "same",
    dtype: DType | str | None = None,
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Split stacked layers (layers_0, layers_1, …) for MaxText's `scan_layers=false`.

    Args:
        source: A run directory, step or item, or a tree.
        destination: The directory to create. It appears only when everything is written.

    Raises:
        CheckpointError: See `ckpttools.UnstackLayers` and `ckpttools.convert`.
    """
    if not force_unroll and (keep_step or flavor != "same"):
        text = f"{option('keep_step')} and {option('flavor')} apply only with {option('force_unroll')}"
        raise UsageError(text, hint="also pass it")
    change: Transform = (
        ForceUnroll(scan_axis, keep_step, flavor) if force_unroll else UnstackLayers(scan_axis)
    )
    return write_changed([change, *_casts(dtype)], source, destination, common)


def _options_of_transforms() -> list[Option]:
    return [*writer_options(), *(item for name in transforms() for item in options_of(name))]


@command(ChangedRun, more=_options_of_transforms)
@declare(*CHANGING)
def transform(
    source: Source,
    destination: LocationLike,
    *,
    transforms: str | Transform | Sequence[Transform],
    **options: Any,
) -> Prepared:
    """Write a checkpoint after one or several transforms.

    Args:
        source: A file, item, step or run directory, or a tree.
        destination: The directory to create. It appears only when everything is written.
        transforms: One or several transforms, or the name of a transform that a package provides.
        options: Options of the named transform.

    Raises:
        UsageError: The transform does not exist, or does not have one of the options.
        CheckpointError: See the transforms and `ckpttools.convert`.
    """
    if not isinstance(transforms, str):
        result = [transforms] if callable(transforms) else transforms
        return write_changed(result, source, destination, options)
    own = {item.name: options.pop(item.name) for item in options_of(transforms) if item.name in options}
    return write_changed([transform_named(transforms, own)], source, destination, options)


def _casts(dtype: DType | str | None) -> list[Transform]:
    return [] if dtype is None else [CastMap({}, dtype)]
