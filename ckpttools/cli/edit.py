"""Commands that rewrite a checkpoint: strip-optimizer, (un)stack, select, cast, remap, quantize, reshard."""

from __future__ import annotations

import click

from ckpttools.api.options.convert import QUANTIZE, QUANTIZE_READING, RESHARD, RESHARD_STORAGE, SHARDS
from ckpttools.api.options.edit import CAST, REMAP, SELECT, STACK, STRIP_OPTIMIZER, UNSTACK
from ckpttools.cli.options import flags, given_flags, output_options, resource_options
from ckpttools.cli.write import (
    WriteCommand,
    WriteFunction,
    common_options,
    model_source_and_destination,
    source_and_destination,
    target_options,
    writes,
)


@click.command(
    "strip-optimizer", short_help="Drop the optimizer state; keep only the parameters.", cls=WriteCommand
)
@source_and_destination
@flags(*STRIP_OPTIMIZER)
@target_options
@common_options
@writes
def strip_optimizer() -> WriteFunction:
    """Write only the parameters of a training checkpoint.

    SRC may be a run directory, a step or an item. DST gets 0/items, or <step>/items with
    --keep-step; pass that to MaxText as load_parameters_path.

    MaxText's trainers store the flavor linen, which training and decoding load. MaxText's own tool writes
    nnx for a run with pure_nnx, which only decoding loads.

    Optimizer state is recognized by its structure: it mirrors the parameters, next to a step counter or below
    a name that optimizers use. For any other mirror, such as an average of the parameters (EMA), pass --keep
    or --drop; nothing is written until then. All learned values stay.

    If there is nothing to strip, nothing is written and the exit code is 2.

    \b
    Examples:
      $ ckpt strip-optimizer ~/run/checkpoints ~/llama --dtype bfloat16
      $ ckpt strip-optimizer ~/run/checkpoints ~/llama --step 5000 --keep-step
    """
    from ckpttools.api.transforms import strip_optimizer

    return strip_optimizer


@click.command(short_help="Stack per-layer arrays for scan_layers=true.", cls=WriteCommand)
@source_and_destination
@flags(*STACK)
@target_options
@common_options
@writes
def stack() -> WriteFunction:
    """Stack separate layers (layers_0, layers_1, …) for MaxText's scan_layers=true.

    Parameters are stacked on --scan-axis, and so are the optimizer's moments in a training checkpoint; random
    number generator states on axis 0. Layers that differ are reported.

    Layers that ckpt unstack wrote are stacked as before, as recorded in their metadata. Otherwise the model's
    family decides, by config.json or by names; if several layouts fit, they are listed, nothing is written
    and the exit code is 3.

    If layers are already stacked, nothing is written and the exit code is 2.

    \b
    Examples:
      $ ckpt stack ~/maxtext/llama-unscanned ~/maxtext/llama-scanned
      $ ckpt stack ~/gemma3-unscanned ~/gemma3-scanned --family gemma3
    """
    from ckpttools.api.transforms import stack

    return stack


@click.command(short_help="Split stacked layers into one array per layer.", cls=WriteCommand)
@source_and_destination
@flags(*UNSTACK)
@target_options
@common_options
@writes
def unstack() -> WriteFunction:
    """Split stacked layers into one array per layer for MaxText's scan_layers=false.

    Parameters and, in a training checkpoint, the optimizer's moments are split on --scan-axis, random number
    generator states on axis 0. Cycles, remainders and blocks get the model's layer numbers. --keep-step and
    --flavor require --force-unroll.

    If layers are not stacked, nothing is written and the exit code is 2.

    \b
    Examples:
      $ ckpt unstack ~/maxtext/llama-scanned ~/maxtext/llama-unscanned
      $ ckpt unstack ~/run/checkpoints ~/decode --force-unroll --dtype bfloat16
    """
    from ckpttools.api.transforms import unstack

    return unstack


@click.command(short_help="Keep or drop arrays by name.", cls=WriteCommand)
@source_and_destination
@flags(*SELECT)
@target_options
@common_options
@writes
def select() -> WriteFunction:
    """Write the arrays that match --keep (default: all), without those that match --drop.

    --prefix selects a model within another and removes the prefix; patterns refer to the names in SRC.

    A pattern is a glob of a full path, with "/" or "." between its keys, or of a key with everything below
    it. "*" matches any text, even across keys; "?" one character; "[0-9]" one of several. A pattern that
    matches nothing is an error.

    \b
    Examples:
      $ ckpt select ~/maxtext/run/checkpoints ~/weights --keep params
      $ ckpt select ~/ppo/step-100 ~/policy --prefix policy --to safetensors
      $ ckpt select ~/llama ~/body --drop '*embed_tokens*' --drop lm_head.weight
    """
    from ckpttools.api.transforms import select

    return select


