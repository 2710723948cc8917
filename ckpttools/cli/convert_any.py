"""`ckpt convert to-…`: any format into one, without knowing the model; the format declares its options."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.declared import declared, made
from ckpttools.cli.transforming import common_options, model_places, transform_options
from ckpttools.cli.write import write


def to_format(name: str) -> click.Command:
    """The command that writes a format."""
    from ckpttools.api.convert import convert
    from ckpttools.formats.registry import writable

    def command(**options: Any) -> None:
        write(convert.plan, format=name, **options)

    format = writable()[name]
    options = (model_places, declared(format.options), transform_options, common_options)
    return made(f"convert to-{name}", format.help, command, *options)
