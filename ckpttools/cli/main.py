"""The entry point `ckpt` and its commands."""

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
from ckpttools.cli.command import GLOBAL_PANEL, MAX_WIDTH, HelpFormatter, PanelOption
from ckpttools.cli.command_line import COMPLETION_VARIABLE, command_with, remember_command
from ckpttools.cli.error_boundary import (
    exit_code_of,
    finish_output,
    reopen_closed_streams,
    retry_partial_writes,
    translate_click_errors,
)
from ckpttools.cli.lazy import Deferred, LazyGroup, has_written, is_path, is_writer, lazy_command
from ckpttools.cli.output import choose, chosen, has_color, print_stderr, reset_choices, styled
from ckpttools.cli.suggestions import ALIASES, translate_maxtext_script
from ckpttools.core.details import log_detail
from ckpttools.core.errors import CheckpointWarning, SeveralCheckpointsError, StepWarning, UsageError
from ckpttools.core.plugins import entry_points_of, package_name
from ckpttools.core.text import format_disk, plural

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ckpttools.api.prepared import Prepared
    from ckpttools.stores.costs import Traffic


def plugin_commands() -> Mapping[str, Deferred]:
    """Return the commands of plug-ins by name, without loading them."""
    result: dict[str, Deferred] = {}
    for group, load in (
        ("ckpttools.transforms", _make_transform_command),
        ("ckpttools.commands", _load_command),
    ):
        for point in entry_points_of(group):
            result[point.name] = Deferred(partial(load, point), f"From the package {package_name(point)}.")
    return result


def _load_command(point: EntryPoint) -> click.Command:
    try:
        result = point.load()
    except Exception as error:
        problem = f"the command {point.name} of {package_name(point)} cannot be loaded"
        raise UsageError(problem, got=repr(error), hint="repair that package, or remove it") from error
    if not isinstance(result, click.Command):
        problem = f"{point.name} of {package_name(point)} is not a command"
        raise UsageError(problem, got=type(result).__name__, expected="a click.Command")
    return result


def _make_transform_command(point: EntryPoint) -> click.Command:
    from ckpttools.api.transforms import transform
    from ckpttools.cli.options import given_flags
    from ckpttools.cli.write import (
        WriteCommand,
        common_options,
        make_command,
        source_and_destination,
        target_options,
    )
    from ckpttools.transforms.registry import help_of, options_of

    def command(**options: Any) -> Prepared:
        return transform.plan(transforms=point.name, **options)

    options = (
        source_and_destination,
        given_flags(*options_of(point.name)),
        target_options,
        common_options,
    )
    return make_command(point.name, help_of(point.name), command, *options, cls=WriteCommand)


