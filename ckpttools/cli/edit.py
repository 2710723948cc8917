"""`ckpt stack` and `ckpt unstack`: layers as MaxText's scan_layers=true or false expects them."""

from __future__ import annotations

from typing import Any

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
from ckpttools.cli.write import write
from ckpttools.maxtext.versions import VERSIONS

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
"""Adds how parameters are to be left over."""


@click.command("strip-optimizer", short_help="Parameters of a training checkpoint.")
@source_and_destination
@parameter_options
@patterns_option("--keep", "Keep what matches, such as 'ema_params', a key and everything below it.")
@patterns_option("--drop", "Leave out what matches, whatever it is.")
@dtype_option
@target_options
@common_options
def strip_optimizer(**options: Any) -> None:
    """Write the parameters of a training checkpoint and nothing else.

    SRC may be a run directory, a step or an item; it is only read. DST gets 0/items, or <step>/items with
    --keep-step; pass that to MaxText as load_parameters_path.

    MaxText's trainers store the flavour linen, which all of MaxText loads. Its own tool for this writes nnx
    for a run with pure_nnx; decoding loads that, training does not.

    Optimizer state is recognised by its structure: it mirrors the parameters, with a step counter beside it
    or below a name that optimizers use. What mirrors them otherwise, such as an average of them (EMA), may be
    either: nothing is written until --keep or --drop decides. Everything that is learned stays.

    If there is nothing to strip, nothing is written and the exit code is 2.

    \b
    Example:
      ckpt strip-optimizer ~/run/checkpoints ~/llama --dtype bfloat16
    """
    from ckpttools.api.transforms import strip_optimizer

    write(strip_optimizer.plan, **options)


@click.command(short_help="Layers one by one to stacks for jax.lax.scan.")
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
    help="Layers after which their kinds repeat: 6 in gemma3, 4 in olmo3 and llama4, 2 in gpt-oss; 1 for "
    "all in one stack. By default as before ckpt unstack, else as in the model's family.",
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
    help="What positions of a cycle are called: layers/layers_0, layers/layer_0, scanned_blocks/local_layers "
    "and global_layer (gemma4), these below layers (qwen3-next), or scanned_blocks/layers_0 behind single "
    "layers (deepseek4). By default as in the model's family.",
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
def stack(**options: Any) -> None:
    """Stack separate layers (layers_0, layers_1, …), as MaxText's scan_layers=true expects them.

    Parameters are stacked on --scan-axis, and so are the moments of the optimizer in a training checkpoint;
    states of random number generators on axis 0. Layers that differ are reported, with what differs.

    Layers that ckpt unstack took apart are put together as they were, which it notes in the metadata.
    Otherwise the model's family decides, by its config.json or by names; if several layouts fit, they are
    listed, nothing is written and the exit code is 3.

    If layers are already stacked, nothing is written and the exit code is 2.

    \b
    Example:
      ckpt stack ~/maxtext/llama-unscanned ~/maxtext/llama-scanned
      ckpt stack ~/gemma3-unscanned ~/gemma3-scanned --family gemma3
    """
    from ckpttools.api.transforms import stack

    write(stack.plan, **options)


@click.command(short_help="Stacked layers to layers one by one.")
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
def unstack(**options: Any) -> None:
    """Write stacked layers one by one (layers_0, layers_1, …), as MaxText's scan_layers=false expects them.

    Parameters and, in a training checkpoint, the moments of the optimizer are taken apart on --scan-axis,
    states of random number generators on axis 0. Cycles, remainders and blocks get the numbers of the model's
    layers. --keep-step and --flavour go with --force-unroll.

    If layers are not stacked, nothing is written and the exit code is 2.

    \b
    Example:
      ckpt unstack ~/maxtext/llama-scanned ~/maxtext/llama-unscanned
      ckpt unstack ~/run/checkpoints ~/decode --force-unroll --dtype bfloat16
    """
    from ckpttools.api.transforms import unstack

    write(unstack.plan, **options)


@click.command(short_help="Some arrays of a checkpoint.")
@source_and_destination
@keep_option
@drop_option
@click.option(
    "--prefix",
    type=NON_EMPTY_TEXT,
    metavar="NAME",
    help="Keep only what begins with NAME and a dot, and cut that off: the policy beside a value model.",
)
@target_options
@common_options
def select(**options: Any) -> None:
    """Write the arrays that --keep matches (by default all), without those that --drop matches.

    With --prefix they are those of a model within another, under its own names; patterns are of the names
    in SRC.

    A pattern is a glob of a whole path, with "/" or "." between its keys, or of a key with everything below
    it. "*" stands for any text, even across keys; "?" for one character; "[0-9]" for one of several. A
    pattern that matches nothing is an error.

    \b
    Example:
      ckpt select ~/maxtext/run/checkpoints ~/weights --keep params
      ckpt select ~/ppo/step-100 ~/policy --prefix policy --to safetensors
      ckpt select ~/llama ~/body --drop '*embed_tokens*' --drop lm_head.weight
    """
    from ckpttools.api.transforms import select

    write(select.plan, **options)


@click.command(short_help="The same arrays in other dtypes.")
@source_and_destination
@dtype_option
@dtype_map_option
@force_option
@dequantize_like_option
@target_options
@common_options
def cast(**options: Any) -> None:
    """Write a checkpoint in other dtypes: rounded to nearest even, NaN and infinity kept.

    Values that become infinite, or zero, are counted; so are those that become NaN where a dtype has no
    infinity. The last line says how many there were, --json in which arrays.

    With --dtype bfloat16, float16 or float32, quantised weights (FP8, MXFP4, NVFP4, int4) are multiplied by
    their scales, and the config.json of a Hugging Face model no longer says that they are quantised.

    Casts between integers and floating-point numbers that can lose values are refused; --force rounds and
    clips them.

    \b
    Example:
      ckpt cast ~/maxtext/llama ~/maxtext/llama-bf16 --dtype bfloat16
      ckpt cast ~/DeepSeek-V3 ~/DeepSeek-V3-bf16 --dtype bfloat16
      ckpt cast ~/llama ~/mixed --dtype-map '*norm*=float32' --dtype bfloat16
    """
    from ckpttools.api.transforms import cast

    write(cast.plan, **options)


@click.command(short_help="Arrays under other names, by rules or by a function.")
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
def remap(**options: Any) -> None:
    """Rename, drop and rearrange arrays, by a file of rules, a Python function, or a version of MaxText.

    A file has rules in TOML, or the same in JSON; the first match wins:

    \b
      [[rules]]
      from = "model.layers.{layer}.mlp.gate_proj.weight"
      to = "params/params/decoder/layers_{layer}/mlp/wi_0/kernel"
      axes = "mlp embed"
      to-axes = "embed mlp"

    Without axes only names change. An axis may move from the name into the array, and back. {...} stands for
    any text. `drop = true` in place of `to` leaves arrays out. Arrays that no rule matches stay as they are.

    A function is called with the path and the lazy array of each array. It returns the new path, None to drop
    it, another lazy array, or (path, array).

    With --maxtext a checkpoint that one version of MaxText wrote is laid out as another one loads it: how
    layers are stacked, and where biases of routers lie. It stays stacked or not, and training state stays.

    \b
    Example:
      ckpt remap ~/maxtext/llama ~/renamed --map names.toml --strict
      ckpt remap ~/qwen3-next ~/qwen3-next-new --maxtext 0.2.5
      ckpt remap ~/llama ~/renamed --map ./names.py:rename --to safetensors
    """
    from ckpttools.api.transforms import remap

    write(remap.plan, **options)
