"""`ckpt strip-optimizer`: the parameters of a training checkpoint."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.options import patterns_option, together
from ckpttools.cli.transforming import (
    common_options,
    dtype_option,
    places,
    target_options,
)
from ckpttools.cli.write import write

parameter_options = together(
    click.option("--keep-step", is_flag=True, help="Keep the training step; by default DST has step 0."),
    click.option(
        "--flavour",
        type=click.Choice(("same", "linen", "nnx")),
        default="same",
        show_default=True,
        help="How parameters are nested: as in SRC, params/params/…, or …/value.",
    ),
)
"""Adds how parameters are to be left over."""


@click.command("strip-optimizer", short_help="Parameters of a training checkpoint.")
@places
@parameter_options
@patterns_option("--keep", "Keep what matches, such as 'ema_params', a key and everything below it.")
@patterns_option("--drop", "Leave out what matches, whatever it is.")
@dtype_option
@target_options
@common_options
def strip_optimizer(**options: Any) -> None:
    """Write the parameters of a training checkpoint and nothing else.

    SRC may be a run directory, a step or an item; it is only read. DST gets 0/items, or <step>/items with
    --keep-step; pass that to MaxText as load_parameters_path.

    MaxText's trainers store the flavour linen, which all of MaxText loads. Its own tool for this writes nnx
    for a run with pure_nnx; decoding loads that, training does not.

    Optimizer state is recognised by its structure: it mirrors the parameters, with a step counter beside it
    or below a name that optimizers use. What mirrors them otherwise, such as an average of them (EMA), may be
    either: nothing is written until --keep or --drop decides. Everything that is learned stays.

    If there is nothing to strip, nothing is written and the exit code is 2.

    \b
    Example:
      ckpt strip-optimizer ~/run/checkpoints ~/llama --dtype bfloat16
    """
    from ckpttools.api.changes import strip_optimizer

    write(strip_optimizer.plan, **options)
