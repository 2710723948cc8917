"""The common work of commands that write: plan, then print or run the plan.

A command that opens a checkpoint, changes its tree and writes it:

@click.command("select", short_help="…", cls=WriteCommand)
@source_and_destination
@flags(*SELECT)
@target_options
@common_options
@writes
def select() -> WriteFunction:
    from ckpttools.api.transforms import select

    return select
"""

from __future__ import annotations

import functools
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import click

from ckpttools.api.options import OPENING
from ckpttools.api.options.convert import FORMAT, TARGET
from ckpttools.array.blockwise import QuantizationError, total_error
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.command_line import command_line, resumable_command
from ckpttools.cli.lazy import mark_written
from ckpttools.cli.options import (
    ANY_PATH,
    MODEL,
    CommandBody,
    Decorator,
    combine_options,
    flags,
    given_flags,
    output_options,
    resource_options,
)
from ckpttools.cli.output import print_json, print_lines, print_stderr, width
from ckpttools.cli.table import Column, draw_table
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, MissingPathError, UsageError
from ckpttools.core.notes import Notes
from ckpttools.core.text import plural, printable
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.plan_report import PlanReport
    from ckpttools.api.prepared import Prepared
    from ckpttools.run.events import Receipt


REPORTS = "ckpttools.reports"
"""Key in `Context.meta` of a list that collects the reports of several runs, which are then not printed."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The flags of `ckpttools.cli.options.output_options`: what to do with planned work."""

    dry_run: bool
    progress: bool
    as_json: bool
    distributed: bool
    coordinator: str | None
    process: str | None

    @classmethod
    def pop_from(cls, ctx: click.Context) -> OutputOptions:
        """Remove the flags from a context's parameters, so that the command gets only the others."""
        return cls(**{item.name: ctx.params.pop(item.name) for item in fields(cls)})


class WriteCommand(BaseCommand):
    """A command whose function returns planned work, which is then printed, run or saved.

    The function takes the arguments of a call in `ckpttools.api`, and `OutputOptions` in `context.obj`. It
    returns the result of the call's `plan`, or None if it has done something else.
    """

    def invoke(self, ctx: click.Context) -> None:
        output = ctx.obj = OutputOptions.pop_from(ctx)
        report: object = None
        if output.distributed and not output.dry_run:
            _make_absolute(ctx.params)
            report = run_distributed(partial(self.plan, ctx), output)
        else:
            # `plan` is not called, because tracebacks have at most seven frames above the command's body.
            ctx.params["command"] = resumable_command()
            with swaps_explained(ctx.params):
                prepared = super().invoke(ctx)
            if prepared is not None:
                report = (
                    _print_plan(prepared, _source(ctx), output) if output.dry_run else _run(prepared, output)
                )
        if output.as_json and report is not None:
            collected = ctx.meta.get(REPORTS)
            print_json(report) if collected is None else collected.append(report)

    def plan(self, ctx: click.Context) -> Any:
        """Plan the work, with `OutputOptions` in `ctx.obj`; None if the command has done something else."""
        ctx.params["command"] = resumable_command()
        with swaps_explained(ctx.params):
            return super().invoke(ctx)

    def prepare(self, ctx: click.Context) -> Prepared:
        """Plan with absolute paths, for other processes.

        Raises:
            UsageError: A flag applies only to commands that run.
            CheckpointError: The command cannot be planned.
        """
        output = ctx.obj = OutputOptions.pop_from(ctx)
        for flag, is_given in (("--dry-run", output.dry_run), ("--resume", ctx.params.get("resume"))):
            if is_given:
                raise UsageError(f"{flag} has no meaning for a plan in a file", hint="leave it out")
        _make_absolute(ctx.params)
        prepared: Prepared = super().invoke(ctx)
        return prepared


def _make_absolute(params: dict[str, Any]) -> None:
    """Make paths absolute, because other processes may have other working directories."""
    from ckpttools.api.calls import absolute

    params.update({name: absolute(item) for name, item in params.items() if isinstance(item, Location)})


def _source(ctx: click.Context) -> Location:
    """Return the first location that the command reads."""
    name = next(item.name for item in ctx.command.params if isinstance(item, click.Argument))
    given = ctx.params[name or ""]
    location: Location = given[0] if isinstance(given, tuple) else given
    return location


