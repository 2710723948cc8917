"""`ckpt shrink`: make a smaller model from parts of a model."""

from __future__ import annotations

import click

from ckpttools.api.options.build import SHRINK
from ckpttools.cli.options import flags
from ckpttools.cli.write import WriteCommand
from ckpttools.cli.writing import (
    WriteFunction,
    common_options,
    model_source_and_destination,
    target_options,
    writes,
)


@click.command(short_help="Make a smaller model: fewer layers, experts or tokens.", cls=WriteCommand)
@model_source_and_destination
@flags(*SHRINK)
@target_options
@common_options
@writes
def shrink() -> WriteFunction:
    """Write a smaller model, with some layers, experts or tokens, for bring-up and tests.

    SRC is a Hugging Face model or any MaxText checkpoint; optimizer moments are cut with the weights.
    config.json is rewritten to describe the small model, also one stored in a MaxText checkpoint. Values do
    not change. Full chunks are shared with source files that keep at least half of their bytes, so that
    copies of DST do not contain the rest; --reference shares chunks with other files too.

    \b
    Examples:
      $ ckpt shrink ~/Llama-3.1-70B ~/four-layers --layers 4
      $ ckpt shrink ~/deepseek3 ~/small --layers 6 --experts 16 --vocab 32000
    """
    from ckpttools.api.shrink import shrink

    return shrink
