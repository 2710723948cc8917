"""Lazy arrays as lines of text, and back: an array is made again without opening what it is read from.

Each node is a list, and has the number of its line; what it is made of are numbers of lines before it. Nodes
are made when they are asked for: of an array that is stacked from thousands only those that are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, cast, overload

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import (
    BlockCodes,
    BlockScales,
    Chunked,
    Concat,
    Constant,
    Decoded,
    Dequantized,
    Elementwise,
    LowRank,
    Mean,
    Padded,
    Plus,
    Relayout,
    Renormed,
    Repeated,
    Seeded,
    Stack,
    Stored,
    Take,
    Window,
    take,
)
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape, grid_indices, grid_shape
from ckpttools.formats.placement import Appended, ChunkFiles, DataFile, Placement
from ckpttools.stores.base import File, is_inside

# Rooms whose frozen dataclasses may be named in a line: functions of elements, codecs, and encoded chunks.
_OPS = ("ckpttools.mapping.", "ckpttools.transforms.", "ckpttools.quantized.")
_CODECS = ("ckpttools.codecs.",)
_ENCODED = (
    "ckpttools.formats.zarr.inner_chunks:EncodedChunk",
    "ckpttools.formats.torch.entry:SavedTensor",
    *_CODECS,
)
# What stands for a value that JSON does not have.
_DTYPE, _BYTES, _TUPLE, _SOURCE, _LINE = "dtype", "bytes", "tuple", "source", "line"


class NotInLinesError(Exception):
    """An array, or a place, of which lines cannot say what it is."""


class NodeLines:
    """Arrays become lines.

    Args:
        source: gives a file its number.

    Attributes:
        lines: what was said so far.
    """

    def __init__(self, source: Callable[[ByteSource], int]) -> None:
        self._source = source
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []
        self.lines: list[str] = []

    def number(self, array: LazyArray) -> int:
        """The line of an array, which is written if it was not yet.

        Raises:
            NotInLinesError: it is made of something that lines do not know.
        """
        found = self._numbers.get(id(array))
        if found is None:
            said = self._said(array)
            found = self._numbers[id(array)] = len(self.lines)
            # A number means this object as long as there is no other one with its address.
            self._kept.append(array)
            self.lines.append(_text(said))
        return found

    def _said(self, array: LazyArray) -> list[object]:
        kind = [array.shape, _dtype(array.dtype)]
        match array:
            case Stored():
                return ["stored", *kind, self._source(array.source), array.offset, array.whole_bytes]
            case Constant():
                return ["constant", *kind, array.element.hex()]
            case Seeded():
                return ["seeded", *kind, array.key, array.scale.hex()]
            case Stack():
                return ["stack", *kind, array.axis, [self.number(part) for part in array.parts]]
            case Concat():
                return ["concat", *kind, array.axis, [self.number(part) for part in array.parts]]
            case LowRank():
                return ["lowrank", *kind, array.scale, [self.number(part) for part in array.parts]]
            case Plus() | Renormed():
                return [type(array).__name__, *kind, [self.number(part) for part in array.parts]]
            case Mean():
                weights = [each.hex() for each in (*array.weights, array.total)]
                return ["mean", *kind, weights, [self.number(part) for part in array.parts]]
            case Take():
                return ["take", self.number(array.source), array.axis, array.index]
            case Relayout():
                how = array.split, array.order, array.merge
                return ["relayout", *kind, self.number(array.source), *how]
            case Window():
                return ["window", *kind, self.number(array.source), array.start]
            case Padded():
                return ["padded", *kind, self.number(array.source)]
            case Repeated():
                return ["repeated", *kind, self.number(array.source), array.axis, array.times]
            case Elementwise():
                return ["elementwise", *kind, self.number(array.source), said_of(array.op, _OPS)]
            case BlockCodes() | BlockScales():
                encoder = said_of(array.encoder, _OPS)
                return [type(array).__name__, *kind, self.number(array.source), encoder, array.name]
            case Dequantized():
                numbers = [self.number(each) for each in (array.codes, *array.scales)]
                return [
                    "dequantized",
                    *kind,
                    numbers,
                    array.blocks,
                    array.packed,
                    said_of(array.decoding, _OPS),
                ]
            case Decoded(encoded=code):
                return ["decoded", *kind, self._plain(code)]
            case Chunked(gaps=None):
                parts = (array.part(index) for index in grid_indices(array.shape, array.chunk))
                numbers = [self.number(part) for part in parts]
                return ["chunked", *kind, array.chunk, array.part_scratch, numbers]
        raise NotInLinesError(f"{array!r}")

    def _plain(self, value: object) -> object:
        """A value of an encoded chunk; objects that many have, such as codecs, have lines of their own."""
        if isinstance(value, File):
            return {_SOURCE: self._source(value)}
        if isinstance(value, tuple):
            return {_TUPLE: [self._plain(each) for each in value]}
        if not is_dataclass(value) or isinstance(value, DType):
            return _plain(value)
        found = self._numbers.get(id(value))
        if found is None:
            said = said_of(value, _ENCODED, self._plain)
            found = self._numbers[id(value)] = len(self.lines)
            self._kept.append(value)
            self.lines.append(_text(said))
        return {_LINE: found}


class Nodes:
    """Lines become arrays, each when it is asked for.

    Args:
        lines: what `NodeLines` wrote.
        source: the file of a number.
    """

    def __init__(self, lines: Sequence[bytes], source: Callable[[int], ByteSource]) -> None:
        self._lines, self._source = lines, source
        self._made: dict[int, LazyArray] = {}
        self._objects: dict[int, object] = {}

    def array(self, number: int) -> LazyArray:
        """The array of a line. Raises FormatError where the line says none."""
        found = self._made.get(number)
        if found is None:
            try:
                found = self._array(json.loads(self._lines[number]))
            except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
                raise FormatError("a line of a plan says no array", got=error) from error
            # Another thread may have been quicker.
            found = self._made.setdefault(number, found)
        return found

    def _array(self, said: list[Any]) -> LazyArray:
        match said:
            case ["take", source, axis, index]:
                return take(self.array(source), axis, index)
            case [str(kind), shape, name, *rest]:
                return self._made_of(kind, tuple(shape), DTYPES[name], rest)
        raise ValueError(f"{said!r:.80}")

    def _made_of(self, kind: str, shape: Shape, dtype: DType, rest: list[Any]) -> LazyArray:
        match kind, rest:
            case "stored", [source, offset, whole_bytes]:
                return Stored(shape, dtype, self._source(source), offset, whole_bytes)
            case "constant", [element]:
                return Constant(shape, dtype, bytes.fromhex(element))
            case "seeded", [key, scale]:
                return Seeded(shape, dtype, key, float.fromhex(scale))
            case "stack", [axis, numbers]:
                return Stack(shape, dtype, cast("tuple[LazyArray, ...]", _Parts(self, numbers)), axis)
            case "concat", [axis, numbers]:
                return Concat(shape, dtype, tuple(map(self.array, numbers)), axis)
            case "lowrank", [scale, numbers]:
                return LowRank(shape, dtype, tuple(map(self.array, numbers)), scale)
            case "Plus" | "Renormed", [numbers]:
                made_of_parts = Plus if kind == "Plus" else Renormed
                return made_of_parts(shape, dtype, tuple(map(self.array, numbers)))
            case "mean", [numbers, parts]:
                *weights, total = map(float.fromhex, numbers)
                return Mean(shape, dtype, tuple(map(self.array, parts)), tuple(weights), total)
            case "relayout", [source, split, order, merge]:
                groups = tuple(map(tuple, split))
                return Relayout(shape, dtype, self.array(source), groups, tuple(order), tuple(merge))
            case "window", [source, start]:
                return Window(shape, dtype, self.array(source), tuple(start))
            case "padded", [source]:
                return Padded(shape, dtype, self.array(source))
            case "repeated", [source, axis, times]:
                return Repeated(shape, dtype, self.array(source), axis, times)
            case "elementwise", [source, op]:
                return Elementwise(shape, dtype, self.array(source), made_of(op, _OPS))
            case "BlockCodes" | "BlockScales", [source, encoder, name]:
                made = BlockCodes if kind == "BlockCodes" else BlockScales
                return made(shape, dtype, self.array(source), made_of(encoder, _OPS), name)
            case "dequantized", [numbers, blocks, packed, decoding]:
                codes, *scales = map(self.array, numbers)
                cells = tuple(map(tuple, blocks))
                return Dequantized(shape, dtype, codes, tuple(scales), cells, packed, made_of(decoding, _OPS))
            case "decoded", [code]:
                return Decoded(shape, dtype, self._unplain(code))
            case "chunked", [chunk, part_scratch, numbers]:
                part = _LineGrid(self, grid_shape(shape, tuple(chunk)), numbers)
                return Chunked(shape, dtype, tuple(chunk), part, part_scratch)
        raise ValueError(f"{kind!r:.80}")

    def _unplain(self, value: Any) -> Any:
        """The inverse of `NodeLines._plain`."""
        match value:
            case {"source": number}:
                return self._source(number)
            case {"tuple": values}:
                return tuple(map(self._unplain, values))
            case {"line": number}:
                return self._object(number)
        return _unplain(value)

    def _object(self, number: int) -> object:
        found = self._objects.get(number)
        if found is None:
            made = made_of(json.loads(self._lines[number]), _ENCODED, self._unplain)
            found = self._objects.setdefault(number, made)
        return found


class _Parts(Sequence[LazyArray]):
    """What a stack is made of, each made when it is asked for."""

    def __init__(self, nodes: Nodes, numbers: Sequence[int]) -> None:
        self._nodes, self._numbers = nodes, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> LazyArray: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LazyArray]: ...
    def __getitem__(self, index: int | slice) -> LazyArray | Sequence[LazyArray]:
        if isinstance(index, slice):
            return _Parts(self._nodes, self._numbers[index])
        return self._nodes.array(self._numbers[index])


class _LineGrid:
    """The chunks of an array, by grid index."""

    def __init__(self, nodes: Nodes, grid: Shape, numbers: Sequence[int]) -> None:
        self._nodes, self._grid, self._numbers = nodes, grid, numbers

    def __call__(self, index: Shape) -> LazyArray:
        position = 0
        for i, count in zip(index, self._grid, strict=True):
            position = position * count + i
        return self._nodes.array(self._numbers[position])


def said_of_placement(placement: Placement) -> list[object]:
    """A place as a list. Raises NotInLinesError for one that writes nothing."""
    match placement.home:
        case DataFile(file, offset, per_file):
            home: list[object] = ["file", file, offset, per_file]
        case ChunkFiles(directory, prefix, separator):
            home = ["chunks", directory, prefix, separator]
        case Appended(file, most):
            home = ["appended", file, most]
        case other:
            raise NotInLinesError(f"{other!r:.80}")
    codec = None if placement.codec is None else said_of(placement.codec, _CODECS)
    return [placement.shape, placement.itemsize, placement.chunk, home, codec]


def placement_of(said: Any) -> Placement:
    """The inverse of `said_of_placement`. Raises FormatError where nothing is said of a place."""
    homes: Mapping[str, Callable[..., DataFile | ChunkFiles | Appended]] = {
        "file": DataFile,
        "chunks": ChunkFiles,
        "appended": Appended,
    }
    try:
        shape, itemsize, chunk, (kind, *home), codec = said
        outside = [each for each in home if isinstance(each, str) and each and not is_inside(f"d/{each}")]
        if outside or str(home[0]).startswith("/"):
            raise ValueError(f"a file outside of the destination, {home}")
        made = None if codec is None else made_of(codec, _CODECS)
        return Placement(tuple(shape), itemsize, tuple(chunk), homes[kind](*home), made)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError("a line of a plan says no place", got=error) from error


def said_of(
    value: Any, rooms: tuple[str, ...], plain: Callable[[object], object] | None = None
) -> list[object]:
    """A dataclass of one of some rooms by its name and its fields.

    Args:
        value: the object.
        rooms: what names of classes may begin with.
        plain: makes a value of a field one that JSON has; None where they are plain.

    Raises:
        NotInLinesError: another object.
    """
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not (is_dataclass(kind) and name.startswith(rooms) and "<" not in name):
        raise NotInLinesError(f"{value!r:.80}")
    said = {each.name: (plain or _plain)(getattr(value, each.name)) for each in fields(kind) if each.init}
    return [name, said]


def made_of(said: Any, rooms: tuple[str, ...], unplain: Callable[[Any], object] | None = None) -> Any:
    """The inverse of `said_of`. Raises ValueError where something else is named."""
    name, values = said
    module, _, kind = str(name).partition(":")
    # Nothing else is imported, and no other class is made, whatever the file says.
    if not (str(name).startswith(rooms) and kind.isidentifier()):
        raise ValueError(f"{name!r:.80} is none of the things that a plan may name")
    found = getattr(import_module(module), kind)
    if not (isinstance(found, type) and is_dataclass(found) and found.__module__ == module):
        raise ValueError(f"{name!r:.80} is none of the things that a plan may name")
    return found(**{key: (unplain or _unplain)(value) for key, value in values.items()})


def _plain(value: object) -> object:
    match value:
        case DType():
            return {_DTYPE: _dtype(value)}
        case bytes():
            return {_BYTES: value.hex()}
        case None | bool() | int() | float() | str():
            return value
        case tuple():
            return {_TUPLE: [_plain(each) for each in value]}
    raise NotInLinesError(f"{value!r:.80}")


def _unplain(value: Any) -> object:
    match value:
        case {"dtype": name}:
            return DTYPES[name]
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"tuple": values}:
            return tuple(map(_unplain, values))
        case dict() | list():
            raise ValueError(f"{value!r:.80} is no value")
    return value


def _dtype(dtype: DType) -> str:
    if DTYPES.get(dtype.name) != dtype:
        raise NotInLinesError(f"{dtype!r:.80}")
    return dtype.name


def _text(said: Iterable[object]) -> str:
    return json.dumps(said, separators=(",", ":"))


def texts(lines: Iterable[Iterable[object]]) -> Iterator[str]:
    """Each list as a line of JSON."""
    return map(_text, lines)
