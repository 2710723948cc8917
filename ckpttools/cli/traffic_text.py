"""What a command took of stores behind a network, said when it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ckpttools.cli.output import say
from ckpttools.cli.units import disk
from ckpttools.core.text import plural

if TYPE_CHECKING:
    from ckpttools.stores.costs import Traffic


@contextmanager
def telling_traffic() -> Iterator[None]:
    """Says on stderr how many requests were made and how many bytes came, unless an error ends the command
    or nothing was asked."""
    from ckpttools.stores.traffic import counted

    with counted() as traffic:
        try:
            yield
        except click.exceptions.Exit:  # such as that there are differences
            _tell(traffic())
            raise
        _tell(traffic())


def _tell(traffic: Mapping[str, Traffic]) -> None:
    for address, each in traffic.items():
        say(f"{plural(each.requests, 'request')} to {address}, {disk(each.nbytes)} read")
