"""Options that say how Orbax and zarr store what is written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ckpttools.cli.options import SIZE, Decorator, bundled
from ckpttools.core.errors import UsageError

if TYPE_CHECKING:
    from ckpttools.formats.zarr.chunk_codecs import CompressionSpec


class Compression(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """`none`, `zstd` or `zstd:9`, as `ckpttools.formats.zarr.chunk_codecs.parse_compression` takes it."""

    name = "compression"

    def convert(
        self, value: str | CompressionSpec, param: click.Parameter | None, ctx: click.Context | None
    ) -> CompressionSpec | None:
        from ckpttools.formats.zarr.chunk_codecs import parse_compression

        if not isinstance(value, str):
            return value
        try:
            return parse_compression(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


compression_option = click.option(
    "--compression",
    type=Compression(),
    default="none",
    show_default=True,
    metavar="none|zstd[:N]",
    help="Compress chunks: smaller on disk, slower to write and to load.",
)
_ENCODING = ("ocdbt", "zarr3", "compression", "target_data_file_bytes")


def _storage(by_default: bool) -> Decorator:
    """Options of how Orbax stores what is written.

    Args:
        by_default: whether the command shares bytes with SRC, where nothing is lost, if nothing is said.
    """
    return bundled(
        "storage",
        partial(_chosen, by_default),
        click.option(
            "--ocdbt/--no-ocdbt",
            default=True,
            show_default=True,
            help="Few data files under an index, or a directory for each array and a file for each chunk.",
        ),
        click.option(
            "--zarr3/--zarr2", default=True, show_default=True, help="Version of zarr that arrays are in."
        ),
        compression_option,
        click.option(
            "--target-data-file-size",
            "target_data_file_bytes",
            type=SIZE,
            metavar="SIZE",
            help="With OCDBT, begin another data file at this size; without it there is one.",
        ),
        click.option(
            "--reference/--copy",
            default=None,
            help=_SHARES if by_default else _COPIES,
        ),
    )


_SHARES = (
    "Share bytes with SRC by hard links, or write all of them. Without either, zarr chunks are shared that "
    "stay as they are, unless another option says how they are to be stored."
)
_COPIES = (
    "Share bytes with SRC by hard links, wherever that can be expressed, or write all of them (the default). "
    "Ranges of safetensors are shared in their order of axes, which loads slower."
)


def _chosen(by_default: bool, reference: bool | None, **values: Any) -> dict[str, Any]:
    from ckpttools.formats.references import NO_REFERENCES, ReferenceMode, References, reference_mode

    context = click.get_current_context()
    said = (context.get_parameter_source(name) for name in _ENCODING)
    encodes = any(source is not ParameterSource.DEFAULT for source in said)
    mode = reference_mode(reference, by_default=by_default, encodes=encodes)
    shared = References(mode, context.params["destination"])
    return {**values, "references": NO_REFERENCES if mode is ReferenceMode.NONE else shared}


storage_options = _storage(by_default=False)
"""Hands the command the arguments of `OrbaxWriter` of the same names, as `storage`. The command has a DST."""

sharing_storage_options = _storage(by_default=True)
"""The same for commands that change the tree rather than the layout: what can be shared with SRC is."""
