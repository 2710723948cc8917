"""`ckpt PATH`: what is there, and which commands go on from there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import click

from ckpttools.cli.options import ANY_PATH, json_option, requests_option
from ckpttools.cli.output import print_report, styled, width
from ckpttools.core.text import printable
from ckpttools.stores.place import Place

if TYPE_CHECKING:
    from ckpttools.api.summary import Summary


@click.command("summary", hidden=True)
@click.argument("path", type=ANY_PATH)
@json_option
@requests_option
def summary(path: Place, as_json: bool, requests: int | None) -> None:
    """Say what is at PATH, whatever it is, and which commands go on from there."""
    from ckpttools.api.summary import summary as look

    found = look(path, requests=requests)
    print_report(found, _lines(found), as_json=as_json)


def _lines(found: Summary) -> Iterator[str]:
    from ckpttools.cli.ls_text import item_lines, lines_of
    from ckpttools.cli.tree_facts import facts

    yield f"{styled(printable(found.path), bold=True)}: {printable(found.what)}"
    if found.run is not None:
        # Its own path where that is one level below.
        yield from islice(lines_of(found.run), int(found.run.path == found.path), None)
    if found.items:
        yield from item_lines(found.items)
    if found.tree is not None:
        yield from facts(found.tree, width())
    yield ""
    for number, command in enumerate(found.next):
        yield f"{'next' if not number else '':<6}{command}"
