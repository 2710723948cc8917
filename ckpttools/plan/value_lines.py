"""Serialization of values, frozen dataclasses and placements as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import FormatError
from ckpttools.formats.placement import Appended, ChunkFiles, DataFile, Placement
from ckpttools.stores.base import is_inside

# Rooms whose frozen dataclasses lines may name: elementwise ops, codecs, and encoded chunks.
OPS = ("ckpttools.mapping.", "ckpttools.transforms.", "ckpttools.quantized.")
CODECS = ("ckpttools.codecs.",)
ENCODED = (
    "ckpttools.formats.zarr.inner_chunks:EncodedChunk",
    "ckpttools.formats.torch.entry:SavedTensor",
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


def list_line(declared: Iterable[object]) -> str:
    """Encode a list as a line of JSON."""
    return json.dumps(declared, separators=(",", ":"))


def texts(lines: Iterable[Iterable[object]]) -> Iterator[str]:
    """Encode each list as a line of JSON."""
    return map(list_line, lines)


def encode_placement(placement: Placement) -> list[object]:
    """Encode a placement. Raise NotInLinesError if it writes nothing."""
    match placement.home:
        case DataFile(file, offset, per_file):
            home: list[object] = ["file", file, offset, per_file]
        case ChunkFiles(directory, prefix, separator):
            home = ["chunks", directory, prefix, separator]
        case Appended(file, limit):
            home = ["appended", file, limit]
        case other:
            raise NotInLinesError(f"{other!r:.80}")
    codec = None if placement.codec is None else encode_dataclass(placement.codec, CODECS)
    return [placement.shape, placement.itemsize, placement.chunk, home, codec]


def decode_placement(declared: Any) -> Placement:
    """Decode the result of `encode_placement`. Raise FormatError if it is not a placement."""
    homes: Mapping[str, Callable[..., DataFile | ChunkFiles | Appended]] = {
        "file": DataFile,
        "chunks": ChunkFiles,
        "appended": Appended,
    }
    try:
        shape, itemsize, chunk, (kind, *home), codec = declared
        outside = [item for item in home if isinstance(item, str) and item and not is_inside(f"d/{item}")]
        if outside or str(home[0]).startswith("/"):
            raise ValueError(f"a file outside the destination, {home}")
        built = None if codec is None else decode_dataclass(codec, CODECS)
        return Placement(tuple(shape), itemsize, tuple(chunk), homes[kind](*home), built)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError("a line of the plan does not describe a placement", got=error) from error
