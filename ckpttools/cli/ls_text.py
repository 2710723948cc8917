"""A run on a terminal: a row for each step, and what resuming takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import click

from ckpttools.cli.output import labelled, styled, width
from ckpttools.cli.table import Column, draw_table
from ckpttools.cli.units import disk
from ckpttools.core.text import age, plural, printable, some
from ckpttools.runs.listing import ItemListing, RunListing, StepListing

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


def lines_of(listing: RunListing) -> Iterator[str]:
    """The run, its steps, and what there is to say of them."""
    yield styled(printable(listing.path), bold=True)
    now = time.time()
    rows = [_cells(step, listing, now) for step in listing.steps]
    table = list(draw_table(_COLUMNS, rows, width()))
    yield from table
    if left := _left_out(table, rows):
        yield f"no room for {', '.join(left)}: --json has all"
    total, own = (sum(getattr(step, name) for step in listing.steps) for name in ("nbytes", "own_bytes"))
    shared = f", {disk(total - own)} of it in files with names outside of their step" if total > own else ""
    yield f"{plural(len(listing.steps), 'step')}, {len(listing.finished)} finished: {disk(total)}{shared}"
    for label, text in _remarks(listing):
        yield from labelled(f"  {label}", printable(text), _LABEL, width())


def _left_out(table: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Titles of columns that a narrow terminal has no room for."""
    shown = click.unstyle(table[0]).split() if table else []
    filled = [column.head for k, column in enumerate(_COLUMNS) if any(row[k] for row in rows)]
    return [head for head in filled if head and head not in shown]


def _remarks(listing: RunListing) -> Iterator[tuple[str, str]]:
    if listing.latest is not None:
        yield _latest(listing, listing.latest)
    elif listing.tracker is None:
        yield "resumes", "no step: Orbax lists none here"
    elif listing.tracker:
        yield "latest", f"none of these, by {listing.tracker}"
    for name, why in listing.passed_over.items():
        yield "passed over", f"{name}: {why}"
    for step in listing.steps:
        if step.unfinished is not None and step.name not in listing.passed_over:
            yield _state(step), f"{step.name}: {step.unfinished}"
        if step.deleting is not None:
            yield "deleting", f"item {step.deleting} of {step.name}: Orbax was interrupted; retry it there"
    if listing.beside:
        yield "beside", some(listing.beside, 5)


def _latest(listing: RunListing, step: int) -> tuple[str, str]:
    by = f", by {listing.tracker}" if listing.tracker else ""
    if listing.resumes is None:
        return "latest", f"step {step}{by}, {listing.hindered}"
    if listing.tracker is not None:
        return "resumes", f"step {step}{by}"
    return "resumes", f"step {step}, {f'from {listing.resume_item}' if listing.resume_item else _NO_ITEM}"


def _state(step: StepListing) -> str:
    if step.unfinished is None:
        return ""
    return "damaged" if step.is_damaged else "unfinished"


def _cells(step: StepListing, listing: RunListing, now: float) -> list[str]:
    shown = sorted((step.metrics or {}).items())[:3]
    marks = [
        _state(step),
        f"{plural(step.missing_chunks, 'chunk')} missing" if step.missing_chunks else "",
        "deleting" if step.deleting is not None else "",
        "resumes" if step.step == listing.resumes else "",
    ]
    return [
        printable(str(step.step)),
        printable(", ".join(map(_item, step.items))),
        step.kind,
        disk(step.nbytes),
        "" if step.own_bytes == step.nbytes else disk(step.own_bytes),
        "" if step.saved is None else f"{age(now - step.saved)} ago",
        printable(" ".join(f"{name}={value:.6g}" for name, value in shown)),
        ", ".join(filter(None, marks)),
    ]


def _item(item: ItemListing) -> str:
    return item.name or "(the step itself)"


def item_lines(items: Sequence[ItemListing]) -> Iterator[str]:
    """The items of one step."""
    columns = (Column("item"), Column("kind"), Column("arrays", right=True), Column("size", right=True))
    rows = [
        [
            printable(item.name),
            item.kind,
            *((f"{item.arrays:,}", disk(item.nbytes)) if item.arrays else ("", "")),
        ]
        for item in items
    ]
    yield from draw_table(columns, rows, width())
