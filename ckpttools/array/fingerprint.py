"""What two plans have in common that put the same bytes of the same files in the same places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from typing import TypeAlias

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import (
    INNER,
    Chunked,
    Constant,
    Decoded,
    InMemoryArray,
    SeededNoise,
    Stored,
    distinct_arrays,
    source_arrays,
)
from ckpttools.core.region import grid_indices
from ckpttools.stores.memory import Bytes
from ckpttools.stores.registry import parse


def sources(arrays: Iterable[LazyArray]) -> Iterator[ByteSource]:
    """The files that reading these arrays reads; one may come several times."""
    for array in distinct_arrays(arrays):
        if not source_arrays(array):
            yield from array.sources()


# What knows its chunks takes so many times the memory of what lies in one piece: keys, places, its metadata.
_CHUNKED = 3


def nodes(arrays: Iterable[LazyArray]) -> int:
    """How many arrays these are with all that they are made of, each counted once, by their memory."""
    return sum(_CHUNKED if isinstance(array, Chunked) else 1 for array in distinct_arrays(arrays))


Identify: TypeAlias = Callable[[ByteSource], tuple[str, str]]
"""The one name of a file, and something that changes when its content does."""


def identity(source: ByteSource) -> tuple[str, str]:
    """A file's own name, however the path to it is written, and its version."""
    # What an index holds is called after its array, wherever the process is.
    return source.path if isinstance(source, Bytes) else str(parse(source.path).resolve()), source.version


def fingerprint_once(identify: Identify) -> Identify:
    """The same, asked once for each file: many arrays lie in few files.

    It is for one fingerprint. Later a link may lead elsewhere, or the process be in another directory.
    """
    known: dict[tuple[str, str], tuple[str, str]] = {}

    def identified(source: ByteSource) -> tuple[str, str]:
        key = source.path, source.version
        if key not in known:
            known[key] = identify(source)
        return known[key]

    return identified


class Describer:
    """Describes arrays as plain values; what several are made of is described once and has a number.

    Args:
        identify: says which file a source is.
    """

    def __init__(self, identify: Identify = identity) -> None:
        self._identify = fingerprint_once(identify)
        self._numbers: dict[int, int] = {}

    def lines(self, array: LazyArray) -> Iterator[object]:
        """What an array is made of, as far as that was not said before, and then its number."""
        yield from self._new(array)
        yield self._numbers[id(array)]

    def _new(self, array: LazyArray) -> Iterator[object]:
        if id(array) in self._numbers:
            return
        parts = source_arrays(array)
        for part in parts:
            if id(part) not in self._numbers:
                yield from self._new(part)
        self._numbers[id(array)] = len(self._numbers)
        if parts:
            yield [*_own_fields(array), [self._numbers[id(part)] for part in parts]]
        else:
            yield _described(array, self._identify)


def _described(array: LazyArray, identify: Identify) -> list[object]:
    """What an array is made of, as plain values: arrays described alike hold the same elements.

    Raises:
        TypeError: not a node of the closed set.
    """
    match array:
        case Stored(source=source):
            return ["stored", *identify(source), array.offset]
        case Chunked():
            parts = (array.part(index) for index in grid_indices(array.shape, array.chunk))
            return ["chunked", array.chunk, *(_described(part, identify) for part in parts)]
        case Decoded(encoded=code):
            return ["decoded", *identify(code.source), code.offset, code.code]
        case Constant():
            return ["constant", array.element.hex()]
        case SeededNoise():
            return _own_fields(array)
        case InMemoryArray():
            return ["held", array.holder.version]
        case _ if source_arrays(array):
            return [*_own_fields(array), *(_described(part, identify) for part in source_arrays(array))]
        case _:
            raise TypeError(f"{array!r} is not a node")


def _own_fields(array: LazyArray) -> list[object]:
    """What an array makes of those that it is made of."""
    kind = type(array)
    return [kind.__name__, *[repr(getattr(array, name)) for name in _own_names(kind)]]


@cache
def _own_names(kind: type[LazyArray]) -> tuple[str, ...]:
    """Names of the fields that say what an array of a class makes of others."""
    return tuple(field.name for field in fields(kind) if field.name not in INNER)
