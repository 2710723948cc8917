"""Recorded calls that another process can repeat: the function's name and its arguments as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

# Arguments that are one or several locations, even if given as text.
_LOCATIONS = frozenset(
    ("source", "destination", "like", "model", "adapter", "base", "others", "decoder", "hosts", "prefer")
)
# Arguments that matter only to the calling process.
_LOCAL_ARGUMENTS = ("observe", "command", "resume", "jobs")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that plans a conversion.

    Attributes:
        name: Name of the function in `ckpttools`.
        arguments: Arguments, with absolute locations.
        is_relative: Whether the original locations were relative.
        not_text: Name of an argument that text cannot express, such as a function; "" if there is none.
    """

    name: str
    arguments: Mapping[str, object]
    is_relative: bool = False
    not_text: str = ""

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, object]) -> Call:
        """Record the call `ckpttools.name(**arguments)`."""
        declared: dict[str, object] = {}
        is_relative = False
        for item, value in arguments.items():
            if item in _LOCAL_ARGUMENTS:
                continue
            try:
                declared[item] = _reject_unserializable(
                    _parse_locations(value) if _is_placed(item, value) else value
                )
            except TypeError:
                return cls(name, {}, not_text=f"{item}, of type {type(value).__name__}")
            is_relative |= (_is_placed(item, value) or _is_path(value)) and declared[item] != _as_typed(value)
        return cls(name, declared, is_relative)

    def replan(
        self, jobs: int, relocate: Callable[[str], str] = str, code: Mapping[str, str] | None = None
    ) -> Prepared:
        """Repeat the call and return its plan.

        Args:
            jobs: Number of workers, which determines the size of tasks.
            relocate: Maps a recorded location to its location on this machine.
            code: The code that the user named (`user_code`). It replaces the code in the arguments, and no
                other code runs. None if the call comes from the user, not from a file.

        Raises:
            ValueError: The call does not exist, or does not write a checkpoint in tasks.
            UsageError: `code` is for an argument that does not name code.
            CodeNotAllowedError: An argument names code that is not in `code`.
            CheckpointError: The call cannot be planned.
        """
        from ckpttools.api.prepared import Prepared

        package = import_module("ckpttools")
        result = getattr(package, self.name, None) if self.name in package.__all__ else None
        plan: Any = getattr(result, "plan", None)
        if plan is None:
            raise ValueError(f"no call that plans: {self.name}")
        if code is None:
            built = plan(**_relocate(self.arguments, relocate), jobs=jobs)
        else:
            for name in code.keys() - code_in(self.arguments).keys():
                raise UsageError(
                    f"the plan does not run code of {option(name)}", got=code[name], hint="leave it out"
                )
            from ckpttools.core.user_code import allow_only

            with allow_only(set(code.values())):
                built = plan(**{**_relocate(self.arguments, relocate), **code}, jobs=jobs)
        if not isinstance(built, Prepared):
            raise ValueError(f"no call that writes by tasks: {self.name}")
        return built


def code_in(arguments: Mapping[str, object]) -> dict[str, str]:
    """Return the code named in a call's arguments: a function in `map`, a Python file in `family`."""
    named = {name: value for name in ("map", "family") if isinstance(value := arguments.get(name), str)}
    return {
        name: value
        for name, value in named.items()
        if value.endswith(".py") or (name == "map" and ":" in value)
    }


def user_code(**named: str | None) -> dict[str, str]:
    """Return the code that the user named for a plan, by argument, with absolute paths.

    Args:
        named: The user's value for each argument, or None.

    Raises:
        UsageError: A value does not name code.
    """
    given = {name: value for name, value in named.items() if value is not None}
    for name in given.keys() - code_in(given).keys():
        expected = "FILE.py:FUNCTION or MODULE:FUNCTION" if name == "map" else "FILE.py"
        raise UsageError(
            f"{option(name)} is for code that a plan names",
            got=given[name],
            expected=expected,
            hint="leave it out: the plan's other arguments do not need confirmation",
        )
    return {name: _absolute_code(value) for name, value in given.items()}


def _absolute_code(value: str) -> str:
    file, colon, function = value.rpartition(":") if ":" in value else (value, "", "")
    return f"{absolute(parse(file))}{colon}{function}" if file.endswith(".py") else value


def absolute(location: Location) -> Location:
    """Return an absolute location, valid in any process on this machine."""
    if location.store.scheme != "file" or ".." not in location.parts:
        return location.absolute()
    # `..` after a symbolic link resolves differently, and intermediate directories may disappear later.
    last = location.name
    return location.resolve() if last == ".." else location.parent.resolve() / last


def _is_placed(name: str, value: object) -> bool:
    """Return whether the text of an argument is a location. A family may also be a name."""
    from ckpttools.model_families.registry import names_a_file

    is_file = name == "family" and isinstance(value, str) and names_a_file(value)
    return name in _LOCATIONS or is_file


def _parse_locations(value: object) -> object:
    """Convert one or several texts to locations."""
    if isinstance(value, list | tuple):
        return [_parse_locations(item) for item in value]
    return parse(value) if isinstance(value, str) else value


def _as_typed(value: object) -> object:
    return [str(item) for item in value] if isinstance(value, list | tuple) else str(value)


def _reject_unserializable(value: object) -> object:
    """Return a value as JSON can represent it. Raise TypeError if JSON cannot represent it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Location():
            return str(absolute(value))
        case _ if _is_path(value):
            return str(absolute(parse(str(value))))
        case DType():
            return value.name
        case Mapping():
            return {_text(key): _reject_unserializable(item) for key, item in value.items()}
        case list() | tuple():
            return [_reject_unserializable(item) for item in value]
    raise TypeError(type(value).__name__)


def _is_path(value: object) -> bool:
    return hasattr(value, "__fspath__")


def _text(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(type(key).__name__)
    return key


def _relocate(value: Any, relocate: Callable[[str], str]) -> Any:
    """Replace locations with those on this machine."""
    if isinstance(value, str):
        return relocate(value)
    if isinstance(value, Mapping):
        return {key: _relocate(item, relocate) for key, item in value.items()}
    return [_relocate(item, relocate) for item in value] if isinstance(value, list) else value
