"""`ckpt adapter`: LoRA adapters and the models that they are of."""

from __future__ import annotations

from typing import Any

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
from ckpttools.cli.write import write

_like_option = like_option(
    "The model that a MaxText BASE came from; by default what hf-to-maxtext carried along."
)
_scale_option = click.option(
    "--scale",
    type=float,
    default=1.0,
    show_default=True,
    metavar="X",
    help="Multiply the adapter's changes, besides its own scale; -1 takes them away again.",
)
_alpha_option = click.option(
    "--alpha",
    type=float,
    metavar="X",
    help="Alpha of a MaxText adapter, if nothing beside it states it; Tunix notes none.",
)
_base_name_option = click.option(
    "--base-name",
    metavar="NAME",
    help="What the configuration calls the base; by default its name on the hub if that is known, "
    "or else its path.",
)
_base_options = combine_options(
    click.option(
        "--base", type=MODEL, required=True, metavar="BASE", help="The model that the adapter belongs to."
    ),
    _like_option,
    family_option,
    rope_layout_option,
)


@click.group(cls=LazyGroup, short_help="LoRA adapters: merged, extracted, to MaxText, to PEFT.")
def adapter() -> None:
    """LoRA adapters and the models that they are of.

    \b
    Example:
      ckpt adapter merge ~/base ~/adapter ~/merged
    """


@adapter.command("merge", short_help="A model with an adapter in its weights.")
@click.argument("source", metavar="BASE", type=MODEL)
@click.argument("adapter", metavar="ADAPTER", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@_scale_option
@_alpha_option
@click.option(
    "--dtype",
    type=DTYPE,
    help="Cast BASE before anything is added, as ckpt cast does; of quantised weights it makes numbers.",
)
@_like_option
@family_option
@target_options
@common_options
def merge(**options: Any) -> None:
    """Write a model with a LoRA adapter merged into its weights.

    BASE is a Hugging Face model or a MaxText checkpoint; DST is the same with other weights. ADAPTER is a
    directory that PEFT saved (LoRA, rsLoRA and DoRA, patterns of ranks, embeddings, fused experts, whole
    modules), or a checkpoint of a MaxText adapter. Products are summed in float64, added in float32, and
    rounded once. Of a quantised BASE, --dtype makes numbers on the way.

    \b
    Example:
      ckpt adapter merge ~/base ~/adapter ~/merged
      ckpt adapter merge ~/base-fp8 ~/adapter ~/merged --dtype bfloat16
      ckpt adapter merge ~/maxtext/llama3.1-8b ~/adapter ~/maxtext/merged
    """
    from ckpttools.api.adapters import merge_adapter

    write(merge_adapter.plan, **options)


@adapter.command("extract", short_help="What a fine-tuning changed, as an adapter.")
@click.argument("source", metavar="TUNED", type=MODEL)
@click.argument("base", metavar="BASE", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@count_option("--rank", "Rank of the factors; with --error at most.")
@click.option(
    "--error",
    type=click.FloatRange(0, 1, max_open=True),
    metavar="X",
    help="What may be left of the difference of each matrix, by Frobenius' norm: 0.1 is a tenth.",
)
@click.option("--dtype", type=DTYPE, default="float32", show_default=True, help="Dtype of the factors.")
@_base_name_option
@_like_option
@family_option
@resource_options
@output_options
def extract(**options: Any) -> None:
    """Write what a fine-tuning changed of a model as a LoRA adapter of PEFT.

    TUNED and BASE are Hugging Face models or MaxText checkpoints. The difference of each matrix of a linear
    layer is written in its strongest directions; what else differs is named and left out. The plan already
    reads both models: it says what is left of the differences.

    \b
    Example:
      ckpt adapter extract ~/tuned ~/base ~/adapter --rank 16
      ckpt adapter extract ~/tuned ~/base ~/adapter --error 0.05 --rank 128
    """
    from ckpttools.api.adapters import extract_adapter

    write(extract_adapter.plan, **options)


@adapter.command("to-maxtext", short_help="PEFT's adapter to MaxText's.")
@click.argument("source", metavar="ADAPTER", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@_base_options
@click.option(
    "--scan/--no-scan",
    default=None,
    help="Stack the layers, as in the model that will use it; by default as in BASE, if it is MaxText's.",
)
@click.option(
    "--scan-axis",
    type=click.IntRange(0, 1),
    metavar="N",
    help="Axis on which layers are stacked; by default as in a MaxText BASE, else 1.",
)
@maxtext_option("Version of MaxText that is to load it.")
@click.option(
    "--layout",
    type=click.Choice(LORA_LAYOUTS),
    default="restore",
    show_default=True,
    help="As MaxText's lora.lora_restore_path reads it, as checkpoints of its own fine-tuning have it, or as "
    "its converter writes it.",
)
@_scale_option
@storage_options
@resource_options
@output_options
def to_maxtext(**options: Any) -> None:
    """Write a LoRA adapter of PEFT as MaxText restores it.

    BASE is the Hugging Face model, or a MaxText checkpoint of it. DST gets 0/items; pass it to MaxText as
    lora.lora_restore_path=DST/0/items, with what the plan says. What MaxText has no place for is refused.

    \b
    Example:
      ckpt adapter to-maxtext ~/adapter ~/maxtext/adapter --base ~/base
    """
    from ckpttools.api.adapters import adapter_to_maxtext

    write(adapter_to_maxtext.plan, **options)


@adapter.command("to-peft", short_help="MaxText's adapter to PEFT's.")
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
def to_peft(**options: Any) -> None:
    """Write a MaxText LoRA adapter as PEFT, vLLM and others load it.

    ADAPTER is a checkpoint with factors: of MaxText's own fine-tuning, of Tunix (STEP/model_params), of
    MaxText's converter, or as its inference engine takes them; scanned or not, of any rank.

    \b
    Example:
      ckpt adapter to-peft ~/run/checkpoints ~/adapter --base ~/base
    """
    from ckpttools.api.adapters import adapter_to_peft

    write(adapter_to_peft.plan, **options)
