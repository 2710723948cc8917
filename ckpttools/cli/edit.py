"""Commands that edit a checkpoint: strip-optimizer, stack, unstack, select, cast, remap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.options import NON_EMPTY_TEXT, combine_options, patterns_option
from ckpttools.cli.transform_options import (
    common_options,
    dequantize_like_option,
    drop_option,
    dtype_map_option,
    dtype_option,
    force_option,
    keep_option,
    map_option,
    source_and_destination,
    strict_option,
    target_options,
)
from ckpttools.cli.write import WriteCommand
from ckpttools.maxtext.versions import VERSIONS

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

parameter_options = combine_options(
    click.option("--keep-step", is_flag=True, help="Keep the training step; by default DST has step 0."),
    click.option(
        "--flavour",
        type=click.Choice(("same", "linen", "nnx")),
        default="same",
        show_default=True,
        help="How parameters are nested: as in SRC, params/params/…, or …/value.",
    ),
)
"""Options for the parameters that remain."""


@click.command(
    "strip-optimizer", short_help="Drop the optimizer state; keep only the parameters.", cls=WriteCommand
)
@source_and_destination
@parameter_options
@patterns_option("--keep", "Keep matching arrays; a key such as 'ema_params' includes everything below it.")
@patterns_option("--drop", "Leave out matching arrays, whatever their role.")
@dtype_option
@target_options
@common_options
def strip_optimizer(**options: Any) -> Prepared:
    """Write only the parameters of a training checkpoint.

    SRC may be a run directory, a step or an item. DST gets 0/items, or <step>/items with
    --keep-step; pass that to MaxText as load_parameters_path.

    MaxText's trainers store the flavour linen, which training and decoding load. MaxText's own tool writes
    nnx for a run with pure_nnx, which only decoding loads.

    Optimizer state is recognized by its structure: it mirrors the parameters, next to a step counter or below
    a name that optimizers use. For any other mirror, such as an average of the parameters (EMA), pass --keep
    or --drop; nothing is written until then. All learned values stay.

    If there is nothing to strip, nothing is written and the exit code is 2.

    \b
    Example:
      ckpt strip-optimizer ~/run/checkpoints ~/llama --dtype bfloat16
    """
    from ckpttools.api.transforms import strip_optimizer

    return strip_optimizer.plan(**options)


@click.command(short_help="Stack per-layer arrays for scan_layers=true.", cls=WriteCommand)
@source_and_destination
@click.option(
    "--scan-axis",
    type=click.IntRange(min=0),
    metavar="N",
    help="Axis of the layers in each stacked parameter, counted from 0: with 1, layers of [embed, mlp] "
    "become [embed, layers, mlp] (MaxText's param_scan_axis). By default the one from which ckpt unstack "
    "took them, else 1, as in MaxText.",
)
@click.option(
    "--cycle",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of layers after which their kinds repeat: 6 in gemma3, 4 in olmo3 and llama4, 2 in "
    "gpt-oss; 1 "
    "for a single stack. Default: as before ckpt unstack, else from the model's family.",
)
@click.option(
    "--family",
    type=NON_EMPTY_TEXT,
    metavar="NAME|FILE",
    help="The model's family, which knows the cycle; by default that of the config.json carried along, else "
    "inferred from names.",
)
@click.option(
    "--cycle-names",
    type=click.Choice(("layers", "layer", "local-global", "layers-local-global", "blocks-layers")),
    help="Names of the positions of a cycle: layers/layers_0, layers/layer_0, scanned_blocks/local_layers "
    "and global_layer (gemma4), these below layers (qwen3-next), or scanned_blocks/layers_0 after single "
    "layers (deepseek4). Default: those of the model's family.",
)
@click.option(
    "--maxtext",
    type=click.Choice(list(VERSIONS)),
    help="Version of MaxText that is to load it. By default the layout from before ckpt unstack, else "
    "that of the newest.",
)
@dtype_option
@target_options
@common_options
def stack(**options: Any) -> Prepared:
    """Stack separate layers (layers_0, layers_1, …) for MaxText's scan_layers=true.

    Parameters are stacked on --scan-axis, and so are the optimizer's moments in a training checkpoint; random
    number generator states on axis 0. Layers that differ are reported.

    Layers that ckpt unstack wrote are stacked as before, as recorded in their metadata. Otherwise the model's
    family decides, by config.json or by names; if several layouts fit, they are listed, nothing is written
    and the exit code is 3.

    If layers are already stacked, nothing is written and the exit code is 2.

    \b
    Example:
      ckpt stack ~/maxtext/llama-unscanned ~/maxtext/llama-scanned
      ckpt stack ~/gemma3-unscanned ~/gemma3-scanned --family gemma3
    """
    from ckpttools.api.transforms import stack

    return stack.plan(**options)


@click.command(short_help="Split stacked layers into one array per layer.", cls=WriteCommand)
@source_and_destination
@click.option(
    "--scan-axis",
    type=click.IntRange(min=0),
    metavar="N",
    help="Axis of each stacked parameter along which its layers lie, counted from 0 (MaxText's "
    "param_scan_axis). By default as shapes show it; required where they do not.",
)
@click.option(
    "--force-unroll",
    is_flag=True,
    help="Also leave out all training state, as MaxText's force_unroll: from training to inference.",
)
@parameter_options
@dtype_option
@target_options
@common_options
def unstack(**options: Any) -> Prepared:
    """Split stacked layers into one array per layer for MaxText's scan_layers=false.

    Parameters and, in a training checkpoint, the optimizer's moments are split on --scan-axis, random number
    generator states on axis 0. Cycles, remainders and blocks get the model's layer numbers. --keep-step and
    --flavour require --force-unroll.

    If layers are not stacked, nothing is written and the exit code is 2.

    \b
    Example:
      ckpt unstack ~/maxtext/llama-scanned ~/maxtext/llama-unscanned
      ckpt unstack ~/run/checkpoints ~/decode --force-unroll --dtype bfloat16
    """
    from ckpttools.api.transforms import unstack

    return unstack.plan(**options)


@click.command(short_help="Keep or drop arrays by name.", cls=WriteCommand)
@source_and_destination
@keep_option
@drop_option
@click.option(
    "--prefix",
    type=NON_EMPTY_TEXT,
    metavar="NAME",
    help="Keep only arrays whose names begin with NAME and a dot, and remove that prefix: for example the "
    "policy of a checkpoint that also has a value model.",
)
@target_options
@common_options
def select(**options: Any) -> Prepared:
    """Write the arrays that match --keep (default: all), without those that match --drop.

    --prefix selects a model within another and removes the prefix; patterns refer to the names in SRC.

    A pattern is a glob of a full path, with "/" or "." between its keys, or of a key with everything below
    it. "*" matches any text, even across keys; "?" one character; "[0-9]" one of several. A pattern that
    matches nothing is an error.

    \b
    Example:
      ckpt select ~/maxtext/run/checkpoints ~/weights --keep params
      ckpt select ~/ppo/step-100 ~/policy --prefix policy --to safetensors
      ckpt select ~/llama ~/body --drop '*embed_tokens*' --drop lm_head.weight
    """
    from ckpttools.api.transforms import select

    return select.plan(**options)


@click.command(short_help="Cast a checkpoint to other dtypes.", cls=WriteCommand)
@source_and_destination
@dtype_option
@dtype_map_option
@force_option
@dequantize_like_option
@target_options
@common_options
def cast(**options: Any) -> Prepared:
    """Cast a checkpoint to other dtypes, rounding to nearest even.

    NaN and infinity are kept. Values that overflow or underflow are counted, and so are those that become NaN
    in a dtype without infinity. The last line reports the counts; --json lists the arrays.

    With --dtype bfloat16, float16 or float32, quantized weights (FP8, MXFP4, NVFP4, int4) are dequantized,
    and the quantization is removed from a Hugging Face config.json.

    Casts between integers and floating-point values that can lose information are refused; --force rounds and
    clips.

    \b
    Example:
      ckpt cast ~/maxtext/llama ~/maxtext/llama-bf16 --dtype bfloat16
      ckpt cast ~/DeepSeek-V3 ~/DeepSeek-V3-bf16 --dtype bfloat16
      ckpt cast ~/llama ~/mixed --dtype-map '*norm*=float32' --dtype bfloat16
    """
    from ckpttools.api.transforms import cast

    return cast.plan(**options)


@click.command(short_help="Rename, drop and rearrange arrays by rules or a function.", cls=WriteCommand)
@source_and_destination
@map_option
@strict_option
@click.option(
    "--maxtext",
    type=click.Choice(list(VERSIONS)),
    help="Write a checkpoint of MaxText in the layout of this version of it, in place of --map.",
)
@click.option(
    "--family",
    type=NON_EMPTY_TEXT,
    metavar="NAME|FILE",
    help="With --maxtext, the model's family; by default that of the config.json carried along, else "
    "inferred from names.",
)
@target_options
@common_options
def remap(**options: Any) -> Prepared:
    """Rename, drop and rearrange arrays by rules, a Python function, or a MaxText version.

    A file contains rules in TOML or JSON; the first match wins:

    \b
      [[rules]]
      from = "model.layers.{layer}.mlp.gate_proj.weight"
      to = "params/params/decoder/layers_{layer}/mlp/wi_0/kernel"
      axes = "mlp embed"
      to-axes = "embed mlp"

    Without axes only names change. An axis may move from the name into the array, and back. {...} matches any
    text. `drop = true` instead of `to` drops arrays. Unmatched arrays are left unchanged.

    A function gets the path and the lazy array of each array. It returns the new path, None to drop the
    array, another lazy array, or (path, array).

    --maxtext converts a checkpoint to the layout of another MaxText version: how layers are stacked, and
    where router biases are. Stacked layers stay stacked, and training state stays.

    \b
    Example:
      ckpt remap ~/maxtext/llama ~/renamed --map names.toml --strict
      ckpt remap ~/qwen3-next ~/qwen3-next-new --maxtext 0.2.5
      ckpt remap ~/llama ~/renamed --map ./names.py:rename --to safetensors
    """
    from ckpttools.api.transforms import remap

    return remap.plan(**options)
