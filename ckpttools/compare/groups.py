"""Differences of several arrays together: of each layer, and of parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, nan
from typing import TypeVar, get_args

from ckpttools.compare.diff import ArrayDiff
from ckpttools.compare.norms import Distance
from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import natural_key
from ckpttools.maxtext.layers import split_layer_number
from ckpttools.roles.of_tree import Role, Typed, roles_of


@dataclass(frozen=True, slots=True)
class GroupDiff:
    """Arrays that belong together.

    Attributes:
        name: `model.layers.17`, the name of an array outside of layers, or a role.
        arrays: Number of arrays that were compared or that one side lacks.
        num_differing: Number of those that are not equal.
        distance: Distance of the arrays of equal shape that are not bit-identical, as one vector; None if
            there are none.
        max_abs: Largest |a - b| of these.
        nan: Number of their elements that are NaN on one side only; `distance` and `max_abs` ignore them.
        most_different: The array with the largest relative L2 distance; None if there is none.
    """

    name: str
    arrays: int
    num_differing: int
    distance: Distance | None
    max_abs: float
    nan: int
    most_different: str | None

    @property
    def rel_l2(self) -> float | None:
        """Return the relative L2 distance; NaN or infinity if elements differ that are not finite."""
        if self.distance is None:
            return None
        return nan if self.nan else inf if self.max_abs == inf else self.distance.rel_l2


_Sortable = TypeVar("_Sortable", ArrayDiff, GroupDiff)


def with_roles(result: Iterable[ArrayDiff], arrays: Mapping[str, Typed]) -> tuple[ArrayDiff, ...]:
    """Return the entries with the roles of their arrays, inferred from all arrays together."""
    known = roles_of({(name,): item for name, item in arrays.items()})
    return tuple(replace(item, role=known.of((item.name,))) for item in result)


def by_layer(result: Iterable[ArrayDiff]) -> tuple[GroupDiff, ...]:
    """Return the layers and other arrays whose parameters differ in values, those that differ most first."""
    groups = _grouped((item for item in result if item.role == "parameter"), lambda item: _layer(item.name))
    return sorted_by([item for item in groups if item.num_differing and item.distance], "rel-l2")


def by_role(result: Iterable[ArrayDiff]) -> tuple[GroupDiff, ...]:
    """Return parameters, optimizer state and other state, as far as there are such arrays."""
    groups = {item.name: item for item in _grouped(result, lambda item: item.role)}
    return tuple(groups[role] for role in get_args(Role) if role in groups)


def grouped(name: str, items: Sequence[ArrayDiff]) -> GroupDiff:
    """Return these arrays as one group."""
    measured = [item for item in items if item.distance is not None]
    return GroupDiff(
        name,
        len(items),
        sum(not item.is_equal for item in items),
        Distance.joined(item.distance for item in measured if item.distance) if measured else None,
        max((item.deviation.max_abs for item in items if item.deviation), default=0.0),
        sum(item.deviation.nan for item in items if item.deviation),
        max(measured, key=_relative).name if measured else None,
    )


def sorted_by(items: Sequence[_Sortable], sort: str) -> tuple[_Sortable, ...]:
    """Return arrays or groups by name, or those that differ most first: by relative L2 or by `max`."""
    if sort == "name":
        return tuple(sorted(items, key=lambda item: natural_key(item.name)))
    return tuple(sorted(items, key=_relative if sort == "rel-l2" else _largest, reverse=True))


def _relative(item: ArrayDiff | GroupDiff) -> float:
    """Return a number that is larger for items that differ more.

    Arrays that one side lacks come first, as do items whose NaN or infinities differ.
    """
    if item.distance is not None:
        return inf if _largest(item) == inf else item.distance.rel_l2
    return inf if isinstance(item, ArrayDiff) and not item.is_equal else -1.0


def _largest(item: ArrayDiff | GroupDiff) -> float:
    if isinstance(item, GroupDiff):
        return inf if item.nan else item.max_abs
    if item.deviation is None:
        return -1.0 if item.is_equal else inf
    return inf if item.deviation.nan else item.deviation.max_abs


def _grouped(items: Iterable[ArrayDiff], key: Callable[[ArrayDiff], str]) -> list[GroupDiff]:
    groups: dict[str, list[ArrayDiff]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [grouped(name, members) for name, members in groups.items()]


def _layer(name: str) -> str:
    """Return the layer of an array, as the beginning of its name; the whole name if it is in none."""
    result = split_layer_number(name)
    return name if result is None else f"{result[0]}{result[1]}"
