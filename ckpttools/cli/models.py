"""`ckpt convert hf-to-maxtext` and `maxtext-to-hf`, and options about the model."""

from __future__ import annotations

from shlex import split
from typing import TYPE_CHECKING, Any

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
from ckpttools.cli.write import WriteCommand
from ckpttools.formats.safetensors.format import MAX_SHARD

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

rope_layout_option = click.option(
    "--rope-layout",
    type=click.Choice(("halves", "interleaved")),
    help="RoPE layout of MaxText's query and key weights. Default: inferred from the model's RoPE type.",
)
family_option = click.option(
    "--family",
    type=NON_EMPTY_TEXT,
    shell_complete=complete_family,
    metavar="NAME|FILE",
    help="Use this model family's mapping: a name of `ckpt families`, or a file. A name is refused if "
    "config.json's own family also fits but gives different values.",
)
_tied_option = click.option(
    "--tied",
    type=click.Choice(("keep", "drop", "materialize")),
    help="Output head: keep the arrays as stored, drop it, or copy it from the embedding if none is stored. "
    "Default: follow config.json, and refuse arrays that contradict it.",
)
model_options = combine_options(rope_layout_option, family_option, _tied_option)
"""Add options that override the model's configuration."""


_maxtext_option = maxtext_option(
    "MaxText version that will load it: a release, or a commit of its main branch."
)
_mapping_options = combine_options(
    click.option(
        "--scan/--no-scan",
        default=True,
        show_default=True,
        help="Stack layers for MaxText's scan_layers=true, or keep one array per layer.",
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
        help="Store arrays in float32 if their values would otherwise not round-trip bit for bit.",
    ),
    click.option(
        "--pad-vocab",
        type=click.IntRange(min=1),
        metavar="N",
        help="Pad the vocabulary to N rows with zeros; the reverse conversion drops them.",
    ),
    click.option(
        "--text-only",
        is_flag=True,
        help="Leave out the vision and audio towers of a multimodal model, which are converted by default.",
    ),
    click.option(
        "--carry",
        is_flag=True,
        help="Store unconverted arrays (MTP layers, omitted towers) alongside, for the reverse conversion. "
        "By "
        "default they are left out and listed.",
    ),
    model_options,
    click.option(
        "--quantized",
        type=click.Choice(("dequantize", "keep")),
        default="dequantize",
        show_default=True,
        help="Dequantize weights to --dtype (default: bfloat16), or keep FP8 with its scales; `ckpt "
        "maxtext-config DST` reports how MaxText uses them.",
    ),
    patterns_option(
        "--drop",
        "Leave out source arrays whose names match, such as '*.rotary_emb.*', or a key and all below it.",
    ),
    max_header_option,
    prefer_rank_option,
)


@click.command(
    "hf-to-maxtext", short_help="Convert Hugging Face safetensors to a MaxText checkpoint.", cls=WriteCommand
)
@model_source_and_destination
@_mapping_options
@storage_options
@resource_options
@output_options
def hf_to_maxtext(**options: Any) -> Prepared:
    """Convert a Hugging Face checkpoint to one that MaxText trains and decodes.

    SRC is a directory with config.json and the weights, as safetensors or as PyTorch and its trainers save
    them, or a model on the Hub. DST gets 0/items in the layout of MaxText's own converter; pass it to MaxText
    as load_parameters_path=DST/0/items.

    DST appears only when everything is written; until then the data is in DST.partial. Run the same command
    again to resume an interrupted conversion.

    \b
    Example:
      ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
    """
    from ckpttools.api.hf_to_maxtext import hf_to_maxtext

    return hf_to_maxtext.plan(**options)


def _conversion_arguments(
    _context: click.Context, _option: click.Parameter, declared: tuple[str, ...]
) -> tuple[str, ...]:
    """Split settings that contain several words into single words."""
    return tuple(word for item in declared for word in split(item))


_reverse_options = combine_options(
    click.option(
        "--maxtext-config",
        multiple=True,
        callback=_conversion_arguments,
        metavar="WORDS",
        help="Without a stored config.json, create one from the run's settings: CONFIG.yml first, then "
        "NAME=VALUE, as one text or repeated. Sizes are checked against the arrays.",
    ),
    like_option("Original Hugging Face model or config.json. Default: the one stored in the checkpoint."),
    dtype_option,
    click.option(
        "--prefix",
        metavar="NAME",
        help="Write only the model below this path of a composite one, and strip the path from its names.",
    ),
    click.option(
        "--names",
        type=click.Choice(("hub", "transformers", "text")),
        help="Tensor names where the Hub and transformers differ. Default: as in the original model. 'text' "
        "writes the text model of a multimodal one, with its own config.json.",
    ),
    click.option(
        "--scan-axis",
        type=click.IntRange(0, 1),
        metavar="N",
        help="Axis on which layers are stacked, 0 or 1, if the arrays do not show it.",
    ),
    click.option(
        "--carry",
        is_flag=True,
        help="Take missing arrays (towers, MTP layers) from --like.",
    ),
    click.option(
        "--padding-rows",
        type=click.Choice(("keep", "drop")),
        help="Rows beyond the vocabulary: keep them, with a matching vocab_size, or drop them. Default: drop "
        "zero rows, refuse others.",
    ),
    click.option(
        "--quantized",
        type=click.Choice(("dequantize", "keep")),
        help="Dequantize FP8 weights, or write them with their scales. Default: keep them, unless --dtype is "
        "given.",
    ),
    model_options,
    step_option,
    max_index_option,
)


@click.command(
    "maxtext-to-hf", short_help="Convert a MaxText checkpoint to Hugging Face safetensors.", cls=WriteCommand
)
@model_source_and_destination
@_reverse_options
@generated_options([MAX_SHARD])
@resource_options
@output_options
def maxtext_to_hf(**options: Any) -> Prepared:
    """Convert a MaxText checkpoint to one that transformers and vLLM load.

    SRC is a run directory, a step or an item, with parameters only or training state (the optimizer is not
    read), in Linen or NNX, with stacked layers or not. DST gets the weights, config.json and the other files
    that hf-to-maxtext stored or --like has.

    \b
    Example:
      ckpt convert maxtext-to-hf ~/run/checkpoints ~/tuned --like ~/Llama-3.1-8B
    """
    from ckpttools.api.maxtext_to_hf import maxtext_to_hf

    return maxtext_to_hf.plan(**options)


padding_rows_option = click.option(
    "--padding-rows",
    type=click.Choice(("keep", "drop")),
    help="Whether to compare MaxText's rows beyond Hugging Face's vocabulary. Default: compare them unless "
    "all are zeros.",
)


conversion_side_options = combine_options(
    model_options,
    patterns_option("--drop", "Hugging Face arrays that the conversion left out, such as '*.rotary_emb.*'."),
)
