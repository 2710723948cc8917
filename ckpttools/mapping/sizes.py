"""Infer lengths of axes from a configuration and from shapes, each with its origin."""

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

# The largest plausible number in a name; no model has more layers or experts.
_MAX_COORDINATE = 10_000


@dataclass(frozen=True, slots=True)
class Size:
    """The length of an axis, with its origin.

    Attributes:
        length: The length of the axis.
        source: The origin of the length.
        is_assumed: Whether the length is the default of the model type rather than stated.
    """

    length: int
    source: str
    is_assumed: bool = False


def lengths_of(sizes: Mapping[str, Size]) -> dict[str, int]:
    """Return the lengths without their origins."""
    return {axis: size.length for axis, size in sizes.items()}


Alternatives = tuple[str | int, ...]
"""Names of configuration fields, with dots for nested ones; the first that exists counts.

A number at the end is the default; a default of 0 allows the field to be 0.
"""


def nested_value(config: Mapping[str, Any], name: str) -> Any:
    """Return the configuration field at a dotted name, or None.

    In a list, a number selects an item, `#` counts the items, and `#NAME` counts the items equal to NAME.
    """
    value: Any = config
    for key in name.split("."):
        # Parsed files contain plain dicts; checking isinstance with Mapping would take five times as long.
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
    """Return whether a configuration has a field, with dots for nested fields; null values count."""
    first, _, rest = name.partition(".")
    inner = config.get(first)
    return first in config and (not rest or (isinstance(inner, Mapping) and states_field(inner, rest)))


def first_stated(
    config: Mapping[str, Any], names: Iterable[str], location: str, defaults: Mapping[str, Any]
) -> tuple[str | None, Any, str]:
    """Return the first of these fields that the configuration states or that has a default.

    Args:
        config: The parsed `config.json`.
        names: The names of fields.
        location: The location of the configuration, for messages.
        defaults: Defaults of the model type, in the form of a configuration.

    Returns:
        The name or None, the value, and an explanation if the value is a default, else "".
    """
    for name in names:
        if (value := nested_value(config, name)) is not None:
            return name, value, ""
        if (value := nested_value(defaults, name)) is not None:
            return name, value, f"{location}: no {name}, for which transformers uses {json.dumps(value)}"
    return None, None, ""


def sizes_from_config(
    config: Mapping[str, Any],
    fields: Mapping[str, Alternatives],
    location: str,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Size]:
    """Read the axis lengths that a configuration states; unknown axes are left out.

    Args:
        config: The parsed `config.json`.
        fields: Axis -> the fields that state its length.
        location: The location of the configuration, for messages.
        defaults: Defaults of the model type, in the form of a configuration.

    Raises:
        ConfigError: A field is not a positive integer.
    """
    sizes: dict[str, Size] = {}
    for axis, alternatives in fields.items():
        names = [alternative for alternative in alternatives if isinstance(alternative, str)]
        default = next((alternative for alternative in alternatives if isinstance(alternative, int)), None)
        name, value, source = first_stated(config, names, location, defaults or {})
        if name is not None:
            length = _length(value, name, location, 1 if default != 0 else 0)
            sizes[axis] = Size(length, source or f"{location}: {name}", is_assumed=bool(source))
        elif default is not None:
            sizes[axis] = Size(default, f"{location}: no {names[0]}")
    return sizes


def _length(value: object, name: str, location: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"{name} must be an integer of at least {least}",
            location=location,
            got=repr(value),
        )
    return value


def derive(sizes: Mapping[str, Size], formulas: Mapping[str, str], location: str) -> dict[str, Size]:
    """Complete `sizes` with the formulas whose axes are all known.

    Raises:
        ConfigError: A division leaves a remainder, or a length would be negative.
    """
    complete = dict(sizes)
    for _ in formulas:
        lengths = lengths_of(complete)
        for axis, formula in formulas.items():
            if axis in complete or not axes_in(formula) <= set(lengths):
                continue
            sources = "; ".join(sorted({complete[name].source for name in axes_in(formula)}))
            try:
                length = value(formula, lengths)
            except DoesNotDivideError as error:
                raise ConfigError(
                    f"the layers do not form complete groups: {error}",
                    location=location,
                    got=sources,
                    expected=f"{axis} = {formula} without a remainder",
                ) from error
            if length < 0:
                raise ConfigError(f"{axis} = {formula} would be {length}", location=location, got=sources)
            is_assumed = any(complete[name].is_assumed for name in axes_in(formula))
            complete[axis] = Size(length, f"{formula} ({sources})", is_assumed)
    return complete


@dataclass(frozen=True, slots=True)
class Observation:
    """An array with named axes and a known shape."""

    key: str
    groups: tuple[AxisGroup, ...]
    shape: tuple[int, ...]


