"""numpy's basic indexing, as a region to read and what to take of it."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import SupportsIndex

from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape

Key = SupportsIndex | slice | EllipsisType
Index = Key | tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Indexing:
    """What an index asks for.

    Attributes:
        region: the smallest box that has all of it.
        within: the index that takes it out of that box.
    """

    region: Region
    within: tuple[int | slice, ...]


def indexing(shape: Shape, index: Index) -> Indexing:
    """Whole numbers, slices and an ellipsis, meant as numpy means them: `array[3, :, -1]`, `array[..., ::2]`.

    Raises:
        IndexError: anything else, too many of them, or a number beyond the axis.
    """
    keys = _for_each_axis(index if isinstance(index, tuple) else (index,), len(shape))
    starts, stops, within = [], [], []
    for axis, (key, length) in enumerate(zip(keys, shape, strict=True)):
        indices, take = _along(key, length, axis)
        starts.append(min(indices[0], indices[-1]) if indices else 0)
        stops.append(max(indices[0], indices[-1]) + 1 if indices else 0)
        within.append(take)
    return Indexing(Region(tuple(starts), tuple(stops)), tuple(within))


def _for_each_axis(keys: tuple[Key, ...], rank: int) -> tuple[Key, ...]:
    """The keys with the ellipsis written out, and whole axes at the end."""
    places = [place for place, key in enumerate(keys) if key is Ellipsis]
    missing = rank - (len(keys) - len(places))
    if missing < 0 or len(places) > 1:
        got = "two ellipses" if len(places) > 1 else f"{len(keys) - len(places)} indices"
        raise IndexError(f"an array of {rank} axes has no place for {got}")
    place = places[0] if places else len(keys)
    return (*keys[:place], *[slice(None)] * missing, *keys[place + 1 :])


def _along(key: Key, length: int, axis: int) -> tuple[range, int | slice]:
    """The coordinates that are asked for, and how they lie between the first and the last of them."""
    # numpy takes a boolean for a mask, `operator.index` for 0 or 1.
    if isinstance(key, bool) or not isinstance(key, SupportsIndex | slice):
        raise _no_index(key)
    try:
        if isinstance(key, slice):
            indices = range(*key.indices(length))
            return indices, slice(None, None, indices.step)
        number = operator.index(key)
    except (TypeError, ValueError) as error:
        raise _no_index(key) from error
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of bounds for axis {axis} of length {length}")
    at = number % length
    return range(at, at + 1), 0


def _no_index(key: object) -> IndexError:
    return IndexError(f"a lazy array is indexed by whole numbers, slices and ..., not by {key!r}")
