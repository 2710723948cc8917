"""`ckpt shrink`: make a smaller model of a model's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.options import NON_EMPTY_TEXT, count_option, like_option
from ckpttools.cli.transform_options import (
    common_options,
    dtype_option,
    model_source_and_destination,
    target_options,
)
from ckpttools.cli.write import WriteCommand

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared


def _layers(context: click.Context, option: click.Parameter, value: str | None) -> int | list[int] | None:
    try:
        if value is None or value.isdecimal():
            return value and int(value)  # type: ignore[return-value]
        return [int(item) for item in value.split(",") if item]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is neither a number nor a list such as 0,1,5.") from error


@click.command(short_help="Make a smaller model: fewer layers, experts or tokens.", cls=WriteCommand)
@model_source_and_destination
@click.option(
    "--layers",
    metavar="N|N,N,…",
    callback=_layers,
    help="Keep the first N layers, or, with commas, those with these numbers.",
)
@count_option("--experts", "Keep the first N experts of each layer.")
@count_option("--vocab", "Keep the first N tokens; the tokenizer stays as it is.")
@like_option("The original model of a MaxText checkpoint without a stored config.json.")
@click.option(
    "--family",
    type=NON_EMPTY_TEXT,
    metavar="NAME|FILE",
    help="The model's family, if not as config.json says.",
)
@dtype_option
@target_options
@common_options
def shrink(**options: Any) -> Prepared:
    """Write a smaller model, with some layers, experts or tokens, for bring-up and tests.

    SRC is a Hugging Face model or any MaxText checkpoint; optimizer moments are cut with the weights.
    config.json is rewritten to describe the small model, also one stored in a MaxText checkpoint. Values do
    not change. Full chunks are shared with source files that keep at least half of their bytes, so that
    copies of DST do not contain the rest; --reference shares chunks with other files too.

    \b
    Example:
      ckpt shrink ~/Llama-3.1-70B ~/four-layers --layers 4
      ckpt shrink ~/deepseek3 ~/small --layers 6 --experts 16 --vocab 32000
    """
    from ckpttools.api.shrink import shrink

    return shrink.plan(**options)
