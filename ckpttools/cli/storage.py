"""Options that say how Orbax and zarr store what is written."""

from __future__ import annotations

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


def _storage(by_default: bool) -> Decorator:
    """Options of how Orbax stores what is written.

    Args:
        by_default: whether the command shares bytes with SRC, where nothing is lost, if nothing is said.
    """
    return bundled(
        "storage",
        _said,
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


def _said(**values: Any) -> dict[str, Any]:
    """What the user says of it: where something is said, less is shared with the source."""
    context = click.get_current_context()
    said = {
        name: value
        for name, value in values.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if "compression" in said:
        said["compression"] = said["compression"] or "none"
    return said


storage_options = _storage(by_default=False)
"""Hands the command what the user says of it as `storage`, arguments of `ckpttools.api.arguments.Storing`."""

sharing_storage_options = _storage(by_default=True)
"""The same for commands that change the tree rather than the layout: what can be shared with SRC is."""