@click.command(short_help="Cast a checkpoint to other dtypes.", cls=WriteCommand)
@source_and_destination
@flags(*CAST)
@target_options
@common_options
@writes
def cast() -> WriteFunction:
    """Cast a checkpoint to other dtypes, rounding to nearest even.

    NaN and infinity are kept. Values that overflow, underflow, or become NaN in a dtype without infinity are
    counted. The last line reports the counts; --json lists the arrays.

    With --dtype bfloat16, float16 or float32, quantized weights (FP8, MXFP4, NVFP4, int4) are dequantized,
    and the quantization is removed from a Hugging Face config.json.

    Casts between integers and floating-point values that can lose information are refused; --force rounds and
    clips.

    \b
    Examples:
      $ ckpt cast ~/maxtext/llama ~/maxtext/llama-bf16 --dtype bfloat16
      $ ckpt cast ~/DeepSeek-V3 ~/DeepSeek-V3-bf16 --dtype bfloat16
      $ ckpt cast ~/llama ~/mixed --dtype-map '*norm*=float32' --dtype bfloat16
    """
    from ckpttools.api.transforms import cast

    return cast


@click.command(short_help="Rename, drop and rearrange arrays by rules or a function.", cls=WriteCommand)
@source_and_destination
@flags(*REMAP)
@target_options
@common_options
@writes
def remap() -> WriteFunction:
    """Rename, drop and rearrange arrays by rules, a Python function, or a MaxText version.

    --dry-run lists all old and new names. In --rename, "*" stands for any text and {layer} for a number; the
    new name has the same ones, each "*" in order. The first OLD that matches wins.

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
    where router biases are. Stacked layers remain stacked, and training state is kept.

    \b
    Examples:
      $ ckpt remap ~/llama ~/base --rename 'model.*=base.*' --drop lm_head
      $ ckpt remap ~/maxtext/llama ~/renamed --map names.toml --strict
      $ ckpt remap ~/qwen3-next ~/qwen3-next-new --maxtext 0.2.5
      $ ckpt remap ~/llama ~/renamed --map ./names.py:rename --to safetensors
    """
    from ckpttools.api.transforms import remap

    return remap


@click.command(short_help="Quantize a model to FP8 or MXFP4.", cls=WriteCommand)
@model_source_and_destination
@flags(*QUANTIZE)
@given_flags(*SHARDS)
@flags(*QUANTIZE_READING)
@resource_options
@output_options
@writes
def quantize() -> WriteFunction:
    """Quantize a model to FP8 or MXFP4 for transformers and vLLM.

    SRC is a Hugging Face model or a MaxText checkpoint. The matrices of linear layers are quantized;
    config.json records how, and which are not. The largest errors are listed; --json has the error of every
    array. Arrays with NaN or infinity are refused.

    \b
    Examples:
      $ ckpt quantize ~/run/checkpoints ~/tuned-fp8 --like ~/Qwen3-8B
      $ ckpt quantize ~/Qwen3-8B ~/Qwen3-8B-FP8 --exclude '*.down_proj.weight'
    """
    from ckpttools.api.quantize import quantize

    return quantize


@click.command(short_help="Rewrite a checkpoint's chunks for a device mesh.", cls=WriteCommand)
@source_and_destination
@flags(*RESHARD)
@given_flags(*RESHARD_STORAGE)
@common_options
@writes
def reshard() -> WriteFunction:
    """Write an Orbax checkpoint in which each device of a mesh reads full chunks.

    DST also stores the sharding on that mesh: Orbax restores arrays with it, unless a target overrides it.
    SRC may have any format and is read once; no device is needed.

    \b
    Examples:
      $ ckpt reshard ~/llama ~/llama-32 --mesh fsdp=16,tensor=2
      $ ckpt inspect chunks ~/llama-32 --mesh fsdp=16,tensor=2 --rules maxtext
    """
    from ckpttools.api.reshard import reshard

    return reshard