def unify(known: Mapping[str, Size], arrays: Iterable[Observation]) -> dict[str, Size]:
    """Complete `known` with lengths from shapes; shapes that contradict `known` are left to the caller.

    If only one of the named axes in an array axis is unknown, the array's length determines it. Passes repeat
    until nothing new is found.
    """
    sizes = dict(known)
    observations = [item for item in arrays if len(item.groups) == len(item.shape)]
    is_new = True
    while is_new:
        is_new = False
        for observation in observations:
            for group, length in zip(observation.groups, observation.shape, strict=True):
                unknown = [axis for axis in group if axis not in sizes]
                known_length = prod(sizes[axis].length for axis in group if axis in sizes)
                if len(unknown) == 1 and length > 0 and known_length > 0 and length % known_length == 0:
                    sizes[unknown[0]] = Size(
                        length // known_length, f"{observation.key} {list(observation.shape)}"
                    )
                    is_new = True
    return sizes


def sizes_from_keys(sizes: Mapping[str, Size], keys: Iterable[str], sides: Iterable[Side]) -> dict[str, Size]:
    """Complete `sizes` with the highest numbers in keys; axes without keys are left out.

    Only names that match a side's full key count. Numbers far above the number of names are ignored, because
    the missing keys before them could not be listed.
    """
    complete = dict(sizes)
    names = list(keys)
    limit = max_coordinate(len(names))
    lengths = lengths_of(sizes)
    for side in sides:
        informative = {
            k: field for k, field in enumerate(side.key.fields) if _determines_sizes(field, lengths)
        }
        for name in names if informative else ():
            numbers = side.key.numbers(name) or ()
            for k, field in informative.items() if numbers else ():
                for axis, coordinate in next(field.indices(numbers[k], lengths), {}).items():
                    if coordinate < limit and (axis not in complete or coordinate >= complete[axis].length):
                        complete[axis] = Size(coordinate + 1, name)
    return complete


def max_coordinate(names: int) -> int:
    """Return the limit above which a number in one of the names is implausible."""
    return max(_MAX_COORDINATE, names)


def _determines_sizes(field: Field, lengths: Mapping[str, int]) -> bool:
    """Return whether a field's number gives the coordinate of an axis of unknown length."""
    known = set(field.counts) <= lengths.keys()
    return len(field.axes) == 1 and field.axes[0] not in lengths and known and not field.labels


def require(
    sizes: Mapping[str, Size], axes: Iterable[str], observations: Iterable[Observation], location: str
) -> dict[str, int]:
    """Return the plain lengths of `axes`.

    Raises:
        ShapeError: A length is given neither by the configuration nor by a shape.
    """
    missing = sorted({axis for axis in axes if axis not in sizes})
    if missing:
        observation = next(
            (item for item in observations if any(missing[0] in group for group in item.groups)), None
        )
        raise ShapeError(
            f"the size of {', '.join(missing)} cannot be inferred",
            location=location,
            got=_unknown_reason(observation, missing[0], sizes) if observation else None,
            expected="a field of the configuration or an array that shows it",
        )
    return lengths_of(sizes)


def _unknown_reason(shown: Observation, axis: str, sizes: Mapping[str, Size]) -> str:
    """Explain why an array does not determine the length of an axis."""
    if len(shown.groups) != len(shown.shape):
        return f"{shown.key} {list(shown.shape)}, which should have {len(shown.groups)} axes"
    number = next(k for k, group in enumerate(shown.groups) if axis in group)
    others = [f"{item} {sizes[item].length}" for item in shown.groups[number] if item in sizes]
    group = " ".join(shown.groups[number])
    return (
        f"{shown.key} {list(shown.shape)}, where {shown.shape[number]} is ({group}) with {', '.join(others)}"
    )


def label_counts(sides: Iterable[Side]) -> dict[str, Size]:
    """Return the lengths of axes that keys spell as words."""
    return {
        field.axes[0]: Size(len(field.labels), f"the labels of {side.key}")
        for side in sides
        for field in side.key.fields
        if field.labels
    }


def observed(
    arrays: Mapping[str, LazyArray], sides: Iterable[Side], sizes: Mapping[str, Size]
) -> list[Observation]:
    """Return the first array of each side, at coordinate 0 of every axis."""
    observations: list[Observation] = []
    known = lengths_of(sizes)
    for side in sides:
        axes = side.key.axes
        lengths = {**dict.fromkeys(axes, 1), **known}
        if side.key.needs <= lengths.keys():
            key = side.key.format(dict.fromkeys(axes, 0), lengths)
            if key in arrays:
                observations.append(_observation(key, side, arrays[key].shape))
    return observations


def _observation(key: str, side: Side, shape: Shape) -> Observation:
    """Return the observed axes of an array; an axis that joins several parts is not observed."""
    at = side.join.at if side.join is not None and len(shape) == len(side.groups) else len(shape)
    groups = tuple(group for k, group in enumerate(side.groups) if k != at)
    return Observation(key, groups, (*shape[:at], *shape[at + 1 :]))
