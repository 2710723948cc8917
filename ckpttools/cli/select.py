"""`ckpt select`: some arrays of a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.options import SOME_TEXT
from ckpttools.cli.transforming import (
    common_options,
    drop_option,
    keep_option,
    locations,
    target_options,
)
from ckpttools.cli.write import write


@click.command(short_help="Some arrays of a checkpoint.")
@locations
@keep_option
@drop_option
@click.option(
    "--prefix",
    type=SOME_TEXT,
    metavar="NAME",
    help="Keep only what begins with NAME and a dot, and cut that off: the policy beside a value model.",
)
@target_options
@common_options
def select(**options: Any) -> None:
    """Write the arrays that --keep matches (by default all), without those that --drop matches.

    With --prefix they are those of a model within another, under its own names; patterns are of the names
    in SRC.

    A pattern is a glob of a whole path, with "/" or "." between its keys, or of a key with everything below
    it. "*" stands for any text, even across keys; "?" for one character; "[0-9]" for one of several. A
    pattern that matches nothing is an error.

    \b
    Example:
      ckpt select ~/maxtext/run/checkpoints ~/weights --keep params
      ckpt select ~/ppo/step-100 ~/policy --prefix policy --to safetensors
      ckpt select ~/llama ~/body --drop '*embed_tokens*' --drop lm_head.weight
    """
    from ckpttools.api.changes import select

    write(select.plan, **options)
