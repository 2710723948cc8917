"""`ckpt remap`: arrays under other names, by rules or by a function."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.options import SOME_TEXT
from ckpttools.cli.transforming import (
    common_options,
    locations,
    map_option,
    strict_option,
    target_options,
)
from ckpttools.cli.write import write
from ckpttools.maxtext.versions import VERSIONS


@click.command(short_help="Arrays under other names, by rules or by a function.")
@locations
@map_option
@strict_option
@click.option(
    "--maxtext",
    type=click.Choice(list(VERSIONS)),
    help="Write a checkpoint of MaxText in the layout of this version of it, in place of --map.",
)
@click.option(
    "--family",
    type=SOME_TEXT,
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
    from ckpttools.api.changes import remap

    write(remap.plan, **options)
