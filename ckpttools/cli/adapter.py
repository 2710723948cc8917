"""`ckpt adapter`: merge, extract and convert LoRA adapters."""

from __future__ import annotations

import click

from ckpttools.api.options.adapters import (
    ADAPTER_TO_MAXTEXT,
    ADAPTER_TO_PEFT,
    EXTRACT_ADAPTER,
    MERGE_ADAPTER,
)
from ckpttools.cli.lazy import LazyGroup
from ckpttools.cli.options import ANY_PATH, MODEL, flags, output_options, resource_options
from ckpttools.cli.write import (
    WriteCommand,
    WriteFunction,
    common_options,
    storage_options,
    target_options,
    writes,
)


@click.group(cls=LazyGroup, short_help="Merge, extract and convert LoRA adapters.")
def adapter() -> None:
    """Merge, extract and convert LoRA adapters.

    \b
    Examples:
      $ ckpt adapter merge ~/base ~/adapter ~/merged
      $ ckpt adapter extract ~/tuned ~/base ~/adapter --rank 16
    """


@adapter.command("merge", short_help="Merge an adapter into a model's weights.", cls=WriteCommand)
@click.argument("source", metavar="BASE", type=MODEL)
@click.argument("adapter", metavar="ADAPTER", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@flags(*MERGE_ADAPTER)
@target_options
@common_options
@writes
def merge() -> WriteFunction:
    """Write a model with a LoRA adapter merged into its weights.

    BASE is a Hugging Face model or a MaxText checkpoint; DST is of the same kind. ADAPTER is
    a directory that PEFT saved (LoRA, rsLoRA and DoRA, rank patterns, embeddings, fused experts, full
    modules), or a MaxText adapter checkpoint. Products are summed in float64, added in float32, and rounded
    once. Pass --dtype to merge into a quantized BASE.

    \b
    Examples:
      $ ckpt adapter merge ~/base ~/adapter ~/merged
      $ ckpt adapter merge ~/base-fp8 ~/adapter ~/merged --dtype bfloat16
      $ ckpt adapter merge ~/maxtext/llama3.1-8b ~/adapter ~/maxtext/merged
    """
    from ckpttools.api.adapters import merge_adapter

    return merge_adapter


@adapter.command("extract", short_help="Extract a LoRA adapter from a fine-tuned model.", cls=WriteCommand)
@click.argument("source", metavar="TUNED", type=MODEL)
@click.argument("base", metavar="BASE", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@flags(*EXTRACT_ADAPTER)
@resource_options
@output_options
@writes
def extract() -> WriteFunction:
    """Write the changes of a fine-tuned model as a PEFT LoRA adapter.

    TUNED and BASE are Hugging Face models or MaxText checkpoints. The difference of each linear layer's
    matrix is approximated by its largest singular vectors; other differences are listed and left out. The
    plan reads both models to report the remaining error.

    \b
    Examples:
      $ ckpt adapter extract ~/tuned ~/base ~/adapter --rank 16
      $ ckpt adapter extract ~/tuned ~/base ~/adapter --error 0.05 --rank 128
    """
    from ckpttools.api.adapters import extract_adapter

    return extract_adapter


@adapter.command("to-maxtext", short_help="Convert a PEFT adapter to MaxText.", cls=WriteCommand)
@click.argument("source", metavar="ADAPTER", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@flags(*ADAPTER_TO_MAXTEXT)
@storage_options
@resource_options
@output_options
@writes
def to_maxtext() -> WriteFunction:
    """Write a PEFT LoRA adapter in the layout that MaxText restores.

    BASE is the Hugging Face model, or its MaxText checkpoint. DST gets 0/items; pass
    lora.lora_restore_path=DST/0/items and the settings that the plan prints to MaxText. Modules that MaxText
    cannot adapt are refused.

    \b
    Examples:
      $ ckpt adapter to-maxtext ~/adapter ~/maxtext/adapter --base ~/base
      $ ckpt adapter to-maxtext ~/adapter ~/lora --base ~/base --layout converter
    """
    from ckpttools.api.adapters import adapter_to_maxtext

    return adapter_to_maxtext


@adapter.command("to-peft", short_help="Convert a MaxText adapter to PEFT.", cls=WriteCommand)
@click.argument("source", metavar="ADAPTER", type=ANY_PATH)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@flags(*ADAPTER_TO_PEFT)
@resource_options
@output_options
@writes
def to_peft() -> WriteFunction:
    """Write a MaxText LoRA adapter in the layout that PEFT and vLLM load.

    ADAPTER is a checkpoint with factors, scanned or not, of any rank: from MaxText's own fine-tuning, from
    Tunix (STEP/model_params), from MaxText's converter, or in the layout of its inference engine.

    \b
    Examples:
      $ ckpt adapter to-peft ~/run/checkpoints ~/adapter --base ~/base
      $ ckpt adapter to-peft ~/run/checkpoints ~/adapter --base ~/base --step 500
    """
    from ckpttools.api.adapters import adapter_to_peft

    return adapter_to_peft
