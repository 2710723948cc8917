"""What hosts hold on a terminal: a row for each save, and what is missing."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ckpttools.api.assemble import HostsListing, SaveListing, host_text
from ckpttools.cli.output import labelled, width
from ckpttools.cli.table import Column, draw_table
from ckpttools.core.text import age, plural, printable, some

_COLUMNS = (
    Column("step", right=True),
    Column("begun", right=True, spare=2),
    Column("hosts", right=True),
    Column("chunks", right=True),
    Column("on several", right=True, spare=1),
    Column("missing", right=True),
    Column(""),
)
_LABEL = 12
_MOST = 8


def lines_of(listing: HostsListing) -> Iterator[str]:
    """The saves, what the incomplete ones lack, and what cannot be used."""
    newest, now = listing.newest, time.time()
    yield from draw_table(_COLUMNS, [_cells(each, newest, now) for each in listing.saves], width())
    for save in listing.saves:
        for label, text in _lacking(save):
            yield from labelled(f"  {label}", printable(text), _LABEL, width())
    for name, why in listing.unusable.items():
        yield from labelled("  unusable", printable(f"{name}: {why}"), _LABEL, width())
    for text in listing.lost[:_MOST]:
        yield from labelled("  lost", printable(text), _LABEL, width())


def _cells(save: SaveListing, newest: SaveListing | None, now: float) -> list[str]:
    missing = sum(each.count for each in save.missing)
    verdict = "complete" if save.is_complete else "not complete"
    return [
        str(save.step),
        "" if save.began is None else f"{age(now - save.began)} ago",
        f"{len(save.hosts):,}",
        f"{save.chunks:,}",
        f"{save.twins:,}",
        f"{missing:,}" if missing else "",
        f"{verdict}, would be assembled" if save is newest else verdict,
    ]


def _lacking(save: SaveListing) -> Iterator[tuple[str, str]]:
    hosts = list(map(host_text, save.hosts, save.processes))
    yield from zip((f"{save.step} of", *[""] * _MOST), hosts[:_MOST], strict=False)
    if len(hosts) > _MOST:
        yield "", f"and {len(hosts) - _MOST:,} more"
    for each in save.missing[:_MOST]:
        cells = some(["/".join(map(str, cell)) for cell in each.cells], _MOST)
        yield "lacks", f"{each}{f' ({cells})' if any(each.cells) else ''}"
    if len(save.missing) > _MOST:
        yield "", f"and {len(save.missing) - _MOST:,} more arrays"
    for wanted in save.wanted or ():
        processes = " or ".join(map(str, wanted.processes))
        yield "wanted", f"the host of process {processes}, for {plural(wanted.chunks, 'chunk')}"
