"""Options of writers and transforms as data, for Python and the command line."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from ckpttools.core.budget import parse_size
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option as option_text


@dataclass(frozen=True, slots=True)
class Option:
    """One option: an argument `max_shard_size`, a flag `--max-shard-size`.

    Attributes:
        name: of the argument.
        type: bool for a switch, int for a whole number, str for text, a tuple for one of these texts;
            else what makes a value of whatever is said, which on the command line is text, or raises a
            UsageError, as `ckpttools.core.budget.parse_size`.
        default: what it is if nothing is said, as the user would say it; None for nothing.
        help: a sentence or two.
        metavar: what stands for the value in the help of the command; None for what the type is called.
        least: the smallest number that an int may be.
    """

    name: str
    type: type | tuple[str, ...] | Callable[[Any], object]
    default: object = None
    help: str = ""
    metavar: str | None = None
    least: int = 0

    def parsed(self, value: Any) -> Any:
        """Parse and validate a value.

        Raises:
            UsageError: this cannot be meant.
        """
        if value is None:
            return None
        value = to_python_number(value)
        if isinstance(self.type, tuple):
            return self._checked(value, value in self.type, f"one of {', '.join(self.type)}")
        if self.type is bool:
            return self._checked(value, isinstance(value, bool), "True or False")
        if self.type is int:
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= self.least
            return self._checked(value, is_number, f"a whole number from {self.least} on")
        if self.type is str:
            return self._checked(value, isinstance(value, str) and value, "text that is not empty")
        return parse_size_option(self.name, value) if self.type is parse_size else self.type(value)

    def _checked(self, value: Any, is_meant: object, expected: str) -> Any:
        return value if is_meant else refuse(self.name, value, expected)

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether a value is the default, so that formats without the option can ignore it."""
        return not value if self.default is None else value == self.default


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Raise UsageError for an invalid value of an option."""
    raise UsageError(f"{option_text(name)} cannot be this", got=reprlib.repr(value), expected=expected)


def parse_size_option(name: str, size: int | str) -> int:
    """Parse the bytes of an option, like `ckpttools.core.budget.parse_size`.

    Raises:
        UsageError: it is no size; names the option.
    """
    try:
        return parse_size(size)
    except UsageError:
        refuse(name, size, "512MiB, 2GB or a number of bytes from 1 on")


def to_python_number(value: Any) -> Any:
    """Convert a NumPy or JAX scalar to a Python number; return anything else unchanged."""
    is_one = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_one else value


def parse_options(
    options: Iterable[Option], declared: Mapping[str, Any], others: Callable[[], Iterable[Option]], what: str
) -> dict[str, Any]:
    """Return the values of all options by name, with defaults for missing ones.

    Args:
        options: those that there are.
        declared: name -> value.
        others: options of others, asked only where a name is unknown: they may be said as long as that asks
            for nothing.
        what: what is not so, for the message.

    Raises:
        UsageError: one that there is not, or a value that cannot be meant.
    """
    known = {option.name: option for option in options}
    if unknown := declared.keys() - known.keys():
        unknown -= {other.name for other in others() if other.asks_for_nothing(declared.get(other.name))}
    if unknown:
        raise UsageError(
            f"{what} with these options",
            got=", ".join(sorted(unknown)),
            expected=f"none but {', '.join(sorted(known))}" if known else "none",
        )
    return {name: item.parsed(declared.get(name, item.default)) for name, item in known.items()}
