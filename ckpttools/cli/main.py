"""The entry point `ckpt`: its commands."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckpttools import __version__
from ckpttools.cli import stopping
from ckpttools.cli.command_line import COMPLETION_VARIABLE, remember_command
from ckpttools.cli.error_boundary import (
    exit_code_of,
    finish_output,
    kept_from_click,
    open_closed,
    write_whole,
)
from ckpttools.cli.lazy import Deferred, LazyGroup, has_written, in_module, is_path, writes
from ckpttools.cli.output import say
from ckpttools.cli.units import disk
from ckpttools.core.errors import StepWarning, UsageError
from ckpttools.core.message_terms import as_flags
from ckpttools.core.plugins import announced, package_of
from ckpttools.core.text import plural

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ckpttools.stores.costs import Traffic


def plugged_in() -> Mapping[str, Deferred]:
    """All of them, by name; none is loaded."""
    result: dict[str, Deferred] = {}
    for group, load in (("ckpttools.transforms", _transform), ("ckpttools.commands", _command)):
        for point in announced(group):
            result[point.name] = Deferred(partial(load, point), f"Of the package {package_of(point)}.")
    return result


def _command(point: EntryPoint) -> click.Command:
    try:
        result = point.load()
    except Exception as error:
        what = f"the command {point.name} of {package_of(point)} cannot be loaded"
        raise UsageError(what, got=repr(error), hint="repair that package, or remove it") from error
    if not isinstance(result, click.Command):
        what = f"{point.name} of {package_of(point)} is no command"
        raise UsageError(what, got=type(result).__name__, expected="a click.Command")
    return result


def _transform(point: EntryPoint) -> click.Command:
    from ckpttools.api.changes import transform
    from ckpttools.cli.declared import built, declared
    from ckpttools.cli.transforming import common_options, locations, target_options
    from ckpttools.cli.write import write
    from ckpttools.transforms.registry import help_of, options_of

    def command(**options: Any) -> None:
        write(transform.plan, transforms=point.name, **options)

    options = (locations, declared(options_of(point.name)), target_options, common_options)
    return built(point.name, help_of(point.name), command, *options)


_COMMANDS = {
    "adapter": in_module("adapter", "adapter", "LoRA adapters: merged, extracted, to MaxText, to PEFT."),
    "average": in_module("average", "average", "The weighted mean of checkpoints."),
    "assemble": in_module("assemble", "assemble", "One checkpoint of the parts that hosts of a job kept."),
    "cast": in_module("cast", "cast", "The same arrays in other dtypes."),
    "completion": in_module("completion", "completion", "Print a script that completes `ckpt` in a shell."),
    "convert": in_module("convert", "convert", "Write a checkpoint in another form."),
    "copy": in_module("copy", "copy", "A checkpoint to another place or store, byte for byte."),
    "demo": in_module("demo", "demo", "Make, convert and load a small model, and back."),
    "diff": in_module("diff", "diff", "What differs between two checkpoints, how far, and why."),
    "doctor": in_module("doctor", "doctor", "What is wrong with a checkpoint, and what to do."),
    "families": in_module("families", "families", "List, show and check model families."),
    "formats": in_module("listings", "formats", "List the formats that can be read and written."),
    "hash": in_module("hash", "hash_command", "Digests that no format or layout changes."),
    "inspect": in_module("inspect", "inspect", "Look into a checkpoint without loading it."),
    "ls": in_module("ls", "ls", "The steps of a run: kind, size, age, finished or not."),
    "maxtext-config": in_module(
        "maxtext_config", "maxtext_config", "What MaxText must be told to run a checkpoint."
    ),
    "plan": in_module("plan", "plan", "A conversion in a file, for many processes to carry out."),
    "prune": in_module("prune", "prune", "Delete steps of a run by rules, or only their optimizer."),
    "plan-training": in_module("plan_training", "plan_training", "What a training's checkpoints will take."),
    "quantize": in_module("quantize", "quantize", "A model with quantised weights."),
    "remap": in_module("remap", "remap", "Arrays under other names, by rules or by a function."),
    "reshard": in_module("reshard", "reshard", "Chunks that suit a mesh."),
    "resolve": in_module("resolve", "resolve", "What a run of MaxText would load, and what it would miss."),
    "run": in_module("run", "run", "A part of a plan, how far it has come, or its last steps."),
    "select": in_module("select", "select", "Some arrays of a checkpoint."),
    "shrink": in_module("shrink", "shrink", "A part of a model that is a model itself."),
    "stack": in_module("scan", "stack", "Layers one by one to stacks for jax.lax.scan."),
    "stitch": in_module("synth", "stitch", "The towers of one model, the decoder of another."),
    "strip-optimizer": in_module("scan", "strip_optimizer", "Parameters of a training checkpoint."),
    "synth": in_module("synth", "synth", "A model of noise, from its configuration."),
    "unstack": in_module("scan", "unstack", "Stacked layers to layers one by one."),
    "verify": in_module("verify", "verify", "Prove that a checkpoint holds what another one does."),
}


_SUMMARY = in_module("summary", "summary", "What is at a path.")


class _Root(LazyGroup):
    """The group of all commands."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command and ends the process; with `standalone_mode=False` errors are raised instead."""
        code: int | None
        run = partial(super().main, args, prog_name, complete_var, False, **extra)
        if not standalone_mode:
            return run()
        if COMPLETION_VARIABLE in os.environ:
            _answer_shell(run)
        open_closed()
        write_whole()
        try:
            with stopping.raised():
                code = run()
        except BaseException as end:
            words = sys.argv[1:] if args is None else args
            code = exit_code_of(end, traceback="--traceback" in words)
        finish_output()
        sys.exit(code)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        words = list(args)
        with kept_from_click():
            context = super().make_context(info_name, args, parent, **extra)
        remember_command(context, words)
        return context

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        command = self.get_command(ctx, args[0])
        is_only_path = command is None and is_path(args[0])
        if is_only_path or (len(args) == 1 and command and _needs_more(command) and _is_checkpoint(args[0])):
            return "PATH", _SUMMARY.load(), args
        return super().resolve_command(ctx, args)

    def _instead(self, ctx: click.Context, name: str, known: Sequence[str]) -> str:
        from ckpttools.formats.interrupted import next_step
        from ckpttools.stores.publishing import begun_at
        from ckpttools.stores.registry import parse

        begun = begun_at(parse(name))
        if begun is not None:
            return f"Begun and not done: {next_step(begun)}."
        meant = super()._instead(ctx, name, known)
        return meant if meant.startswith("Did") else f"Nor is there a path of this name. {meant}"

    def invoke(self, ctx: click.Context) -> None:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            warnings.simplefilter("default", StepWarning)
            try:
                with kept_from_click(), as_flags(), telling_traffic():
                    super().invoke(ctx)
            except stopping.Stopped as end:
                end.goes_on, end.is_done = writes(ctx), has_written(ctx)
                raise


