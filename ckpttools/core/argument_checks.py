"""Validate the arguments of public functions against their annotations.

    @checked
    def inspect(source: Source, *, sharding: bool = False, **reading: Unpack[Opening]) -> TreeReport: ...

`inspect(path, sharding="no")` raises UsageError before the function runs. Equivalent values are converted:
dtypes of numpy, JAX or torch to `DType`, scalars of numpy or JAX to Python numbers, and a single value to a
list of one where several are expected. Option objects, such as `ckpttools.ToMaxText(scan="no")`, are
validated when they are constructed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from inspect import Parameter, signature, unwrap
from itertools import zip_longest
from os import PathLike
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    ParamSpec,
    Protocol,
    SupportsIndex,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from ckpttools.core.dtypes import DType, dtype_like
from ckpttools.core.errors import similar_names
from ckpttools.core.options import Option, refuse, to_python_number

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

_TYPE_NAMES: Mapping[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "text",
    NoneType: "None",
    SupportsIndex: "an integer",
    DType: "a dtype",
}
_NUMBER_TYPES: Mapping[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float)}


# Methods of protocols that are checked. Other methods are inherited from `object`.
_SPECIAL_MEMBERS = ("__call__", "__index__")
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)
# Fields and arguments of functions without declared options. They must be at least 1, since 0 would look like
# an unset option.
_COUNTS = ("jobs", "requests")
_COUNT = Option("count", int, least=1)


class _WrongTypeError(Exception):
    """A value of the wrong type."""


class Named(Protocol):
    """Anything with the name of a keyword argument."""

    @property
    def name(self) -> str: ...


def validate_arguments(
    call: Callable[P, R], *groups: type, more: Callable[[], Iterable[Named]] = tuple
) -> Callable[P, R]:
    """Return a function that validates its arguments against their annotations.

    The function raises UsageError for an invalid value and TypeError for an unknown name. The message
    suggests a similar name.

    Args:
        call: The function to wrap.
        groups: `TypedDict` classes of the keyword arguments that a function with `**options: Any` passes on.
        more: Returns further valid names, which `call` passes on to code that validates them. It is called
            only for names that are not in `groups`. A function with `**options: Any` and no groups accepts
            any name.
    """

    validate = argument_validator(call, *groups, more=more)

    @wraps(call)
    def result(*args: P.args, **options: P.kwargs) -> R:
        given, named = validate(args, options)
        unchecked: Callable[..., R] = call
        return unchecked(*given, **named)

    return result


def argument_validator(
    call: Callable[..., Any], *groups: type, more: Callable[[], Iterable[Named]] = tuple
) -> Callable[[Sequence[object], Mapping[str, object]], tuple[list[Any], dict[str, Any]]]:
    """Return a function that validates and converts the arguments of `call`.

    The arguments and errors are those of `validate_arguments`.
    """

    def validate(args: Sequence[object], options: Mapping[str, object]) -> tuple[list[Any], dict[str, Any]]:
        kinds = argument_types(call)
        convert = partial(_convert_argument, kinds=kinds, options=vars(call).get("options", ()))
        if unknown := [] if hands_on_any else options.keys() - kinds:
            _check_names(call, unknown, [*kinds, *(item.name for item in more())])
        return (
            [convert(name, value) for name, value in _name_positional(call, args)],
            {name: convert(name, value) for name, value in options.items()},
        )

    hands_on_any = not groups and any(
        parameter.kind is Parameter.VAR_KEYWORD and parameter.annotation == "Any"
        for parameter in signature(call).parameters.values()
    )
    vars(call)["groups"] = groups
    return validate


def validate_fields(built: type[T]) -> type[T]:
    """Validate the fields of an options class when it is created."""
    built.__init__ = validate_arguments(built.__init__)  # type: ignore[method-assign]
    return built


@cache
def argument_types(call: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotation of each argument by name, including those of a `TypedDict`."""
    kinds: dict[str, Any] = {}
    names: dict[str, Any] = getattr(unwrap(call), "__globals__", {})
    for parameter in signature(call).parameters.values():
        kind = Any if parameter.annotation is Parameter.empty else parameter.annotation
        kind = eval(kind, names) if isinstance(kind, str) else kind
        if parameter.kind is not Parameter.VAR_KEYWORD:
            kinds[parameter.name] = kind
        elif kind is not Any:
            kinds |= get_type_hints(get_args(kind)[0])
    handed_on = (get_type_hints(group) for group in getattr(call, "groups", ()))
    return {**{name: kind for group in handed_on for name, kind in group.items()}, **kinds}