_GROUPS = {
    "Convert": {
        "convert": lazy_command("convert", "convert", "Convert a checkpoint to another format or framework."),
        "copy": lazy_command("copy", "copy", "Copy a checkpoint or run between stores, byte for byte."),
        "quantize": lazy_command("edit", "quantize", "Quantize a model to FP8 or MXFP4."),
        "reshard": lazy_command("edit", "reshard", "Rewrite a checkpoint's chunks for a device mesh."),
    },
    "Inspect": {
        "inspect": lazy_command(
            "inspect", "inspect", "Show a checkpoint's tree, statistics, chunks or report."
        ),
        "browse": lazy_command("browse", "browse", "Browse a checkpoint or a run in the terminal."),
        "cat": lazy_command("cat", "cat", "Print the values of an array or a region of it."),
        "ls": lazy_command("ls", "ls", "List the steps in a training run."),
        "diff": lazy_command("diff", "diff", "Compare two checkpoints: what differs, how much, and why."),
        "verify": lazy_command(
            "verify", "verify", "Verify bit for bit that two checkpoints hold the same arrays."
        ),
        "hash": lazy_command("hash", "hash_command", "Print layout-independent digests of every array."),
        "doctor": lazy_command("doctor", "doctor", "Diagnose a checkpoint and suggest fixes."),
    },
    "Edit": {
        "select": lazy_command("edit", "select", "Keep or drop arrays by name."),
        "cast": lazy_command("edit", "cast", "Cast a checkpoint to other dtypes."),
        "remap": lazy_command("edit", "remap", "Rename, drop and rearrange arrays by rules or a function."),
        "stack": lazy_command("edit", "stack", "Stack per-layer arrays for scan_layers=true."),
        "unstack": lazy_command("edit", "unstack", "Split stacked layers into one array per layer."),
        "strip-optimizer": lazy_command(
            "edit", "strip_optimizer", "Drop the optimizer state; keep only the parameters."
        ),
    },
    "Build models": {
        "adapter": lazy_command("adapter", "adapter", "Merge, extract and convert LoRA adapters."),
        "average": lazy_command("build", "average", "Average several checkpoints or steps of a run."),
        "shrink": lazy_command("build", "shrink", "Make a smaller model: fewer layers, experts or tokens."),
        "stitch": lazy_command("build", "stitch", "Combine one model's towers with another's decoder."),
        "synth": lazy_command("build", "synth", "Create a randomly initialized model from a config."),
    },
    "MaxText and runs": {
        "maxtext-config": lazy_command(
            "maxtext_config", "maxtext_config", "Print the MaxText settings for a checkpoint, or check yours."
        ),
        "resolve": lazy_command("resolve", "resolve", "Predict which checkpoint a MaxText run would load."),
        "plan-training": lazy_command(
            "plan_training", "plan_training", "Plan checkpoint sizes and save intervals of a training run."
        ),
        "prune": lazy_command("prune", "prune", "Delete old steps of a run, or only their optimizer state."),
        "assemble": lazy_command("assemble", "assemble", "Combine the parts that hosts of a job saved."),
    },
    "Distributed": {
        "plan": lazy_command("plan", "plan", "Save a conversion plan to run on many workers."),
        "run": lazy_command("run", "run", "Run part of a plan, show its status, or publish it."),
    },
    "Reference": {
        "families": lazy_command("families", "families", "List, show and check model families."),
        "formats": lazy_command("families", "formats", "List the supported checkpoint formats."),
        "demo": lazy_command("demo", "demo", "Convert a small model to MaxText and back, and load it."),
        "help": lazy_command("help", "help_command", "Show the help of a command, or of a topic."),
        "skill": lazy_command("help", "skill", "Print a SKILL.md for coding agents."),
        "completion": lazy_command("completion", "completion", "Print or install a shell completion script."),
    },
}
_COMMANDS = {name: entry for group in _GROUPS.values() for name, entry in group.items()}


_SUMMARY = lazy_command("ls", "summary", "Identify a path.")


class _Root(LazyGroup):
    """The group of all commands."""

    accepts_path = True

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and end the process; with `standalone_mode=False`, raise errors instead."""
        code: int | None
        reset_choices()
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
            # A usage error may come before the options are parsed.
            is_traced = bool(chosen("traceback")) or "--traceback" in words
            code = exit_code_of(end, traceback=is_traced, as_json=_is_json(words))
        if chosen("verbose"):
            from ckpttools.core.process_memory import peak_bytes

            log_detail("exit code %s; peak memory %s", code or 0, format_disk(peak_bytes() or 0))
        finish_output()
        sys.exit(code)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        words = list(args)
        with translate_click_errors():
            context = super().make_context(info_name, args, parent, color=has_color(), **extra)
        remember_command(context, words)
        return context

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if line := translate_maxtext_script(args):
            raise click.UsageError(f"This is a MaxText command line. With ckpt: {line}", ctx)
        command = self.get_command(ctx, args[0])
        is_only_path = command is None and _is_meant_as_path(args)
        if is_only_path or (
            len(args) == 1 and command and _requires_arguments(command) and _is_checkpoint(args[0])
        ):
            return "PATH", _SUMMARY.load(), args
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "info":
            return _SUMMARY.load()
        group, *rest = ALIASES.get(cmd_name, (cmd_name,))
        command = super().get_command(ctx, group)
        for name in rest:
            command = command.get_command(ctx, name) if isinstance(command, click.Group) else None
        return command

    def suggest(self, ctx: click.Context, args: Sequence[str], known: Sequence[str]) -> str:
        name = args[0]
        from ckpttools.formats.interrupted import next_step
        from ckpttools.stores.publishing import find_unfinished
        from ckpttools.stores.registry import parse

        unfinished = find_unfinished(parse(name))
        if unfinished is not None:
            return f"Interrupted conversion: {next_step(unfinished)}."
        return super().suggest(ctx, args, known)

    def help_text(self, ctx: click.Context, *, is_full: bool) -> str:
        return super().help_text(ctx, is_full=True)

    def format_details(self, ctx: click.Context, formatter: HelpFormatter) -> None:
        groups: dict[str, Mapping[str, Deferred]] = {**_GROUPS}
        if others := {name: entry for name, entry in self.more().items() if name not in _COMMANDS}:
            groups["Plug-ins"] = dict(sorted(others.items()))
        column = max(len(name) for group in groups.values() for name in group)
        for title, group in groups.items():
            with formatter.section(title):
                formatter.write_terms((f"{name:<{column}}", entry.help) for name, entry in group.items())

    def invoke(self, ctx: click.Context) -> None:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            warnings.simplefilter("default", StepWarning)
            try:
                with translate_click_errors(), report_traffic():
                    super().invoke(ctx)
            except signals.Stopped as end:
                end.goes_on, end.is_done = is_writer(ctx), has_written(ctx)
                raise
            except SeveralCheckpointsError as error:
                raise _suggest_command(error) from None


def _suggest_command(error: SeveralCheckpointsError) -> SeveralCheckpointsError:
    """Suggest the typed command with the path of one of several checkpoints."""
    command = command_with(error.location or "", error.suggested)
    return error.at(hint=f"name one of them: {command}") if command else error


def _complete_in_shell(complete: Callable[[], object]) -> NoReturn:
    """Let click print completions, then exit.

    Errors are not shown: they would appear in the line that is being typed.
    """
    with suppress(Exception):
        from ckpttools.cli.completion import register_shells

        register_shells()
        choose("completion", True)
        complete()
    sys.exit(1)


def _is_json(words: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON, even if it cannot be parsed."""
    if "--jsonl" in words:
        choose("jsonl", True)
    is_default = os.environ.get("CKPT_JSON", "").strip().lower() in ("1", "true", "t", "yes", "y", "on")
    return "--jsonl" in words or "--json" in words or is_default


