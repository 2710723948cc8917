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
        name: name of the argument.
        type: bool for a switch, int for an integer, str for text, a tuple for a choice of texts; otherwise a
            function that converts the given value, text on the command line, or raises UsageError, like
            `ckpttools.core.budget.parse_size`.
        default: default value, as the user would write it; None for none.
        help: a sentence or two.
        metavar: placeholder for the value in the help of the command; None for the name of the type.
        least: smallest valid int.
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
            UsageError: the value is invalid.
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
            return self._checked(value, is_number, f"an integer of at least {self.least}")
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
        UsageError: the value is not a size; the message names the option.
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
    options: Iterable[Option], declared: Mapping[str, Any], others: Callable[[], Iterable[Option]], what: str
) -> dict[str, Any]:
    """Return the values of all options by name, with defaults for missing ones.

    Args:
        options: the available options.
        declared: name -> value.
        others: returns options of other formats, called only for unknown names; these are accepted with their
            default values.
        what: beginning of the error message, such as "zarr3 is not stored".

    Raises:
        UsageError: an option is unknown, or a value is invalid.
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
