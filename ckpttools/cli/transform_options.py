"""Options of commands that open a checkpoint, change its tree and write it.

    @click.command("select", short_help="…", cls=WriteCommand)
    @source_and_destination
    @click.option("--keep", …)
    @target_options
    @common_options
    def select(**options: Any) -> Prepared:
        from ckpttools.api.transforms import select

        return select.plan(**options)

Commands that convert take all transforms at once: `transform_options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttools.cli.generated_options import generated_options
from ckpttools.cli.options import (
    ANY_PATH,
    DTYPE,
    MODEL,
    NON_EMPTY_TEXT,
    Decorator,
    combine_options,
    output_options,
    patterns_option,
    read_options,
    resource_options,
)
from ckpttools.formats.orbax.options import STORAGE

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckpttools.core.dtypes import DType


storage_options = generated_options(STORAGE)
"""Add the options of `ckpttools.api.arguments.Storing`."""
new_storage_options = generated_options([item for item in STORAGE if item.name != "reference"])
"""Add the same options without sharing of bytes, for commands without a source."""


source_and_destination = combine_options(
    click.argument("source", metavar="SRC", type=ANY_PATH),
    click.argument("destination", metavar="DST", type=ANY_PATH),
)
"""Add SRC and DST; the first decorator of a command."""
model_source_and_destination = combine_options(
    click.argument("source", metavar="SRC", type=MODEL),
    click.argument("destination", metavar="DST", type=ANY_PATH),
)
"""Add SRC and DST, where SRC may be a model on the Hub."""
common_options = combine_options(read_options, resource_options, output_options)
"""Add reading, resource and output options; the last decorator of a command."""


class _FormatName(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A writable format; plug-ins are loaded only when one is named, or all are listed."""

    name = "format"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self._names())}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self._names():
            self.fail(f"{value!r} is not one of {', '.join(self._names())}.", param, ctx)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]

    def _names(self) -> list[str]:
        from ckpttools.formats.registry import writable

        return list(writable())


def format_option(help: str) -> Decorator:
    """Add `--to FORMAT`."""
    return click.option("--to", "format", type=_FormatName(), help=help)


target_options = combine_options(
    format_option("Format of DST. Default: that of SRC. Orbax gets <step>/<item>, both named as in SRC."),
    storage_options,
)
"""Add the format of DST, and how Orbax stores it."""
new_target_options = combine_options(
    format_option("Format of DST. Default: that of the framework whose names it has."),
    new_storage_options,
)
"""Add the same options for commands that read no checkpoint."""


class DTypeOfPattern(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """`PATTERN=DTYPE`, as `("*/mlp/*", bfloat16)`."""

    name = "pattern=dtype"

    def convert(
        self, value: str | tuple[str, DType], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, DType]:
        if not isinstance(value, str):
            return value
        pattern, equals, dtype = value.rpartition("=")
        if not (pattern and equals):
            self.fail(f"{value!r} is not PATTERN=DTYPE, such as '*/mlp/*=bfloat16'.", param, ctx)
        return pattern, DTYPE.convert(dtype, param, ctx)


keep_option = patterns_option(
    "--keep", "Keep only what matches, such as 'params/*', or a key and everything below it."
)
drop_option = patterns_option("--drop", "Leave out what matches, even where --keep matches.")
dtype_option = click.option(
    "--dtype", type=DTYPE, help="Cast floating-point arrays. Default: keep their dtypes."
)
dtype_map_option = click.option(
    "--dtype-map",
    type=DTypeOfPattern(),
    metavar="PATTERN=DTYPE",
    multiple=True,
    callback=lambda context, option, value: dict(value),
    help="Cast arrays that match, of any dtype; the first match wins, and --dtype applies to the rest. "
    "May be repeated.",
)
dequantize_like_option = click.option(
    "--dequantize-like",
    type=click.Choice(("float32", "maxtext")),
    default="float32",
    show_default=True,
    help="How products of quantized weights and their scales are rounded: once, from float32; or as MaxText "
    "does when it loads FP8, with scales rounded to bfloat16 first.",
)
force_option = click.option(
    "--force",
    is_flag=True,
    help="Also cast where integers can be lost (they are rounded, clipped and counted), to exponents alone "
    "(float8_e8m0fnu), and float8 that may have lost its scales.",
)
map_option = click.option(
    "--map",
    type=NON_EMPTY_TEXT,
    metavar="MAP",
    help="Rename: FILE.toml or FILE.json with rules, module:function, or FILE.py:function.",
)
strict_option = click.option("--strict", is_flag=True, help="Refuse arrays that no rule of --map matches.")


transform_options = combine_options(
    click.option("--strip-optimizer", is_flag=True, help="Drop the optimizer state, before anything else."),
    keep_option,
    drop_option,
    click.option(
        "--names",
        type=click.Choice(("hub",)),
        help="Name a model's arrays as the hub does: without the prefixes of PyTorch trainers, and for Llama "
        "from the names of torchtitan and Meta's code, too.",
    ),
    map_option,
    strict_option,
    dtype_option,
    dtype_map_option,
    force_option,
)
"""Add all transforms of `ckpttools.convert`: strip, select, rename, cast."""