def _is_meant_as_path(words: Sequence[str]) -> bool:
    """Return whether the first word is a path, and not a mistyped command with the name of a directory.

    A path is not followed by other words than options. RUN@STEP is a path that does not exist, whose error
    names the step.
    """
    first, *rest = words
    if "/" not in first and any(not word.startswith("-") for word in rest):
        return False
    run, at, _ = first.rpartition("@")
    return is_path(first) or (bool(at and run) and is_path(run))


def _requires_arguments(command: click.Command) -> bool:
    """Return whether a command requires arguments, so that its name alone can only be a path."""
    return isinstance(command, click.Group) or any(param.required for param in command.params)


def _is_checkpoint(word: str) -> bool:
    """Return whether a directory of this name exists that `ckpt PATH` identifies."""
    from ckpttools.core.errors import CheckpointError
    from ckpttools.stores.registry import parse

    path = parse(word)
    if not path.is_dir():
        return False
    from ckpttools.formats.detect import LocationKind, detect

    try:
        return detect(path).kind not in (LocationKind.EMPTY, LocationKind.OTHER)
    except CheckpointError:
        return False


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning of the library without its source location."""
    label = styled("Warning:", fg="yellow", bold=True)
    print_stderr(f"{label} {message.args[0] if isinstance(message, CheckpointWarning) else message}")


@click.command(
    "ckpt",
    cls=_Root,
    lazy=_COMMANDS,
    more=plugin_commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
)
@click.version_option(
    __version__, "-V", "--version", message="%(prog)s %(version)s", cls=PanelOption, panel=GLOBAL_PANEL
)
def main() -> None:
    """Convert, inspect, compare and repair LLM checkpoints.

    Pass a path instead of a command to identify a checkpoint and see what you can do with it. Write ./NAME
    for a directory that has the name of a command.

    `ckpt help COMMAND` describes all options of a command. `ckpt help` also has topics: options, exit-codes
    and environment.

    \b
    Examples:
      $ ckpt ~/models/Llama-3.1-8B
      $ ckpt inspect tree ~/models/Llama-3.1-8B
    """


@contextmanager
def report_traffic() -> Iterator[None]:
    """Print the number of requests and of bytes read on stderr, unless the command fails."""
    from ckpttools.stores.registry import count_traffic

    with count_traffic() as traffic:
        try:
            yield
        except click.exceptions.Exit:  # For example, because checkpoints differ.
            _print_traffic(traffic())
            raise
        _print_traffic(traffic())


def _print_traffic(traffic: Mapping[str, Traffic]) -> None:
    for address, item in traffic.items():
        print_stderr(f"{plural(item.requests, 'request')} to {address}, {format_disk(item.nbytes)} read")