@contextmanager
def swaps_explained(params: Mapping[str, Any]) -> Iterator[None]:
    """Replace the error about a missing source if the destination is a checkpoint."""
    try:
        yield
    except MissingPathError:
        source, destination = params.get("source"), params.get("destination")
        if isinstance(source, Location) and isinstance(destination, Location):
            refuse_swapped(source, destination)
        raise


_DIRECTIONS = ("hf-to-maxtext", "maxtext-to-hf")


def refuse_swapped(source: Location, destination: Location) -> None:
    """Raise MissingPathError if a source does not exist but the destination is a checkpoint.

    The error has the typed command with both swapped, and of two directions the one that fits.
    """
    from ckpttools.formats.detect import LocationKind, detect

    if source.lexists() or not destination.exists() or source.spelling_hint().startswith("did you mean"):
        return
    if detect(destination).kind in (LocationKind.EMPTY, LocationKind.OTHER):
        return
    other = {str(source): str(destination), str(destination): str(source)}
    words = [other.get(word.rstrip("/"), word) for word in shlex.split(command_line())]
    if direction := next((word for word in words if word in _DIRECTIONS), None):
        from ckpttools.api.convert import infer_conversion

        with suppress(CheckpointError):
            inferred = infer_conversion(destination).function.replace("_", "-")
            words[words.index(direction)] = inferred
    raise MissingPathError(
        f"{source} does not exist, but {destination} is a checkpoint",
        hint=f"to read it: {shlex.join(words)}",
    )


def _print_plan(prepared: Prepared, source: Location, output: OutputOptions) -> PlanReport:
    from ckpttools.api.plan_report import describe
    from ckpttools.cli.plan_text import print_plan
    from ckpttools.stores.publishing import find_unfinished

    report = describe(prepared, source)
    if not output.as_json:
        print_plan(report)
    # A problem that prevents the conversion also fails the dry run, after the plan is printed.
    prepared.check()
    unfinished = find_unfinished(prepared.destination)
    if unfinished is not None:
        consequence = "begins anew" if prepared.options.overwrite else "is refused"
        print_stderr(
            f"{unfinished.location} exists: the command that began it resumes it; any other {consequence}"
        )
    return report


def _run(prepared: Prepared, output: OutputOptions) -> Receipt:
    from ckpttools.api.plan_report import new_parent_remarks
    from ckpttools.cli.plan_text import mesh_read_lines, print_notes
    from ckpttools.cli.progress import progress_observer

    # Print only the error: the plan of a refused conversion is irrelevant.
    prepared.check()
    above = tuple(new_parent_remarks(prepared.destination))
    print_notes(prepared.plan.notes, (*prepared.plan.raw_remarks, *above))
    if prepared.mesh_reads:
        print_stderr(*mesh_read_lines(prepared.mesh_reads))
    with progress_observer(output.progress) as observe:
        receipt = prepared.run(observe=observe)
    if REPORTS not in click.get_current_context().meta:
        mark_written()
    return finish(replace(receipt, notes=receipt.notes + Notes(remarks=above)), as_json=output.as_json)


def finish(receipt: Receipt, *, as_json: bool) -> Receipt:
    """Print the closing lines of a run, unless `as_json`.

    Returns the receipt, including the suggested commands.
    """
    from ckpttools.api.next_steps import NextSteps, next_steps
    from ckpttools.cli.plan_text import advice_lines, closing_line, print_next

    if not as_json:
        closing = [*error_lines(receipt.errors), closing_line(receipt), *advice_lines(receipt.notes)]
        print_lines(closing, is_summary=True)
    steps = next_steps(receipt.destination) or NextSteps(())
    if not as_json:
        print_next(steps)
    return replace(receipt, notes=receipt.notes + Notes(remarks=steps.surprises), next=steps.uses)


_MAX_WORST = 5
_COLUMNS = (
    Column("worst arrays"),
    Column("rms / rms of values", right=True),
    Column("max error", right=True),
)


