"""`ckpt adapter`: merge, extract and convert LoRA adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.adapters.to_maxtext import LORA_LAYOUTS
from ckpttools.cli.lazy import LazyGroup
from ckpttools.cli.models import family_option, rope_layout_option
from ckpttools.cli.options import (
    ANY_PATH,
    DTYPE,
    MODEL,
    combine_options,
    count_option,
    like_option,
    max_index_option,
    maxtext_option,
    output_options,
    resource_options,
    step_option,
)
from ckpttools.cli.transform_options import common_options, storage_options, target_options
from ckpttools.cli.write import WriteCommand

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

_like_option = like_option("The original model of a MaxText BASE. Default: the one stored in it.")
_scale_option = click.option(
    "--scale",
    type=float,
    default=1.0,
    show_default=True,
    metavar="X",
    help="Extra scale of the adapter's changes; -1 subtracts them.",
)
_alpha_option = click.option(
    "--alpha",
    type=float,
    metavar="X",
    help="Alpha of a MaxText adapter whose files do not state it, such as Tunix's.",
)
_base_name_option = click.option(
    "--base-name",
    metavar="NAME",
    help="Name of the base model in adapter_config.json. Default: its Hub name if known, else its path.",
)
_base_options = combine_options(
    click.option(
        "--base", type=MODEL, required=True, metavar="BASE", help="The model that the adapter belongs to."
    ),
    _like_option,
    family_option,
    rope_layout_option,
)


@click.group(cls=LazyGroup, short_help="Merge, extract and convert LoRA adapters.")
def adapter() -> None:
    """Merge, extract and convert LoRA adapters.

    \b
    Example:
      ckpt adapter merge ~/base ~/adapter ~/merged
    """


@adapter.command("merge", short_help="Merge an adapter into a model's weights.", cls=WriteCommand)
@click.argument("source", metavar="BASE", type=MODEL)
@click.argument("adapter", metavar="ADAPTER", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@_scale_option
@_alpha_option
@click.option(
    "--dtype",
    type=DTYPE,
    help="Cast BASE before the merge, like ckpt cast. Dequantizes quantized weights.",
)
@_like_option
@family_option
@target_options
@common_options
def merge(**options: Any) -> Prepared:
    """Write a model with a LoRA adapter merged into its weights.

    BASE is a Hugging Face model or a MaxText checkpoint; DST is the same kind with other weights. ADAPTER is
    a directory that PEFT saved (LoRA, rsLoRA and DoRA, rank patterns, embeddings, fused experts, full
    modules), or a MaxText adapter checkpoint. Products are summed in float64, added in float32, and rounded
    once. Pass --dtype to merge into a quantized BASE.

    \b
    Example:
      ckpt adapter merge ~/base ~/adapter ~/merged
      ckpt adapter merge ~/base-fp8 ~/adapter ~/merged --dtype bfloat16
      ckpt adapter merge ~/maxtext/llama3.1-8b ~/adapter ~/maxtext/merged
    """
    from ckpttools.api.adapters import merge_adapter

    return merge_adapter.plan(**options)


@adapter.command("extract", short_help="Extract a LoRA adapter from a fine-tuned model.", cls=WriteCommand)
@click.argument("source", metavar="TUNED", type=MODEL)
@click.argument("base", metavar="BASE", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@count_option("--rank", "Rank of the factors; with --error, the maximum rank.")
@click.option(
    "--error",
    type=click.FloatRange(0, 1, max_open=True),
    metavar="X",
    help="Largest remaining error of each matrix, relative to the Frobenius norm of its difference: 0.1 is a "
    "tenth.",
)
@click.option("--dtype", type=DTYPE, default="float32", show_default=True, help="Dtype of the factors.")
@_base_name_option
@_like_option
@family_option
@resource_options
@output_options
def extract(**options: Any) -> Prepared:
    """Write the changes of a fine-tuned model as a PEFT LoRA adapter.

    TUNED and BASE are Hugging Face models or MaxText checkpoints. The difference of each linear layer's
    matrix is approximated by its largest singular vectors; other differences are listed and left out. The
    plan reads both models to report the remaining error.

    \b
    Example:
      ckpt adapter extract ~/tuned ~/base ~/adapter --rank 16
      ckpt adapter extract ~/tuned ~/base ~/adapter --error 0.05 --rank 128
    """
    from ckpttools.api.adapters import extract_adapter

    return extract_adapter.plan(**options)


@adapter.command("to-maxtext", short_help="Convert a PEFT adapter to MaxText.", cls=WriteCommand)
@click.argument("source", metavar="ADAPTER", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@_base_options
@click.option(
    "--scan/--no-scan",
    default=None,
    help="Stack the layers, as in the model that will use the adapter. Default: as in a MaxText BASE.",
)
@click.option(
    "--scan-axis",
    type=click.IntRange(0, 1),
    metavar="N",
    help="Axis on which layers are stacked. Default: as in a MaxText BASE, else 1.",
)
@maxtext_option("MaxText version that will load it.")
@click.option(
    "--layout",
    type=click.Choice(LORA_LAYOUTS),
    default="restore",
    show_default=True,
    help="Write what MaxText's lora.lora_restore_path reads, the layout of its fine-tuning checkpoints, or "
    "that "
    "of its converter.",
)
@_scale_option
@storage_options
@resource_options
@output_options
def to_maxtext(**options: Any) -> Prepared:
    """Write a PEFT LoRA adapter in the layout that MaxText restores.

    BASE is the Hugging Face model, or its MaxText checkpoint. DST gets 0/items; pass
    lora.lora_restore_path=DST/0/items and the settings that the plan prints to MaxText. Modules that MaxText
    cannot adapt are refused.

    \b
    Example:
      ckpt adapter to-maxtext ~/adapter ~/maxtext/adapter --base ~/base
    """
    from ckpttools.api.adapters import adapter_to_maxtext

    return adapter_to_maxtext.plan(**options)


@adapter.command("to-peft", short_help="Convert a MaxText adapter to PEFT.", cls=WriteCommand)
@click.argument("source", metavar="ADAPTER", type=ANY_PATH)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@_base_options
@_alpha_option
@_scale_option
@_base_name_option
@step_option
@max_index_option
@resource_options
@output_options
def to_peft(**options: Any) -> Prepared:
    """Write a MaxText LoRA adapter in the layout that PEFT and vLLM load.

    ADAPTER is a checkpoint with factors, scanned or not, of any rank: from MaxText's own fine-tuning, from
    Tunix (STEP/model_params), from MaxText's converter, or in the layout of its inference engine.

    \b
    Example:
      ckpt adapter to-peft ~/run/checkpoints ~/adapter --base ~/base
    """
    from ckpttools.api.adapters import adapter_to_peft

    return adapter_to_peft.plan(**options)
