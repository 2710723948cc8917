"""`ckpt copy`: copy a checkpoint byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ckpttools.api.options.runs import COPY
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.command_line import command_line
from ckpttools.cli.options import (
    ANY_PATH,
    DRY_RUN,
    flags,
    json_option,
    limit_options,
    progress_option,
    unprotected_option,
)
from ckpttools.cli.output import format_labeled, print_report, print_stderr, prose_width
from ckpttools.cli.progress import progress_events
from ckpttools.core.text import format_disk, format_memory, plural
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.copying.prepared import CopiedPart, CopyReport


@click.command(short_help="Copy a checkpoint or run between stores, byte for byte.", cls=BaseCommand)
@click.argument("source", metavar="SRC", type=ANY_PATH)
@click.argument("destination", metavar="DST", type=ANY_PATH)
@flags(*COPY[:3])
@limit_options
@flags(DRY_RUN, *COPY[3:4])
@unprotected_option
@flags(*COPY[4:])
@progress_option
@json_option
def copy(
    source: Location,
    destination: Location,
    steps: tuple[int, ...],
    latest: int | None,
    verify: bool,
    memory: int,
    jobs: int | None,
    requests: int | None,
    dry_run: bool,
    overwrite: bool,
    public: bool,
    allow_outside_links: bool,
    progress: bool,
    as_json: bool,
) -> None:
    """Copy a checkpoint from any store to any store: a run, a step, an item, a model.

    The files that mark DST as a checkpoint are written last, so an incomplete copy is never mistaken for one.
    For a run, finished steps are copied, oldest first. Steps that DST already has are left as they are, so
    the same command copies new steps and resumes an interrupted copy.

    \b
    Examples:
      $ ckpt copy ~/maxtext/run/checkpoints gs://my-bucket/runs/run/checkpoints
      $ ckpt copy gs://my-bucket/runs/run/checkpoints ~/run --latest 1
      $ ckpt copy hf://org/name s3://my-bucket/models/name
    """
    from ckpttools.api.copy import copy as copy_checkpoint

    prepared = copy_checkpoint.plan(
        source,
        destination,
        steps=steps,
        latest=latest,
        verify=verify,
        memory=memory,
        jobs=jobs,
        requests=requests,
        overwrite=overwrite,
        public=public,
        allow_outside_links=allow_outside_links,
        command=command_line(),
    )
    if dry_run:
        lines = [*_plan_lines(prepared.report), "", "Dry run: nothing was written."]
        print_report(prepared.report, lines, as_json=as_json)
        prepared.check()
        return
    prepared.check()
    for line in _note_lines(prepared.report):
        print_stderr(line)
    with progress_events(progress) as observe:
        report = prepared.run(observe)
    print_report(report, [*_plan_lines(report), _closing_line(report)], as_json=as_json, is_summary=True)


def _note_lines(report: CopyReport) -> Iterator[str]:
    """Print the notes of the plan on stderr."""
    for name, reason in report.omitted.items():
        yield from format_labeled("left out", f"{name}: {reason}", 9, prose_width())
    for text in report.remarks:
        yield from format_labeled("note", text, 9, prose_width())


def _plan_lines(report: CopyReport) -> Iterator[str]:
    """Yield a line for each part, and in a dry run lines for skipped files."""
    for part in report.parts:
        name, files = part.name or report.destination, plural(part.files, "file")
        yield f"{name}: {part.outcome}, {files}, {format_disk(part.bytes)}{_details_text(part)}"
    if any(part.outcome == "to be copied" for part in report.parts):
        yield from _note_lines(report)


def _details_text(part: CopiedPart) -> str:
    parts = []
    if part.bytes_resumed:
        parts.append(f"{format_disk(part.bytes_resumed)} by an earlier run")
    if part.bytes_by_store:
        parts.append(f"{format_disk(part.bytes_by_store)} by the store itself")
    if part.files_unchanged:
        files = plural(part.files_unchanged, "file")
        parts.append(f"{files} unchanged since the last copy (same inode and times, or ETag)")
    if part.files_compared:
        parts.append(
            f"{plural(part.files_compared, 'file')}, {format_disk(part.bytes_verified)}, compared "
            "byte by byte"
        )
    elif part.bytes_verified:
        parts.append(f"{format_disk(part.bytes_verified)} read again")
    return f" ({', '.join(parts)})" if parts else ""


def _closing_line(report: CopyReport) -> str:
    """Return a one-line summary of a copy, with its URL."""
    from ckpttools.cli.plan_text import published_text

    resumed = sum(part.bytes_resumed for part in report.parts)
    rate = (report.bytes - resumed) / max(report.seconds, 1e-9)
    speed = f" ({format_disk(rate)}/s)" if rate else ""
    parts = [plural(report.files, "file"), f"{format_disk(report.bytes)} in {report.seconds:.2f} s{speed}"]
    existing_count = sum(part.outcome == "there already" for part in report.parts)
    if existing_count:
        parts.append(f"{existing_count} of {len(report.parts)} already existed")
    if report.peak_bytes is not None:
        parts.append(f"peak memory {format_memory(report.peak_bytes)}")
    return f"{report.destination}: {', '.join(parts)}{published_text(report.published)}"
