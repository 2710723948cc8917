"""`ckpt prune`: delete old steps or their optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttools.api.options.runs import PRUNE
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option
from ckpttools.cli.output import format_labeled, print_report, styled, width, with_flags
from ckpttools.cli.table import Column, draw_table
from ckpttools.core.options import switch
from ckpttools.core.text import format_disk, plural, printable
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttools.api.prune import PruneReport

_COLUMNS = (Column("step", right=True), Column(""), Column("size", right=True, spare=1), Column("why"))


@click.command(short_help="Delete old steps of a run, or only their optimizer state.", cls=BaseCommand)
@click.argument("path", metavar="RUN", type=ANY_PATH)
@flags(
    *PRUNE[:5],
    switch("yes", "Delete; without this, only the plan is printed."),
    switch("dry_run", "Only print the plan, as without --yes."),
    *PRUNE[5:7],
)
@json_option
@flags(*PRUNE[7:])
def prune(
    path: Location,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    strip_older: bool,
    copy: bool,
    yes: bool,
    dry_run: bool,
    finish: bool,
    undo: bool,
    as_json: bool,
    requests: int | None,
) -> None:
    """Delete the steps of a run that no rule keeps, as Orbax's preservation policies would.

    The last finished step, targets of symbolic links, and directories that are unfinished or contain
    unknown files are never deleted. Without --yes nothing is deleted, completed or restored.

    \b
    Examples:
      $ ckpt prune ~/run/checkpoints --keep-last 3 --keep-every 10000
      $ ckpt prune ~/run --keep-last 2 --keep-best loss:3 --strip-older --yes
      $ ckpt prune ~/run/checkpoints --finish --yes
    """
    from ckpttools.api.prune import prune as plan

    if yes and dry_run:
        raise click.UsageError("--yes and --dry-run exclude each other: leave one out")
    prepared = plan.plan(
        path,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        strip_older=strip_older,
        copy=copy,
        finish=finish,
        undo=undo,
        requests=requests,
    )
    report = prepared.run() if yes else prepared.report
    print_report(report, _report_lines(report), as_json=as_json, is_summary=yes)


def _report_lines(report: PruneReport) -> Iterator[str]:
    yield styled(printable(report.path), bold=True)
    rows = [
        [
            str(step.step),
            _outcome_text(step.outcome, report.is_done),
            format_disk(step.nbytes),
            with_flags(printable(step.reason)),
        ]
        for step in report.steps
    ]
    if rows:
        yield from draw_table(_COLUMNS, rows, width())
    for text in report.unchanged_steps:
        yield from format_labeled("  left", printable(text), 9, width())
    if not report.steps:
        words = {"finish": "finished", "undo": "undone"}
        yield f"The prune that was interrupted {'is' if report.is_done else 'would be'} {words[report.what]}."
    else:
        num_deleted = sum(step.outcome == "deleted" for step in report.steps)
        stripped = sum(step.outcome == "stripped" for step in report.steps)
        freed = format_disk(report.freed_bytes)
        summary = f"{plural(num_deleted, 'step')} deleted, {stripped} stripped, at least {freed} freed"
        yield summary if report.is_done else f"would be: {summary}"
        if stripped and not report.is_copied:
            yield "Stripped steps keep their complete data files; --copy frees more."
    if not report.is_done:
        is_idle = report.steps and all(step.outcome not in ("deleted", "stripped") for step in report.steps)
        yield "There is nothing to do." if is_idle else "Dry run: nothing was deleted. Pass --yes to delete."


def _outcome_text(outcome: str, is_done: bool) -> str:
    if is_done or outcome in ("kept", "left alone"):
        return outcome
    return {"deleted": "delete", "stripped": "strip"}[outcome]
