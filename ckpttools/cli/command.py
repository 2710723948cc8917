"""Base classes of commands: the format of their help, and the options that all commands have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ckpttools.cli.output import choose, chosen, has_color, show_details

if TYPE_CHECKING:
    from ckpttools.core.options import Option, Panel

# Longer lines are hard to read, and click leaves two columns free.
MAX_WIDTH = 122
EXAMPLES = "\n\b\nExamples:\n"
"""Start of the examples in the docstring of a command: lines that begin with `$ `."""
GLOBAL_PANEL: Panel = "Global options"
# Keeps a flag and its value on one line.
_FIXED_SPACE = "\xa0"


class PanelOption(click.Option):
    """An option that knows its panel in the help.

    Args:
        declared: Declaration of the option.
        panel: The panel, if there is no declaration.
    """

    def __init__(
        self, *args: Any, declared: Option | None = None, panel: Panel = "Options", **settings: Any
    ) -> None:
        if declared is not None and declared.env:
            settings |= {"envvar": f"CKPT_{declared.name.removeprefix('as_').upper()}", "show_envvar": True}
        super().__init__(*args, **settings)
        self.panel = panel if declared is None else declared.panel
        self.is_shared = panel == GLOBAL_PANEL if declared is None else declared.is_shared

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the name of the option for errors, with the variable only if that has the value."""
        source = ctx.get_parameter_source(self.name) if ctx is not None and self.name else None
        if source is ParameterSource.ENVIRONMENT:
            return super().get_error_hint(ctx)
        return " / ".join(f"'{name}'" for name in self.opts)


def _global_flag(*names: str, **settings: Any) -> PanelOption:
    name = names[-1].removeprefix("--")

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        # The default of a command must not undo an option before its name.
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            choose(name, value)
            if name == "verbose" and value:
                show_details()
            ctx.color = has_color()

    return PanelOption(
        [*names],
        panel=GLOBAL_PANEL,
        expose_value=False,
        is_eager=True,
        callback=callback,
        envvar=f"CKPT_{name.upper()}",
        **settings,
    )


_GLOBAL_FLAGS = (
    _global_flag(
        "-q",
        "--quiet",
        is_flag=True,
        help="Print only errors and data that was asked for; diff, verify and doctor only set the exit code.",
    ),
    _global_flag(
        "-v",
        "--verbose",
        is_flag=True,
        help="Print details on stderr: files, requests, decisions, retries and times.",
    ),
    _global_flag(
        "--color",
        type=click.Choice(("auto", "always", "never")),
        default="auto",
        show_default=True,
        metavar="WHEN",
        help="Use colors: auto, always or never. NO_COLOR and FORCE_COLOR set the default.",
    ),
    _global_flag("--traceback", is_flag=True, help="Show the Python traceback of an error."),
)


class HelpFormatter(click.HelpFormatter):
    """Help with colored headings, which click removes unless stdout is a terminal."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write the usage line."""
        super().write_usage(click.style(prog, fg="cyan", bold=True), args, f"{_heading('Usage:')} ")

    def write_heading(self, heading: str) -> None:
        """Write the heading of a section."""
        self.write(f"{'':>{self.current_indent}}{_heading(f'{heading}:')}\n")

    def write_terms(self, rows: Iterable[tuple[str, str]]) -> None:
        """Write a list of commands or options with their descriptions."""
        self.write_dl([(click.style(term, fg="cyan"), text) for term, text in rows])


def _heading(text: str) -> str:
    return click.style(text, fg="green", bold=True)


class BaseCommand(click.Command):
    """A command whose options are in panels.

    `--help` describes the options of the command itself, and lists those that many commands share;
    `ckpt help COMMAND` describes all of them.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        names = {name for param in params for name in param.opts}
        added = [flag for flag in _GLOBAL_FLAGS if names.isdisjoint(flag.opts)]
        position = len(params) - (self.get_help_option(ctx) is not None)
        return [*params[:position], *added, *params[position:]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # An option without its value would end parsing before the arguments are known.
        if args and args[-1].startswith("-") and chosen("completion"):
            args = args[:-1]
        return super().parse_args(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        return self.help_text(ctx, is_full=False)

    def help_text(self, ctx: click.Context, *, is_full: bool) -> str:
        """Return the help text. If `is_full`, it also describes shared options."""
        formatter = HelpFormatter(width=ctx.terminal_width, max_width=ctx.max_content_width or MAX_WIDTH)
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_details(ctx, formatter)
        self.format_panels(ctx, formatter, is_full=is_full)
        return formatter.getvalue().rstrip("\n").replace(_FIXED_SPACE, " ")

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        text, _, examples = cleandoc(self.help or "").partition(EXAMPLES)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text.rstrip())
        if examples:
            with formatter.section("Examples"):
                for line in examples.rstrip().splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line.strip()}\n")

    def format_details(self, ctx: click.Context, formatter: HelpFormatter) -> None:
        """Write the text before the options, such as the commands of a group."""

    def format_panels(self, ctx: click.Context, formatter: HelpFormatter, *, is_full: bool) -> None:
        """Write the options, one section for each panel."""
        panels = _panels(self.get_params(ctx), ctx)
        titles: Iterable[Panel] = panels
        if len(panels) > 1:  # `ckpt --help` has only one panel, and starts faster without this import.
            from ckpttools.core.options import PANELS

            titles = PANELS
        short = []
        for title in titles:
            described = [row for row, is_shared in panels.get(title, ()) if is_full or not is_shared]
            if described:
                with formatter.section(title):
                    formatter.write_terms(described)
            if others := [row for row, is_shared in panels.get(title, ()) if not is_full and is_shared]:
                short.append((title.partition(" options")[0], ", ".join(_short(term) for term, _ in others)))
        if short:
            name = ctx.command_path.partition(" ")[2]
            with formatter.section(f"Shared options, described by `ckpt help {name}`"):
                formatter.write_terms(short)


def _panels(
    params: Sequence[click.Parameter], ctx: click.Context
) -> dict[Panel, list[tuple[tuple[str, str], bool]]]:
    """Return the options of each panel as ((flags, help), whether the option is shared)."""
    result: dict[Panel, list[tuple[tuple[str, str], bool]]] = {}
    for param in params:
        record = param.get_help_record(ctx)
        if record is None or not isinstance(param, click.Option):
            continue
        is_help = "--help" in param.opts
        panel: Panel = GLOBAL_PANEL if is_help else getattr(param, "panel", "Options")
        result.setdefault(panel, []).append((record, is_help or getattr(param, "is_shared", False)))
    return result


def _short(term: str) -> str:
    """Shorten `--ocdbt / --no-ocdbt` to `--[no-]ocdbt`."""
    on, slash, off = term.partition(" / ")
    if slash and off == f"--no-{on[2:]}":
        return f"--[no-]{on[2:]}"
    return term.replace(" / ", "/").replace(", ", "/").replace(" ", _FIXED_SPACE)
