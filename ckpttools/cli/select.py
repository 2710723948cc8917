"""`ckpt select`: some arrays of a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.transforming import (
    common_options,
    drop_option,
    keep_option,
    places,
    target_options,
)
from ckpttools.cli.write import write


@click.command(short_help="Some arrays of a checkpoint.")
@places
@keep_option
@drop_option
@target_options
@common_options
def select(**options: Any) -> None:
    """Write the arrays that --keep matches (by default all), without those that --drop matches.

    A pattern is a glob of a whole path, with "/" or "." between its keys, or of a key with everything below
    it. "*" stands for any text, even across keys; "?" for one character; "[0-9]" for one of several. A
    pattern that matches nothing is an error.

    \b
    Example:
      ckpt select ~/maxtext/run/checkpoints ~/weights --keep params
      ckpt select ~/llama ~/body --drop '*embed_tokens*' --drop lm_head.weight
    """
    from ckpttools.api.changes import select

    write(select.plan, **options)
