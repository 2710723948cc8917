"""`ckpt quantize`: a model with quantised weights."""

from __future__ import annotations

from typing import Any

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
from ckpttools.cli.write import write
from ckpttools.formats.safetensors.format import MAX_SHARD


@click.command(short_help="A model with quantised weights.")
@model_source_and_destination
@click.option(
    "--scheme",
    type=click.Choice(("fp8-block128", "mxfp4")),
    default="fp8-block128",
    show_default=True,
    help="FP8 in blocks of 128 x 128 with float32 scales, as of DeepSeek V3 and Qwen; or MXFP4 for experts "
    "in gpt-oss's layout.",
)
@patterns_option(
    "--exclude", "Leave these arrays as they are, besides embeddings, norms, heads, routers and towers."
)
@click.option(
    "--dtype",
    type=DTYPE,
    help="Cast the floating-point arrays that are not quantised; by default they stay as they are.",
)
@like_option("Of a MaxText checkpoint the model it came from, as of maxtext-to-hf.")
@click.option(
    "--carry",
    is_flag=True,
    help="Of a MaxText checkpoint: take what is not there (towers, prediction layers) from --like.",
)
@generated_options([MAX_SHARD])
@step_option
@max_header_option
@max_index_option
@prefer_rank_option
@resource_options
@output_options
def quantize(**options: Any) -> None:
    """Write a model as FP8 or MXFP4, for transformers, vLLM and others.

    SRC is a Hugging Face model or a MaxText checkpoint. The matrices of linear layers are quantised;
    config.json says how, and which are not. The error of each array is in --json, the largest are listed.
    Arrays with NaN or infinity are refused.

    \b
    Example:
      ckpt quantize ~/run/checkpoints ~/tuned-fp8 --like ~/Qwen3-8B
      ckpt quantize ~/Qwen3-8B ~/Qwen3-8B-FP8 --exclude '*.down_proj.weight'
    """
    from ckpttools.api.quantize import quantize

    write(quantize.plan, **options)
