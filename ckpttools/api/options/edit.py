"""Options of functions that select, rename, cast, strip or stack arrays."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.api.options import DEQUANTIZE_LIKE, DTYPE, FAMILY, MAXTEXT, count, patterns, with_help
from ckpttools.core.dtypes import DType, parse_dtype
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import action, option
from ckpttools.core.options import Option, switch, variant


def parse_dtype_of_pattern(text: str) -> tuple[str, DType]:
    """Parse PATTERN=DTYPE: `("*/mlp/*", bfloat16)`.

    Raises:
        UsageError: The pattern or the dtype is missing.
        UnknownNameError: The dtype does not exist.
    """
    pattern, equals, dtype = text.rpartition("=")
    if not (pattern and equals):
        raise UsageError(f"{text!r} is not PATTERN=DTYPE, such as '*/mlp/*=bfloat16'.")
    return pattern, parse_dtype(dtype)


def parse_rename(text: str) -> tuple[str, str]:
    """Parse OLD=NEW: `("model.*", "base.*")`.

    Raises:
        UsageError: The text does not have exactly one "=", with a name on each side.
    """
    old, equals, new = text.partition("=")
    if not (old and new) or "=" in new:
        drop = f"; to leave arrays out, use {option('drop', 'PATTERN')}" if equals and not new else ""
        raise UsageError(f"{text!r} is not OLD=NEW, such as 'model.*=base.*'{drop}.")
    return old, new


def _distinct(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Collect the values of `rename`.

    Raises:
        UsageError: Two values have the same old name.
    """
    names: dict[str, str] = {}
    for old, new in pairs:
        if names.setdefault(old, new) != new:
            raise UsageError(
                "a name cannot become two names",
                got=" and ".join(option("rename", {old: item}) for item in (names[old], new)),
                hint="leave one of them out",
            )
    return names


KEEP = patterns("keep", "Keep only matching arrays, such as 'params/*', or a key and everything below it.")
DROP = patterns("drop", "Leave out matching arrays, even if {keep} matches them too.")
SELECT = (
    KEEP,
    DROP,
    Option(
        "prefix",
        str,
        None,
        "Keep only arrays whose names begin with NAME and a dot, and remove that prefix: for example the "
        "policy of a checkpoint that also has a value model.",
        "NAME",
    ),
)

DTYPE_MAP = Option(
    "dtype_map",
    parse_dtype_of_pattern,
    None,
    "Cast arrays that match, of any dtype; the first match wins, and {dtype} applies to the rest.",
    "PATTERN=DTYPE",
    many=dict,
)
FORCE = switch(
    "force",
    "Also cast if integers can be lost (they are rounded, clipped and counted), to a dtype of exponents "
    "(float8_e8m0fnu), or from float8 that may have lost its scales.",
)
CAST = (DTYPE, DTYPE_MAP, FORCE, DEQUANTIZE_LIKE)

MAP = Option(
    "map",
    str,
    None,
    "Rename: FILE.toml or FILE.json with rules, module:function, or FILE.py:function.",
    "MAP",
    complete="files",
)
RENAME = Option(
    "rename",
    parse_rename,
    None,
    "Rename arrays: 'model.*=base.*', where * is any text, or 'h.{N}.*=layers.{N+1}.*', where {N} is a "
    "number.",
    "OLD=NEW",
    many=_distinct,
    complete="arrays",
)
STRICT = switch("strict", "Refuse arrays that no rule of {map} or {rename} matches.")
REMAP = (
    RENAME,
    MAP,
    with_help(DROP, "Leave out matching arrays, before anything is renamed."),
    STRICT,
    variant(
        MAXTEXT,
        default=None,
        env=False,
        help="Write a MaxText checkpoint in the layout of this version, instead of {rename} or {map}.",
    ),
    with_help(
        FAMILY,
        "With {maxtext}, the model's family. Default: that of the stored config.json, else inferred from "
        "names.",
    ),
)

PARAMETERS = (
    switch("keep_step", "Keep the training step; by default {destination} has step 0."),
    Option(
        "flavor",
        ("same", "linen", "nnx"),
        "same",
        "How parameters are nested: as in {source}, params/params/…, or …/value.",
    ),
)
"""Options for the remaining parameters."""
STRIP_OPTIMIZER = (
    *PARAMETERS,
    patterns("keep", "Keep matching arrays; a key such as 'ema_params' includes everything below it."),
    patterns("drop", "Leave out matching arrays, whatever their role."),
    DTYPE,
)

SCAN_AXIS = Option("scan_axis", int, None, "", "N")
STACK = (
    with_help(
        SCAN_AXIS,
        "Axis of the layers in each stacked parameter, counted from 0: with 1, layers of [embed, mlp] "
        "become [embed, layers, mlp] (MaxText's param_scan_axis). Default: as before "
        f"{action('unstack')}, else "
        "1.",
    ),
    count(
        "cycle",
        "Number of layers after which their kinds repeat: 6 in gemma3, 4 in olmo3 and llama4, 2 in "
        f"gpt-oss; 1 for a single stack. Default: as before {action('unstack')}, else from the model's "
        "family.",
    ),
    with_help(
        FAMILY,
        "The model's family, which knows the cycle. Default: that of the stored config.json, else inferred "
        "from names.",
    ),
    Option(
        "cycle_names",
        ("layers", "layer", "local-global", "layers-local-global", "blocks-layers"),
        None,
        "Names of the positions of a cycle: layers/layers_0, layers/layer_0, scanned_blocks/local_layers "
        "and global_layer (gemma4), these below layers (qwen3-next), or scanned_blocks/layers_0 after "
        "single layers (deepseek4). Default: those of the model's family.",
    ),
    variant(
        MAXTEXT,
        default=None,
        env=False,
        help=f"MaxText version that will load it. Default: the layout from before {action('unstack')}, "
        "else the "
        "newest.",
    ),
    DTYPE,
)
UNSTACK = (
    with_help(
        SCAN_AXIS,
        "Axis of each stacked parameter on which its layers are stacked, counted from 0 (MaxText's "
        "param_scan_axis). Default: inferred from shapes; required if they are ambiguous.",
    ),
    switch(
        "force_unroll",
        "Also leave out all training state, as MaxText's force_unroll: from training to inference.",
    ),
    *PARAMETERS,
    DTYPE,
)
