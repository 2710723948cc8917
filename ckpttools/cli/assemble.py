"""`ckpt assemble`: one checkpoint of what several hosts kept."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.options import (
    ANY_PATH,
    max_header_option,
    max_index_option,
    output_options,
    resource_options,
    with_optimizer_option,
)
from ckpttools.cli.output import print_report
from ckpttools.cli.transforming import target_options
from ckpttools.cli.write import write
from ckpttools.stores.place import Place


@click.command(short_help="One checkpoint of the parts that hosts of a job kept.")
@click.argument("places", metavar="HOST_DIR… [DST]", nargs=-1, required=True, type=ANY_PATH)
@click.option(
    "--list",
    "is_listing",
    is_flag=True,
    help="Only say which steps are there, and what they lack; no DST. --dry-run compares bytes, too.",
)
@click.option(
    "--prefer",
    type=ANY_PATH,
    metavar="HOST_DIR",
    multiple=True,
    help="Take from this host what others have with different bytes. May be repeated.",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Step to put together; by default the newest complete one.",
)
@target_options
@max_header_option
@max_index_option
@with_optimizer_option
@resource_options
@output_options
def assemble(places: tuple[Place, ...], is_listing: bool, **options: Any) -> None:
    """Make one checkpoint of the parts that hosts keep: emergency, multi-tier or peer-to-peer checkpoints.

    HOST_DIR is the local directory of a host, with its steps in it, or a directory above those of several
    hosts; also a copy in a bucket, or the persistent directory. DST gets STEP/items of the newest step of
    which together they have every chunk. Steps are never mixed. What several hosts have is compared byte by
    byte. Files are shared where they can be linked, else copied.

    \b
    Example:
      ckpt assemble /mnt/ramdisks --list
      ckpt assemble /mnt/ramdisks ~/out/run/checkpoints
      ckpt assemble host0 host3 gs://bucket/mtc/host1 DST --prefer host0
    """
    from ckpttools.api.assemble import assemble as put_together
    from ckpttools.api.calls import absolute

    if is_listing:
        _list(places, options)
        return
    *hosts, destination = map(absolute, places)
    if not hosts:
        raise click.UsageError("DST is missing: name the directories of hosts, then DST; or --list")

    def call(source: Place, destination: Place, **said: Any) -> Any:
        return put_together.plan(hosts, destination, **said)

    write(call, source=hosts[0], destination=destination, **options)


def _list(places: tuple[Place, ...], options: dict[str, Any]) -> None:
    from ckpttools.api.assemble import list_saves
    from ckpttools.cli.assemble_text import lines_of

    listing = list_saves(places, requests=options["requests"], max_index_bytes=options["max_index_bytes"])
    print_report(listing, lines_of(listing), as_json=options["as_json"])
