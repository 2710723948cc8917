"""Lazy arrays, placements and other values as lines of text, read without opening the source files.

Each node is a list with a line number; its inputs are the numbers of earlier lines. Nodes are created on
demand: of an array stacked from thousands of parts, only the parts that are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, cast, overload

from ckpttools.array.blockwise import BlockCodes, BlockScales
from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.lowrank import DoraUpdate, LowRank, Plus
from ckpttools.array.mean import Mean
from ckpttools.array.nodes import (
    Chunked,
    Concat,
    Constant,
    Decoded,
    Dequantized,
    Elementwise,
    Padded,
    Relayout,
    Repeated,
    SeededNoise,
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

# The first fields of every array's line: its shape and the name of its dtype.
_Kind = tuple[Shape, str]


class NodeLines:
    """Encoder of arrays as lines.

    Args:
        source: Returns the index of a file.

    Attributes:
        lines: The lines written so far.
    """

    def __init__(self, source: Callable[[ByteSource], int]) -> None:
        self._source = source
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []
        self.lines: list[str] = []

    def number(self, array: LazyArray) -> int:
        """Return the line number of an array, adding a line if it has none.

        Raises:
            NotInLinesError: A part of the array has no text form.
        """
        result = self._numbers.get(id(array))
        if result is None:
            line = self._encode(array)
            result = self._numbers[id(array)] = len(self.lines)
            # Keep the object alive, since the key is its address.
            self._kept.append(array)
            self.lines.append(list_line(line))
        return result

    def _encode(self, array: LazyArray) -> list[object]:
        kind = array.shape, dtype_name(array.dtype)
        line = self._leaf(array, kind) or self._combined(array, kind) or self._derived(array, kind)
        if line is None:
            raise NotInLinesError(f"{array!r}")
        return line

    def _leaf(self, array: LazyArray, kind: _Kind) -> list[object] | None:
        """Encode an array without inputs; return None for others."""
        match array:
            case Stored():
                return ["stored", *kind, self._source(array.source), array.offset, array.whole_bytes]
            case Constant():
                return ["constant", *kind, array.element.hex()]
            case SeededNoise():
                return ["seeded", *kind, array.key, array.scale.hex()]
            case Decoded(encoded=code):
                return ["decoded", *kind, self._encode_field(code)]
        return None

    def _combined(self, array: LazyArray, kind: _Kind) -> list[object] | None:
        """Encode an array with several inputs; return None for others."""
        match array:
            case Stack():
                return ["stack", *kind, array.axis, self._all(array.parts)]
            case Concat():
                return ["concat", *kind, array.axis, self._all(array.parts)]
            case LowRank():
                return ["lowrank", *kind, array.scale, self._all(array.parts)]
            case Plus() | DoraUpdate():
                return [type(array).__name__, *kind, self._all(array.parts)]
            case Mean():
                weights = [weight.hex() for weight in (*array.weights, array.total)]
                return ["mean", *kind, weights, self._all(array.parts)]
            case Dequantized():
                numbers = self._all((array.codes, *array.scales))
                decoding = encode_dataclass(array.decoding, OPS)
                return ["dequantized", *kind, numbers, array.blocks, array.packed, decoding]
            case Chunked(gaps=None):
                parts = (array.part(index) for index in grid_indices(array.shape, array.chunk))
                return ["chunked", *kind, array.chunk, array.part_scratch, self._all(parts)]
        return None

    def _derived(self, array: LazyArray, kind: _Kind) -> list[object] | None:
        """Encode an array with one input; return None for others."""
        match array:
            case Take():
                return ["take", self.number(array.source), array.axis, array.index]
            case Relayout():
                arguments = array.split, array.order, array.merge
                return ["relayout", *kind, self.number(array.source), *arguments]
            case Window():
                return ["window", *kind, self.number(array.source), array.start]
            case Padded():
                return ["padded", *kind, self.number(array.source)]
            case Repeated():
                return ["repeated", *kind, self.number(array.source), array.axis, array.times]
            case Elementwise():
                return ["elementwise", *kind, self.number(array.source), encode_dataclass(array.op, OPS)]
            case BlockCodes() | BlockScales():
                encoder = encode_dataclass(array.encoder, OPS)
                return [type(array).__name__, *kind, self.number(array.source), encoder, array.name]
        return None

    def _all(self, arrays: Iterable[LazyArray]) -> list[int]:
        return [self.number(item) for item in arrays]

    def _encode_field(self, value: object) -> object:
        """Encode a field of an encoded chunk; shared objects, such as codecs, get their own lines."""
        if isinstance(value, File):
            return {SOURCE: self._source(value)}
        if isinstance(value, tuple):
            return {TUPLE: [self._encode_field(item) for item in value]}
        if not is_dataclass(value) or isinstance(value, DType):
            return encode_json(value)
        result = self._numbers.get(id(value))
        if result is None:
            declared = encode_dataclass(value, ENCODED, self._encode_field)
            result = self._numbers[id(value)] = len(self.lines)
            self._kept.append(value)
            self.lines.append(list_line(declared))
        return {LINE: result}


class Nodes:
    """Decoder of lines, which creates each array on demand.

    Args:
        lines: The output of `NodeLines`.
        source: Returns the file with an index.
    """

    def __init__(self, lines: Sequence[bytes], source: Callable[[int], ByteSource]) -> None:
        self._lines, self._source = lines, source
        self._arrays: dict[int, LazyArray] = {}
        self._objects: dict[int, object] = {}

    def array(self, number: int) -> LazyArray:
        """Return the array of a line. Raise FormatError if the line does not describe an array."""
        result = self._arrays.get(number)
        if result is None:
            try:
                result = self._array(json.loads(self._lines[number]))
            except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
                raise FormatError("a line of the plan does not describe an array", got=error) from error
            # Another thread may have created it first.
            result = self._arrays.setdefault(number, result)
        return result

    def _array(self, values: list[Any]) -> LazyArray:
        match values:
            case ["take", source, axis, index]:
                return take(self.array(source), axis, index)
            case [str(kind), shape, name, *rest]:
                return self._decode(kind, tuple(shape), DTYPES[name], rest)
        raise ValueError(f"{values!r:.80}")

    def _decode(self, kind: str, shape: Shape, dtype: DType, rest: list[Any]) -> LazyArray:
        for decode in (self._leaf, self._combined, self._derived):
            result = decode(kind, shape, dtype, rest)
            if result is not None:
                return result
        raise ValueError(f"{kind!r:.80}")

    def _leaf(self, kind: str, shape: Shape, dtype: DType, rest: list[Any]) -> LazyArray | None:
        """Decode the result of `NodeLines._leaf`."""
        match kind, rest:
            case "stored", [source, offset, whole_bytes]:
                return Stored(shape, dtype, self._source(source), offset, whole_bytes)
            case "constant", [element]:
                return Constant(shape, dtype, bytes.fromhex(element))
            case "seeded", [key, scale]:
                return SeededNoise(shape, dtype, key, float.fromhex(scale))
            case "decoded", [code]:
                return Decoded(shape, dtype, self._decode_field(code))
        return None

    def _combined(self, kind: str, shape: Shape, dtype: DType, rest: list[Any]) -> LazyArray | None:
        """Decode the result of `NodeLines._combined`."""
        match kind, rest:
            case "stack", [axis, numbers]:
                return Stack(shape, dtype, cast("tuple[LazyArray, ...]", _Parts(self, numbers)), axis)
            case "concat", [axis, numbers]:
                return Concat(shape, dtype, tuple(map(self.array, numbers)), axis)
            case "lowrank", [scale, numbers]:
                return LowRank(shape, dtype, tuple(map(self.array, numbers)), scale)
            case "Plus" | "DoraUpdate", [numbers]:
                made_of_parts = Plus if kind == "Plus" else DoraUpdate
                return made_of_parts(shape, dtype, tuple(map(self.array, numbers)))
            case "mean", [numbers, parts]:
                *weights, total = map(float.fromhex, numbers)
                return Mean(shape, dtype, tuple(map(self.array, parts)), tuple(weights), total)
            case "dequantized", [numbers, blocks, packed, decoding]:
                codes, *scales = map(self.array, numbers)
                cells = tuple(map(tuple, blocks))
                return Dequantized(
                    shape, dtype, codes, tuple(scales), cells, packed, decode_dataclass(decoding, OPS)
                )
            case "chunked", [chunk, part_scratch, numbers]:
                part = _LineGrid(self, grid_shape(shape, tuple(chunk)), numbers)
                return Chunked(shape, dtype, tuple(chunk), part, part_scratch)
        return None

    def _derived(self, kind: str, shape: Shape, dtype: DType, rest: list[Any]) -> LazyArray | None:
        """Decode the result of `NodeLines._derived`; "take" has no shape of its own."""
        match kind, rest:
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
                return Elementwise(shape, dtype, self.array(source), decode_dataclass(op, OPS))
            case "BlockCodes" | "BlockScales", [source, encoder, name]:
                result = BlockCodes if kind == "BlockCodes" else BlockScales
                return result(shape, dtype, self.array(source), decode_dataclass(encoder, OPS), name)
        return None

    def _decode_field(self, value: Any) -> Any:
        """Decode the result of `NodeLines._encode_field`."""
        match value:
            case {"source": number}:
                return self._source(number)
            case {"tuple": values}:
                return tuple(map(self._decode_field, values))
            case {"line": number}:
                return self._object(number)
        return decode_json(value)

    def _object(self, number: int) -> object:
        result = self._objects.get(number)
        if result is None:
            built = decode_dataclass(json.loads(self._lines[number]), ENCODED, self._decode_field)
            result = self._objects.setdefault(number, built)
        return result


class _Parts(Sequence[LazyArray]):
    """The parts of a stack, created on demand."""

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
    """The chunks of an array by grid index."""

    def __init__(self, nodes: Nodes, grid: Shape, numbers: Sequence[int]) -> None:
        self._nodes, self._grid, self._numbers = nodes, grid, numbers

    def __call__(self, index: Shape) -> LazyArray:
        position = 0
        for i, count in zip(index, self._grid, strict=True):
            position = position * count + i
        return self._nodes.array(self._numbers[position])


# Packages whose frozen dataclasses lines may name: elementwise ops, codecs, and encoded chunks.
OPS = ("ckpttools.mapping.", "ckpttools.transforms.", "ckpttools.quantized.")
CODECS = ("ckpttools.codecs.",)
ENCODED = (
    "ckpttools.formats.zarr.inner_chunks:EncodedChunk",
    "ckpttools.formats.torch.dcp:SavedTensor",
    *CODECS,
)
# Keys that mark values without a JSON type.
DTYPE, BYTES, TUPLE, SOURCE, LINE, OP = "dtype", "bytes", "tuple", "source", "line", "op"


class NotInLinesError(Exception):
    """An array or placement has no text form."""


def encode_dataclass(
    value: Any, rooms: tuple[str, ...], plain: Callable[[object], object] | None = None
) -> list[object]:
    """Encode a dataclass from one of the given rooms as its name and fields.

    Args:
        value: The object.
        rooms: Allowed prefixes of class names.
        plain: Encodes a field; None for `encode_json`.

    Raises:
        NotInLinesError: The object is not such a dataclass.
    """
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not (is_dataclass(kind) and name.startswith(rooms) and "<" not in name):
        raise NotInLinesError(f"{value!r:.80}")
    declared = {
        field.name: (plain or encode_json)(getattr(value, field.name)) for field in fields(kind) if field.init
    }
    return [name, declared]


def decode_dataclass(
    declared: Any, rooms: tuple[str, ...], unplain: Callable[[Any], object] | None = None
) -> Any:
    """Decode the result of `encode_dataclass`. Raise ValueError if the name is not allowed."""
    name, values = declared
    module, _, kind = str(name).partition(":")
    # A plan file must not be able to import other modules or create other classes.
    if not (str(name).startswith(rooms) and kind.isidentifier()):
        raise ValueError(f"{name!r:.80} is not allowed in a plan")
    try:
        result = getattr(import_module(module), kind)
    except ImportError as error:
        raise ValueError(f"{name!r:.80} is not allowed in a plan") from error
    if not (isinstance(result, type) and is_dataclass(result) and result.__module__ == module):
        raise ValueError(f"{name!r:.80} is not allowed in a plan")
    return result(**{key: (unplain or decode_json)(value) for key, value in values.items()})


def encode_json(value: object) -> object:
    """Encode a field as JSON. Raise NotInLinesError if that is impossible."""
    match value:
        case DType():
            return {DTYPE: dtype_name(value)}
        case bytes():
            return {BYTES: value.hex()}
        case None | bool() | int() | float() | str():
            return value
        case tuple():
            return {TUPLE: [encode_json(item) for item in value]}
    # An op may contain others.
    return {OP: encode_dataclass(value, OPS)}


def decode_json(value: Any) -> object:
    """Decode the result of `encode_json`. Raise ValueError for anything else."""
    match value:
        case {"dtype": name}:
            return DTYPES[name]
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"tuple": values}:
            return tuple(map(decode_json, values))
        case {"op": declared}:
            return decode_dataclass(declared, OPS)
        case dict() | list():
            raise ValueError(f"{value!r:.80} is not a value")
    return value


def dtype_name(dtype: DType) -> str:
    """Return a dtype's name. Raise NotInLinesError if it is not in `DTYPES`."""
    if DTYPES.get(dtype.name) != dtype:
        raise NotInLinesError(f"{dtype!r:.80}")
    return dtype.name


