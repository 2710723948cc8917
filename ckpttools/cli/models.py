"""`ckpt convert hf-to-maxtext` and `maxtext-to-hf`: between two spellings of one model."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.declared import declared
from ckpttools.cli.options import (
    ANY_PATH,
    SOME_TEXT,
    max_header_option,
    max_index_option,
    output_options,
    patterns_option,
    resource_options,
    step_option,
    together,
)
from ckpttools.cli.storage import storage_options
from ckpttools.cli.transforming import dtype_option, places
from ckpttools.cli.write import write
from ckpttools.formats.safetensors.format import MAX_SHARD

rope_layout_option = click.option(
    "--rope-layout",
    type=click.Choice(("halves", "interleaved")),
    help="Order of rotary pairs in MaxText's query and key; without it as the model's rope type implies.",
)
family_option = click.option(
    "--family",
    type=SOME_TEXT,
    metavar="NAME|FILE",
    help="Use this family's rows, whatever model_type says: a name of `ckpt families`, or your own file.",
)
_tied_option = click.option(
    "--tied",
    type=click.Choice(("keep", "drop", "materialize")),
    help="What becomes of the output head: as the arrays are, without one, or made from the embedding. "
    "Without this, config.json says, and arrays that contradict it are refused.",
)
model_options = together(rope_layout_option, family_option, _tied_option)
"""Adds what a user may say of the model, whatever its configuration says."""


_mapping_options = together(
    click.option(
        "--scan/--no-scan",
        default=True,
        show_default=True,
        help="Stack the layers, as MaxText's scan_layers=true wants them, or keep one array for each.",
    ),
    click.option(
        "--scan-axis",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        metavar="N",
        help="Axis on which layers are stacked, 0 or 1 (MaxText's param_scan_axis).",
    ),
    dtype_option,
    click.option(
        "--exact",
        is_flag=True,
        help="Store in float32 the arrays whose values would otherwise not come back to the bit.",
    ),
    click.option(
        "--pad-vocab",
        type=click.IntRange(min=1),
        metavar="N",
        help="Give the vocabulary N rows, zeros at the end; the way back cuts them off.",
    ),
    click.option(
        "--carry",
        is_flag=True,
        help="Keep what is not converted (vision tower, prediction layers) beside the arrays, "
        "for the way back. Without it, it is left out, by name.",
    ),
    model_options,
    patterns_option("--drop", "Leave out source arrays whose names match, such as '*.rotary_emb.*'."),
    max_header_option,
)


@click.command("hf-to-maxtext", short_help="Hugging Face safetensors to MaxText's Orbax.")
@places
@_mapping_options
@storage_options
@resource_options
@output_options
def hf_to_maxtext(**options: Any) -> None:
    """Convert a Hugging Face checkpoint into one that MaxText trains and decodes from.

    SRC is a directory with safetensors and config.json. DST gets 0/items, as MaxText's own converter
    lays it out; give it to MaxText as load_parameters_path=DST/0/items.

    Nothing has the name DST before everything is written; until then DST.partial grows. The same command
    again goes on where an interrupted one stopped.

    \b
    Example:
      ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
    """
    from ckpttools.api.hf_to_maxtext import hf_to_maxtext

    write(hf_to_maxtext.plan, **options)


_back_options = together(
    click.option(
        "--like",
        type=ANY_PATH,
        metavar="HF_DIR|CONFIG",
        help="Directory of the model it came from, or a config.json; without it what hf-to-maxtext carried.",
    ),
    dtype_option,
    click.option(
        "--prefix",
        metavar="NAME",
        help="Write only the model below this path of a composite one, and take the path off its names.",
    ),
    click.option(
        "--names",
        type=click.Choice(("hub", "transformers", "text")),
        help="How tensors are named, where the hub and transformers differ; without it as in the model "
        "it came from. 'text' writes the text model of a multimodal one, with its own config.json.",
    ),
    click.option(
        "--scan-axis",
        type=click.IntRange(0, 1),
        metavar="N",
        help="Axis on which layers are stacked, 0 or 1, where the arrays do not tell.",
    ),
    click.option(
        "--carry",
        is_flag=True,
        help="Take what is not converted (vision tower, prediction layers) from --like.",
    ),
    click.option(
        "--padding-rows",
        type=click.Choice(("keep", "drop")),
        help="What becomes of rows beyond the vocabulary, whatever they hold: written, with a vocab_size of "
        "so many, or left out. Without this, zeros are left out and others refused.",
    ),
    model_options,
    step_option,
    max_index_option,
)


@click.command("maxtext-to-hf", short_help="MaxText's Orbax to Hugging Face safetensors.")
@places
@_back_options
@declared([MAX_SHARD])
@resource_options
@output_options
def maxtext_to_hf(**options: Any) -> None:
    """Convert a MaxText checkpoint into one that transformers, vLLM and others load.

    SRC is a run directory, a step or an item: parameters alone or a training checkpoint, whose optimizer
    state is not read; of Linen or NNX; with stacked layers or not. DST is a directory; it gets the weights,
    config.json and whatever else hf-to-maxtext carried along, or --like has.

    \b
    Example:
      ckpt convert maxtext-to-hf ~/run/checkpoints ~/tuned --like ~/Llama-3.1-8B
    """
    from ckpttools.api.maxtext_to_hf import maxtext_to_hf

    write(maxtext_to_hf.plan, **options)
