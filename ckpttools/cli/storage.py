"""Options that say how Orbax and zarr store what is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttools.cli.options import SIZE, bundled
from ckpttools.errors import UsageError

if TYPE_CHECKING:
    from ckpttools.formats.chunk_codecs import CompressionSpec


class Compression(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """`none`, `zstd` or `zstd:9`, as `ckpttools.formats.chunk_codecs.parse_compression` takes it."""

    name = "compression"

    def convert(
        self, value: str | CompressionSpec, param: click.Parameter | None, ctx: click.Context | None
    ) -> CompressionSpec | None:
        from ckpttools.formats.chunk_codecs import parse_compression

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
storage_options = bundled(
    "storage",
    dict,
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
)
"""Hands the command the arguments of `OrbaxWriter` of the same names, as `storage`."""
