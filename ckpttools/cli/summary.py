"""`ckpt PATH`: identify a path and suggest commands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import click

from ckpttools.api.options import REQUESTS
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option
from ckpttools.cli.output import print_report, styled, width
from ckpttools.core.text import printable
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.summary import Summary


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
    from ckpttools.cli.ls import collection_lines, item_lines, run_lines
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
