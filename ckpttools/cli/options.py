"""Flags generated from declared options, and options that exist only on the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ckpttools.api.options import DOWNLOAD, LIMITS, MEMORY, WRITING
from ckpttools.cli.command import PanelOption
from ckpttools.cli.message_terms import flag
from ckpttools.cli.output import choose, chosen, print_stderr, with_flags
from ckpttools.core.errors import CheckpointError, MemoryBudgetError
from ckpttools.core.memory_limit import format_size, limit_memory, parse_size
from ckpttools.core.options import PLACEHOLDER, Option, any_text, shared, switch
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import allowing_unprotected
from ckpttools.stores.registry import parse
from ckpttools.stores.web.hub_name import model_at

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # Generic since click 8.2.

CommandBody = Callable[..., Any]
Decorator = Callable[[CommandBody], CommandBody]

# Positional arguments that help texts mention.
_POSITIONALS = {"source": "SRC", "destination": "DST", "base": "BASE"}
_EMPTY_MESSAGE = "the text is empty; a shell variable may not be set"


class ParsedText(ParamType):
    """Text that a function of the library parses.

    Args:
        option: Declaration of the option.
        parse: Returns the value, or raises an error for an invalid text.
        is_parsed: Whether the command receives the parsed value; otherwise it receives the text after
            validation.
    """

    def __init__(self, option: Option, parse: Callable[[Any], object], is_parsed: bool) -> None:
        self.name = "size" if parse is parse_size and is_parsed else option.name
        self._option, self._parse, self._is_parsed = option, parse, is_parsed

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        # Plug-ins may add values, so the values are looked up when the help is shown.
        values = self._option.complete
        return f"[{'|'.join(values())}]" if callable(values) else None

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self._is_parsed and not isinstance(value, str):
            return value
        try:
            result = self._parse(value)
        except CheckpointError as error:
            self.fail(error.raw.message if self.name == "size" else str(error.raw), param, ctx)
        return result if self._is_parsed else value


class LocationType(click.Path):
    """A path or URL that may not exist. Empty text, as from an unset shell variable, is rejected."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        if value == "":
            self.fail(_EMPTY_MESSAGE, param, ctx)
        return parse(value, is_written=param is not None and param.name in _DESTINATION_PARAMETERS)


class ModelLocationType(LocationType):
    """A path, URL or Hub model: org/name is a Hub model unless such a directory exists."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        location = super().convert(value, param, ctx)
        result = model_at(value)
        if result.store is not location.store:
            print_stderr(f"{value} is not a local directory; using {result}")
        return result


class NonEmptyText(ParamType):
    """Text that is not empty."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value or self.fail(_EMPTY_MESSAGE, param, ctx)


class Number(ParamType):
    """An integer or floating-point number within the limits of an option.

    Limits exclude NaN: as a tolerance, no difference would be within it and none would exceed it.
    """

    def __init__(self, option: Option, kind: type[int] | type[float]) -> None:
        self.name = "integer" if kind is int else "float"
        self._option, self._kind = option, kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        try:
            number = self._kind(value)
        except ValueError:
            number = None
        if number is None or not self._option.allows(number):
            self.fail(f"{value!r} is not {self._option.numbers()}", param, ctx)
        return number


# Parameters for outputs. Errors about them do not suggest a download.
_DESTINATION_PARAMETERS = ("destination", "manifest", "output")
ANY_PATH = LocationType()
MODEL = ModelLocationType()
_TYPES: dict[object, click.ParamType[Any]] = {
    str: NonEmptyText(),
    any_text: click.STRING,
    parse: ANY_PATH,
    model_at: MODEL,
}


def combine_options(*decorators: Decorator) -> Decorator:
    """Combine decorators into one, in the order of the help."""

    def decorate(command: CommandBody) -> CommandBody:
        return functools.reduce(lambda built, decorator: decorator(built), reversed(decorators), command)

    return decorate


class _GivenOption(PanelOption):
    """An option that is passed to the command only if the user gave it."""

    def handle_parse_result(self, ctx: click.Context, opts: Any, args: list[str]) -> Any:
        result = super().handle_parse_result(ctx, opts, args)
        if self.name and ctx.get_parameter_source(self.name) is ParameterSource.DEFAULT:
            ctx.params.pop(self.name, None)
        return result


def flags(*options: Option) -> Decorator:
    """Add the flags of declared options, in the order of the help."""
    return combine_options(*(_make_flag(option) for option in options if option.flag is not None))


def given_flags(*options: Option) -> Decorator:
    """Add flags of options whose text a format or a transform parses.

    The command receives only options that the user gave, even if they equal the default, because a format
    rejects options that it does not have.
    """
    return combine_options(*(_make_flag(option, is_parsed=False, cls=_GivenOption) for option in options))


def flag_help(option: Option) -> str:
    """Return the help of an option's flag."""
    text = PLACEHOLDER.sub(
        lambda match: _POSITIONALS.get(match[1]) or flag(match[1]), with_flags(option.help)
    )
    return f"{text} May be repeated." if option.many else text


