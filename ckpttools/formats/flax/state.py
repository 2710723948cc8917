"""Convert the contents of Flax msgpack files to the leaves of a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from math import prod
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, Stored, number_array
from ckpttools.array.tree import Empty, Leaf, Path, Text, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape
from ckpttools.formats.flax.msgpack import DamagedError, Extension, Reader, Span
from ckpttools.formats.pieced import reshape_pieces
from ckpttools.stores.base import File

# `flax.serialization._MsgpackExtType`, and the key that marks arrays larger than 1 GiB, which Flax splits.
_ARRAY, _COMPLEX, _NUMBER = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
# Placeholders for arrays in other files, from Orbax before `_METADATA` and, for multi-process arrays, from
# `flax.training.checkpoints`.
_PLACEHOLDERS = ("PLACEHOLDER://", "//GDAPlaceholder:")


@dataclass
class FlaxState:
    """The contents of a state file.

    Attributes:
        leaves: The leaves by path.
        scalars: Paths of the leaves that were Python numbers.
        elsewhere: Names of the arrays in other files, by path.
        others: Kinds of all other objects (not arrays, numbers or texts), by path.
    """

    leaves: dict[Path, Leaf] = field(default_factory=dict)
    scalars: set[Path] = field(default_factory=set)
    elsewhere: dict[Path, str] = field(default_factory=dict)
    others: dict[Path, str] = field(default_factory=dict)


def flax_state(file: File) -> FlaxState:
    """Read the leaves of a `flax.serialization` file, or of a stream of named leaves (EasyLM).

    Raises:
        FormatError: The file is damaged or not a state.
    """
    reader, state = Reader(file), FlaxState()
    try:
        first = reader.value()
        if isinstance(first, list):
            for path, span in _stream(first, reader):
                inner = reader.within(span)
                _Filling(state, file, inner).add(path, inner.value())
        else:
            _Filling(state, file, reader).add((), first)
        if not reader.is_at_end:
            raise DamagedError(f"{file.size - reader.at:,} bytes left over")
    except DamagedError as error:
        raise FormatError(
            "the file is not a Flax msgpack state, or is truncated",
            location=file.path,
            got=f"byte {reader.at:,} of {file.size:,}: {error}",
            hint="fetch the file again",
        ) from error
    return state


def _stream(first: list[Any], reader: Reader) -> Iterator[tuple[Path, Span]]:
    """Yield the entries of a stream: the path and the byte range of each value."""
    pair: Any = first
    while True:
        path, span = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        is_valid = isinstance(path, list) and all(type(key) in (str, int) for key in path)
        if not is_valid or not isinstance(span, Span):
            raise DamagedError("neither a dictionary nor pairs of a path and a state")
        yield tuple(path or ()), span
        if reader.is_at_end:
            return
        pair = reader.value()


@dataclass
class _Filling:
    """Collects the leaves of a state while its values are read."""

    state: FlaxState
    file: File
    reader: Reader

    def add(self, path: Path, value: Any) -> None:
        if isinstance(value, dict) and value.get(_CHUNKED) is True:
            self._leaf(path, self._join_chunks(value))
        elif isinstance(value, dict) and (name := _array_named(value)):
            self._elsewhere(path, name)
        elif isinstance(value, dict | list) and value:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                self.add((*path, key), item)
        elif isinstance(value, dict | list):
            self._leaf(path, Empty(type(value).__name__.capitalize()))
        elif isinstance(value, str) and value.startswith(_PLACEHOLDERS):
            self._elsewhere(path, value.partition("PLACEHOLDER://")[2] or value.partition(":")[2])
        else:
            self._add_one(path, value)

    def _add_one(self, path: Path, value: Any) -> None:
        if isinstance(value, Extension) and value.code in (_ARRAY, _NUMBER):
            self._leaf(path, self._array(value.span))
        elif isinstance(value, Extension | Span):
            kind = "a complex number" if isinstance(value, Extension) and value.code == _COMPLEX else "bytes"
            self.state.others[path] = kind
        elif isinstance(value, str):
            self._leaf(path, Text(value))
        elif value is None:
            self._leaf(path, Empty("None"))
        else:
            self._leaf(path, _number(value))
            self.state.scalars.add(path)

    def _leaf(self, path: Path, leaf: Leaf) -> None:
        if path in self.state.leaves:
            raise DamagedError(f"duplicate path {dotted(path)}")
        self.state.leaves[path] = leaf

    def _elsewhere(self, path: Path, name: str) -> None:
        self.state.elsewhere[path] = name

    def _array(self, span: Span) -> LazyArray:
        """Return an array from the encoding of `flax.serialization`: shape, dtype name and bytes."""
        declared = self.reader.within(span).value()
        shape, name, data = (
            declared if isinstance(declared, list) and len(declared) == 3 else (None, None, None)
        )
        dtype = DTYPES.get(name) if isinstance(name, str) else None
        lengths = _lengths(shape)
        if dtype is None or not isinstance(data, Span):
            raise DamagedError(f"an array of an unknown dtype: {name!r}")
        if prod(lengths) * dtype.itemsize != data.nbytes:
            raise DamagedError(f"{data.nbytes:,} bytes for an array of {dtype}{list(lengths)}")
        if not data.nbytes:
            return Constant(lengths, dtype, bytes(dtype.itemsize))
        return Stored(lengths, dtype, self.file, data.start)

    def _join_chunks(self, value: Mapping[str | int, Any]) -> LazyArray:
        """Join the flat pieces of an array that Flax split; they are stored under the keys of a tuple."""
        shape, chunks = _tuple_items(value.get("shape")), _tuple_items(value.get("chunks"))
        pieces = [self._array(chunk.span) for chunk in chunks if isinstance(chunk, Extension)]
        stored = [piece for piece in pieces if isinstance(piece, Stored) and piece.ndim == 1]
        lengths = _lengths(shape)
        joined = (
            sum(item.size for item in stored) == prod(lengths) and len({item.dtype for item in stored}) == 1
        )
        if not joined or len(stored) < len(chunks):
            raise DamagedError(f"the pieces of an array do not add up to {list(lengths)}")
        return reshape_pieces(stored, lengths)


def _tuple_items(value: Any) -> list[Any]:
    """Return the items of a tuple, which Flax writes as `{"0": first, "1": second}`."""
    items = value if isinstance(value, dict) else {}
    result = [items.get(str(location)) for location in range(len(items))]
    if not items or any(item is None for item in result):
        raise DamagedError("an array in pieces that are not numbered")
    return result


def _lengths(value: Any) -> Shape:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise DamagedError("an array without a shape")
    return tuple(value)


def _array_named(value: Mapping[str | int, Any]) -> str | None:
    """Return the array that T5X names instead of storing it, by the spec with which tensorstore opens it."""
    location = value.get("kvstore")
    name = location.get("path") if isinstance(location, dict) else None
    return name.strip("/") if isinstance(name, str) and "driver" in value else None


def _number(value: bool | int | float) -> LazyArray:
    result = number_array(value)
    if result is None:
        raise DamagedError(f"an integer of more than 64 bits: {value}")
    return result
