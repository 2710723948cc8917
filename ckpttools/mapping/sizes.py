"""Lengths of axes, found from a configuration and from shapes, each with where it was first said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from ckpttools.errors import ConfigError, ShapeError
from ckpttools.mapping.axes import Group


@dataclass(frozen=True, slots=True)
class Size:
    """The length of an axis and who says so."""

    length: int
    source: str


Alternatives = tuple[str, ...]
"""Names of a configuration's fields, the first that is there counts."""


def sizes_from_config(
    config: Mapping[str, object], fields: Mapping[str, Alternatives], place: str
) -> dict[str, Size]:
    """The axis lengths that a configuration states; axes that it is silent about are left out.

    Raises:
        ConfigError: a field is not a positive whole number.
    """
    sizes: dict[str, Size] = {}
    for axis, names in fields.items():
        name = next((name for name in names if config.get(name) is not None), None)
        if name is None:
            continue
        value = config[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{name} is not a size", place=place, got=repr(value), wanted="a whole number of at least 1"
            )
        sizes[axis] = Size(value, f"{place}: {name}")
    return sizes


@dataclass(frozen=True, slots=True)
class Observation:
    """One array whose axes are named and whose shape is known."""

    key: str
    groups: tuple[Group, ...]
    shape: tuple[int, ...]


def unify(known: Mapping[str, Size], seen: Iterable[Observation]) -> dict[str, Size]:
    """`known`, completed by what the shapes say. Shapes that contradict `known` are left to the caller.

    An axis of the array gives the one unknown among its named axes; passes are made until nothing new
    is found.
    """
    sizes = dict(known)
    observations = [each for each in seen if len(each.groups) == len(each.shape)]
    found = True
    while found:
        found = False
        for each in observations:
            for group, length in zip(each.groups, each.shape, strict=True):
                unknown = [axis for axis in group if axis not in sizes]
                rest = prod(sizes[axis].length for axis in group if axis in sizes)
                if len(unknown) == 1 and length % rest == 0 and length > 0:
                    sizes[unknown[0]] = Size(length // rest, f"{each.key} {list(each.shape)}")
                    found = True
    return sizes


def require(
    sizes: Mapping[str, Size], axes: Iterable[str], seen: Iterable[Observation], place: str
) -> dict[str, int]:
    """The plain lengths of `axes`.

    Raises:
        ShapeError: neither the configuration nor any shape says one of them.
    """
    missing = sorted({axis for axis in axes if axis not in sizes})
    if missing:
        shown = next((each for each in seen if any(missing[0] in group for group in each.groups)), None)
        raise ShapeError(
            f"the size of {', '.join(missing)} cannot be told",
            place=place,
            got=_why_not_told(shown, missing[0], sizes) if shown else None,
            wanted="a field of the configuration or an array that shows it",
        )
    return {axis: size.length for axis, size in sizes.items()}


def _why_not_told(shown: Observation, axis: str, sizes: Mapping[str, Size]) -> str:
    """What the array says of the axis, and what is in the way."""
    if len(shown.groups) != len(shown.shape):
        return f"{shown.key} {list(shown.shape)}, which should have {len(shown.groups)} axes"
    number = next(k for k, group in enumerate(shown.groups) if axis in group)
    others = [f"{each} {sizes[each].length}" for each in shown.groups[number] if each in sizes]
    group = " ".join(shown.groups[number])
    return (
        f"{shown.key} {list(shown.shape)}, where {shown.shape[number]} is ({group}) with {', '.join(others)}"
    )
