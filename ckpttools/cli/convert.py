"""`ckpt convert`: convert between checkpoint formats and models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckpttools.api.options.convert import CONVERT
from ckpttools.cli.lazy import Deferred, LazyGroup, lazy_command
from ckpttools.cli.options import flags, given_flags
from ckpttools.cli.write import WriteCommand
from ckpttools.cli.writing import common_options, make_command, model_source_and_destination

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

# Commands that are imported only when they run.
_COMMANDS = {
    "hf-to-maxtext": lazy_command(
        "models", "hf_to_maxtext", "Convert Hugging Face safetensors to a MaxText checkpoint."
    ),
    "maxtext-to-hf": lazy_command(
        "models", "maxtext_to_hf", "Convert a MaxText checkpoint to Hugging Face safetensors."
    ),
}


def _to_formats() -> dict[str, Deferred]:
    """Return one command for each writable format."""
    from ckpttools.formats.known_formats import writable

    return {
        f"to-{name}": Deferred(partial(to_format, name), f"Convert any format to {name}.")
        for name in writable()
    }


@click.group(cls=LazyGroup, lazy=_COMMANDS, more=_to_formats)
def convert() -> None:
    """Convert a checkpoint to another format or framework.

    \b
    Example:
      ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
    """


def to_format(name: str) -> click.Command:
    """Return the command that writes a format."""
    from ckpttools.api.convert import convert
    from ckpttools.formats.known_formats import writable

    def command(**options: Any) -> Prepared:
        return convert.plan(format=name, **options)

    format = writable()[name]
    options = (
        model_source_and_destination,
        given_flags(*format.options),
        flags(*CONVERT),
        common_options,
    )
    return make_command(f"convert to-{name}", format.help, command, *options, cls=WriteCommand)
