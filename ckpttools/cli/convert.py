"""`ckpt convert`: from one form of checkpoint to another."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from ckpttools.cli.generated_options import generated_options, make_command
from ckpttools.cli.lazy import Deferred, LazyGroup, lazy_command
from ckpttools.cli.transform_options import common_options, model_source_and_destination, transform_options
from ckpttools.cli.write import write

# Commands in files of their own, imported when they are run.
_COMMANDS = {
    "hf-to-maxtext": lazy_command("models", "hf_to_maxtext", "Hugging Face to MaxText's Orbax."),
    "maxtext-to-hf": lazy_command("models", "maxtext_to_hf", "MaxText's Orbax to Hugging Face."),
}


def _to_formats() -> dict[str, Deferred]:
    """A command for each format that can be written."""
    from ckpttools.formats.registry import writable

    return {f"to-{name}": Deferred(partial(to_format, name), f"Any format to {name}.") for name in writable()}


@click.group(cls=LazyGroup, lazy=_COMMANDS, more=_to_formats)
def convert() -> None:
    """Write a checkpoint in another form.

    \b
    Example:
      ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
    """


def to_format(name: str) -> click.Command:
    """The command that writes a format."""
    from ckpttools.api.convert import convert
    from ckpttools.formats.registry import writable

    def command(**options: Any) -> None:
        write(convert.plan, format=name, **options)

    format = writable()[name]
    options = (
        model_source_and_destination,
        generated_options(format.options),
        transform_options,
        common_options,
    )
    return make_command(f"convert to-{name}", format.help, command, *options)
