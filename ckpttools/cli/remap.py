"""`ckpt remap`: arrays under other names, by rules or by a function."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.transforming import (
    common_options,
    map_option,
    places,
    strict_option,
    target_options,
)
from ckpttools.cli.write import write
from ckpttools.core.errors import UsageError


@click.command(short_help="Arrays under other names, by rules or by a function.")
@places
@map_option
@strict_option
@target_options
@common_options
def remap(map: str | None, **options: Any) -> None:
    """Rename, drop and rearrange arrays, by a file of rules or by a Python function.

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

    \b
    Example:
      ckpt remap ~/maxtext/llama ~/renamed --map names.toml --strict
      ckpt remap ~/llama ~/renamed --map ./names.py:rename --to safetensors
    """
    from ckpttools.api.changes import remap

    if map is None:
        raise UsageError(
            "it is not said how to rename", hint="give --map FILE.toml or --map FILE.py:function"
        )
    write(remap.plan, map=map, **options)