def error_lines(errors: Mapping[str, QuantizationError]) -> Iterator[str]:
    """Yield the arrays with the largest errors, then the error of all arrays.

    Args:
        errors: Errors by array name, largest first.
    """
    if not errors:
        return
    total = total_error(errors)
    if not total.largest:
        yield f"{plural(len(errors), 'array')} quantized without error: all values are unchanged"
        return
    worst = [(printable(name), *_error_cells(errors[name])) for name in list(errors)[:_MAX_WORST]]
    all_arrays = (f"all {plural(len(errors), 'array')}", *_error_cells(total))
    yield from draw_table(_COLUMNS, [*worst, all_arrays], width())


def _error_cells(error: QuantizationError) -> tuple[str, str]:
    return f"{error.relative:.4f}", f"{error.largest:.3g}"


def run_distributed(plan: Callable[[], Prepared], output: OutputOptions) -> Receipt | None:
    """Run this process's share of the work and print it. Returns the receipt if this process published it.

    Args:
        plan: Plans the conversion.
        output: Address of the job, number of this process, and what to print.
    """
    from ckpttools.api.distributed import Callbacks, convert_distributed
    from ckpttools.cli.plan_text import part_line, print_gain, waiting_line
    from ckpttools.cli.progress import progress_observer
    from ckpttools.plan.parts import parse_part
    from ckpttools.sharding.processes import abandon_job, join_job, leave_job

    job = join_job(output.coordinator, None if output.process is None else parse_part(output.process))
    try:
        with progress_observer(output.progress and job.number == 0) as observe:
            callbacks = Callbacks(
                observe,
                lambda built: print_stderr(part_line(built)),
                lambda result: print_stderr(waiting_line(result)),
            )
            receipt = convert_distributed(job, plan, callbacks)
        if receipt is not None:
            if not output.as_json:
                print_gain(receipt)
            receipt = finish(receipt, as_json=output.as_json)
        leave_job(job)
        return receipt
    except BaseException:
        abandon_job(job)
        raise


source_and_destination = combine_options(
    click.argument("source", metavar="SRC", type=ANY_PATH),
    click.argument("destination", metavar="DST", type=ANY_PATH),
)
"""Add SRC and DST. Must be the first decorator of a command."""
model_source_and_destination = combine_options(
    click.argument("source", metavar="SRC", type=MODEL),
    click.argument("destination", metavar="DST", type=ANY_PATH),
)
"""Add SRC and DST, where SRC may be a model on the Hub."""
storage_options = given_flags(*TARGET[1:])
"""Add the options for storing Orbax output."""
target_options = combine_options(flags(FORMAT), storage_options)
"""Add the format of DST, and the options for storing Orbax output."""
common_options = combine_options(flags(*OPENING), resource_options, output_options)
"""Add reading, resource and output options."""


class WriteFunction(Protocol):
    """A function of `ckpttools` that writes a checkpoint."""

    @property
    def plan(self) -> Callable[..., Prepared]:
        """The function that only plans the work."""


def writes(find: Callable[[], WriteFunction]) -> CommandBody:
    """Create the body of a command that passes its options to a function that writes.

    Must be the last decorator.

    Args:
        find: Imports and returns the function.
    """

    @functools.wraps(find)
    def command(**options: Any) -> Prepared:
        return find().plan(**options)

    return command


def make_command(
    name: str,
    help: str,
    body: Callable[..., Any],
    *decorators: Decorator,
    cls: type[click.Command] = BaseCommand,
) -> click.Command:
    """Create a command whose help has examples after "Examples:", one line each.

    Raises:
        UsageError: Two options have the same flag.
    """
    text = help if "\nExamples:" in help else f"{help.rstrip()}\n\nExamples:\n  $ ckpt {name} SRC DST\n"
    command = combine_options(*decorators)(body)
    result = click.command(name, cls, help=text.replace("\nExamples:", "\n\b\nExamples:"))(command)
    flags = Counter(opt for param in result.params for opt in (*param.opts, *param.secondary_opts))
    if duplicates := sorted(item for item, count in flags.items() if count > 1):
        raise UsageError(
            f"the plug-in {name} declares options that all commands have",
            got=", ".join(duplicates),
            expected="other names",
        )
    return result
