"""`ckpt average`: average checkpoints with weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

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
from ckpttools.cli.write import WriteCommand
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import flag
from ckpttools.stores.location import Location
from ckpttools.transforms.mean_weights import DECAYS

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", re.IGNORECASE)
_choice_options = combine_options(
    click.option(
        "--steps",
        metavar="STEPS",
        help="Steps of one run: numbers and ranges, separated by commas. 1000..5000/500 is every 500th, "
        "which "
        "must all exist; 1000..5000 all finished steps in the range.",
    ),
    count_option("--last", "Average the latest N finished steps of one run."),
    click.option(
        "--weights",
        metavar="W,W,…",
        callback=lambda context, option, value: _parse_numbers(value),
        help="One weight for each checkpoint, in order. Default: equal weights.",
    ),
    click.option(
        "--ema",
        type=float,
        metavar="B",
        help="Weight the checkpoints like a moving average with this decay, such as 0.9.",
    ),
    click.option(
        "--decay",
        type=click.Choice(tuple(DECAYS)),
        help="Weight the checkpoints to emulate a learning rate that decays to zero this way.",
    ),
    click.option(
        "--normalize/--no-normalize",
        default=True,
        show_default=True,
        help="Divide by the sum of the weights, or return the weighted sum.",
    ),
    click.option(
        "--parameters",
        metavar="KEY",
        help="Average this subtree of a training state instead of its parameters: its key, such as "
        "opt_state/1/ema, or ema for the only one.",
    ),
    click.option(
        "--force",
        is_flag=True,
        help="Average models whose config.json files describe different computations, such as another RoPE "
        "scaling or activation. The result has the config.json of the last model.",
    ),
)


def _parse_numbers(value: str | None) -> list[float] | None:
    try:
        return None if value is None else [float(item) for item in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of numbers, such as 1,0.5,-0.5.") from error


def _reject_blanks(weights: list[float] | None, locations: list[Location]) -> None:
    """Raise UsageError for weights with spaces, since click would parse the rest as checkpoints."""
    numbers = [
        str(location) for location in locations if _NUMBER.fullmatch(str(location)) and not location.exists()
    ]
    if weights is not None and len(weights) == 1 and numbers:
        raise UsageError(
            "weights are separated by commas",
            got=f"{numbers[0]} as a checkpoint",
            expected=flag("weights", ",".join([f"{weights[0]:g}", *numbers])),
        )


@click.command(short_help="Average several checkpoints or steps of a run.", cls=WriteCommand)
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
def average(others: tuple[Location, ...], **options: Any) -> Prepared:
    """Write the mean of steps of a run, or of checkpoints of one model in any formats.

    Sums are accumulated in checkpoint order, in float32 or wider, and rounded once: the result is bitwise the
    same for any --jobs and --memory. Only the parameters of training states are averaged. The step, integers
    and model files come from the last checkpoint. Names and shapes must agree.

    With --no-normalize, --weights computes any sum: A + 0.5 (B - C) is A B C with --weights 1,0.5,-0.5.

    \b
    Example:
      ckpt average ~/run/checkpoints ~/merged --steps 1000..5000/500 --decay sqrt
      ckpt average ~/seed-1 ~/seed-2 ~/seed-3 ~/soup
    """
    from ckpttools.api.average import average

    _reject_blanks(options["weights"], [*others, options["destination"]])
    return average.plan(others=others, **options)
