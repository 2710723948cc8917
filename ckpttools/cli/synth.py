"""`ckpt synth` and `ckpt stitch`: create models from random values or from two models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.options import ANY_PATH, DTYPE, MODEL, output_options, resource_options
from ckpttools.cli.transform_options import common_options, new_target_options, target_options
from ckpttools.cli.write import WriteCommand

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared


@click.command(short_help="Create a randomly initialized model from a config.", cls=WriteCommand)
@click.argument("source", metavar="CONFIG", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@click.option(
    "--seed",
    type=int,
    metavar="N",
    default=0,
    show_default=True,
    help="Random seed; the same seed gives the same bits.",
)
@click.option(
    "--as",
    "names",
    type=click.Choice(("huggingface", "maxtext")),
    default="huggingface",
    show_default=True,
    help="Framework whose names and layout to write.",
)
@click.option("--scan/--no-scan", default=True, show_default=True, help="For MaxText: stack the layers.")
@click.option("--dtype", type=DTYPE, help="Dtype of the weights. Default: bfloat16.")
@new_target_options
@resource_options
@output_options
def synth(**options: Any) -> Prepared:
    """Create a randomly initialized model of any family.

    CONFIG is a config.json, or its directory; no weights are needed. Norms are the identity; other weights
    have the standard deviation initializer_range of the configuration and are the same for any --jobs.
    Without --to, DST has safetensors for Hugging Face and Orbax for MaxText.

    \b
    Example:
      ckpt synth ~/DeepSeek-V3/config.json ~/noise
      ckpt synth ~/Llama-3.1-8B ~/noise --as maxtext --seed 7
    """
    from ckpttools.api.synth import synth

    return synth.plan(**options)


@click.command(short_help="Combine one model's towers with another's decoder.", cls=WriteCommand)
@click.argument("source", metavar="SRC", type=MODEL)
@click.argument("decoder", metavar="DECODER", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@target_options
@common_options
def stitch(**options: Any) -> Prepared:
    """Combine the towers of SRC with the text model of DECODER: embedding, layers, final norm and head.

    Both are Hugging Face models, or both MaxText's; the text models must have the same shapes. DECODER may be
    a text-only model. config.json and the tokenizer come from SRC.

    \b
    Example:
      ckpt stitch ~/Qwen3-VL-8B ~/tuned-text ~/tuned-vl
    """
    from ckpttools.api.synth import stitch

    return stitch.plan(**options)
