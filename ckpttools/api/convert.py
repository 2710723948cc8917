"""Convert any format to any other format, optionally with transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Unpack

from ckpttools.api.options import OPENING, WRITING_OPTIONS
from ckpttools.api.options.convert import CONVERT, FORMAT
from ckpttools.api.prepared import Prepared, WriteRequest, Writing, command
from ckpttools.api.sources import (
    Opening,
    Patterns,
    Source,
    Storing,
    opened,
    part_of,
    patterns_of,
    read_options,
    rest_of,
)
from ckpttools.api.tree_plan import plan_tree
from ckpttools.array.tree import Tree
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import ChosenItemWarning, UsageError, suppress_step_warnings
from ckpttools.core.message_terms import action, option
from ckpttools.core.options import declare
from ckpttools.formats.registry import writer_for, writer_options
from ckpttools.maxtext.hub_names import ToHubNames, with_name_remarks
from ckpttools.maxtext.scan_axis import KeepScanAxis
from ckpttools.maxtext.source_checks import conversion_of
from ckpttools.maxtext.strip import StripOptimizer
from ckpttools.maxtext.view import view_of
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.transforms.base import Transform
from ckpttools.transforms.cast import CastMap
from ckpttools.transforms.functions import Mapper, mapped_by
from ckpttools.transforms.rename import renames_of_option
from ckpttools.transforms.select import Select


class ChangedRun(Opening, Storing, Writing, total=False):
    """Types of the options of functions that change and write a tree, except those of the format."""

    format: str | None


def write_changed(
    transforms: Sequence[Transform],
    source: Source,
    destination: LocationLike,
    declared: Mapping[str, Any],
    *,
    as_read: bool = True,
    make: Callable[[Mapping[str, Any]], Tree] | None = None,
    least_share: float = 0.0,
) -> Prepared:
    """Prepare to write a transformed source.

    Args:
        transforms: Transforms to apply, in order.
        source, destination: The input and the output.
        declared: The options of `ChangedRun`.
        as_read: Whether chunks stay as in the source unless an option changes them; unchanged chunks are
            shared.
        make: Creates the tree to transform from the options for opening paths; None to open the source.
        least_share: See `ckpttools.formats.base.Target`.
    """
    opening, writing = part_of(declared, Opening), part_of(declared, Writing)
    write_options = rest_of(declared, Opening, Writing)

    with WriteRequest(source, destination, **writing) as request:
        tree = make(opening) if make else opened(source, read_options(opening))
        writer = writer_for(
            tree,
            destination=parse(destination),
            shares=as_read,
            least_share=least_share,
            **write_options,
        )
        prepared = plan_tree(tree.pipe(*transforms), writer, request.resources, tree)
        return replace(request.complete(prepared), source=tree)


@command(ChangedRun, more=writer_options)
@declare(FORMAT, *CONVERT, *OPENING, *WRITING_OPTIONS)
def convert(
    source: Source,
    destination: LocationLike,
    *,
    format: str | None = None,
    strip_optimizer: bool = False,
    keep: Patterns = (),
    drop: Patterns = (),
    names: Literal["hub"] | None = None,
    rename: Mapping[str, str] | None = None,
    map: Mapper | None = None,
    strict: bool = False,
    dtype: DType | str | None = None,
    dtype_map: Mapping[str, DType | str] | None = None,
    force: bool = False,
    **options: Any,
) -> Prepared:
    """Write any checkpoint in another format or layout. The model does not need to be known.

    Changes are applied in this order: strip, select, name, rename, cast.

    Args:
        source: A file, item, step or run directory, or a tree.
        destination: The directory to create. It appears only when everything is written.
        options: Options of the format: for "orbax" `item`, `as_step` and those of
            `ckpttools.formats.orbax.options.STORAGE`, for "safetensors" `max_shard_size` and `separator`, for
            "zarr3" `compression`; see `ckpt convert to-NAME --help`.

    Raises:
        UsageError: The format lacks an option, or an option requires another one that is not given.
        CheckpointError: The source cannot be read, a change does not apply to it, the format cannot represent
            the result, the work does not fit into the memory, or reading or writing fails.
    """
    dropped = patterns_of(drop)
    transforms = [
        *([KeepScanAxis(StripOptimizer(drop=dropped))] if strip_optimizer else []),
        *_select_transforms(patterns_of(keep), () if strip_optimizer else dropped),
        *_name_transforms(names, format, is_mapped=bool(map is not None or rename)),
        *_map_transforms(rename or None, map, strict),
        *_cast(dtype, dtype_map, force),
    ]
    return write_changed(transforms, source, destination, {**options, "format": format}, as_read=False)


def _select_transforms(keep: Sequence[str], drop: Sequence[str]) -> list[Transform]:
    return [KeepScanAxis(Select(keep, drop))] if keep or drop else []


def _name_transforms(names: str | None, format: str | None, *, is_mapped: bool) -> list[Transform]:
    """Return the transform to Hub names, or suggest how to get Hub names."""
    if names is not None:
        return [ToHubNames()]
    return [with_name_remarks] if format == "safetensors" and not is_mapped else []


def _map_transforms(rename: Mapping[str, str] | None, map: Mapper | None, strict: bool) -> list[Transform]:
    if rename is not None or map is not None:
        return [renaming_of(rename, map, strict=strict)]
    if strict:
        raise UsageError(
            f"{option('strict')} applies only to the rules of {option('map')} or {option('rename')}",
            hint=f"give {option('map')} or {option('rename')} as well",
        )
    return []


def renaming_of(rename: Mapping[str, str] | None, map: Mapper | None, *, strict: bool) -> Transform:
    """Return the transform for the option `rename` or `map`.

    Raises:
        UsageError: Both are given, or `rename` is invalid.
        CheckpointError: See `ckpttools.mapped_by`.
    """
    if rename is None:
        assert map is not None
        return mapped_by(map, strict=strict)
    if map is not None:
        raise UsageError(
            f"{option('rename')} and {option('map')} exclude each other",
            hint="write all rules into the file, or rename in two steps",
        )
    return renames_of_option(rename, strict=strict)


def _cast(
    dtype: DType | str | None, dtype_map: Mapping[str, DType | str] | None, force: bool
) -> list[Transform]:
    if dtype is not None or dtype_map:
        return [CastMap(dict(dtype_map or {}), dtype, force)]
    if force:
        raise UsageError(
            f"{option('force')} applies only to casts",
            hint=f"give {option('dtype')} or {option('dtype_map')} as well",
        )
    return []


class InferredConversion(NamedTuple):
    """The conversion that a model needs.

    Attributes:
        function: Name of the function of `ckpttools`.
        what: Description of the model, such as "a Hugging Face model (safetensors)".
        target: Result of the function, such as "MaxText".
    """

    function: Literal["hf_to_maxtext", "maxtext_to_hf"]
    what: str
    target: str


def infer_conversion(source: LocationLike, **opening: Unpack[Opening]) -> InferredConversion:
    """Return the conversion that a model needs. Reads headers and indexes, but no arrays.

    Raises:
        UsageError: The checkpoint can be converted in neither or in both directions.
        CheckpointError: The path does not exist, is not a single checkpoint, or cannot be read.
    """
    with suppress_step_warnings(ChosenItemWarning):
        tree = opened(source, read_options(opening))
    function, view, location = conversion_of(tree), view_of(tree), str(source)
    if function is None:
        names = [action(name, location, "DST") for name in ("hf_to_maxtext", "maxtext_to_hf")]
        raise UsageError(
            "this checkpoint does not show in which direction to convert it",
            location=location,
            got=f"{tree.metadata.format}, with names of neither Hugging Face nor MaxText, or of both",
            expected="a Hugging Face model or a MaxText checkpoint",
            hint=f"name the direction: {names[0]} or {names[1]}; "
            f"{action('inspect', location)} lists the names",
        )
    if function == "hf_to_maxtext":
        return InferredConversion(function, f"a Hugging Face model ({tree.metadata.format})", "MaxText")
    kind = view.kind or tree.metadata.format
    return InferredConversion(function, f"a MaxText checkpoint ({kind})", "Hugging Face")
