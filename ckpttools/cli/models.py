"""`ckpt convert hf-to-maxtext` and `maxtext-to-hf`."""

from __future__ import annotations

import click

from ckpttools.api.options.convert import HF_TO_MAXTEXT, MAXTEXT_TO_HF, SHARDS
from ckpttools.cli.convert import ConvertCommand
from ckpttools.cli.options import flags, given_flags, output_options, resource_options
from ckpttools.cli.write import WriteFunction, model_source_and_destination, storage_options, writes


@click.command(
    "hf-to-maxtext",
    short_help="Convert Hugging Face safetensors to a MaxText checkpoint.",
    cls=ConvertCommand,
)
@model_source_and_destination
@flags(*HF_TO_MAXTEXT)
@storage_options
@resource_options
@output_options
@writes
def hf_to_maxtext() -> WriteFunction:
    """Convert a Hugging Face checkpoint to a MaxText checkpoint.

    SRC is a directory with config.json and the weights, as safetensors or as PyTorch and its trainers save
    them, or a model on the Hub. DST gets 0/items in the layout of MaxText's own converter; pass it to MaxText
    as load_parameters_path=DST/0/items.

    DST appears only when everything is written; until then the data is in DST.partial. Run the same command
    again to resume an interrupted conversion.

    \b
    Examples:
      $ ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
      $ ckpt convert hf-to-maxtext ~/Llama-3.1-8B ~/out --no-scan --dtype bfloat16
      $ ckpt convert hf-to-maxtext hf://Qwen/Qwen3-8B gs://bucket/qwen3 --dry-run
    """
    from ckpttools.api.hf_to_maxtext import hf_to_maxtext

    return hf_to_maxtext


@click.command(
    "maxtext-to-hf",
    short_help="Convert a MaxText checkpoint to Hugging Face safetensors.",
    cls=ConvertCommand,
)
@model_source_and_destination
@flags(*MAXTEXT_TO_HF)
@given_flags(*SHARDS)
@resource_options
@output_options
@writes
def maxtext_to_hf() -> WriteFunction:
    """Convert a MaxText checkpoint to a model that transformers and vLLM load.

    SRC is a run directory, a step or an item, with parameters only or training state (the optimizer is not
    read), in Linen or NNX, with stacked layers or not. DST gets the weights, config.json and the other files
    that hf-to-maxtext stored or --like has.

    \b
    Examples:
      $ ckpt convert maxtext-to-hf ~/run/checkpoints ~/tuned --like ~/Llama-3.1-8B
      $ ckpt convert maxtext-to-hf gs://bucket/run ~/tuned --step 500
    """
    from ckpttools.api.maxtext_to_hf import maxtext_to_hf

    return maxtext_to_hf
