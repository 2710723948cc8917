"""`ckpt convert`: from one form of checkpoint to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpttools.cli.command_line import command_line
from ckpttools.cli.lazy import Lazy, LazyGroup
from ckpttools.cli.options import (
    Output,
)
from ckpttools.cli.output import print_json, say, show
from ckpttools.core.errors import UsageError

if TYPE_CHECKING:
    from ckpttools.api.conversion import Conversion, Resources


# Commands in files of their own, imported when they are run.
_COMMANDS = {
    "hf-to-maxtext": Lazy("ckpttools.cli.models", "hf_to_maxtext", "Hugging Face to MaxText's Orbax."),
    "maxtext-to-hf": Lazy("ckpttools.cli.models", "maxtext_to_hf", "MaxText's Orbax to Hugging Face."),
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


def beside_manifest(resources: Resources, output: Output) -> Resources:
    """What the conversion itself may take, where a manifest is made meanwhile."""
    return replace(resources, manifest=output.manifest is not None)


def perform(
    plan: Callable[[], Conversion],
    source: Path,
    destination: Path,
    output: Output,
    *,
    like: Path | None = None,
) -> None:
    """Plans, then prints the plan or carries it out, as the user asked for.

    Args:
        plan: makes the plan.
        source, destination: what is read and what is written; they must be apart.
        output: what the user wants to see.
        like: what is read beside the source.
    """
    from ckpttools.run.apart import check_apart

    check_apart(source, destination)
    if like is not None:
        check_apart(like, destination, "--like")
    if output.resume:
        _require_partial(destination)
    if output.manifest is not None:
        from ckpttools.api.beside import check_beside
        from ckpttools.digest.manifest import check_name

        check_beside(output.manifest, source, destination)
        check_name(output.manifest, overwrite=output.overwrite)
    conversion = plan()
    if output.dry_run:
        _print_plan(conversion, source, destination, output)
    else:
        _carry_out(conversion, destination, output)


def _print_plan(conversion: Conversion, source: Path, destination: Path, output: Output) -> None:
    from ckpttools.cli.plan_text import describe, print_plan
    from ckpttools.run.staging import begun_at

    report = describe(conversion.plan, source, destination)
    if output.as_json:
        print_json(report)
    else:
        print_plan(report)
    # What would stop the conversion is an error of its plan, too; the plan is worth seeing all the same.
    conversion.check(destination, overwrite=output.overwrite)
    begun = begun_at(destination)
    if begun is not None:
        what = "begins anew" if output.overwrite else "is refused"
        say(f"{begun} is there: the command that began it goes on from there; any other {what}")


def _carry_out(conversion: Conversion, destination: Path, output: Output) -> None:
    from ckpttools.cli.plan_text import closing_line, print_notes
    from ckpttools.cli.progress import listening

    # A refusal stands alone: what would be done matters to nobody then.
    conversion.check(destination, overwrite=output.overwrite)
    print_notes(conversion.plan.notes, conversion.plan.remarks)
    with listening(output.progress) as observe:
        receipt = conversion.run(
            destination,
            overwrite=output.overwrite,
            observe=observe,
            manifest=output.manifest,
            command=command_line(),
        )
    if output.as_json:
        print_json(receipt)
    else:
        show([closing_line(receipt)])


def _require_partial(destination: Path) -> None:
    from ckpttools.run.staging import Staging

    directory = Staging(destination).directory
    if not directory.exists():
        raise UsageError(
            "there is nothing to go on with",
            wanted=f"{directory}, which an interrupted conversion leaves",
            hint="run the command without --resume",
        )
