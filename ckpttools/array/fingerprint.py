"""What two plans have in common that put the same bytes of the same files in the same places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import Chunked, described, inner

# Fields of nodes that are made of others; the rest of their fields say how.
_INNER = ("source", "parts")


def sources(arrays: Iterable[LazyArray]) -> Iterator[ByteSource]:
    """The files that reading these arrays reads; one may come several times."""
    seen: set[int] = set()
    rest = list(arrays)
    while rest:
        array = rest.pop()
        if id(array) not in seen:
            # Of one array there may be a part in every layer.
            seen.add(id(array))
            rest.extend(inner(array))
            if not inner(array):
                yield from array.sources()


# What knows its chunks takes so many times the memory of what lies in one piece: keys, places, its metadata.
_CHUNKED = 3


def nodes(arrays: Iterable[LazyArray]) -> int:
    """How many arrays these are with all that they are made of, each counted once, by their memory."""
    seen: set[int] = set()
    rest, found = list(arrays), 0
    while rest:
        array = rest.pop()
        if id(array) not in seen:
            seen.add(id(array))
            rest.extend(inner(array))
            found += _CHUNKED if isinstance(array, Chunked) else 1
    return found


class Describer:
    """Describes arrays as plain values; what several are made of is described once and has a number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def lines(self, array: LazyArray) -> Iterator[object]:
        """What an array is made of, as far as that was not said before, and then its number."""
        yield from self._new(array)
        yield self._numbers[id(array)]

    def _new(self, array: LazyArray) -> Iterator[object]:
        if id(array) in self._numbers:
            return
        parts = inner(array)
        for part in parts:
            yield from self._new(part)
        self._numbers[id(array)] = len(self._numbers)
        if parts:
            how = [repr(getattr(array, each.name)) for each in fields(array) if each.name not in _INNER]
            yield [type(array).__name__, how, [self._numbers[id(part)] for part in parts]]
        else:
            yield described(array)
