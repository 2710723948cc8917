"""`ckpt assemble`: combine the parts of a checkpoint from several hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

import click

from ckpttools.api.assemble import HostsListing, SaveListing, host_text
from ckpttools.api.options import MAX_HEADER_BYTES, MAX_INDEX_BYTES, WITH_OPTIMIZER
from ckpttools.api.options.runs import ASSEMBLE
from ckpttools.cli.options import ANY_PATH, flags, output_options, resource_options
from ckpttools.cli.output import format_labeled, print_report, width
from ckpttools.cli.table import Column, draw_table
from ckpttools.cli.write import WriteCommand, target_options
from ckpttools.core.options import switch
from ckpttools.core.text import format_age, plural, printable, sample_names
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.convert import ChangedRun
    from ckpttools.api.prepared import Prepared


@click.command(short_help="Combine the parts that hosts of a job saved.", cls=WriteCommand)
@click.argument("locations", metavar="HOST_DIR… [DST]", nargs=-1, required=True, type=ANY_PATH)
@flags(
    switch(
        "is_listing",
        "Only list the steps and what they lack; takes no DST. Use --dry-run to compare bytes as well.",
        flag="--list",
    ),
    *ASSEMBLE,
)
@target_options
@flags(MAX_HEADER_BYTES, MAX_INDEX_BYTES, WITH_OPTIMIZER)
@resource_options
@output_options
def assemble(
    locations: tuple[Location, ...],
    is_listing: bool,
    prefer: tuple[Location, ...],
    **options: Unpack[ChangedRun],
) -> Prepared | None:
    """Combine the parts that hosts keep: emergency, multi-tier or peer-to-peer checkpoints.

    HOST_DIR is the local directory of a host with its steps, a directory that contains those of several
    hosts, a copy in a bucket, or the persistent directory. DST gets STEP/items of the newest step whose every
    chunk is on some host. Steps are never mixed. Chunks that several hosts have are compared byte by byte.
    Files are hard-linked where possible, otherwise copied.

    \b
    Examples:
      $ ckpt assemble /mnt/ramdisks --list
      $ ckpt assemble /mnt/ramdisks ~/out/run/checkpoints
      $ ckpt assemble host0 host3 gs://bucket/mtc/host1 DST --prefer host0
    """
    from ckpttools.api.assemble import assemble as put_together
    from ckpttools.api.calls import absolute

    if is_listing:
        _list_saves(locations, options, as_json=click.get_current_context().obj.as_json)
        return None
    *hosts, destination = map(absolute, locations)
    if not hosts:
        raise click.UsageError("missing DST: pass the host directories, then DST; or --list")
    return put_together.plan(hosts, destination, prefer=prefer, **options)


def _list_saves(locations: tuple[Location, ...], options: ChangedRun, *, as_json: bool) -> None:
    from ckpttools.api.assemble import list_saves

    listing = list_saves(locations, requests=options["requests"], max_index_bytes=options["max_index_bytes"])
    print_report(listing, format_lines(listing), as_json=as_json)


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
_MAX_LISTED = 8


def format_lines(listing: HostsListing) -> Iterator[str]:
    """Yield lines about the saves, missing chunks of incomplete saves, and unusable files."""
    newest, now = listing.newest, time.time()
    yield from draw_table(_COLUMNS, [_row_cells(item, newest, now) for item in listing.saves], width())
    for save in listing.saves:
        for label, text in _missing_text(save):
            yield from format_labeled(f"  {label}", printable(text), _LABEL, width())
    for name, reason in listing.unusable.items():
        yield from format_labeled("  unusable", printable(f"{name}: {reason}"), _LABEL, width())
    for text in listing.missing_files[:_MAX_LISTED]:
        yield from format_labeled("  lost", printable(text), _LABEL, width())


def _row_cells(save: SaveListing, newest: SaveListing | None, now: float) -> list[str]:
    missing = sum(item.num_missing for item in save.missing)
    verdict = "complete" if save.is_complete else "not complete"
    return [
        str(save.step),
        "" if save.started_at is None else f"{format_age(now - save.started_at)} ago",
        f"{len(save.hosts):,}",
        f"{save.chunks:,}",
        f"{save.num_duplicates:,}",
        f"{missing:,}" if missing else "",
        f"{verdict}, would be assembled" if save is newest else verdict,
    ]


def _missing_text(save: SaveListing) -> Iterator[tuple[str, str]]:
    hosts = list(map(host_text, save.hosts, save.processes))
    yield from zip((f"{save.step} of", *[""] * _MAX_LISTED), hosts[:_MAX_LISTED], strict=False)
    if len(hosts) > _MAX_LISTED:
        yield "", f"and {len(hosts) - _MAX_LISTED:,} more"
    for item in save.missing[:_MAX_LISTED]:
        cells = sample_names(["/".join(map(str, cell)) for cell in item.cells], _MAX_LISTED)
        yield "lacks", f"{item}{f' ({cells})' if any(item.cells) else ''}"
    if len(save.missing) > _MAX_LISTED:
        yield "", f"and {len(save.missing) - _MAX_LISTED:,} more arrays"
    for expected in save.expected or ():
        processes = " or ".join(map(str, expected.processes))
        yield "expected", f"the host of process {processes}, for {plural(expected.chunks, 'chunk')}"
