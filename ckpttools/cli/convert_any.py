"""`ckpt convert to-…`: any format into one, without knowing the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.options import SIZE
from ckpttools.cli.storage import compression_option, storage_options
from ckpttools.cli.transforming import common_options, places, transform_options, write

if TYPE_CHECKING:
    from ckpttools.formats.zarr.chunk_codecs import CompressionSpec


@click.command("to-safetensors", short_help="Any format to safetensors.")
@places
@click.option(
    "--max-shard-size",
    type=SIZE,
    default="5GB",
    show_default=True,
    help="Bytes of tensors in one file at most, unless one alone has more; as huggingface_hub splits them.",
)
@click.option(
    "--separator",
    type=click.Choice((".", "/")),
    default=".",
    show_default=True,
    help="What joins the keys of a path to the name of a tensor.",
)
@transform_options
@common_options
def to_safetensors(max_shard_size: int, separator: str, changes: dict[str, Any], **common: Any) -> None:
    """Write any checkpoint as safetensors: the same arrays under the same names, no model known.

    SRC may be a file, an item, a step or a run directory. DST is a directory; it gets model.safetensors,
    or model-00001-of-00003.safetensors and so on with model.safetensors.index.json.

    What safetensors has no place for (keys of lists, empty nodes, strings, custom metadata, the step) goes
    into the metadata of the first file, and comes back when that is converted or inspected.

    \b
    Example:
      ckpt convert to-safetensors ~/maxtext/llama ~/llama --dtype bfloat16
    """
    from ckpttools.api.convert import convert

    own = {**changes, "max_shard_size": max_shard_size, "separator": separator}
    write(convert.plan, to="safetensors", **own, **common)


@click.command("to-orbax", short_help="Any format to Orbax.")
@places
@click.option("--item", default="items", show_default=True, metavar="NAME", help="Name of the item.")
@click.option(
    "--as-step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Number of the step that is written; without it that of SRC, or 0 where it has none.",
)
@storage_options
@transform_options
@common_options
def to_orbax(
    item: str, as_step: int | None, storage: dict[str, Any], changes: dict[str, Any], **common: Any
) -> None:
    """Write any checkpoint as Orbax, or an Orbax checkpoint in another layout: no model known.

    SRC may be a file, an item, a step or a run directory. DST gets <step>/<item>, as CheckpointManager and
    MaxText lay it out.

    Keys of lists, empty nodes, strings, scalars, typed PRNG keys, custom metadata and the step are kept.
    Arrays restore as numpy's where no target says otherwise, typed PRNG keys on one device.

    \b
    Example:
      ckpt convert to-orbax ~/run/checkpoints ~/smaller --compression zstd:9
      ckpt convert to-orbax weights.safetensors ~/orbax --item params --no-ocdbt
    """
    from ckpttools.api.convert import convert

    write(convert.plan, to="orbax", item=item, as_step=as_step, storage=storage, **changes, **common)


@click.command("to-zarr3", short_help="Any format to a plain zarr v3 hierarchy.")
@places
@compression_option
@transform_options
@common_options
def to_zarr3(compression: CompressionSpec | None, changes: dict[str, Any], **common: Any) -> None:
    """Write any checkpoint as zarr v3: groups and arrays under the keys of the tree, no model known.

    SRC may be a file, an item, a step or a run directory. DST is the root group, which zarr.open_group of
    zarr-python opens. Arrays of dtypes that zarr-python lacks, such as bfloat16, are read by tensorstore;
    zarr-python opens what is beside them by name, but cannot list their group.

    What zarr has no place for (keys of lists, empty nodes, strings, custom metadata, the step) goes into
    the attributes of the root, and comes back when that is converted or inspected.

    \b
    Example:
      ckpt convert to-zarr3 ~/maxtext/llama ~/zarr/llama --dtype float32
    """
    from ckpttools.api.convert import convert

    write(convert.plan, to="zarr3", compression=compression, **changes, **common)
