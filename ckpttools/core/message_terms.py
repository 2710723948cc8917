"""Terms in messages: options, arguments and calls, which Python and the command line spell differently.

    f"allow its replacement with {option('overwrite', True)}"
        allow its replacement with overwrite=True
        allow its replacement with --overwrite
    f"{action('plan_status', plan)} lists the parts"
        `ckpttools.plan_status("train.plan")` lists the parts
        `ckpt run train.plan --status` lists the parts

A term is data inside the text: private-use characters that start with a mark of this process, so that names
of files and arrays cannot contain a term. `render` spells terms as in Python. The command line has its own
table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Protocol

from ckpttools.core.text import TERM, TERM_END, TERM_FIRST, TERM_START, printable

PLAN = "PLAN"
"""Placeholder for the path of a plan in a term; `error_in_plan` replaces it with the path."""
# Placeholders for numbers.
_NUMBER_PLACEHOLDERS = ("N", "X", "ALPHA")
_NAME = re.compile(r"\{([a-z][a-z_]*)\}")
# Packages whose dataclasses hold the data of checkpoints: many thousands of objects.
_PACKAGES_WITHOUT_REPORTS = frozenset(
    ("array", "codecs", "formats", "mapping", "model_families", "plan", "quantized", "roles", "stores")
)
# Functions without arguments whose commands have arguments.
_FUNCTIONS_WITHOUT_ARGUMENTS = ("ckpttools.families",)
# Options that are accepted only by the call that makes a plan.
_PLAN_ONLY_OPTIONS = ("overwrite",)


class Terms(Protocol):
    """Spelling of terms for one audience."""

    def option(self, name: str, value: Any) -> str:
        """Format an option: `scan_axis`, or `scan_axis=0` with a value."""

    def quoted_option(self, name: str, value: str) -> str:
        """Format an option whose value a shell may expand."""

    def location(self, name: str) -> str:
        """Format the name of an argument that is a location."""

    def variable(self, name: str) -> str:
        """Format an instruction to set an environment variable to 1."""

    def call(self, function: str, args: Sequence[Any], options: Mapping[str, Any]) -> str:
        """Format a call of a public function, or only its name if there are no arguments."""

    def retry(self) -> str:
        """Format the advice to retry."""

    def traceback(self) -> str:
        """Format an instruction to show the traceback."""


def option(name: str, value: object = None) -> str:
    """Return the term of an option.

    Args:
        name: Name of the argument, such as "scan_axis".
        value: A boolean, number, string or dictionary; None for the option itself.
    """
    return _term("option", name, value)


def quoted_option(name: str, value: str) -> str:
    """Return the term of an option whose value a shell may expand, such as a pattern."""
    return _term("quoted_option", name, value)


def repeated_option(name: str, values: Sequence[str]) -> str:
    """Return the term of an option with several values, all quoted."""
    return quoted_option(name, values[0]) if len(values) == 1 else _term("option", name, [*values])


def location(name: str) -> str:
    """Return the term of an argument that is a location."""
    return _term("location", name)


def variable(name: str) -> str:
    """Return the term of an environment variable that is set to 1."""
    return _term("variable", name)


def call(function: str, *args: object, **options: object) -> str:
    """Return the term of a call, for use in backticks.

    Args:
        function: Name of a public function, such as "plan_status". A suffix after a dot adds flags of the
            command line: "inspect.names" lists all names.
        args, options: Arguments in the order and under the names of the function; None is omitted. Words in
            capitals such as "DST" stand for values that the user knows.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return _term("call", function, [*args], given)


def action(function: str, *args: object, **options: object) -> str:
    """Return the term of a call in backticks, as a next step."""
    return f"`{call(function, *args, **options)}`"


def retry_term() -> str:
    """Return the term of the advice to retry: make the same call, or run the same command."""
    return _term("retry")


def traceback_term() -> str:
    """Return the term of the traceback, which the command line shows with a flag."""
    return _term("traceback")


def with_options(text: str) -> str:
    """Replace each `{name}` in a text of a table with the option `name`."""
    return _NAME.sub(lambda result: option(result[1]), text)


class _PythonTerms:
    """Terms as keyword arguments and calls."""

    def option(self, name: str, value: Any) -> str:
        return f"`{name}`" if value is None else f"{name}={_literal(value)}"

    quoted_option = option

    def location(self, name: str) -> str:
        return f"`{name}`"

    def variable(self, name: str) -> str:
        return f"{name}=1"

    def call(self, function: str, args: Sequence[Any], options: Mapping[str, Any]) -> str:
        name = f"ckpttools.{function.partition('.')[0]}"
        if name in _FUNCTIONS_WITHOUT_ARGUMENTS:
            return name
        arguments = [*map(_literal, args), *(f"{key}={_literal(value)}" for key, value in options.items())]
        return f"{name}({', '.join(arguments)})" if arguments else name

    def retry(self) -> str:
        return "make the same call again"

    def traceback(self) -> str:
        return "the traceback"


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    if not isinstance(value, str) or value in _NUMBER_PLACEHOLDERS:
        return str(value)
    if '"' in value or "\\" in value:
        import json

        value = json.dumps(value, ensure_ascii=False)[1:-1]
    return f'"{value}"'


PYTHON: Terms = _PythonTerms()
_MAX_DEPTH = 32


