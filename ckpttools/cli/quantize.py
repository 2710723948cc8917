"""`ckpt quantize`: quantize the weights of a model."""

from __future__ import annotations

import click

from ckpttools.api.options.convert import QUANTIZE, QUANTIZE_READING, SHARDS
from ckpttools.cli.options import flags, given_flags, output_options, resource_options
from ckpttools.cli.write import WriteCommand
from ckpttools.cli.writing import WriteFunction, model_source_and_destination, writes


@click.command(short_help="Quantize a model to FP8 or MXFP4.", cls=WriteCommand)
@model_source_and_destination
@flags(*QUANTIZE)
@given_flags(*SHARDS)
@flags(*QUANTIZE_READING)
@resource_options
@output_options
@writes
def quantize() -> WriteFunction:
    """Quantize a model to FP8 or MXFP4 for transformers and vLLM.

    SRC is a Hugging Face model or a MaxText checkpoint. The matrices of linear layers are quantized;
    config.json records how, and which are not. The largest errors are listed; --json has the error of every
    array. Arrays with NaN or infinity are refused.

    \b
    Examples:
      $ ckpt quantize ~/run/checkpoints ~/tuned-fp8 --like ~/Qwen3-8B
      $ ckpt quantize ~/Qwen3-8B ~/Qwen3-8B-FP8 --exclude '*.down_proj.weight'
    """
    from ckpttools.api.quantize import quantize

    return quantize