def list_line(values: Iterable[object]) -> str:
    """Encode a list as a line of JSON."""
    return json.dumps(values, separators=(",", ":"))


def texts(lines: Iterable[Iterable[object]]) -> Iterator[str]:
    """Encode each list as a line of JSON."""
    return map(list_line, lines)


def encode_placement(placement: Placement) -> list[object]:
    """Encode a placement. Raise NotInLinesError if it writes nothing."""
    match placement.home:
        case DataFile(file, offset, per_file):
            destination: list[object] = ["file", file, offset, per_file]
        case ChunkFiles(directory, prefix, separator):
            destination = ["chunks", directory, prefix, separator]
        case Appended(file, limit):
            destination = ["appended", file, limit]
        case other:
            raise NotInLinesError(f"{other!r:.80}")
    codec = None if placement.codec is None else encode_dataclass(placement.codec, CODECS)
    return [placement.shape, placement.itemsize, placement.chunk, destination, codec]


def decode_placement(value: Any) -> Placement:
    """Decode the result of `encode_placement`. Raise FormatError if it is not a placement."""
    factories: Mapping[str, Callable[..., DataFile | ChunkFiles | Appended]] = {
        "file": DataFile,
        "chunks": ChunkFiles,
        "appended": Appended,
    }
    try:
        shape, itemsize, chunk, (kind, *destination), codec = value
        outside = [
            item for item in destination if isinstance(item, str) and item and not is_inside(f"d/{item}")
        ]
        if outside or str(destination[0]).startswith("/"):
            raise ValueError(f"a file outside the destination, {destination}")
        result = None if codec is None else decode_dataclass(codec, CODECS)
        return Placement(tuple(shape), itemsize, tuple(chunk), factories[kind](*destination), result)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError("a line of the plan does not describe a placement", got=error) from error
