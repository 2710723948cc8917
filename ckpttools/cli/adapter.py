"""`ckpt adapter`: LoRA adapters and the models that they are of."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.models import family_option
from ckpttools.cli.options import ANY_PATH, MODEL, together
from ckpttools.cli.transforming import common_options, target_options
from ckpttools.cli.write import write

_base_options = together(
    click.option(
        "--like",
        type=MODEL,
        metavar="HF_DIR|CONFIG",
        help="Of a MaxText BASE the model it came from; by default what hf-to-maxtext carried along.",
    ),
    family_option,
)


@click.group()
def adapter() -> None:
    """LoRA adapters and the models that they are of.

    \b
    Example:
      ckpt adapter merge ~/models/Llama-3.1-8B ~/adapter ~/merged
    """


@adapter.command("merge", short_help="A model with an adapter in its weights.")
@click.argument("source", metavar="BASE", type=MODEL)
@click.argument("adapter", metavar="ADAPTER", type=MODEL)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@click.option(
    "--scale",
    type=float,
    default=1.0,
    show_default=True,
    metavar="X",
    help="Multiply the adapter's changes, besides its own scale; -1 takes them away again.",
)
@_base_options
@target_options
@common_options
def merge(**options: Any) -> None:
    """Write a model with a LoRA adapter merged into its weights.

    BASE is a Hugging Face model or a MaxText checkpoint; DST is the same with other weights. ADAPTER is a
    directory that PEFT saved: LoRA and rsLoRA, patterns of ranks, embeddings, fused experts, whole modules.
    Products are summed in float64, added in float32, and rounded once.

    \b
    Example:
      ckpt adapter merge ~/models/Llama-3.1-8B ~/adapter ~/merged
      ckpt adapter merge ~/maxtext/llama3.1-8b ~/adapter ~/maxtext/merged
    """
    from ckpttools.api.adapters import merge_adapter

    write(merge_adapter.plan, **options)
