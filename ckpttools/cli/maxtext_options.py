"""Options of several commands about MaxText: the model that a checkpoint came from, and versions."""

from __future__ import annotations

import click

from ckpttools.cli.options import MODEL, Decorator
from ckpttools.maxtext.versions import NEWEST, VERSIONS


def like_option(help: str) -> Decorator:
    """Adds the model that a checkpoint came from, as `like`."""
    return click.option("--like", type=MODEL, metavar="HF_DIR|CONFIG", help=help)


def maxtext_option(help: str) -> Decorator:
    """Adds a version of MaxText, by default the newest, as `maxtext`."""
    kind = click.Choice(list(VERSIONS))
    return click.option("--maxtext", type=kind, default=NEWEST, show_default=True, help=help)
