"""From any format to any: the same tree, or what transforms make of it, in other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpttools.api.arguments import (
    Patterns,
    Reading,
    Size,
    Source,
    Storing,
    opened,
    patterns_of,
    read_options,
)
from ckpttools.api.conversion import Conversion, Resources
from ckpttools.api.prepared import Prepared, Writing, command, prepare, writing_of
from ckpttools.api.save import plan_tree
from ckpttools.api.storing import fitting, orbax_options, writer_for
from ckpttools.core.budget import parse_size
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.wording import option
from ckpttools.formats.base import ReadOptions, Writer
from ckpttools.maxtext.strip import StripOptimizer
from ckpttools.transforms.base import Transform
from ckpttools.transforms.cast import CastMap
from ckpttools.transforms.functions import Mapper, mapped_by
from ckpttools.transforms.select import Select

if TYPE_CHECKING:
    from typing import Unpack


def plan_any(
    source: Source,
    writer: Writer,
    *,
    read: ReadOptions | None = None,
    resources: Resources | None = None,
    transforms: Sequence[Transform] = (),
) -> Conversion:
    """Plans writing the checkpoint at `source` with `writer`; reads headers and indexes, no array.

    Args:
        source: a file, an item, a step or a run directory of any format.
        writer: the format to write and its options.
        read: how to open the source.
        resources: what the conversion may take.
        transforms: what to make of the tree on the way, first to last.

    Raises:
        CheckpointError: the source cannot be read, a transform does not take it, the format cannot hold
            it, or the work does not fit into the memory.
    """
    return plan_tree(opened(source, read).pipe(*transforms), writer, resources)


class Changing(Reading, Storing, Writing, total=False):
    """What calls that change a tree and write it hand on.

    Attributes:
        to: format of the destination, "orbax", "safetensors" or "zarr3"; None for that of the source.
    """

    to: str | None


def write_changed(
    transforms: Sequence[Transform], source: Source, destination: str | Path, said: Changing
) -> Prepared:
    """Prepares writing what transforms make of a source, in its format and under its step and item."""
    read, storage = read_options(said), orbax_options(said, destination, shares=True)

    def plan(resources: Resources) -> Conversion:
        tree, to = opened(source, read), said.get("to")
        writer = writer_for(tree, to, **fitting(storage, to or tree.metadata.format))
        return plan_tree(tree.pipe(*transforms), writer, resources)

    return prepare(plan, source, destination, **writing_of(said))


class _Common(Reading, Storing, Writing, total=False):
    """What `convert` hands on."""


@command(_Common)
def convert(
    source: Source,
    destination: str | Path,
    *,
    to: str | None = None,
    strip_optimizer: bool = False,
    keep: Patterns = (),
    drop: Patterns = (),
    map: Mapper | None = None,
    strict: bool = False,
    dtype: DType | str | None = None,
    dtype_map: Mapping[str, DType | str] | None = None,
    force: bool = False,
    item: str | None = None,
    as_step: int | None = None,
    max_shard_size: Size | None = None,
    separator: str | None = None,
    **common: Unpack[_Common],
) -> Prepared:
    """Writes any checkpoint in another format, or in another layout of its own: no model known.

    The changes apply in this order: strip, select, rename, cast.

    Args:
        source: a file, an item, a step, a run directory, or a tree.
        destination: directory that appears when everything is written.
        to: "orbax", "safetensors" or "zarr3"; None for the format of the source.
        strip_optimizer: leave out optimizer state; what `drop` names goes before.
        keep, drop: as of `ckpttools.select`.
        map, strict: as of `ckpttools.remap`.
        dtype, dtype_map, force: as of `ckpttools.cast`.
        item, as_step: of Orbax: name of the item, "items" without it, and number of the step, that of the
            source without it.
        max_shard_size, separator: of safetensors: bytes of tensors in one file at most, and what joins keys
            to names.
        common: `Reading`, `Storing` (`ckpttools.api.arguments`) and `Writing` (`ckpttools.api.prepared`).

    Raises:
        UsageError: an option that the format does not have, or that is about another that is not given.
        CheckpointError: the source cannot be read, a change does not fit it, the format cannot hold it, the
            work does not fit into the memory, or reading or writing fails.
    """
    dropped = patterns_of(drop)
    transforms = [
        *([StripOptimizer(drop=dropped)] if strip_optimizer else []),
        *_selected(patterns_of(keep), () if strip_optimizer else dropped),
        *_mapped(map, strict),
        *_cast(dtype, dtype_map, force),
    ]
    read, storage = read_options(common), orbax_options(common, destination, shares=False)
    own = {
        "item": item,
        "step": as_step,
        "max_shard_bytes": None if max_shard_size is None else parse_size(max_shard_size),
        "separator": separator,
    }
    said = {name: value for name, value in own.items() if value is not None}

    def plan(resources: Resources) -> Conversion:
        tree = opened(source, read)
        named = {"item": "items"} if (to or tree.metadata.format) == "orbax" else {}
        writer = writer_for(tree, to, **{**named, **said, **storage})
        return plan_tree(tree.pipe(*transforms), writer, resources)

    return prepare(plan, source, destination, **writing_of(common))


def _selected(keep: Sequence[str], drop: Sequence[str]) -> list[Transform]:
    return [Select(keep, drop)] if keep or drop else []


def _mapped(map: Mapper | None, strict: bool) -> list[Transform]:
    if map is not None:
        return [mapped_by(map, strict=strict)]
    if strict:
        raise UsageError(
            f"{option('strict')} is about the rules of {option('map')}",
            hint=f"give {option('map')} as well",
        )
    return []


def _cast(
    dtype: DType | str | None, dtype_map: Mapping[str, DType | str] | None, force: bool
) -> list[Transform]:
    if dtype is not None or dtype_map:
        return [CastMap(dict(dtype_map or {}), dtype, force)]
    if force:
        raise UsageError(
            f"{option('force')} is about casts",
            hint=f"give {option('dtype')} or {option('dtype_map')} as well",
        )
    return []
