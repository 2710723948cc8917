"""Flags generated from options that a format's writer or a transform declares as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import click
from click.core import ParameterSource

from ckpttools.cli.options import NON_EMPTY_TEXT, Decorator, combine_options
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import flag
from ckpttools.core.options import Option


class _ParsedType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A click type that validates text with the library's parser and passes it on unchanged."""

    def __init__(self, name: str, parse: Callable[[Any], object]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            self._parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return value


def generated_options(options: Collection[Option]) -> Decorator:
    """Add options; the command gets those that the user gave, even if equal to the default."""
    return combine_options(*map(_make_flag, options))


class _GivenOption(click.Option):
    """An option that the command gets only if the user gave it."""

    def handle_parse_result(self, ctx: click.Context, opts: Any, args: list[str]) -> Any:
        result = super().handle_parse_result(ctx, opts, args)
        if self.name and ctx.get_parameter_source(self.name) is ParameterSource.DEFAULT:
            ctx.params.pop(self.name, None)
        return result


def _make_flag(option: Option) -> Decorator:
    declared: dict[str, Any] = {
        "cls": _GivenOption,
        "default": option.default,
        "show_default": option.default is not None,
        "help": option.help,
    }
    if option.type is bool:
        return click.option(f"{flag(option.name, True)}/{flag(option.name, False)}", option.name, **declared)
    return click.option(
        flag(option.name), option.name, type=_click_type(option), metavar=option.metavar, **declared
    )


def _click_type(option: Option) -> click.ParamType[Any]:
    if isinstance(option.type, tuple):
        return click.Choice(option.type)
    if option.type is int:
        return click.IntRange(min=option.least)
    return NON_EMPTY_TEXT if option.type is str else _ParsedType(option.name, option.type)


def make_command(
    name: str,
    help: str,
    body: Callable[..., Any],
    *decorators: Decorator,
    cls: type[click.Command] = click.Command,
) -> click.Command:
    """Create a command whose examples in the help text, after "Example:", are not wrapped.

    Raises:
        UsageError: two options have one flag.
    """
    text = help if "\nExample:" in help else f"{help.rstrip()}\n\nExample:\n  ckpt {name} SRC DST\n"
    command = combine_options(*decorators)(body)
    built = click.command(name, cls, help=text.replace("\nExample:", "\n\b\nExample:"))(command)
    flags = Counter(opt for param in built.params for opt in (*param.opts, *param.secondary_opts))
    if twice := sorted(item for item, count in flags.items() if count > 1):
        raise UsageError(
            f"the plug-in {name} declares options that all commands have",
            got=", ".join(twice),
            expected="other names",
        )
    return built