def render(text: str, terms: Terms = PYTHON) -> str:
    """Render the terms in a text for an audience; Python by default."""
    return TERM.sub(lambda result: printable(_format(result[0], terms)), text) if TERM_START in text else text


def render_all(value: Any, terms: Terms = PYTHON, depth: int = 0) -> Any:
    """Render the terms in JSON-like data or a dataclass; return the same object if nothing changes.

    Args:
        value: The data.
        terms: The spelling of terms.
        depth: Number of containers around the value. Texts inside more than `_MAX_DEPTH` containers are user
            data, such as settings, and have no terms.
    """
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, str):
        return render(value, terms)
    if isinstance(value, list | tuple):
        items = [render_all(item, terms, depth + 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return _render_dict(value, terms, depth + 1)
    changed = {}
    kind: Any = type(value)
    for name in _message_fields(kind):
        old = getattr(value, name, None)
        if (new := render_all(old, terms, depth + 1)) is not old:
            changed[name] = new
    if not changed:
        return value
    from copy import copy

    copied = copy(value)
    for name, new in changed.items():
        object.__setattr__(copied, name, new)
    return copied


@cache
def _message_fields(kind: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass that may contain messages: all, or those in `message_fields`."""
    fields = getattr(kind, "__dataclass_fields__", {})
    _, _, room = kind.__module__.partition("ckpttools.")
    declared: tuple[str, ...] | None = getattr(kind, "message_fields", None)
    is_report = bool(room) and room.partition(".")[0] not in _PACKAGES_WITHOUT_REPORTS
    return (*fields,) if declared is None and is_report else declared or ()


def for_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a public function so that its result, and that of its `plan`, has the terms of Python."""

    @wraps(function)
    def rendered(*args: Any, **options: Any) -> Any:
        try:
            return render_all(function(*args, **options))
        except ModuleNotFoundError as error:
            from ckpttools.core.extras import missing_package

            raise missing_package(error) from error

    if hasattr(function, "plan"):
        vars(rendered)["plan"] = for_python(function.plan)
    return rendered


def _render_dict(value: dict[Any, Any], terms: Terms, depth: int) -> dict[Any, Any]:
    items = {render_all(key, terms, depth): render_all(item, terms, depth) for key, item in value.items()}
    same = all(a is c and b is d for (a, b), (c, d) in zip(items.items(), value.items(), strict=False))
    return value if same else items


def is_call(text: str) -> bool:
    """Return whether a text begins with a call; otherwise it may be a command of another program."""
    return text.startswith(TERM_START)


def has_call(text: str, function: str) -> bool:
    """Return whether a text contains a call of a function."""
    contents = map(_content, TERM.findall(text)) if TERM_START in text else ()
    return any(content[:2] == ["call", function] for content in contents)


def option_names(text: str) -> list[str]:
    """Return the names of the options in a text, in their order."""
    contents = map(_content, TERM.findall(text)) if TERM_START in text else ()
    return [content[1] for content in contents if content[0] in ("option", "quoted_option")]


def rename_option(text: str, old: str, new: str) -> str:
    """Rename the option `old` in a text."""
    return TERM.sub(lambda result: _rename(result[0], old, new), text)


def _rename(term: str, old: str, new: str) -> str:
    kind, *rest = _content(term)
    return _term(kind, new, *rest[1:]) if rest[:1] == [old] and kind.endswith("option") else term


@contextmanager
def error_in_plan(plan: object) -> Iterator[None]:
    """Adapt errors raised inside the `with` to the plan that is being run; see `name_plan`."""
    from ckpttools.core.errors import CheckpointError

    try:
        yield
    except CheckpointError as error:
        error.raw = error.raw.map(lambda text: name_plan(text, plan))
        raise


def name_plan(text: str, plan: object) -> str:
    """Insert the path of a plan, and suggest a new plan for options that the plan fixes."""
    return TERM.sub(lambda result: _in_plan(result[0], str(plan)), text) if TERM_START in text else text


def _in_plan(term: str, plan: str) -> str:
    kind, *rest = _content(term)
    if kind == "call":
        function, args, options = rest
        return _term(kind, function, [plan if item == PLAN else item for item in args], options)
    return f"a plan made with {term}" if kind == "option" and rest[0] in _PLAN_ONLY_OPTIONS else term


def _term(*content: object) -> str:
    import json

    payload = json.dumps(content, default=_plain).encode()
    return TERM_START + "".join(chr(TERM_FIRST + byte) for byte in payload) + TERM_END


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else [*value] if isinstance(value, tuple) else str(value)


def _content(term: str) -> Any:
    import json

    payload = term[len(TERM_START) : -len(TERM_END)]
    return json.loads(bytes(ord(character) - TERM_FIRST for character in payload))


def _format(term: str, terms: Terms) -> str:
    kind, *content = render_all(_content(term), terms)
    return str(_FORMATS[kind](terms)(*content))


_FORMATS: Mapping[str, Callable[[Terms], Callable[..., str]]] = {
    "option": lambda terms: terms.option,
    "quoted_option": lambda terms: terms.quoted_option,
    "location": lambda terms: terms.location,
    "variable": lambda terms: terms.variable,
    "call": lambda terms: terms.call,
    "retry": lambda terms: terms.retry,
    "traceback": lambda terms: terms.traceback,
}
