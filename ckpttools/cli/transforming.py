"""What commands share that open a checkpoint, change its tree and write it.

    @click.command("select", short_help="…")
    @places
    @click.option("--keep", …)
    @target_options
    @common_options
    def select(keep: tuple[str, ...], **common: Any) -> None:
        write_transformed([Select(keep)], **common)

Commands that convert anyway take all transforms at once: `transform_options`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.convert import beside_manifest, perform
from ckpttools.cli.options import (
    ANY_PATH,
    DTYPE,
    SOME_TEXT,
    Command,
    Output,
    bundled,
    output_options,
    read_options,
    resource_options,
)
from ckpttools.cli.storage import sharing_storage_options
from ckpttools.core.errors import UsageError

if TYPE_CHECKING:
    from ckpttools.api.conversion import Conversion, Resources
    from ckpttools.core.dtypes import DType
    from ckpttools.formats.base import ReadOptions, Writer
    from ckpttools.transforms.base import Transform


def places(command: Command) -> Command:
    """Adds SRC and DST; comes first on a command."""
    command = click.argument("destination", metavar="DST", type=ANY_PATH)(command)
    return click.argument("source", metavar="SRC", type=ANY_PATH)(command)


def common_options(command: Command) -> Command:
    """Adds how to read and how to go about writing, as `read`, `resources` and `output`; comes last."""
    for option in (output_options, resource_options, read_options):
        command = option(command)
    return command


def target_options(command: Command) -> Command:
    """Adds the format of DST, as `to`, and how Orbax stores it, as `storage`."""
    to_option = click.option(
        "--to",
        type=click.Choice(("orbax", "safetensors", "zarr3")),
        help="Format of DST; without it that of SRC. Orbax gets <step>/<item>, both named as in SRC.",
    )
    return to_option(sharing_storage_options(command))


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
            self.fail(f"{value!r} is no PATTERN=DTYPE, such as '*/mlp/*=bfloat16'.", param, ctx)
        return pattern, DTYPE.convert(dtype, param, ctx)


keep_option = click.option(
    "--keep",
    metavar="PATTERN",
    multiple=True,
    help="Keep only what matches, such as 'params/*', or a key and all below it. May be repeated.",
)
drop_option = click.option(
    "--drop",
    metavar="PATTERN",
    multiple=True,
    help="Leave out what matches, also of what --keep keeps. May be repeated.",
)
dtype_option = click.option(
    "--dtype", type=DTYPE, help="Cast floating-point arrays; without it they stay as they are."
)
dtype_map_option = click.option(
    "--dtype-map",
    type=DTypeOfPattern(),
    metavar="PATTERN=DTYPE",
    multiple=True,
    help="Cast arrays that match, of any dtype; the first that matches counts, --dtype is for the rest. "
    "May be repeated.",
)
force_option = click.option(
    "--force",
    is_flag=True,
    help="Cast also where whole numbers can be lost: rounded, clipped, counted; and float8 that may have "
    "lost its scales.",
)
map_option = click.option(
    "--map",
    "map_spec",
    type=SOME_TEXT,
    metavar="MAP",
    help="Rename: FILE.toml or FILE.json with rules, module:function, or FILE.py:function.",
)
strict_option = click.option("--strict", is_flag=True, help="Refuse arrays that no rule of --map matches.")


def _transforms(
    strip_optimizer: bool,
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    map_spec: str | None,
    strict: bool,
    dtype: DType | None,
    dtype_map: tuple[tuple[str, DType], ...],
    force: bool,
) -> list[Transform]:
    """The transforms that the options ask for, in the order in which they apply."""
    from ckpttools.transforms.cast import CastMap
    from ckpttools.transforms.functions import mapped_by
    from ckpttools.transforms.select import Select

    chosen: list[Transform] = []
    if strip_optimizer:
        from ckpttools.maxtext.strip import StripOptimizer

        # What is dropped anyway need not be told apart first.
        chosen.append(StripOptimizer(drop=drop))
        drop = ()
    if keep or drop:
        chosen.append(Select(keep, drop))
    if map_spec is not None:
        chosen.append(mapped_by(map_spec, strict=strict))
    elif strict:
        raise UsageError("--strict is about the rules of --map", hint="give --map as well")
    if dtype is not None or dtype_map:
        chosen.append(CastMap(dict(dtype_map), dtype, force))
    elif force:
        raise UsageError("--force is about casts", hint="give --dtype or --dtype-map as well")
    return chosen


transform_options = bundled(
    "transforms",
    _transforms,
    click.option("--strip-optimizer", is_flag=True, help="Leave out optimizer state; first of all."),
    keep_option,
    drop_option,
    map_option,
    strict_option,
    dtype_option,
    dtype_map_option,
    force_option,
)
"""Adds all transforms, as the list `transforms`: first strip, then select, then rename, then cast."""


def write_transformed(
    transforms: Sequence[Transform],
    *,
    source: Path,
    destination: Path,
    to: str | None,
    storage: dict[str, Any],
    read: ReadOptions,
    resources: Resources,
    output: Output,
) -> None:
    """Writes what `transforms` make of SRC; takes what `places`, `target_options`, `common_options` add."""
    from ckpttools.api.convert import plan_tree, writer_for
    from ckpttools.formats.registry import open_tree

    def plan() -> Conversion:
        tree = open_tree(source, read)
        writer = writer_for(tree, to, **_chosen(storage, to or tree.metadata.format))
        return plan_tree(tree.pipe(*transforms), writer, beside_manifest(resources, output))

    perform(plan, source, destination, output)


def write_with(
    writer: Writer,
    transforms: Sequence[Transform],
    *,
    source: Path,
    destination: Path,
    read: ReadOptions,
    resources: Resources,
    output: Output,
) -> None:
    """The same for a command that has its writer."""
    from ckpttools.api.convert import plan_any

    def plan() -> Conversion:
        limits = beside_manifest(resources, output)
        return plan_any(source, writer, read=read, resources=limits, transforms=transforms)

    perform(plan, source, destination, output)


def _chosen(storage: dict[str, Any], to: str | None) -> dict[str, Any]:
    """The options that differ from Orbax's defaults: other formats need not know those."""
    from dataclasses import fields

    from ckpttools.formats.orbax.write import OrbaxWriter
    from ckpttools.formats.references import ReferenceMode

    defaults = {field.name: field.default for field in fields(OrbaxWriter)}
    chosen = {name: value for name, value in storage.items() if value != defaults[name]}
    if to != "orbax" and "references" in chosen and chosen["references"].mode is ReferenceMode.SAME_ORDER:
        del chosen["references"]  # nobody asked for it; only Orbax's files can share bytes
    return chosen