def _answer_shell(complete: Callable[[], object]) -> NoReturn:
    """Let click print completions, and end with its exit code.

    Errors are not shown: they would appear in the line that is being typed.
    """
    with suppress(Exception):
        complete()
    sys.exit(1)


def _needs_more(command: click.Command) -> bool:
    """Return whether a command does nothing without arguments, so that its name alone can only be a path."""
    return isinstance(command, click.Group) or any(param.required for param in command.params)


def _is_checkpoint(word: str) -> bool:
    """Return whether there is a directory of this name that `ckpt PATH` identifies."""
    from ckpttools.core.errors import CheckpointError
    from ckpttools.stores.registry import parse

    path = parse(word)
    if not path.is_dir():
        return False
    from ckpttools.api.summary import summary

    try:
        summary(path)
    except CheckpointError:
        return False
    return True


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning of the library, such as a plug-in that cannot be loaded, without the place in the code."""
    say(f"Warning: {message}")


@click.command(
    "ckpt",
    cls=_Root,
    lazy=_COMMANDS,
    more=plugged_in,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
# The border looks for it itself: it also reports what is wrong with the words before a command begins.
@click.option(
    "--traceback", is_flag=True, expose_value=False, help="Show where in the program an error arose."
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Convert, inspect and prove checkpoints of large models.

    Pass a path instead of a command to identify a checkpoint and see what you can do with it. Write ./run for
    a directory that has the name of a command.

    \b
    Exit codes: 0 done, 1 differences found, 2 usage, 3 bad input,
    4 does not fit into memory or disk, 5 input/output,
    70 a defect of ckpttools, 129 stopped by SIGHUP,
    130 stopped by SIGINT (Ctrl-C), 141 nobody reads the output any more,
    143 stopped by SIGTERM.

    \b
    Example:
      ckpt ~/models/Llama-3.1-8B
      ckpt inspect tree ~/models/Llama-3.1-8B
    """


@contextmanager
def telling_traffic() -> Iterator[None]:
    """Says on stderr how many requests were made and how many bytes came, unless an error ends the command
    or nothing was asked."""
    from ckpttools.stores.registry import counted

    with counted() as traffic:
        try:
            yield
        except click.exceptions.Exit:  # such as that there are differences
            _tell(traffic())
            raise
        _tell(traffic())


def _tell(traffic: Mapping[str, Traffic]) -> None:
    for address, item in traffic.items():
        say(f"{plural(item.requests, 'request')} to {address}, {disk(item.nbytes)} read")
