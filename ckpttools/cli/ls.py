"""`ckpt ls`: list the steps of runs, or the checkpoints in directories; and `ckpt PATH`: identify a path."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import click

from ckpttools.api.options import REQUESTS
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option
from ckpttools.cli.output import format_labeled, print_report, styled, width
from ckpttools.cli.table import Column, draw_table
from ckpttools.core.text import format_age, format_disk, plural, printable, sample_names
from ckpttools.formats.detect import LocationKind, count_members
from ckpttools.runs.collection import CollectionListing
from ckpttools.runs.listing import ItemListing, RunListing, StepListing
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.summary import Summary


@click.command(short_help="List the steps in a training run.", cls=BaseCommand)
@click.argument("paths", metavar="RUN...", type=ANY_PATH, nargs=-1, required=True)
@json_option
@flags(REQUESTS)
def ls(paths: tuple[Location, ...], as_json: bool, requests: int | None) -> None:
    """List the steps in training runs: contents, state, age and disk space.

    "own" is the space that deleting the step would free: files that other steps share, as in a checkpoint
    made by reference, are not counted. The step from which a restarted run resumes is marked. Reads only
    indexes and metadata. Runs of PyTorch trainers (verl, torchtitan, DeepSpeed, transformers) are listed by
    their directory names.

    A directory of several checkpoints or runs is listed as such, one row for each. With several paths, --json
    prints an object with "listings".

    \b
    Examples:
      $ ckpt ls ~/maxtext/run/checkpoints
      $ ckpt ls gs://my-bucket/out/run --json
      $ ckpt ls ~/models ~/maxtext
      $ ckpt ls ~/verl/checkpoints/project/experiment
    """
    from ckpttools.api.ls import list_paths
    from ckpttools.api.ls import ls as look

    if len(paths) > 1:
        listings = list_paths(paths, requests)
        report: object = {"listings": listings}
    else:
        listings = [look(paths[0], requests=requests)]
        report = listings[0]
    lines = [["", *listing_lines(listing)] for listing in listings]
    print_report(report, islice(chain.from_iterable(lines), 1, None), as_json=as_json)


def listing_lines(listing: RunListing | CollectionListing) -> Iterator[str]:
    """Yield lines about a run or a directory of several checkpoints."""
    if isinstance(listing, RunListing):
        yield from run_lines(listing)
    else:
        yield styled(printable(listing.path), bold=True)
        yield from collection_lines(listing)


_MEMBER_COLUMNS = (
    Column("name"),
    Column("kind"),
    Column("format", spare=3),
    Column("steps", right=True),
    Column("size", right=True),
    Column("changed", right=True, spare=2),
    Column("state"),
)


def collection_lines(listing: CollectionListing) -> Iterator[str]:
    """Yield lines about checkpoints and runs in a directory."""
    if not listing.members:
        yield "no checkpoint or run"
        return
    now = time.time()
    rows = [
        [
            printable(member.name),
            member.kind,
            member.format or "",
            "" if member.steps is None else f"{member.steps:,}",
            format_disk(member.nbytes),
            "" if member.modified is None else f"{format_age(now - member.modified)} ago",
            # Names and metadata are read, not contents: "complete" would promise too much.
            "" if member.state == "complete" else member.state,
        ]
        for member in listing.members
    ]
    yield from draw_table(_MEMBER_COLUMNS, rows, width())
    total = sum(member.nbytes for member in listing.members)
    runs = sum(member.kind == LocationKind.RUN for member in listing.members)
    yield f"{count_members(len(listing.members), runs)}: {format_disk(total)}"
    for member in listing.members:
        if member.reason is not None:
            yield from format_labeled(
                f"  {member.state}", printable(f"{member.name}: {member.reason}"), _LABEL, width()
            )
    if listing.is_truncated:
        yield "only some of the directories are searched: list one of them"


_COLUMNS = (
    Column("step", right=True),
    Column("items", spare=3),
    Column("kind"),
    Column("size", right=True),
    Column("own", right=True, spare=2),
    Column("saved", right=True, spare=4),
    Column("metrics", spare=1),
    Column(""),
)
_LABEL = 14
_NO_ITEM = "in which MaxText finds no tree: it looks for items"


def run_lines(listing: RunListing) -> Iterator[str]:
    """Yield lines about a run, its steps, and remarks."""
    yield styled(printable(listing.path), bold=True)
    now = time.time()
    rows = [_row_cells(step, listing, now) for step in listing.steps]
    table = list(draw_table(_COLUMNS, rows, width()))
    yield from table
    if left := _omitted_line(table, rows):
        yield f"no room for {', '.join(left)}: --json has all"
    total, own = (sum(getattr(step, name) for step in listing.steps) for name in ("nbytes", "own_bytes"))
    shared = (
        f", {format_disk(total - own)} of it in files with names outside of their step" if total > own else ""
    )
    steps = plural(len(listing.steps), "step")
    yield f"{steps}, {len(listing.finished)} finished: {format_disk(total)}{shared}"
    for label, text in _remarks(listing):
        yield from format_labeled(f"  {label}", printable(text), _LABEL, width())


def _omitted_line(table: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line with the titles of columns that do not fit the terminal."""
    visible_titles = click.unstyle(table[0]).split() if table else []
    filled = [column.head for k, column in enumerate(_COLUMNS) if any(row[k] for row in rows)]
    return [head for head in filled if head and head not in visible_titles]


