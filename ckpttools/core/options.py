"""Option declarations, from which Python arguments, flags and both references are generated."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, get_args

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.memory_limit import parse_size
from ckpttools.core.message_terms import option as option_text
from ckpttools.core.message_terms import render

PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_ARGS = "\n    Args:\n"
Call = TypeVar("Call", bound=Callable[..., Any])
Panel: TypeAlias = Literal[
    "Options",
    "Model",
    "Source",
    "Destination",
    "Layout",
    "Performance",
    "Many hosts",
    "Hub",
    "Output",
    "Global options",
]
PANELS: tuple[Panel, ...] = get_args(Panel)
"""Headings of options, in the order of the help."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option: the argument `max_shard_size` and the flag `--max-shard-size`.

    Attributes:
        name: Name of the argument.
        type: Bool for a switch, int or float for a number, str for text, a tuple for a choice of texts;
            otherwise a function that converts the given value, text on the command line, or raises
            UsageError, like `ckpttools.core.memory_limit.parse_size`.
        default: Default value, as the user would write it; None for none.
        help: One or two sentences; `{name}` stands for another option, `{source}` and `{destination}` for the
            locations.
        metavar: Placeholder for the value in the help of the command; None for the name of the type.
        least, most: Smallest and largest valid number; None for no limit.
        below: Exclusive upper limit; None for no limit.
        is_required: Whether the command needs the option.
        many: For a repeatable option, the type that collects the values: `tuple` or `dict`.
        flag: Spelling of the flag; "" if it follows from the name, None for an option that exists only in
            Python.
        negative: Flag that sets a switch to False; "" if there is none, None for --no-NAME.
        short: One-letter flag.
        complete: What the shell completes: the returned values, the arrays or steps of the checkpoint in the
            command, or paths.
        panel: Heading of the option in the help of a command.
        is_shared: Whether many commands have the option, so that one page describes it for all of them.
        env: Whether the environment variable CKPT_NAME sets the command's value.
    """

    name: str
    type: type | tuple[str, ...] | Callable[[Any], object]
    default: object = None
    help: str = ""
    metavar: str | None = None
    least: int | None = 0
    most: int | None = None
    below: int | None = None
    is_required: bool = False
    many: Callable[[Any], object] | None = None
    flag: str | None = ""
    negative: str | None = None
    short: str = ""
    complete: Callable[[], Iterable[str]] | Literal["arrays", "steps", "files"] | None = None
    panel: Panel = "Options"
    is_shared: bool = False
    env: bool = False

    def keyword_help(self) -> str:
        """Return the entry of the argument in a docstring."""
        text = render(PLACEHOLDER.sub(r"`\1`", self.help))
        return f"{self.name}: {text}"

    def parsed(self, value: Any) -> Any:
        """Parse and validate a value.

        Raises:
            UsageError: The value is invalid.
        """
        if value is None:
            return None
        value = to_python_number(value)
        if isinstance(self.type, tuple):
            return self._check(value, value in self.type, f"one of {', '.join(self.type)}")
        if self.type is bool:
            return self._check(value, isinstance(value, bool), "True or False")
        if self.type is int:
            is_number = isinstance(value, int) and not isinstance(value, bool) and self.allows(value)
            return self._check(value, is_number, self.numbers())
        if self.type is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and self.allows(value)
            return self._check(value, is_number, self.numbers())
        if self.type is str:
            return self._check(value, isinstance(value, str) and value, "text that is not empty")
        return parse_size_option(self.name, value) if self.type is parse_size else self.type(value)

    def _check(self, value: Any, is_meant: object, expected: str) -> Any:
        return value if is_meant else refuse(self.name, value, expected)

    def allows(self, value: float) -> bool:
        """Return whether a number is within the limits."""
        # NaN is within no limits.
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def numbers(self) -> str:
        """Describe the numbers within the limits."""
        noun = "an integer" if self.type is int else "a number"
        if self.most is not None:
            return f"{noun} from {self.least} to {self.most}"
        if self.below is not None:
            return f"{noun} of at least {self.least} and less than {self.below}"
        return noun if self.least is None else f"{noun} of at least {self.least}"

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether a value is the default, so that formats without the option can ignore it."""
        return not value if self.default is None else value == self.default


def switch(name: str, help: str, **more: Any) -> Option:
    """Declare an option that is off unless it is given."""
    return Option(name, bool, False, help, negative="", **more)


def shared(panel: Panel, *options: Option) -> tuple[Option, ...]:
    """Assign options that several commands share to a panel of the help."""
    return tuple(replace(option, panel=panel, is_shared=True) for option in options)


def variant(option: Option, **changes: Any) -> Option:
    """Return an option of one command that differs from the shared one, for example in its default."""
    return replace(option, is_shared=False, **changes)


def any_text(value: str) -> str:
    """Return the value unchanged: the type of options whose text may be empty."""
    return value


def declare(*options: Option) -> Callable[[Call], Call]:
    """Return a decorator that adds the entries of declared options to a function's docstring.

    Entries that the docstring already has come first. The decorator stores the declarations in the function's
    attribute `options`.
    """

    def add(call: Call) -> Call:
        before, args, after = (call.__doc__ or "").partition(_ARGS)
        own, end, rest = after.partition("\n\n")
        entries = "".join(f"\n        {item.keyword_help()}" for item in options)
        call.__doc__ = f"{before}{args}{own.rstrip()}{entries}{end or chr(10)}{rest}"
        vars(call)["options"] = options
        return call

    return add


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Raise UsageError for an invalid value of an option."""
    raise UsageError(f"{option_text(name)} cannot be this", got=reprlib.repr(value), expected=expected)


def parse_size_option(name: str, size: int | str) -> int:
    """Parse the bytes of an option, like `ckpttools.core.memory_limit.parse_size`.

    Raises:
        UsageError: The value is not a size; the message names the option.
    """
    try:
        return parse_size(size)
    except UsageError:
        refuse(name, size, "a size of at least 1 byte, such as 512MiB or 2GB")


def to_python_number(value: Any) -> Any:
    """Convert a NumPy or JAX scalar to a Python number; return anything else unchanged."""
    is_one = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_one else value


def parse_options(
    options: Iterable[Option],
    declared: Mapping[str, Any],
    others: Callable[[], Iterable[Option]],
    subject: str,
) -> dict[str, Any]:
    """Return the values of all options by name, with defaults for missing ones.

    Args:
        options: The available options.
        declared: Given values by name.
        others: Returns options of other formats, and is called only for unknown names. Options of other
            formats are accepted with their default values.
        subject: Beginning of the error message, such as "zarr3 is not stored".

    Raises:
        UsageError: An option is unknown, or a value is invalid.
    """
    known = {option.name: option for option in options}
    if unknown := declared.keys() - known.keys():
        unknown -= {other.name for other in others() if other.asks_for_nothing(declared.get(other.name))}
    if unknown:
        raise UsageError(
            f"{subject} with these options",
            got=", ".join(sorted(unknown)),
            expected=f"none but {', '.join(sorted(known))}" if known else "none",
        )
    return {name: item.parsed(declared.get(name, item.default)) for name, item in known.items()}
