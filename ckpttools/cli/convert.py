"""`ckpt convert`: from one form of checkpoint to another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.lazy import Lazy, LazyGroup
from ckpttools.cli.options import (
    ANY_PATH,
    DTYPE,
    Output,
    bundled,
    max_header_option,
    output_options,
    resource_options,
)
from ckpttools.cli.output import print_json
from ckpttools.cli.storage import storage_options
from ckpttools.errors import UsageError

if TYPE_CHECKING:
    from ckpttools.convert import Conversion, Resources, ToMaxText


# Commands in files of their own, imported when they are run.
_COMMANDS = {
    "to-orbax": Lazy("ckpttools.cli.convert_any", "to_orbax", "Any format to Orbax."),
    "to-zarr3": Lazy("ckpttools.cli.convert_any", "to_zarr3", "Any format to a plain zarr v3 hierarchy."),
    "to-safetensors": Lazy("ckpttools.cli.convert_any", "to_safetensors", "Any format to safetensors."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def convert() -> None:
    """Write a checkpoint in another form.

    \b
    Example:
      ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
    """


dtype_option = click.option(
    "--dtype", type=DTYPE, help="Cast floating-point arrays; without it they stay as they are."
)


def _to_maxtext(max_header_bytes: int, **values: Any) -> ToMaxText:
    from ckpttools.convert import ToMaxText
    from ckpttools.formats.base import ReadOptions

    return ToMaxText(read=ReadOptions(max_header_bytes=max_header_bytes), **values)


_mapping_options = bundled(
    "options",
    _to_maxtext,
    click.option(
        "--scan/--no-scan",
        default=True,
        show_default=True,
        help="Stack the layers, as MaxText's scan_layers=true wants them, or keep one array for each.",
    ),
    click.option(
        "--scan-axis",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        metavar="N",
        help="Axis on which layers are stacked (MaxText's param_scan_axis).",
    ),
    dtype_option,
    click.option(
        "--rope-layout",
        type=click.Choice(("halves", "interleaved")),
        help="Order of rotary pairs in query and key; without it as the model's rope type implies.",
    ),
    click.option(
        "--family",
        metavar="NAME",
        help="Use this family's rows, whatever model_type says; `ckpt families` lists them.",
    ),
    click.option(
        "--drop",
        metavar="PATTERN",
        multiple=True,
        help="Leave out source arrays whose names match, such as '*.rotary_emb.*'. May be repeated.",
    ),
    max_header_option,
)


@convert.command("hf-to-maxtext", short_help="Hugging Face safetensors to MaxText's Orbax.")
@click.argument("source", metavar="SRC", type=ANY_PATH)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@_mapping_options
@storage_options
@resource_options
@output_options
def hf_to_maxtext(
    source: Path,
    destination: Path,
    options: ToMaxText,
    storage: dict[str, Any],
    resources: Resources,
    output: Output,
) -> None:
    """Convert a Hugging Face checkpoint into one that MaxText trains and decodes from.

    SRC is a directory with safetensors and config.json. DST gets 0/items, as MaxText's own converter
    lays it out; give it to MaxText as load_parameters_path=DST/0/items.

    Nothing has the name DST before everything is written; until then DST.partial grows. The same command
    again goes on where an interrupted one stopped.

    \b
    Example:
      ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b --memory 2GiB
    """
    from ckpttools.convert import plan_to_maxtext
    from ckpttools.formats.orbax_write import OrbaxWriter

    writer = OrbaxWriter(step=0, item="items", **storage)
    perform(lambda: plan_to_maxtext(source, options, resources, writer), source, destination, output)


def perform(plan: Callable[[], Conversion], source: Path, destination: Path, output: Output) -> None:
    """Plans, then prints the plan or carries it out, as the user asked for."""
    if output.resume:
        _require_partial(destination)
    conversion = plan()
    if output.dry_run:
        _print_plan(conversion, source, destination, output)
    else:
        _carry_out(conversion, destination, output)


def _print_plan(conversion: Conversion, source: Path, destination: Path, output: Output) -> None:
    from ckpttools.cli.plan_text import describe, print_plan
    from ckpttools.run.staging import Staging

    report = describe(conversion.plan, source, destination)
    Staging(destination, output.overwrite).check(conversion.plan.layout.nbytes)
    if output.as_json:
        print_json(report)
    else:
        print_plan(report)


def _carry_out(conversion: Conversion, destination: Path, output: Output) -> None:
    from ckpttools.cli.plan_text import closing_line, print_notes
    from ckpttools.cli.progress import listening

    print_notes(conversion.plan.notes)
    with listening(output.progress) as observe:
        receipt = conversion.run(destination, overwrite=output.overwrite, observe=observe)
    if output.as_json:
        print_json(receipt)
    else:
        click.echo(closing_line(receipt))


def _require_partial(destination: Path) -> None:
    from ckpttools.run.staging import Staging

    directory = Staging(destination).directory
    if not directory.exists():
        raise UsageError(
            "there is nothing to go on with",
            wanted=f"{directory}, which an interrupted conversion leaves",
            hint="run the command without --resume",
        )
