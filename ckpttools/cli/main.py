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
from ckpttools.cli import signals
from ckpttools.cli.command_line import COMPLETION_VARIABLE, remember_command
from ckpttools.cli.error_boundary import (
    exit_code_of,
    finish_output,
    reopen_closed_streams,
    retry_partial_writes,
    translate_click_errors,
)
from ckpttools.cli.lazy import Deferred, LazyGroup, has_written, is_path, is_writer, lazy_command
from ckpttools.cli.output import print_stderr
from ckpttools.cli.units import format_disk
from ckpttools.core.errors import StepWarning, UsageError
from ckpttools.core.message_terms import as_flags
from ckpttools.core.plugins import entry_points_of, package_name
from ckpttools.core.text import plural

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ckpttools.stores.costs import Traffic


def plugin_commands() -> Mapping[str, Deferred]:
    """All of them, by name; none is loaded."""
    result: dict[str, Deferred] = {}
    for group, load in (
        ("ckpttools.transforms", _make_transform_command),
        ("ckpttools.commands", _load_command),
    ):
        for point in entry_points_of(group):
            result[point.name] = Deferred(partial(load, point), f"Of the package {package_name(point)}.")
    return result


def _load_command(point: EntryPoint) -> click.Command:
    try:
        result = point.load()
    except Exception as error:
        what = f"the command {point.name} of {package_name(point)} cannot be loaded"
        raise UsageError(what, got=repr(error), hint="repair that package, or remove it") from error
    if not isinstance(result, click.Command):
        what = f"{point.name} of {package_name(point)} is no command"
        raise UsageError(what, got=type(result).__name__, expected="a click.Command")
    return result


def _make_transform_command(point: EntryPoint) -> click.Command:
    from ckpttools.api.transforms import transform
    from ckpttools.cli.generated_options import generated_options, make_command
    from ckpttools.cli.transform_options import common_options, source_and_destination, target_options
    from ckpttools.cli.write import write
    from ckpttools.transforms.registry import help_of, options_of

    def command(**options: Any) -> None:
        write(transform.plan, transforms=point.name, **options)

    options = (
        source_and_destination,
        generated_options(options_of(point.name)),
        target_options,
        common_options,
    )
    return make_command(point.name, help_of(point.name), command, *options)


_COMMANDS = {
    "adapter": lazy_command("adapter", "adapter", "LoRA adapters: merged, extracted, to MaxText, to PEFT."),
    "average": lazy_command("average", "average", "The weighted mean of checkpoints."),
    "assemble": lazy_command("assemble", "assemble", "One checkpoint of the parts that hosts of a job kept."),
    "cast": lazy_command("edit", "cast", "The same arrays in other dtypes."),
    "completion": lazy_command(
        "completion", "completion", "Print a script that completes `ckpt` in a shell."
    ),
    "convert": lazy_command("convert", "convert", "Write a checkpoint in another form."),
    "copy": lazy_command("copy", "copy", "A checkpoint to another place or store, byte for byte."),
    "demo": lazy_command("demo", "demo", "Make, convert and load a small model, and back."),
    "diff": lazy_command("diff", "diff", "What differs between two checkpoints, how far, and why."),
    "doctor": lazy_command("doctor", "doctor", "What is wrong with a checkpoint, and what to do."),
    "families": lazy_command("families", "families", "List, show and check model families."),
    "formats": lazy_command("families", "formats", "List the formats that can be read and written."),
    "hash": lazy_command("hash", "hash_command", "Digests that no format or layout changes."),
    "inspect": lazy_command("inspect", "inspect", "Look into a checkpoint without loading it."),
    "ls": lazy_command("ls", "ls", "The steps of a run: kind, size, age, finished or not."),
    "maxtext-config": lazy_command(
        "maxtext_config", "maxtext_config", "What MaxText must be told to run a checkpoint."
    ),
    "plan": lazy_command("plan", "plan", "A conversion in a file, for many processes to carry out."),
    "prune": lazy_command("prune", "prune", "Delete steps of a run by rules, or only their optimizer."),
    "plan-training": lazy_command(
        "plan_training", "plan_training", "What a training's checkpoints will take."
    ),
    "quantize": lazy_command("quantize", "quantize", "A model with quantised weights."),
    "remap": lazy_command("edit", "remap", "Arrays under other names, by rules or by a function."),
    "reshard": lazy_command("reshard", "reshard", "Chunks that suit a mesh."),
    "resolve": lazy_command(
        "resolve", "resolve", "What a run of MaxText would load, and what it would miss."
    ),
    "run": lazy_command("run", "run", "A part of a plan, how far it has come, or its last steps."),
    "select": lazy_command("edit", "select", "Some arrays of a checkpoint."),
    "shrink": lazy_command("shrink", "shrink", "A part of a model that is a model itself."),
    "stack": lazy_command("edit", "stack", "Layers one by one to stacks for jax.lax.scan."),
    "stitch": lazy_command("synth", "stitch", "The towers of one model, the decoder of another."),
    "strip-optimizer": lazy_command("edit", "strip_optimizer", "Parameters of a training checkpoint."),
    "synth": lazy_command("synth", "synth", "A model of noise, from its configuration."),
    "unstack": lazy_command("edit", "unstack", "Stacked layers to layers one by one."),
    "verify": lazy_command("verify", "verify", "Prove that a checkpoint holds what another one does."),
}


_SUMMARY = lazy_command("summary", "summary", "What is at a path.")


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
            _complete_in_shell(run)
        reopen_closed_streams()
        retry_partial_writes()
        try:
            with signals.raise_on_signal():
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
        with translate_click_errors():
            context = super().make_context(info_name, args, parent, **extra)
        remember_command(context, words)
        return context

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        command = self.get_command(ctx, args[0])
        is_only_path = command is None and is_path(args[0])
        if is_only_path or (
            len(args) == 1 and command and _requires_arguments(command) and _is_checkpoint(args[0])
        ):
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
                with translate_click_errors(), as_flags(), report_traffic():
                    super().invoke(ctx)
            except signals.Stopped as end:
                end.goes_on, end.is_done = is_writer(ctx), has_written(ctx)
                raise


def _complete_in_shell(complete: Callable[[], object]) -> NoReturn:
    """Let click print completions, and end with its exit code.

    Errors are not shown: they would appear in the line that is being typed.
    """
    with suppress(Exception):
        complete()
    sys.exit(1)


def _requires_arguments(command: click.Command) -> bool:
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
    print_stderr(f"Warning: {message}")


@click.command(
    "ckpt",
    cls=_Root,
    lazy=_COMMANDS,
    more=plugin_commands,
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
def report_traffic() -> Iterator[None]:
    """Says on stderr how many requests were made and how many bytes came, unless an error ends the command
    or nothing was asked."""
    from ckpttools.stores.registry import counted

    with counted() as traffic:
        try:
            yield
        except click.exceptions.Exit:  # such as that there are differences
            _print_traffic(traffic())
            raise
        _print_traffic(traffic())


def _print_traffic(traffic: Mapping[str, Traffic]) -> None:
    for address, item in traffic.items():
        print_stderr(f"{plural(item.requests, 'request')} to {address}, {format_disk(item.nbytes)} read")