def _make_flag(option: Option, *, is_parsed: bool = True, **settings: Any) -> Decorator:
    spelling, is_repeatable = option.flag or flag(option.name), option.many
    settings = {"cls": PanelOption, "declared": option, **settings}
    settings |= {"help": flag_help(option), "required": option.is_required}
    if option.complete is not None:
        settings["shell_complete"] = completion_of(option)
    if option.type is bool:
        negative = flag(option.name, False) if option.negative is None else option.negative
        if negative:
            settings |= {"default": option.default, "show_default": option.default is not None}
        switch = f"{spelling}/{negative}" if negative else spelling
        return click.option(switch, option.name, is_flag=True, **settings)
    settings |= {"type": _click_type(option, is_parsed), "metavar": option.metavar}
    if is_repeatable is not None:
        settings |= {"multiple": True, "callback": lambda context, param, values: is_repeatable(values)}
    elif option.default is not None:
        settings |= {"default": option.default, "show_default": True}
    return click.option(*filter(None, (option.short, spelling)), option.name, **settings)


def _click_type(option: Option, is_parsed: bool) -> click.ParamType[Any]:
    kind = option.type
    if isinstance(kind, tuple):
        return click.Choice(kind)
    if kind is int or kind is float:
        return Number(option, kind)
    return _TYPES.get(kind) or ParsedText(option, kind, is_parsed)


def completion_of(option: Option) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return the function that completes values of an option in the shell."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from ckpttools.cli.completion import complete_option

        return complete_option(option, ctx, incomplete)

    return complete


DRY_RUN, PROGRESS, JSON_LINES, JSON = shared(
    "Output",
    switch("dry_run", "Print the plan and write nothing."),
    Option("progress", bool, True, "Report progress on stderr.", env=True),
    switch("as_jsonl", "Print progress and the result as JSON, one object per line.", flag="--jsonl"),
    switch("as_json", "Print the result, or the error, as JSON.", flag="--json", env=True),
)


def _choose_json_lines(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        choose("jsonl", True)


json_option = _make_flag(JSON, callback=lambda ctx, param, value: value or bool(chosen("jsonl")))
progress_option = combine_options(
    flags(PROGRESS),
    # Processed first, because it implies --json.
    _make_flag(JSON_LINES, is_eager=True, expose_value=False, callback=_choose_json_lines),
)


# Below this limit, the libraries that numpy loads end the process without an error that could be caught. With
# one OpenBLAS thread and no work, 150,000 KiB was enough.
_MIN_ADDRESS_SPACE = 256 << 20


def _require_address_space() -> None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < _MIN_ADDRESS_SPACE:
        raise MemoryBudgetError(
            "the limit on this process's memory is too low",
            got=f"a limit of {format_size(soft)} of address space",
            expected=f"at least {format_size(_MIN_ADDRESS_SPACE)}",
            hint="raise it with ulimit -v",
        )


def _limit_process_memory(context: click.Context, option: click.Parameter, memory: int) -> int:
    if not context.resilient_parsing:
        _require_address_space()
        # Counts all checkpoints that are opened from now on. The command's own context is not closed if
        # another of its options is invalid.
        context.find_root().with_resource(limit_memory(memory))
    return memory


memory_option = _make_flag(MEMORY, callback=_limit_process_memory)
limit_options = combine_options(memory_option, flags(*LIMITS[1:]))
"""Add memory and concurrency limits. The command runs within this memory."""
resource_options = combine_options(limit_options, flags(DOWNLOAD))
"""Add the limits of commands that open a checkpoint, and `--download`."""


def _allow_unprotected(context: click.Context, option: click.Parameter, is_allowed: bool) -> None:
    if is_allowed:
        context.with_resource(allowing_unprotected())


(_ALLOW_UNPROTECTED,) = shared(
    "Destination",
    switch(
        "allow_unprotected",
        "Accept a bucket whose server does not detect a second writer; make sure that there is only one.",
    ),
)
unprotected_option = _make_flag(_ALLOW_UNPROTECTED, expose_value=False, callback=_allow_unprotected)
_DISTRIBUTED = shared(
    "Many hosts",
    switch(
        "distributed",
        "Share the work among the processes of a jax.distributed job; each runs this command.",
        env=True,
    ),
    Option(
        "coordinator",
        any_text,
        None,
        "Coordinator address of the job. Default: detected on GKE, TPU, SLURM and MPI.",
        "HOST:PORT",
        env=True,
    ),
    Option(
        "process",
        any_text,
        None,
        "Process index, from 0, and process count. Default: detected like the coordinator.",
        "I/N",
        env=True,
    ),
)
output_options = combine_options(
    flags(DRY_RUN, *WRITING[:2]),
    progress_option,
    flags(*WRITING[2:3], *_DISTRIBUTED),
    unprotected_option,
    flags(*WRITING[3:]),
    json_option,
)
"""Add options for how a command writes and what it prints."""
