"""The common work of commands that write: plan, then print or run the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttools.cli.command_line import resumable_command
from ckpttools.cli.lazy import mark_written
from ckpttools.cli.output import print_json, print_lines, print_stderr, width
from ckpttools.cli.plan import captures_plan, is_capturing_plan
from ckpttools.cli.table import Column, draw_table
from ckpttools.core.text import plural, printable
from ckpttools.quantized.errors import QuantizationError, total_error
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared


def write(
    call: Callable[..., Prepared],
    *,
    source: Location,
    destination: Location,
    dry_run: bool,
    progress: bool,
    as_json: bool,
    distributed: bool = False,
    coordinator: str | None = None,
    process: str | None = None,
    **options: Any,
) -> None:
    """Plan, then print the plan or run it.

    Args:
        call: plans what the command does, such as `ckpttools.select.plan`.
        source, destination: what is read and what is written.
        dry_run, progress, as_json, distributed, coordinator, process: as
            `ckpttools.cli.options.output_options` says.
        options: of the call.
    """
    is_dealt_out = (distributed and not dry_run) or is_capturing_plan()
    if is_dealt_out:
        from ckpttools.api.calls import absolute

        source, destination = absolute(source), absolute(destination)
        options = {
            name: absolute(item) if isinstance(item, Location) else item for name, item in options.items()
        }
    plan = partial(call, source, destination, command=resumable_command(), **options)
    if is_dealt_out and not is_capturing_plan():
        run_distributed(plan, coordinator, process, progress=progress, as_json=as_json)
        return
    prepared = plan()
    if captures_plan(prepared, dry_run=dry_run, resume=bool(options.get("resume"))):
        return
    if dry_run:
        _print_plan(prepared, source, as_json)
    else:
        _run(prepared, progress, as_json)


def _print_plan(prepared: Prepared, source: Location, as_json: bool) -> None:
    from ckpttools.api.plan_report import describe
    from ckpttools.cli.plan_text import print_plan
    from ckpttools.stores import parse
    from ckpttools.stores.publishing import find_unfinished

    report = describe(prepared, source)
    if as_json:
        print_json(report)
    else:
        print_plan(report)
    # An obstacle to the conversion fails the dry run too, after the plan is printed.
    prepared.check()
    begun = find_unfinished(parse(prepared.destination))
    if begun is not None:
        what = "begins anew" if prepared.overwrite else "is refused"
        print_stderr(f"{begun.location} exists: the command that began it resumes it; any other {what}")


def _run(prepared: Prepared, progress: bool, as_json: bool) -> None:
    from ckpttools.api.plan_report import made_above
    from ckpttools.cli.plan_text import closing_line, gain_lines, print_next, print_notes
    from ckpttools.cli.progress import progress_observer

    # Print only the error: the plan of a refused conversion is irrelevant.
    prepared.check()
    print_notes(prepared.plan.notes, (*prepared.plan.remarks, *made_above(prepared.destination)))
    if prepared.gain:
        print_stderr(*gain_lines(prepared.gain))
    with progress_observer(progress) as observe:
        receipt = prepared.run(observe)
    mark_written()
    if as_json:
        print_json(receipt)
    else:
        print_lines([*error_lines(receipt.errors), closing_line(receipt)])
        print_next(receipt.destination)


_MAX_WORST = 5
_COLUMNS = (
    Column("worst arrays"),
    Column("rms / rms of values", right=True),
    Column("max error", right=True),
)


def error_lines(errors: Mapping[str, QuantizationError]) -> Iterator[str]:
    """Yield the arrays with the largest errors, then all together.

    Args:
        errors: by the names of arrays, the worst first.
    """
    if not errors:
        return
    together = total_error(errors)
    if not together.largest:
        yield f"{plural(len(errors), 'array')} quantized without any error: each value is kept"
        return
    worst = [(printable(name), *_error_cells(errors[name])) for name in list(errors)[:_MAX_WORST]]
    both = (f"all {plural(len(errors), 'array')}", *_error_cells(together))
    yield from draw_table(_COLUMNS, [*worst, both], width())


def _error_cells(error: QuantizationError) -> tuple[str, str]:
    return f"{error.relative:.4f}", f"{error.largest:.3g}"


def run_distributed(
    plan: Callable[[], Prepared],
    coordinator: str | None,
    process: str | None,
    *,
    progress: bool,
    as_json: bool,
) -> None:
    """Run this process's share of the work and report it.

    Args:
        plan: decides the conversion.
        coordinator, process, progress, as_json: as `ckpttools.cli.options.output_options` says.
    """
    from ckpttools.api.distributed import Callbacks, convert_together
    from ckpttools.cli.plan_status_text import part_line, waiting_line
    from ckpttools.cli.plan_text import closing_line, print_gain, print_next
    from ckpttools.cli.progress import progress_observer
    from ckpttools.plan.parts import parse_part
    from ckpttools.sharding.distributed_job import abandon_job, join_job, leave_job

    job = join_job(coordinator, None if process is None else parse_part(process))
    try:
        with progress_observer(progress and job.number == 0) as observe:
            told = Callbacks(
                observe,
                lambda built: print_stderr(part_line(built)),
                lambda result: print_stderr(waiting_line(result)),
            )
            receipt = convert_together(job, plan, told)
        if receipt is not None:
            if as_json:
                print_json(receipt)
            else:
                print_gain(receipt)
                print_lines([closing_line(receipt)])
                print_next(receipt.destination)
        leave_job(job)
    except BaseException:
        abandon_job(job)
        raise
