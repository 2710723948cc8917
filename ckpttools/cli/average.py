"""`ckpt average`: the weighted mean of checkpoints."""

from __future__ import annotations

import re
from typing import Any

import click

from ckpttools.cli.options import (
    ANY_PATH,
    combine_options,
    count_option,
    max_header_option,
    max_index_option,
    output_options,
    prefer_rank_option,
    resource_options,
)
from ckpttools.cli.transform_options import dtype_option, target_options
from ckpttools.cli.write import write
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import flag
from ckpttools.stores.location import Location
from ckpttools.transforms.mean_weights import DECAYS

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", re.IGNORECASE)
_choice_options = combine_options(
    click.option(
        "--steps",
        metavar="STEPS",
        help="Of one run: numbers and ranges, separated by commas. 1000..5000/500 is every 500th, which must "
        "all be there; 1000..5000 all finished steps within.",
    ),
    count_option("--last", "Of one run: the latest N finished steps."),
    click.option(
        "--weights",
        metavar="W,W,…",
        callback=lambda context, option, value: _parse_numbers(value),
        help="A number for each checkpoint, in their order; by default all count alike.",
    ),
    click.option(
        "--ema", type=float, metavar="B", help="Weights of a moving average with this decay, such as 0.9."
    ),
    click.option(
        "--decay",
        type=click.Choice(tuple(DECAYS)),
        help="Weights that amount to a learning rate which falls to zero in this way.",
    ),
    click.option(
        "--normalize/--no-normalize",
        default=True,
        show_default=True,
        help="Divide by the sum of the weights; without it the result is the sum.",
    ),
    click.option(
        "--parameters",
        metavar="KEY",
        help="What stands for the parameters of a training state: the key of an average in it, such as "
        "opt_state/1/ema; ema for the only one there is.",
    ),
    click.option(
        "--force",
        is_flag=True,
        help="Average models whose config.json files describe different computations, such as rotary scaling "
        "or activation. The result has the config.json of the last model.",
    ),
)


def _parse_numbers(value: str | None) -> list[float] | None:
    try:
        return None if value is None else [float(item) for item in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of numbers, such as 1,0.5,-0.5.") from error


def _reject_blanks(weights: list[float] | None, locations: list[Location]) -> None:
    """Refuses weights with blanks between, of which all but the first are taken for checkpoints."""
    numbers = [
        str(location) for location in locations if _NUMBER.fullmatch(str(location)) and not location.exists()
    ]
    if weights is not None and len(weights) == 1 and numbers:
        raise UsageError(
            "weights are separated by commas",
            got=f"{numbers[0]} as a checkpoint",
            expected=flag("weights", ",".join([f"{weights[0]:g}", *numbers])),
        )


@click.command(short_help="The weighted mean of checkpoints.")
@click.argument("source", metavar="SRC", type=ANY_PATH)
@click.argument("others", metavar="[SRC]...", type=ANY_PATH, nargs=-1)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@_choice_options
@dtype_option
@target_options
@max_header_option
@max_index_option
@prefer_rank_option
@resource_options
@output_options
def average(others: tuple[Location, ...], **options: Any) -> None:
    """Write the mean of steps of a run, or of checkpoints of one model in any formats.

    Sums are made in the order of the checkpoints, in float32 or wider, and rounded once: the bits are the
    same for any --jobs and --memory. Training states count with their parameters alone. The step, whole
    numbers and the files of a model are those of the last checkpoint. Names and shapes must be the same in
    all.

    With --no-normalize and --weights it is any sum: A + 0.5 (B - C) is A B C with --weights 1,0.5,-0.5.

    \b
    Example:
      ckpt average ~/run/checkpoints ~/merged --steps 1000..5000/500 --decay sqrt
      ckpt average ~/seed-1 ~/seed-2 ~/seed-3 ~/soup
    """
    from ckpttools.api.average import average

    _reject_blanks(options["weights"], [*others, options["destination"]])
    write(average.plan, others=others, **options)
