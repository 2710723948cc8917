"""`ckpt synth` and `ckpt stitch`: create models from random values or from two models."""

from __future__ import annotations

import click

from ckpttools.api.options.build import SYNTH
from ckpttools.api.options.convert import NEW_TARGET
from ckpttools.cli.options import ANY_PATH, MODEL, flags, given_flags, output_options, resource_options
from ckpttools.cli.write import WriteCommand
from ckpttools.cli.writing import WriteFunction, common_options, target_options, writes


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
