"""`ckpt convert`: from one form of checkpoint to another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.command_line import command_line
from ckpttools.cli.lazy import Deferred, LazyGroup, in_module
from ckpttools.cli.options import Output
from ckpttools.cli.output import print_json, say, show
from ckpttools.stores.place import Place

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared


# Commands in files of their own, imported when they are run.
_COMMANDS = {
    "hf-to-maxtext": in_module("models", "hf_to_maxtext", "Hugging Face to MaxText's Orbax."),
    "maxtext-to-hf": in_module("models", "maxtext_to_hf", "MaxText's Orbax to Hugging Face."),
}


def _to_formats() -> dict[str, Deferred]:
    """A command for each format that can be written."""
    from ckpttools.cli.convert_any import to_format
    from ckpttools.formats.registry import writable

    return {f"to-{name}": Deferred(partial(to_format, name), f"Any format to {name}.") for name in writable()}


@click.group(cls=LazyGroup, lazy=_COMMANDS, more=_to_formats)
def convert() -> None:
    """Write a checkpoint in another form.

    \b
    Example:
      ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
    """


def perform(
    call: Callable[..., Prepared],
    source: Place,
    destination: Place,
    resources: dict[str, Any],
    output: Output,
    **options: Any,
) -> None:
    """Plans, then prints the plan or carries it out, as the user asked for.

    Args:
        call: plans what the command does, such as `ckpttools.select.plan`.
        source, destination: what is read and what is written.
        resources: what it may take.
        output: how to go about it and what to print.
        options: of the call.
    """
    prepared = call(
        source,
        destination,
        **resources,
        overwrite=output.overwrite,
        resume=output.resume,
        manifest=output.manifest,
        command=command_line(),
        **options,
    )
    if output.dry_run:
        _print_plan(prepared, source, output)
    else:
        _carry_out(prepared, output)


def _print_plan(prepared: Prepared, source: Place, output: Output) -> None:
    from ckpttools.api.plan_report import describe
    from ckpttools.cli.plan_text import print_plan
    from ckpttools.run.destination import begun_at
    from ckpttools.stores import parse

    report = describe(prepared.plan, source, prepared.destination)
    if output.as_json:
        print_json(report)
    else:
        print_plan(report)
    # What would stop the conversion is an error of its plan, too; the plan is worth seeing all the same.
    prepared.check()
    begun = begun_at(parse(prepared.destination))
    if begun is not None:
        what = "begins anew" if output.overwrite else "is refused"
        say(f"{begun.place} is there: the command that began it goes on from there; any other {what}")


def _carry_out(prepared: Prepared, output: Output) -> None:
    from ckpttools.api.plan_report import made_above
    from ckpttools.cli.plan_text import closing_line, print_notes
    from ckpttools.cli.progress import listening

    # A refusal stands alone: what would be done matters to nobody then.
    prepared.check()
    print_notes(prepared.plan.notes, (*prepared.plan.remarks, *made_above(prepared.destination)))
    with listening(output.progress) as observe:
        receipt = prepared.run(observe)
    if output.as_json:
        print_json(receipt)
    else:
        show([closing_line(receipt)])
