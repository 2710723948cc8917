"""`ckpt convert`: from one form of checkpoint to another."""

from __future__ import annotations

from functools import partial

import click

from ckpttools.cli.lazy import Deferred, LazyGroup, in_module

# Commands in files of their own, imported when they are run.
_COMMANDS = {
    "hf-to-maxtext": in_module("models", "hf_to_maxtext", "Hugging Face to MaxText's Orbax."),
    "maxtext-to-hf": in_module("models", "maxtext_to_hf", "MaxText's Orbax to Hugging Face."),
}


def _to_formats() -> dict[str, Deferred]:
    """A command for each format that can be written."""
    from ckpttools.cli.convert_any import to_format
    from ckpttools.formats.registry import writable

    return {f"to-{name}": Deferred(partial(to_format, name), f"Any format to {name}.") for name in writable()}


@click.group(cls=LazyGroup, lazy=_COMMANDS, more=_to_formats)
def convert() -> None:
    """Write a checkpoint in another form.

    \b
    Example:
      ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
    """
