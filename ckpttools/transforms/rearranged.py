"""Which parts of quantised modules a tree has in another order than they were in.

Numbers are packed along axes, and scaled in groups along axes: in another order of elements they mean
something else. Whole modules side by side along a new first axis, as experts are, are in the old order, and
so is each of such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stack, Take, inner
from ckpttools.array.tree import Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.quantized.tree import by_names
from ckpttools.quantized.weights import Quantized, last_keys


@dataclass(frozen=True, slots=True)
class _Origin:
    """What an array is made of.

    Attributes:
        how: stacks and places in stacks around the members; the same for all arrays of modules that are
            treated alike.
        members: names of parts of quantised modules, in order.
    """

    how: tuple[object, ...]
    members: tuple[str, ...]


def rearranged(made: Tree, members: Mapping[int, str]) -> Iterator[str]:
    """A line for each array in which a part of a quantised module is in another order.

    Args:
        made: the new tree.
        members: identity -> name of each part of a quantised module in the old one.
    """
    for name, array, member in _others(made, members):
        if member.dtype == array.dtype:
            yield f"{name}: {members[id(member)]} in another order"


def recast(made: Tree, members: Mapping[int, str]) -> Iterator[str]:
    """A line for each array that a part of a quantised module is in another dtype in; as `rearranged`."""
    for name, array, member in _others(made, members):
        if member.dtype != array.dtype:
            yield f"{name}: cast from {member.dtype} to {array.dtype}"


def _others(made: Tree, members: Mapping[int, str]) -> Iterator[tuple[str, LazyArray, LazyArray]]:
    """Arrays made of parts in any other way than in stacks, each with one of the parts."""
    for path, array in made.arrays.items():
        if id(array) not in members and not _origin(array, members):
            member = next(_members(array, members), None)
            if member is not None:
                yield dotted(path), array, member


def _members(array: LazyArray, members: Mapping[int, str]) -> Iterator[LazyArray]:
    rest = [array]
    while rest:
        each = rest.pop()
        if id(each) in members:
            yield each
        else:
            rest += inner(each)


def apart(made: Tree, members: Mapping[int, str], before: Mapping[str, Quantized]) -> Iterator[str]:
    """A line for each array made of parts of quantised modules whose other parts are not made alike.

    Args:
        made, members: as for `rearranged`.
        before: the quantised weights of the old tree.
    """
    origins: dict[str, _Origin] = {}
    for path, array in made.arrays.items():
        origin = None if id(array) in members else _origin(array, members)
        if origin:
            origins[dotted(path)] = origin
    if not origins:
        return
    after = by_names(made)[1]
    owned: set[str] = set()
    for name, origin in origins.items():
        weights = [before[each] for each in origin.members if each in before]
        if len(weights) < len(origin.members):
            continue
        near = [each for each in (after[name].sides if name in after else ()) if each in origins]
        sides = {side: origins[side] for side in near if origins[side].how == origin.how}
        own = {side for side, each in sides.items() if _are_of(each.members, weights)}
        owned |= {name, *own}
        there = {sides[side].members for side in own}
        missing = [
            side
            for at, each in enumerate(weights)
            for side in each.sides
            if not any(members[at] == side for members in there)
        ]
        if missing:
            yield f"{name}: without {last_keys(missing)} in the same order"
    yield from (f"{name}: without its weight in the same order" for name in origins if name not in owned)


def _are_of(members: Sequence[str], weights: Sequence[Quantized]) -> bool:
    return all(member in each.sides for member, each in zip(members, weights, strict=True))


def _origin(array: LazyArray, members: Mapping[int, str]) -> _Origin | None:
    """What an array is made of; None where that is anything but stacks on first axes."""
    if id(array) in members:
        return _Origin(("whole",), (members[id(array)],))
    if isinstance(array, Stack) and array.axis == 0:
        parts = [_origin(each, members) for each in array.parts]
        found = [each for each in parts if each is not None]
        if len(found) < len(parts):
            return None
        return _Origin(
            ("stack", *(each.how for each in found)), tuple(n for each in found for n in each.members)
        )
    if isinstance(array, Take) and array.axis == 0:
        origin = _origin(array.source, members)
        how = ("take", array.index, array.source.shape[0])
        return origin and _Origin((*how, origin.how), origin.members)
    return None
