"""`ckpt shrink`: a part of a model that is a model itself."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.options import NON_EMPTY_TEXT, count_option, like_option
from ckpttools.cli.transform_options import (
    common_options,
    dtype_option,
    model_source_and_destination,
    target_options,
)
from ckpttools.cli.write import write


def _layers(context: click.Context, option: click.Parameter, value: str | None) -> int | list[int] | None:
    try:
        if value is None or value.isdecimal():
            return value and int(value)  # type: ignore[return-value]
        return [int(item) for item in value.split(",") if item]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no number, and no list such as 0,1,5.") from error


@click.command(short_help="A part of a model that is a model itself.")
@model_source_and_destination
@click.option(
    "--layers",
    metavar="N|N,N,…",
    callback=_layers,
    help="Keep the first N layers, or, with commas, those with these numbers.",
)
@count_option("--experts", "Keep the first N experts of each layer.")
@count_option("--vocab", "Keep the first N tokens; the tokenizer stays as it is.")
@like_option("The model that a MaxText checkpoint came from, if it carries no config.json.")
@click.option(
    "--family",
    type=NON_EMPTY_TEXT,
    metavar="NAME|FILE",
    help="The model's family, if not as config.json says.",
)
@dtype_option
@target_options
@common_options
def shrink(**options: Any) -> None:
    """Write some layers, experts or tokens of a model: a small one that runs, for bring-up and tests.

    SRC is a Hugging Face model or a MaxText checkpoint of any kind; moments of an optimizer are cut with the
    weights. config.json is made to describe the small model, also where a MaxText checkpoint carries it.
    Weights stay what they are. Whole chunks are shared with files of which at least half is kept, so that
    copies of DST do not carry what was cut; --reference shares them with others, too.

    \b
    Example:
      ckpt shrink ~/Llama-3.1-70B ~/four-layers --layers 4
      ckpt shrink ~/deepseek3 ~/small --layers 6 --experts 16 --vocab 32000
    """
    from ckpttools.api.shrink import shrink

    write(shrink.plan, **options)
