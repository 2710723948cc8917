"""Flags made of options that are declared as data, by a format's writer or a transform."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import click
from click.core import ParameterSource

from ckpttools.cli.options import SOME_TEXT, Command, Decorator, bundled
from ckpttools.core.errors import UsageError
from ckpttools.core.options import Option
from ckpttools.core.wording import flag


class _Parsed(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """Text that the library makes a value of; here it is only tried."""

    def __init__(self, option: Option) -> None:
        self.name, self._option = option.name, option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            self._option.parsed(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return value


def declared(name: str, options: Iterable[Option]) -> Decorator:
    """Hands the command, as the one argument `name`, a dictionary of those options that the user gave."""
    return bundled(name, _said, *map(_flag, options))


def _said(**values: Any) -> dict[str, Any]:
    """What is said, even where it is the default: that may say how something is to be."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in values.items() if source(name) is not ParameterSource.DEFAULT}


def _flag(option: Option) -> Decorator:
    said: dict[str, Any] = {
        "default": option.default,
        "show_default": option.default is not None,
        "help": option.help,
    }
    if option.type is bool:
        return click.option(f"{flag(option.name, True)}/{flag(option.name, False)}", option.name, **said)
    return click.option(flag(option.name), option.name, type=_type(option), metavar=option.metavar, **said)


def _type(option: Option) -> click.ParamType[Any]:
    if isinstance(option.type, tuple):
        return click.Choice(option.type)
    if option.type is int:
        return click.IntRange(min=option.least)
    return SOME_TEXT if option.type is str else _Parsed(option)


def made(name: str, help: str, body: Callable[..., None], *decorators: Decorator) -> click.Command:
    """A command of parts; its help is text whose examples, after "Example:", are left as they are.

    Raises:
        UsageError: two options have one flag.
    """
    command: Command = body
    for decorate in reversed(decorators):
        command = decorate(command)
    text = help if "\nExample:" in help else f"{help.rstrip()}\n\nExample:\n  ckpt {name} SRC DST\n"
    built = click.command(name, help=text.replace("\nExample:", "\n\b\nExample:"))(command)
    flags = Counter(each for param in built.params for each in (*param.opts, *param.secondary_opts))
    if twice := sorted(each for each, count in flags.items() if count > 1):
        raise UsageError(
            f"the plug-in {name} declares options that all commands have",
            got=", ".join(twice),
            wanted="other names",
        )
    return built
