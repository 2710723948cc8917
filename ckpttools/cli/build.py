"""Commands that build models: average, shrink, stitch, synth."""

from __future__ import annotations

import re

import click

from ckpttools.api.options.build import AVERAGE, AVERAGE_READING, SHRINK, SYNTH
from ckpttools.api.options.convert import NEW_TARGET
from ckpttools.cli.message_terms import flag
from ckpttools.cli.options import ANY_PATH, MODEL, flags, given_flags, output_options, resource_options
from ckpttools.cli.write import (
    WriteCommand,
    WriteFunction,
    common_options,
    model_source_and_destination,
    target_options,
    writes,
)
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


@click.command(short_help="Create a randomly initialized model from a config.", cls=WriteCommand)
@click.argument("source", metavar="CONFIG", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@flags(*SYNTH, *NEW_TARGET[:1])
@given_flags(*NEW_TARGET[1:])
@resource_options
@output_options
@writes
def synth() -> WriteFunction:
    """Create a randomly initialized model of any family.

    CONFIG is a config.json, or its directory; no weights are needed. Norms are the identity; other weights
    have the standard deviation initializer_range of the configuration and are the same for any --jobs.
    Without --to, DST has safetensors for Hugging Face and Orbax for MaxText.

    \b
    Examples:
      $ ckpt synth ~/DeepSeek-V3/config.json ~/noise
      $ ckpt synth ~/Llama-3.1-8B ~/noise --as maxtext --seed 7
    """
    from ckpttools.api.synth import synth

    return synth


@click.command(short_help="Combine one model's towers with another's decoder.", cls=WriteCommand)
@click.argument("source", metavar="SRC", type=MODEL)
@click.argument("decoder", metavar="DECODER", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@target_options
@common_options
@writes
def stitch() -> WriteFunction:
    """Combine the towers of SRC with the text model of DECODER: embedding, layers, final norm and head.

    Both are Hugging Face models, or both MaxText's; the text models must have the same shapes. DECODER may be
    a text-only model. config.json and the tokenizer come from SRC.

    \b
    Examples:
      $ ckpt stitch ~/Qwen3-VL-8B ~/tuned-text ~/tuned-vl
      $ ckpt stitch ~/gemma-3-4b-it ~/gemma-tuned ~/gemma-tuned-vision --overwrite
    """
    from ckpttools.api.synth import stitch

    return stitch
