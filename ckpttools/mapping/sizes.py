"""Lengths of axes, found from a configuration and from shapes, each with where it was first said."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, ShapeError
from ckpttools.core.region import Shape
from ckpttools.mapping.arithmetic import DoesNotDivideError, axes_in, value
from ckpttools.mapping.axes import Side
from ckpttools.mapping.keys import AxisGroup, Field

# Coordinates of which no key is there, but a later one: more than any model has layers or experts.
_MOST_UNSEEN = 10_000


@dataclass(frozen=True, slots=True)
class Size:
    """The length of an axis and who says so.

    Attributes:
        length: of the axis.
        source: who says so.
        is_assumed: whether nothing says it, and it is what models of the type have that are silent.
    """

    length: int
    source: str
    is_assumed: bool = False


def lengths_of(sizes: Mapping[str, Size]) -> dict[str, int]:
    """The lengths alone."""
    return {axis: size.length for axis, size in sizes.items()}


Alternatives = tuple[str | int, ...]
"""Names of a configuration's fields, dots for nested ones; the first that is there counts.

A number at the end is the length where none is there, and a 0 there lets a field be 0, too.
"""


def nested_value(config: Mapping[str, Any], name: str) -> Any:
    """The field of a configuration at a dotted name; None without one.

    Below a list, a number is for the item there, `#` for how many there are, and `#NAME` for how many of them
    are NAME.
    """
    value: Any = config
    for key in name.split("."):
        # What is read of a file; asking whether it is any mapping takes five times as long.
        if type(value) is dict:
            value = value.get(key)
        elif isinstance(value, list) and key.startswith("#"):
            value = value.count(key[1:]) if key[1:] else len(value)
        elif isinstance(value, list) and key.isdecimal():
            value = value[int(key)] if int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def states_field(config: Mapping[str, Any], name: str) -> bool:
    """Whether a configuration has a field, dots for nested ones, be it null."""
    first, _, rest = name.partition(".")
    inner = config.get(first)
    return first in config and (not rest or (isinstance(inner, Mapping) and states_field(inner, rest)))


def first_stated(
    config: Mapping[str, Any], names: Iterable[str], location: str, silent: Mapping[str, Any]
) -> tuple[str | None, Any, str]:
    """The first of these fields that a configuration states, or that a model of its type has all the same.

    Args:
        config: the parsed `config.json`.
        names: of fields.
        location: of the configuration, for messages.
        silent: what a model of its type has where it is silent, as it would state that.

    Returns:
        The name, None without any; the value; and where it is not stated, what that means, else "".
    """
    for name in names:
        if (value := nested_value(config, name)) is not None:
            return name, value, ""
        if (value := nested_value(silent, name)) is not None:
            return name, value, f"{location}: no {name}, which means {json.dumps(value)} to transformers"
    return None, None, ""


def sizes_from_config(
    config: Mapping[str, Any],
    fields: Mapping[str, Alternatives],
    location: str,
    silent: Mapping[str, Any] | None = None,
) -> dict[str, Size]:
    """The axis lengths that a configuration states; axes that nothing is known of are left out.

    Args:
        config: the parsed `config.json`.
        fields: axis -> where it is stated.
        location: of the configuration, for messages.
        silent: what a model of its type has where it is silent, as it would state that.

    Raises:
        ConfigError: a field is no positive whole number.
    """
    sizes: dict[str, Size] = {}
    for axis, alternatives in fields.items():
        names = [alternative for alternative in alternatives if isinstance(alternative, str)]
        default = next((alternative for alternative in alternatives if isinstance(alternative, int)), None)
        name, value, source = first_stated(config, names, location, silent or {})
        if name is not None:
            length = _length(value, name, location, 1 if default != 0 else 0)
            sizes[axis] = Size(length, source or f"{location}: {name}", is_assumed=bool(source))
        elif default is not None:
            sizes[axis] = Size(default, f"{location}: no {names[0]}")
    return sizes


def _length(value: object, name: str, location: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"{name} is not a size",
            location=location,
            got=repr(value),
            expected=f"a whole number of at least {least}",
        )
    return value


def derive(sizes: Mapping[str, Size], formulas: Mapping[str, str], location: str) -> dict[str, Size]:
    """`sizes`, completed by the formulas whose axes are all known.

    Raises:
        ConfigError: a division that must come out even does not, or a length would be negative.
    """
    result = dict(sizes)
    for _ in formulas:
        lengths = lengths_of(result)
        for axis, formula in formulas.items():
            if axis in result or not axes_in(formula) <= set(lengths):
                continue
            sources = "; ".join(sorted({result[name].source for name in axes_in(formula)}))
            try:
                length = value(formula, lengths)
            except DoesNotDivideError as error:
                raise ConfigError(
                    f"the layers do not fit the groups that they must form: {error}",
                    location=location,
                    got=sources,
                    expected=f"{axis} = {formula} without remainder",
                ) from error
            if length < 0:
                raise ConfigError(f"{axis} = {formula} would be {length}", location=location, got=sources)
            is_assumed = any(result[name].is_assumed for name in axes_in(formula))
            result[axis] = Size(length, f"{formula} ({sources})", is_assumed)
    return result


@dataclass(frozen=True, slots=True)
class Observation:
    """One array whose axes are named and whose shape is known."""

    key: str
    groups: tuple[AxisGroup, ...]
    shape: tuple[int, ...]


def unify(known: Mapping[str, Size], seen: Iterable[Observation]) -> dict[str, Size]:
    """`known`, completed by what the shapes say. Shapes that contradict `known` are left to the caller.

    An axis of the array gives the one unknown among its named axes; passes are made until nothing new
    is found.
    """
    sizes = dict(known)
    observations = [item for item in seen if len(item.groups) == len(item.shape)]
    result = True
    while result:
        result = False
        for observation in observations:
            for group, length in zip(observation.groups, observation.shape, strict=True):
                unknown = [axis for axis in group if axis not in sizes]
                rest = prod(sizes[axis].length for axis in group if axis in sizes)
                if len(unknown) == 1 and length > 0 and rest > 0 and length % rest == 0:
                    sizes[unknown[0]] = Size(length // rest, f"{observation.key} {list(observation.shape)}")
                    result = True
    return sizes


def sizes_from_keys(sizes: Mapping[str, Size], keys: Iterable[str], sides: Iterable[Side]) -> dict[str, Size]:
    """`sizes`, completed by the highest numbers in keys; axes of which no key is there are left out.

    Only names that are keys of a side as a whole tell anything, and no number does that is far beyond the
    number of names: all that would be missing before it could not even be listed.
    """
    result = dict(sizes)
    names = list(keys)
    limit = most_specific(len(names))
    lengths = lengths_of(sizes)
    for side in sides:
        telling = {k: field for k, field in enumerate(side.key.fields) if _determines_sizes(field, lengths)}
        for name in names if telling else ():
            numbers = side.key.numbers(name) or ()
            for k, field in telling.items() if numbers else ():
                for axis, coordinate in next(field.indices(numbers[k], lengths), {}).items():
                    if coordinate < limit and (axis not in result or coordinate >= result[axis].length):
                        result[axis] = Size(coordinate + 1, name)
    return result


def most_specific(names: int) -> int:
    """The number from which on a number in one of so many names says nothing."""
    return max(_MOST_UNSEEN, names)


def _determines_sizes(field: Field, lengths: Mapping[str, int]) -> bool:
    """Whether its number gives the coordinate of an axis of unknown length."""
    known = set(field.counts) <= lengths.keys()
    return len(field.axes) == 1 and field.axes[0] not in lengths and known and not field.labels


def require(
    sizes: Mapping[str, Size], axes: Iterable[str], seen: Iterable[Observation], location: str
) -> dict[str, int]:
    """The plain lengths of `axes`.

    Raises:
        ShapeError: neither the configuration nor any shape says one of them.
    """
    missing = sorted({axis for axis in axes if axis not in sizes})
    if missing:
        shown = next((item for item in seen if any(missing[0] in group for group in item.groups)), None)
        raise ShapeError(
            f"the size of {', '.join(missing)} cannot be inferred",
            location=location,
            got=_unknown_reason(shown, missing[0], sizes) if shown else None,
            expected="a field of the configuration or an array that shows it",
        )
    return lengths_of(sizes)


def _unknown_reason(shown: Observation, axis: str, sizes: Mapping[str, Size]) -> str:
    """What the array says of the axis, and what is in the way."""
    if len(shown.groups) != len(shown.shape):
        return f"{shown.key} {list(shown.shape)}, which should have {len(shown.groups)} axes"
    number = next(k for k, group in enumerate(shown.groups) if axis in group)
    others = [f"{item} {sizes[item].length}" for item in shown.groups[number] if item in sizes]
    group = " ".join(shown.groups[number])
    return (
        f"{shown.key} {list(shown.shape)}, where {shown.shape[number]} is ({group}) with {', '.join(others)}"
    )


def label_counts(sides: Iterable[Side]) -> dict[str, Size]:
    """The axes that keys write as words."""
    return {
        field.axes[0]: Size(len(field.labels), f"the labels of {side.key}")
        for side in sides
        for field in side.key.fields
        if field.labels
    }


def observed(
    arrays: Mapping[str, LazyArray], sides: Iterable[Side], sizes: Mapping[str, Size]
) -> list[Observation]:
    """The first array of each side: coordinate 0 of every axis."""
    result: list[Observation] = []
    known = lengths_of(sizes)
    for side in sides:
        axes = side.key.axes
        lengths = {**dict.fromkeys(axes, 1), **known}
        if side.key.needs <= lengths.keys():
            key = side.key.format(dict.fromkeys(axes, 0), lengths)
            if key in arrays:
                result.append(_observation(key, side, arrays[key].shape))
    return result


def _observation(key: str, side: Side, shape: Shape) -> Observation:
    """What an array tells of its axes: of one on which several parts lie, nothing."""
    at = side.join.at if side.join is not None and len(shape) == len(side.groups) else len(shape)
    groups = tuple(group for k, group in enumerate(side.groups) if k != at)
    return Observation(key, groups, (*shape[:at], *shape[at + 1 :]))
