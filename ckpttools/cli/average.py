"""`ckpt average`: average checkpoints with weights."""

from __future__ import annotations

import re

import click

from ckpttools.api.options.build import AVERAGE, AVERAGE_READING
from ckpttools.cli.message_terms import flag
from ckpttools.cli.options import ANY_PATH, flags, output_options, resource_options
from ckpttools.cli.write import WriteCommand
from ckpttools.cli.writing import WriteFunction, target_options, writes
from ckpttools.core.errors import UsageError
from ckpttools.stores.location import Location

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", re.IGNORECASE)


def _reject_blanks(weights: list[float] | None, locations: list[Location]) -> None:
    """Raise UsageError for weights with spaces, because click would parse the rest as checkpoints."""
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
@flags(*AVERAGE)
@target_options
@flags(*AVERAGE_READING)
@resource_options
@output_options
@writes
def average() -> WriteFunction:
    """Write the mean of steps of a run, or of checkpoints of one model in any format.

    Sums are accumulated in checkpoint order, in float32 or wider, and rounded once: the result is bitwise the
    same for any --jobs and --memory. Only the parameters of training states are averaged. The step, integers
    and model files come from the last checkpoint. Names and shapes must agree.

    With --no-normalize, --weights computes any sum: A + 0.5 (B - C) is A B C with --weights 1,0.5,-0.5.

    \b
    Examples:
      $ ckpt average ~/run/checkpoints ~/merged --steps 1000..5000/500 --decay sqrt
      $ ckpt average ~/seed-1 ~/seed-2 ~/seed-3 ~/soup
    """
    from ckpttools.api.average import average

    given = click.get_current_context().params
    _reject_blanks(given["weights"], [*given["others"], given["destination"]])
    return average