def _remarks(listing: RunListing) -> Iterator[tuple[str, str]]:
    if listing.latest is not None:
        yield _latest_text(listing, listing.latest)
    elif listing.tracker is None:
        yield "resumes", "no step: Orbax lists none here"
    elif listing.tracker:
        yield "latest", f"none of these, by {listing.tracker}"
    for name, reason in listing.skipped.items():
        yield "skipped", f"{name}: {reason}"
    for step in listing.steps:
        if step.unfinished_reason is not None and step.name not in listing.skipped:
            yield _state_text(step), f"{step.name}: {step.unfinished_reason}"
        if step.item_being_deleted is not None:
            yield (
                "deleting",
                f"item {step.item_being_deleted} of {step.name}: Orbax was interrupted; retry with Orbax",
            )
    if listing.other_entries:
        yield "other files", sample_names(listing.other_entries, 5)


def _latest_text(listing: RunListing, step: int) -> tuple[str, str]:
    by = f", by {listing.tracker}" if listing.tracker else ""
    if listing.resume_step is None:
        return "latest", f"step {step}{by}, {listing.blocked_by}"
    if listing.tracker is not None:
        return "resumes", f"step {step}{by}"
    return "resumes", f"step {step}, {f'from {listing.resume_item}' if listing.resume_item else _NO_ITEM}"


def _state_text(step: StepListing) -> str:
    if step.unfinished_reason is None:
        return ""
    return "damaged" if step.is_damaged else "unfinished"


def _row_cells(step: StepListing, listing: RunListing, now: float) -> list[str]:
    metrics = sorted((step.metrics or {}).items())[:3]
    marks = [
        _state_text(step),
        f"{plural(step.missing_chunks, 'chunk')} missing" if step.missing_chunks else "",
        "deleting" if step.item_being_deleted is not None else "",
        "resumes" if step.step == listing.resume_step else "",
    ]
    return [
        printable(str(step.step)),
        printable(", ".join(map(_item_line, step.items))),
        step.kind,
        format_disk(step.nbytes),
        "" if step.own_bytes == step.nbytes else format_disk(step.own_bytes),
        "" if step.saved_at is None else f"{format_age(now - step.saved_at)} ago",
        printable(" ".join(f"{name}={value:.6g}" for name, value in metrics)),
        ", ".join(filter(None, marks)),
    ]


def _item_line(item: ItemListing) -> str:
    return item.name or "(the step itself)"


def item_lines(items: Sequence[ItemListing]) -> Iterator[str]:
    """Yield lines about the items of one step."""
    columns = (Column("item"), Column("kind"), Column("arrays", right=True), Column("size", right=True))
    rows = [
        [
            printable(item.name),
            item.kind,
            *((f"{item.arrays:,}", format_disk(item.nbytes)) if item.arrays else ("", "")),
        ]
        for item in items
    ]
    yield from draw_table(columns, rows, width())


@click.command("summary", hidden=True, cls=BaseCommand)
@click.argument("path", type=ANY_PATH)
@json_option
@flags(REQUESTS)
def summary(path: Location, as_json: bool, requests: int | None) -> None:
    """Identify PATH and suggest commands."""
    from ckpttools.api.summary import summary as look

    result = look(path, requests=requests)
    print_report(result, _summary_lines(result), as_json=as_json)


def _summary_lines(result: Summary) -> Iterator[str]:
    from ckpttools.cli.tree_facts import fact_lines

    yield f"{styled(printable(result.path), bold=True)}: {printable(result.what)}"
    if result.run is not None:
        # The run's path is printed only if it is one level below.
        yield from islice(run_lines(result.run), int(result.run.path == result.path), None)
    if result.collection is not None:
        yield from collection_lines(result.collection)
    if result.items:
        yield from item_lines(result.items)
    if result.tree is not None:
        yield from fact_lines(result.tree, width())
    yield ""
    for number, command in enumerate(result.next):
        yield f"{'next' if not number else '':<6}{command}"
