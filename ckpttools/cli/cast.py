"""`ckpt cast`: the same arrays in other dtypes."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.transforming import (
    common_options,
    dequantize_like_option,
    dtype_map_option,
    dtype_option,
    force_option,
    locations,
    target_options,
)
from ckpttools.cli.write import write


@click.command(short_help="The same arrays in other dtypes.")
@locations
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
    from ckpttools.api.changes import cast

    write(cast.plan, **options)
