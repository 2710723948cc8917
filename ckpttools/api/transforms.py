"""Functions that select, rename, cast, strip or stack the arrays of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from ckpttools.api.arguments import Patterns, dtype_of, patterns_of, text_of
from ckpttools.api.convert import Changing, write_changed
from ckpttools.api.prepared import Prepared, command
from ckpttools.api.sources import Source
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option, step
from ckpttools.core.options import Option
from ckpttools.formats.registry import writer_options
from ckpttools.maxtext.cycles import CycleNames
from ckpttools.maxtext.scan_axis import KeepScanAxis
from ckpttools.maxtext.stacking import ForceUnroll, StackAsModel, UnstackLayers
from ckpttools.maxtext.strip import NewFlavour, StripOptimizer
from ckpttools.maxtext.to_version import ForVersion
from ckpttools.maxtext.versions import NEWEST
from ckpttools.quantized.config import Like
from ckpttools.stores.registry import LocationLike
from ckpttools.transforms.base import Transform
from ckpttools.transforms.cast import CastMap
from ckpttools.transforms.functions import Mapper, mapped_by
from ckpttools.transforms.registry import options_of, transform_named, transforms
from ckpttools.transforms.select import Select


@command(Changing, more=writer_options)
def select(
    source: Source,
    destination: LocationLike,
    *,
    keep: Patterns = (),
    drop: Patterns = (),
    prefix: str | None = None,
    **common: Unpack[Changing],
) -> Prepared:
    """Write the arrays that match `keep` (default: all), without those that match `drop`.

    Args:
        source: a file, an item, a step, a run directory, or a tree.
        destination: directory that appears when everything is written.
        keep, drop: patterns, such as "params/*", or a key and all below it.
        prefix: the prefix of the names to keep, such as "policy"; it is removed from them.
        common: `ckpttools.api.convert.Changing`.

    Raises:
        UsageError: no pattern is given, one matches nothing, or nothing is left.
        CheckpointError: as `ckpttools.convert`.
    """
    chosen = Select(patterns_of(keep), patterns_of(drop), prefix or "")
    if not (chosen.keep or chosen.drop or chosen.prefix):
        hint = f"give {option('keep', 'PATTERN')} or {option('drop', 'PATTERN')}"
        raise UsageError("nothing says what to select", hint=hint)
    return write_changed([KeepScanAxis(chosen)], source, destination, common)


@command(Changing, more=writer_options)
def remap(
    source: Source,
    destination: LocationLike,
    *,
    map: Mapper | None = None,
    strict: bool = False,
    maxtext: str | None = None,
    family: LocationLike | None = None,
    **common: Unpack[Changing],
) -> Prepared:
    """Rename or rearrange arrays by rules, a function, or for a MaxText version.

    Args:
        source: a file, an item, a step, a run directory, or a tree.
        destination: directory that appears when everything is written.
        map: a file of rules, "module:function", "file.py:function", a function over (path, array), or a
            dictionary of templates: see `ckpttools.mapped_by`.
        strict: refuse arrays that no rule matches.
        maxtext: version of MaxText in whose layout a checkpoint of another one is written, such as "0.2.5".
        family: the model's family, or a file that describes one; None to tell. Only with `maxtext`.
        common: `ckpttools.api.convert.Changing`.

    Raises:
        UsageError: neither `map` nor `maxtext` is given, or both.
        CheckpointError: as `ckpttools.mapped_by`, `ckpttools.ForVersion` and `ckpttools.convert`.
    """
    return write_changed([_remapped(map, strict, maxtext, family)], source, destination, common)


def _remapped(
    map: Mapper | None, strict: bool, maxtext: str | None, family: LocationLike | None
) -> Transform:
    if (map is None) == (maxtext is None):
        which = "no renaming is given" if map is None else "two renamings are given"
        raise UsageError(
            which,
            hint=f"give {option('map', 'FILE.toml')}, {option('map', 'FILE.py:function')} or "
            f"{option('maxtext', 'VERSION')}",
        )
    if map is not None:
        if family is not None:
            raise UsageError(f"{option('family')} applies only with {option('maxtext')}", hint="leave it out")
        return mapped_by(map, strict=strict)
    if strict:
        raise UsageError(f"{option('strict', True)} applies only with {option('map')}", hint="leave it out")
    return ForVersion(maxtext or NEWEST, text_of(family))


@command(Changing, more=writer_options)
def cast(
    source: Source,
    destination: LocationLike,
    *,
    dtype: DType | str | None = None,
    dtype_map: Mapping[str, DType | str] | None = None,
    force: bool = False,
    dequantize_like: Like = "float32",
    **common: Unpack[Changing],
) -> Prepared:
    """Cast a checkpoint to other dtypes, rounding to nearest even and keeping NaN and infinity.

    Quantized weights are multiplied by their scales where `dtype` has 16 bits or more. Values that a
    dtype cannot hold are counted in `Receipt.counts`.

    Args:
        source: a file, an item, a step, a run directory, or a tree.
        destination: directory that appears when everything is written.
        dtype: of floating-point arrays, such as "bfloat16"; None to leave them.
        dtype_map: pattern -> dtype, also for integers; the first match counts, and `dtype` applies to the
            rest.
        force: cast even if integers can lose values, or if float8 may have lost its scales.
        dequantize_like: how products of quantized weights and their scales are rounded, as of
            `ckpttools.hf_to_maxtext`.
        common: `ckpttools.api.convert.Changing`.

    Raises:
        UsageError: no dtype is given, or a pattern matches nothing.
        CheckpointError: as `ckpttools.CastMap` and `ckpttools.convert`.
    """
    if dtype is None and not dtype_map:
        by_pattern = step('dtype_map={"PATTERN": "DTYPE"}', "--dtype-map PATTERN=DTYPE")
        hint = f"give {option('dtype', 'DTYPE')} or {by_pattern}"
        raise UsageError("there is nothing to cast to", hint=hint)
    casts = CastMap(dict(dtype_map or {}), dtype_of(dtype), force, dequantize_like)
    return write_changed([casts], source, destination, common)


@command(Changing, more=writer_options)
def strip_optimizer(
    source: Source,
    destination: LocationLike,
    *,
    keep_step: bool = False,
    flavour: NewFlavour = "same",
    keep: Patterns = (),
    drop: Patterns = (),
    dtype: DType | str | None = None,
    **common: Unpack[Changing],
) -> Prepared:
    """Write only the parameters of a training checkpoint.

    Args:
        source: a run directory, a step, an item, or a tree.
        destination: directory that appears when everything is written.
        keep_step: keep the training step; without it the destination has step 0.
        flavour: how parameters are nested: "same", "linen" (`params/params/…`) or "nnx" (`…/value`).
        keep: patterns of arrays to keep, whatever they are.
        drop: patterns of arrays to leave out, whatever they are.
        dtype: of floating-point arrays, such as "bfloat16"; None to leave them.
        common: `ckpttools.api.convert.Changing`.

    Raises:
        CheckpointError: as `ckpttools.StripOptimizer` and `ckpttools.convert`.
    """
    stripped = KeepScanAxis(StripOptimizer(keep_step, flavour, patterns_of(keep), patterns_of(drop)))
    return write_changed([stripped, *_casts(dtype)], source, destination, common)


@command(Changing, more=writer_options)
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
    **common: Unpack[Changing],
) -> Prepared:
    """Stack separate layers (layers_0, layers_1, …) for MaxText's `scan_layers=true`.

    Args:
        source: a run directory, a step, an item, or a tree.
        destination: directory that appears when everything is written.
        scan_axis: axis of parameters on which layers are stacked; None for the one from which `unstack` took
            them, else 1.
        cycle: layers after which their kinds repeat; None as they were before `unstack`, else as in the
            model's family.
        cycle_names: what positions of a cycle are called: "layers", "layer", "local-global",
            "layers-local-global" or "blocks-layers"; None to tell.
        family: the model's family, or a file that describes one; None to tell.
        maxtext: version of MaxText that is to load it, such as "0.2.5"; None for the layout before `unstack`,
            else the newest.
        dtype: of floating-point arrays, such as "bfloat16"; None to leave them.
        common: `ckpttools.api.convert.Changing`.

    Raises:
        CheckpointError: as `ckpttools.StackLayers` and `ckpttools.convert`; several layouts fit.
    """
    stacked = StackAsModel(scan_axis, cycle, cycle_names, text_of(family), maxtext)
    return write_changed([stacked, *_casts(dtype)], source, destination, common)


@command(Changing, more=writer_options)
def unstack(
    source: Source,
    destination: LocationLike,
    *,
    scan_axis: int | None = None,
    force_unroll: bool = False,
    keep_step: bool = False,
    flavour: NewFlavour = "same",
    dtype: DType | str | None = None,
    **common: Unpack[Changing],
) -> Prepared:
    """Split stacked layers (layers_0, layers_1, …) for MaxText's `scan_layers=false`.

    Args:
        source: a run directory, a step, an item, or a tree.
        destination: directory that appears when everything is written.
        scan_axis: axis of parameters on which layers are stacked; None as shapes show it.
        force_unroll: also leave out all training state, as MaxText's `force_unroll`.
        keep_step, flavour: with `force_unroll`, as of `strip_optimizer`.
        dtype: of floating-point arrays, such as "bfloat16"; None to leave them.
        common: `ckpttools.api.convert.Changing`.

    Raises:
        CheckpointError: as `ckpttools.UnstackLayers` and `ckpttools.convert`.
    """
    if not force_unroll and (keep_step or flavour != "same"):
        declared = f"{option('keep_step')} and {option('flavour')} are about {option('force_unroll')}"
        raise UsageError(declared, hint="give it as well")
    change: Transform = (
        ForceUnroll(scan_axis, keep_step, flavour) if force_unroll else UnstackLayers(scan_axis)
    )
    return write_changed([change, *_casts(dtype)], source, destination, common)


def _options_of_transforms() -> list[Option]:
    return [*writer_options(), *(item for name in transforms() for item in options_of(name))]


@command(Changing, more=_options_of_transforms)
def transform(
    source: Source,
    destination: LocationLike,
    *,
    transforms: str | Transform | Sequence[Transform],
    **options: Any,
) -> Prepared:
    """Write a checkpoint after one or several transforms.

    Args:
        source: a file, an item, a step, a run directory, or a tree.
        destination: directory that appears when everything is written.
        transforms: one or several; or the name of one that a package announces.
        options: those of the transform that is named, and `ckpttools.api.convert.Changing`.

    Raises:
        UsageError: there is no such transform, or it has no such option.
        CheckpointError: as the transforms and `ckpttools.convert`.
    """
    if not isinstance(transforms, str):
        built = [transforms] if callable(transforms) else transforms
        return write_changed(built, source, destination, options)
    own = {item.name: options.pop(item.name) for item in options_of(transforms) if item.name in options}
    return write_changed([transform_named(transforms, own)], source, destination, options)


def _casts(dtype: DType | str | None) -> list[Transform]:
    return [] if dtype is None else [CastMap({}, dtype)]
