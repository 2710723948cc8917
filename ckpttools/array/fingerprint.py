"""Fingerprints of arrays: equal if their elements come from the same bytes of the same files."""

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
    """Yield the files that hold the arrays; a file may occur several times."""
    for array in distinct_arrays(arrays):
        if not source_arrays(array):
            yield from array.sources()


# Memory of a chunked array relative to a contiguous one: it also has keys, offsets and metadata.
_CHUNKED = 3


def nodes(arrays: Iterable[LazyArray]) -> int:
    """Count the arrays and all their sources once each, weighted by their memory use."""
    return sum(_CHUNKED if isinstance(array, Chunked) else 1 for array in distinct_arrays(arrays))


Identify: TypeAlias = Callable[[ByteSource], tuple[str, str]]
"""Maps a file to its canonical name and a version that changes with its content."""


def identity(source: ByteSource) -> tuple[str, str]:
    """Return the canonical name of a file and its version."""
    # Data stored inside an index is named after its array, which does not depend on the working directory.
    return source.path if isinstance(source, Bytes) else str(parse(source.path).resolve()), source.version


def fingerprint_once(identify: Identify) -> Identify:
    """Cache `identify` per file, because many arrays share few files.

    Use the returned function for a single fingerprint: links and the working directory may change later.
    """
    known: dict[tuple[str, str], tuple[str, str]] = {}

    def identified(source: ByteSource) -> tuple[str, str]:
        key = source.path, source.version
        if key not in known:
            known[key] = identify(source)
        return known[key]

    return identified


class Describer:
    """Describes arrays as plain values. A shared source is described once, then referred to by its index.

    Args:
        identify: Returns the identity of a source file.
    """

    def __init__(self, identify: Identify = identity) -> None:
        self._identify = fingerprint_once(identify)
        self._numbers: dict[int, int] = {}

    def lines(self, array: LazyArray) -> Iterator[object]:
        """Yield the descriptions of new sources, then the index of the array."""
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
            yield [*_plain_fields(array), [self._numbers[id(part)] for part in parts]]
        else:
            yield _describe(array, self._identify)


def _describe(array: LazyArray, identify: Identify) -> list[object]:
    """Describe an array by plain values; arrays with equal descriptions have the same elements.

    Raises:
        TypeError: The array is not a known node type.
    """
    match array:
        case Stored(source=source):
            return ["stored", *identify(source), array.offset]
        case Chunked():
            parts = (array.part(index) for index in grid_indices(array.shape, array.chunk))
            return ["chunked", array.chunk, *(_describe(part, identify) for part in parts)]
        case Decoded(encoded=code):
            return ["decoded", *identify(code.source), code.offset, code.code]
        case Constant():
            return ["constant", array.element.hex()]
        case SeededNoise():
            return _plain_fields(array)
        case InMemoryArray():
            return ["held", array.holder.version]
        case _ if source_arrays(array):
            return [*_plain_fields(array), *(_describe(part, identify) for part in source_arrays(array))]
        case _:
            raise TypeError(f"{array!r} is not a node")


def _plain_fields(array: LazyArray) -> list[object]:
    """Return the values of all fields except the source arrays."""
    kind = type(array)
    return [kind.__name__, *[repr(getattr(array, name)) for name in _plain_field_names(kind)]]


@cache
def _plain_field_names(kind: type[LazyArray]) -> tuple[str, ...]:
    """Return the names of all fields of a class except the source arrays."""
    return tuple(field.name for field in fields(kind) if field.name not in INNER)
