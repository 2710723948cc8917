"""`ckpt reshard`: rewrite a checkpoint's chunks for a device mesh."""

from __future__ import annotations

import click

from ckpttools.api.options.convert import RESHARD, RESHARD_STORAGE
from ckpttools.cli.options import flags, given_flags
from ckpttools.cli.write import WriteCommand
from ckpttools.cli.writing import WriteFunction, common_options, source_and_destination, writes


@click.command(short_help="Rewrite a checkpoint's chunks for a device mesh.", cls=WriteCommand)
@source_and_destination
@flags(*RESHARD)
@given_flags(*RESHARD_STORAGE)
@common_options
@writes
def reshard() -> WriteFunction:
    """Write an Orbax checkpoint in which each device of a mesh reads full chunks.

    DST also stores the sharding on that mesh: Orbax restores arrays with it, unless a target overrides it.
    SRC may have any format and is read once; no device is needed.

    \b
    Examples:
      $ ckpt reshard ~/llama ~/llama-32 --mesh fsdp=16,tensor=2
      $ ckpt inspect chunks ~/llama-32 --mesh fsdp=16,tensor=2 --rules maxtext
    """
    from ckpttools.api.reshard import reshard

    return reshard
