"""`ckpt quantize`: quantize the weights of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.generated_options import generated_options
from ckpttools.cli.options import (
    DTYPE,
    like_option,
    max_header_option,
    max_index_option,
    output_options,
    patterns_option,
    prefer_rank_option,
    resource_options,
    step_option,
)
from ckpttools.cli.transform_options import model_source_and_destination
from ckpttools.cli.write import WriteCommand
from ckpttools.formats.safetensors.format import MAX_SHARD

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared


@click.command(short_help="Quantize a model to FP8 or MXFP4.", cls=WriteCommand)
@model_source_and_destination
@click.option(
    "--scheme",
    type=click.Choice(("fp8-block128", "mxfp4")),
    default="fp8-block128",
    show_default=True,
    help="FP8 in blocks of 128 x 128 with float32 scales, as in DeepSeek V3 and Qwen; or MXFP4 for experts "
    "in "
    "gpt-oss's layout.",
)
@patterns_option(
    "--exclude", "Don't quantize matching arrays (embeddings, norms, heads, routers and towers never are)."
)
@click.option(
    "--dtype",
    type=DTYPE,
    help="Cast floating-point arrays that are not quantized. Default: keep their dtypes.",
)
@like_option("The original model of a MaxText checkpoint, as for maxtext-to-hf.")
@click.option(
    "--carry",
    is_flag=True,
    help="For a MaxText checkpoint: take missing arrays (towers, MTP layers) from --like.",
)
@generated_options([MAX_SHARD])
@step_option
@max_header_option
@max_index_option
@prefer_rank_option
@resource_options
@output_options
def quantize(**options: Any) -> Prepared:
    """Quantize a model to FP8 or MXFP4 for transformers and vLLM.

    SRC is a Hugging Face model or a MaxText checkpoint. The matrices of linear layers are quantized;
    config.json records how, and which are not. The largest errors are listed; --json has the error of every
    array. Arrays with NaN or infinity are refused.

    \b
    Example:
      ckpt quantize ~/run/checkpoints ~/tuned-fp8 --like ~/Qwen3-8B
      ckpt quantize ~/Qwen3-8B ~/Qwen3-8B-FP8 --exclude '*.down_proj.weight'
    """
    from ckpttools.api.quantize import quantize

    return quantize.plan(**options)
