"""`ckpt reshard`: rewrite a checkpoint's chunks for a device mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.generated_options import generated_options
from ckpttools.cli.options import NON_EMPTY_TEXT, SIZE
from ckpttools.cli.transform_options import common_options, source_and_destination
from ckpttools.cli.write import WriteCommand
from ckpttools.formats.orbax.options import OPTIONS

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

_UNSUPPORTED_OPTIONS = ("chunks", "reference")


@click.command(short_help="Rewrite a checkpoint's chunks for a device mesh.", cls=WriteCommand)
@source_and_destination
@click.option(
    "--mesh",
    required=True,
    type=NON_EMPTY_TEXT,
    metavar="MESH",
    help="Axes of the devices and their sizes: fsdp=16,tensor=2.",
)
@click.option(
    "--rules",
    type=NON_EMPTY_TEXT,
    default="maxtext",
    show_default=True,
    metavar="RULES",
    help="Sharding rules: maxtext (its logical_axis_rules), or a TOML or JSON file.",
)
@click.option(
    "--subchunks",
    type=SIZE,
    metavar="SIZE",
    help="Largest chunk, such as 8MiB; smaller chunks also suit larger meshes. Default: 64 MiB.",
)
@generated_options([option for option in OPTIONS if option.name not in _UNSUPPORTED_OPTIONS])
@common_options
def reshard(**options: Any) -> Prepared:
    """Write an Orbax checkpoint in which each device of a mesh reads full chunks.

    DST also stores the sharding on that mesh: Orbax restores arrays with it, unless a target overrides it.
    SRC may have any format and is read once; no device is needed.

    \b
    Example:
      ckpt reshard ~/llama ~/llama-32 --mesh fsdp=16,tensor=2
      ckpt inspect chunks ~/llama-32 --mesh fsdp=16,tensor=2 --rules maxtext
    """
    from ckpttools.api.reshard import reshard

    return reshard.plan(**options)
