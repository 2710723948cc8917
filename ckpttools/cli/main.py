"""The entry point `ckpt`: its commands, and what becomes of errors."""

from __future__ import annotations

import os
import sys
import warnings

import click

from ckpttools import __version__
from ckpttools.cli.lazy import Lazy, LazyGroup
from ckpttools.cli.output import say
from ckpttools.errors import CheckpointError, LaterStepWarning, StorageError

# As a shell reports a program that a signal ended: 128 and the signal's number.
_INTERRUPTED, _PIPE_CLOSED = 130, 141

_COMMANDS = {
    "cast": Lazy("ckpttools.cli.cast", "cast", "The same arrays in other dtypes."),
    "convert": Lazy("ckpttools.cli.convert", "convert", "Write a checkpoint in another form."),
    "demo": Lazy("ckpttools.cli.demo", "demo", "Make, convert and load a small model, and back."),
    "diff": Lazy("ckpttools.cli.diff", "diff", "What differs between two checkpoints, how far, and why."),
    "doctor": Lazy("ckpttools.cli.doctor", "doctor", "What is wrong with a checkpoint, and what to do."),
    "families": Lazy("ckpttools.cli.families", "families", "List, show and check model families."),
    "formats": Lazy("ckpttools.cli.listings", "formats", "List the formats that can be read."),
    "hash": Lazy("ckpttools.cli.hash", "hash_command", "Digests that no format or layout changes."),
    "inspect": Lazy("ckpttools.cli.inspect", "inspect", "Look into a checkpoint without loading it."),
    "remap": Lazy("ckpttools.cli.remap", "remap", "Arrays under other names, by rules or by a function."),
    "select": Lazy("ckpttools.cli.select", "select", "Some arrays of a checkpoint."),
    "stack": Lazy("ckpttools.cli.scan", "stack", "Layers one by one to stacks for jax.lax.scan."),
    "strip-optimizer": Lazy("ckpttools.cli.strip", "strip_optimizer", "Parameters of a training checkpoint."),
    "unstack": Lazy("ckpttools.cli.scan", "unstack", "Stacked layers to layers one by one."),
    "verify": Lazy("ckpttools.cli.verify", "verify", "Prove that a checkpoint holds what another one does."),
}


class _Root(LazyGroup):
    """The group of all commands, and the border at which errors become messages and exit codes."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                warnings.simplefilter("default", LaterStepWarning)
                return super().invoke(ctx)
        except BrokenPipeError:
            _drop_output()
            ctx.exit(_PIPE_CLOSED)
        except KeyboardInterrupt:
            click.echo("Stopped. A conversion goes on from there when its command is run again.", err=True)
            ctx.exit(_INTERRUPTED)
        except (CheckpointError, OSError) as error:
            _report(error, traceback=ctx.params["traceback"])
            ctx.exit(error.exit_code if isinstance(error, CheckpointError) else StorageError.exit_code)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning of the library, such as a plug-in that cannot be loaded, without the place in the code."""
    say(f"Warning: {message}")


def _report(error: Exception, *, traceback: bool) -> None:
    """The error on stderr; on demand after the way it came."""
    if traceback:
        from traceback import format_tb

        click.echo("".join(format_tb(error.__traceback__)), err=True, nl=False)
    say(f"Error: {error}")


def _drop_output() -> None:
    """Keeps the interpreter from writing what is left to a reader that has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command(
    "ckpt",
    cls=_Root,
    lazy=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--traceback", is_flag=True, help="Show where in the program an error arose.")
@click.version_option(__version__, message="%(prog)s %(version)s")
def main(traceback: bool) -> None:
    """Convert, inspect and prove checkpoints of large models.

    \b
    Exit codes: 0 done, 1 differences found, 2 usage, 3 bad input,
    4 does not fit into memory or disk, 5 input/output.

    \b
    Example:
      ckpt inspect tree ~/models/Llama-3.1-8B
    """