def _check_names(call: Callable[..., Any], names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = similar_names(name, known, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            called = call.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{hint}")


def _name_positional(call: Callable[..., Any], args: Sequence[object]) -> Iterator[tuple[str, object]]:
    parameters = [
        parameter for parameter in signature(call).parameters.values() if parameter.kind in _POSITIONAL
    ]
    last = parameters[-1].name if parameters else ""
    # Extra arguments belong to a `*command`; otherwise the call itself rejects them.
    yield from zip_longest((parameter.name for parameter in parameters[: len(args)]), args, fillvalue=last)


def _convert_argument(
    name: str, value: object, kinds: Mapping[str, Any], options: Iterable[Option] = ()
) -> Any:
    if name not in kinds:
        return value
    kind = kinds[name]
    option = next((item for item in options if item.name == name), _COUNT if name in _COUNTS else None)
    limits = option if option is not None and option.type is int and option.many is None else None
    try:
        result = _convert(value, kind)
        return _require(result, limits is None or result is None or limits.allows(result))
    except _WrongTypeError:
        words = " or ".join(_describe_type(kind))
        if limits is not None:
            words = words.replace("an integer", limits.numbers())
        refuse(name, value, words)


def _convert(value: Any, kind: Any) -> Any:
    """Return the value converted to a type, or raise `_WrongTypeError`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _convert_scalar(value, inner)
    if origin is Literal:
        return _require(value, isinstance(value, str) and value in inner)
    if kind is DType:
        result = value if isinstance(value, DType) else dtype_like(value)
        return _require(result, result is not None)
    if kind in _NUMBER_TYPES:
        number = to_python_number(value)
        is_bool = isinstance(number, bool)
        return _require(
            number, is_bool if kind is bool else isinstance(number, _NUMBER_TYPES[kind]) and not is_bool
        )
    if _is_of_any_length(kind):
        result = _convert_items(value, inner[0])
        return tuple(result) if origin is tuple else result
    if origin is tuple:
        return _require(value, isinstance(value, tuple | list) and len(value) == len(inner))
    if origin is Mapping:
        return _convert_mapping(value, *inner)
    return _require(value, _is_instance(value, origin or kind))


def _convert_scalar(value: Any, kinds: Sequence[Any]) -> Any:
    """Convert the value to the first type that accepts it."""
    for kind in kinds:
        try:
            return _convert(value, kind)
        except _WrongTypeError:
            continue
    raise _WrongTypeError


def _is_of_any_length(kind: Any) -> bool:
    is_list = get_origin(kind) in (Sequence, Iterable)
    return is_list or (get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis)


def _convert_items(value: Any, kind: Any) -> Any:
    # A 0-d array has `__iter__`, but calling it raises an error.
    value = to_python_number(value)
    if isinstance(value, str | PathLike | Mapping) or not isinstance(value, Iterable):
        return (_convert(value, kind),)
    _require(value, not isinstance(value, bytes | bytearray))
    given = value if isinstance(value, Sequence) else tuple(value)
    converted = tuple(_convert(item, kind) for item in given)
    return given if _are_same(given, converted) else converted


def _convert_mapping(value: Any, key: Any, kind: Any) -> Any:
    _require(value, isinstance(value, Mapping))
    converted = {_convert(name, key): _convert(item, kind) for name, item in value.items()}
    return value if _are_same(value.values(), converted.values()) else converted


def _are_same(values: Iterable[object], others: Iterable[object]) -> bool:
    return all(a is b for a, b in zip(values, others, strict=True))


def _is_instance(value: object, kind: Any) -> bool:
    if kind is Any or not isinstance(kind, type):
        return True
    if _is_protocol(kind):
        return all(hasattr(value, name) for name in _members(kind))
    return isinstance(value, kind)


def _is_protocol(kind: Any) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


@cache
def _members(protocol: type) -> frozenset[str]:
    """Return the members that an object needs to satisfy a protocol."""
    bases = [item for item in protocol.__mro__ if _is_protocol(item) and item is not Protocol]
    names = {name for base in bases for name in (*vars(base), *base.__annotations__)}
    return frozenset(name for name in names if name in _SPECIAL_MEMBERS or not name.startswith("_"))


def _require(value: Any, fits: bool) -> Any:
    if not fits:
        raise _WrongTypeError
    return value


def _describe_type(kind: Any) -> list[str]:
    """Return descriptions of the accepted values."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return list(dict.fromkeys(word for item in inner for word in _describe_type(item)))
    if origin is Literal:
        return [f'"{item}"' for item in inner]
    if _is_of_any_length(kind):
        return [f"a list of {' or '.join(map(_plural, _describe_type(inner[0])))}"]
    if origin is PathLike:
        return ["a path"]
    if origin is Mapping:
        key, value = (" or ".join(_describe_type(item)) for item in inner)
        return [f"a dictionary {{{key}: {value}}}"]
    if origin is Callable or (_is_protocol(kind) and "__call__" in _members(kind)):
        return ["a function"]
    word = _TYPE_NAMES.get(kind) or getattr(kind, "called", f"a {getattr(kind, '__name__', kind)}")
    return [word] if word else []


def _plural(word: str) -> str:
    article, _, noun = word.partition(" ")
    return f"{noun}s" if article in ("a", "an") else word
