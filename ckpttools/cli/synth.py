"""`ckpt synth` and `ckpt stitch`: models of noise, and of two others."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.options import ANY_PATH, DTYPE, MODEL, output_options, resource_options
from ckpttools.cli.transform_options import common_options, new_target_options, target_options
from ckpttools.cli.write import write


@click.command(short_help="A model of noise, from its configuration.")
@click.argument("source", metavar="CONFIG", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@click.option(
    "--seed", type=int, metavar="N", default=0, show_default=True, help="The same seed gives the same bits."
)
@click.option(
    "--as",
    "names",
    type=click.Choice(("huggingface", "maxtext")),
    default="huggingface",
    show_default=True,
    help="Whose names and layout.",
)
@click.option("--scan/--no-scan", default=True, show_default=True, help="For MaxText: stack the layers.")
@click.option("--dtype", type=DTYPE, help="Of the weights; by default bfloat16.")
@new_target_options
@resource_options
@output_options
def synth(**options: Any) -> None:
    """Write a model of any family as before training: noise of a seed, norms that do nothing.

    CONFIG is a config.json, or the directory that has it; no weights are needed. The noise has the standard
    deviation that the configuration calls initializer_range, and is the same for any --jobs. Without --to,
    DST has safetensors for Hugging Face and Orbax for MaxText.

    \b
    Example:
      ckpt synth ~/DeepSeek-V3/config.json ~/noise
      ckpt synth ~/Llama-3.1-8B ~/noise --as maxtext --seed 7
    """
    from ckpttools.api.synth import synth

    write(synth.plan, **options)


@click.command(short_help="The towers of one model, the decoder of another.")
@click.argument("source", metavar="SRC", type=MODEL)
@click.argument("decoder", metavar="DECODER", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@target_options
@common_options
def stitch(**options: Any) -> None:
    """Write the towers of SRC with the text model of DECODER: embedding, layers, final norm and head.

    Both are Hugging Face models or both MaxText's; the text models must have the same shapes. DECODER may be
    a model of text alone. config.json and the tokenizer are those of SRC.

    \b
    Example:
      ckpt stitch ~/Qwen3-VL-8B ~/tuned-text ~/tuned-vl
    """
    from ckpttools.api.synth import stitch

    write(stitch.plan, **options)
