"""`ckpt convert hf-to-maxtext` and `maxtext-to-hf`: between the two layouts of one model."""

from __future__ import annotations

from shlex import split
from typing import Any

import click

from ckpttools.cli.generated_options import generated_options
from ckpttools.cli.options import (
    NON_EMPTY_TEXT,
    combine_options,
    complete_family,
    like_option,
    max_header_option,
    max_index_option,
    maxtext_option,
    output_options,
    patterns_option,
    prefer_rank_option,
    resource_options,
    step_option,
)
from ckpttools.cli.transform_options import (
    dequantize_like_option,
    dtype_option,
    model_source_and_destination,
    storage_options,
)
from ckpttools.cli.write import write
from ckpttools.formats.safetensors.format import MAX_SHARD

rope_layout_option = click.option(
    "--rope-layout",
    type=click.Choice(("halves", "interleaved")),
    help="Order of rotary pairs in MaxText's query and key; by default as the model's rope type implies.",
)
family_option = click.option(
    "--family",
    type=NON_EMPTY_TEXT,
    shell_complete=complete_family,
    metavar="NAME|FILE",
    help="Use this family's rows: a name of `ckpt families`, or your own file. A name is refused "
    "where the family of model_type takes the same arrays and would make other values of them.",
)
_tied_option = click.option(
    "--tied",
    type=click.Choice(("keep", "drop", "materialize")),
    help="What to do with the output head: keep the arrays as they are, leave it out, or make it from the "
    "embedding if none is stored. By default config.json decides, and arrays that contradict it are refused.",
)
model_options = combine_options(rope_layout_option, family_option, _tied_option)
"""Adds what a user may say of the model, whatever its configuration says."""


_maxtext_option = maxtext_option("Version of MaxText that is to load it: a release, or a commit of its main.")
_mapping_options = combine_options(
    click.option(
        "--scan/--no-scan",
        default=True,
        show_default=True,
        help="Stack the layers, as MaxText's scan_layers=true expects them, or keep one array per layer.",
    ),
    click.option(
        "--scan-axis",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        metavar="N",
        help="Axis on which layers are stacked, 0 or 1 (MaxText's param_scan_axis).",
    ),
    _maxtext_option,
    dtype_option,
    dequantize_like_option,
    click.option(
        "--exact",
        is_flag=True,
        help="Store in float32 the arrays whose values would otherwise not come back bit for bit.",
    ),
    click.option(
        "--pad-vocab",
        type=click.IntRange(min=1),
        metavar="N",
        help="Pad the vocabulary to N rows with zeros; the conversion back cuts them off.",
    ),
    click.option(
        "--text-only",
        is_flag=True,
        help="Leave out the towers of a multimodal model (vision, audio), which are converted by default.",
    ),
    click.option(
        "--carry",
        is_flag=True,
        help="Keep what is not converted (prediction layers, towers that are left out) beside the arrays, "
        "for the conversion back. By default it is left out and listed.",
    ),
    model_options,
    click.option(
        "--quantized",
        type=click.Choice(("dequantize", "keep")),
        default="dequantize",
        show_default=True,
        help="What to do with quantised weights: turn them into numbers of --dtype, bfloat16 by default, or "
        "keep FP8, with its scales beside it; `ckpt maxtext-config DST` says what MaxText makes of that.",
    ),
    patterns_option(
        "--drop",
        "Leave out source arrays whose names match, such as '*.rotary_emb.*', or a key and all below it.",
    ),
    max_header_option,
    prefer_rank_option,
)


@click.command("hf-to-maxtext", short_help="Hugging Face safetensors to MaxText's Orbax.")
@model_source_and_destination
@_mapping_options
@storage_options
@resource_options
@output_options
def hf_to_maxtext(**options: Any) -> None:
    """Convert a Hugging Face checkpoint into one that MaxText trains and decodes from.

    SRC is a directory with config.json and the weights, as safetensors or as PyTorch and its trainers save
    them, or a model of the hub. DST gets 0/items, laid out as by MaxText's own converter; pass it to MaxText
    as load_parameters_path=DST/0/items.

    DST appears only once everything is written; until then the data is in DST.partial. Running the same
    command again resumes an interrupted conversion.

    \b
    Example:
      ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
    """
    from ckpttools.api.hf_to_maxtext import hf_to_maxtext

    write(hf_to_maxtext.plan, **options)


def _conversion_arguments(
    _context: click.Context, _option: click.Parameter, declared: tuple[str, ...]
) -> tuple[str, ...]:
    """The words of all that was said, each of which may hold several."""
    return tuple(word for item in declared for word in split(item))


_reverse_options = combine_options(
    click.option(
        "--maxtext-config",
        multiple=True,
        callback=_conversion_arguments,
        metavar="WORDS",
        help="Where no config.json was carried along: make it of the settings of the run, CONFIG.yml first, "
        "then NAME=VALUE, as one text or one by one. Sizes are compared with the arrays.",
    ),
    like_option(
        "Directory of the model it came from, or a config.json; by default what hf-to-maxtext carried along."
    ),
    dtype_option,
    click.option(
        "--prefix",
        metavar="NAME",
        help="Write only the model below this path of a composite one, and strip the path from its names.",
    ),
    click.option(
        "--names",
        type=click.Choice(("hub", "transformers", "text")),
        help="How tensors are named, where the hub and transformers differ; by default as in the model it "
        "came from. 'text' writes the text model of a multimodal one, with its own config.json.",
    ),
    click.option(
        "--scan-axis",
        type=click.IntRange(0, 1),
        metavar="N",
        help="Axis on which layers are stacked, 0 or 1, where the arrays leave that open.",
    ),
    click.option(
        "--carry",
        is_flag=True,
        help="Take what is not there (towers, prediction layers) from --like.",
    ),
    click.option(
        "--padding-rows",
        type=click.Choice(("keep", "drop")),
        help="What to do with rows beyond the vocabulary, whatever they hold: write them, with a matching "
        "vocab_size, or leave them out. By default rows of zeros are left out and any others are refused.",
    ),
    click.option(
        "--quantized",
        type=click.Choice(("dequantize", "keep")),
        help="What to do with FP8 weights: turn them into numbers, or write them with their scales. By "
        "default they are kept, unless --dtype is given.",
    ),
    model_options,
    step_option,
    max_index_option,
)


@click.command("maxtext-to-hf", short_help="MaxText's Orbax to Hugging Face safetensors.")
@model_source_and_destination
@_reverse_options
@generated_options([MAX_SHARD])
@resource_options
@output_options
def maxtext_to_hf(**options: Any) -> None:
    """Convert a MaxText checkpoint into one that transformers, vLLM and others load.

    SRC is a run directory, a step or an item: parameters alone or a training checkpoint, whose optimizer
    state is not read; of Linen or NNX; with stacked layers or not. DST is a directory; it gets the weights,
    config.json and whatever else hf-to-maxtext carried along or --like has.

    \b
    Example:
      ckpt convert maxtext-to-hf ~/run/checkpoints ~/tuned --like ~/Llama-3.1-8B
    """
    from ckpttools.api.maxtext_to_hf import maxtext_to_hf

    write(maxtext_to_hf.plan, **options)


padding_rows_option = click.option(
    "--padding-rows",
    type=click.Choice(("keep", "drop")),
    help="Whether to compare the rows that MaxText has beyond Hugging Face's vocabulary. By default they "
    "are compared unless all are zeros.",
)


conversion_side_options = combine_options(
    model_options,
    patterns_option("--drop", "Hugging Face arrays that the conversion left out, such as '*.rotary_emb.*'."),
)
