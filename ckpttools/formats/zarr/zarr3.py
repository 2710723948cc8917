"""The metadata document of one zarr v3 array, `zarr.json`, as tensorstore reads and writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttools.core.dtypes import DType, from_zarr3
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape
from ckpttools.formats.json_file import parse_json
from ckpttools.formats.zarr.chain import LITTLE, Codec, configuration_of, is_little, parse_chain
from ckpttools.formats.zarr.codecs import (
    ChunkKeys,
    Coding,
    ZarrArray,
    by_tensorstore,
    checked_grid,
    checked_keys,
    fill_element,
    plain,
    zstd,
)


@dataclass(frozen=True, slots=True)
class ArrayDocument:
    """What a `zarr.json` says.

    Attributes:
        shape: of the array.
        dtype: of its elements.
        chunk: shape of the grid's cells.
        codecs: the codec chain as the document has it.
    """

    shape: Shape
    dtype: DType
    chunk: Shape
    codecs: tuple[Mapping[str, Any], ...]

    def to_json(self) -> bytes:
        """The document's bytes, keys in a fixed order."""
        document = {
            "chunk_grid": {"configuration": {"chunk_shape": list(self.chunk)}, "name": "regular"},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [dict(codec) for codec in self.codecs],
            "data_type": self.dtype.zarr3,
            "fill_value": _zero(self.dtype),
            "node_type": "array",
            "shape": list(self.shape),
            "zarr_format": 3,
        }
        return json.dumps(document, separators=(",", ":")).encode()


RAW_CODECS: tuple[Mapping[str, Any], ...] = (LITTLE,)


def _zero(dtype: DType) -> object:
    """The fill value 0 as zarr spells it for this dtype."""
    zeros: dict[str, object] = {"bool": False, "float": 0.0, "complex": [0.0, 0.0]}
    return zeros.get(dtype.kind, 0)


def parse_document(data: bytes, place: str) -> ArrayDocument:
    """Reads a `zarr.json`.

    Raises:
        FormatError: it is not the document of an array with a regular grid and a known dtype.
    """
    try:
        document = parse_json(data)
        chunk = document["chunk_grid"]["configuration"]["chunk_shape"]
        shape, name, codecs = document["shape"], document["data_type"], document["codecs"]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            "not the metadata of a zarr v3 array", place=place, got=f"{type(error).__name__}: {error}"
        ) from error
    dtype = from_zarr3(name) if isinstance(name, str) else None
    if dtype is None:
        raise FormatError("an unknown zarr data type", place=place, got=name)
    return ArrayDocument(tuple(shape), dtype, tuple(chunk), tuple(codecs))


def chunk_key(index: Shape) -> str:
    """The key of a chunk below its array: `c/0/3`, or `c` for an array of rank 0."""
    return "/".join(["c", *map(str, index)])


DOCUMENT = "zarr.json"
_INDEX_CODECS = ("bytes", "crc32c")


def parse_array(data: bytes, place: str) -> ZarrArray:
    """Reads a `zarr.json`, with everything that reading the array takes.

    Raises:
        FormatError: as `parse_document`; or its shape, keys or fill value are none.
    """
    short = parse_document(data, place)
    document = parse_json(data)
    shape, chunk = checked_grid(list(short.shape), list(short.chunk), place)
    coding, at_start = _coding(short.codecs, short.dtype, chunk, document)
    fill = fill_element(document.get("fill_value"), short.dtype, place)
    chain = parse_chain(short.codecs, chunk)
    return ZarrArray(shape, short.dtype, chunk, _keys(document, place), coding, at_start, fill, chain)


def _keys(document: Mapping[str, Any], place: str) -> ChunkKeys:
    encoding = document.get("chunk_key_encoding", {"name": "default"})
    names = {"default": ChunkKeys("c", "/"), "v2": ChunkKeys("", ".")}
    if not isinstance(encoding, dict) or encoding.get("name") not in names:
        raise FormatError("an unknown encoding of chunk keys", place=place, got=encoding)
    keys = names[encoding["name"]]
    return checked_keys(keys.prefix, configuration_of(encoding).get("separator", keys.separator), place)


def _coding(
    codecs: Sequence[Codec], dtype: DType, chunk: Shape, document: Mapping[str, Any]
) -> tuple[Coding, bool | None]:
    """The coding of pieces; and, if chunks are shards of them, whether their index is at the start."""
    if [codec.get("name") for codec in codecs] == ["sharding_indexed"]:
        settings = configuration_of(codecs[0])
        inner = settings.get("chunk_shape", ())
        if _divides(inner, chunk) and _is_plain_index(settings.get("index_codecs", ())):
            pieces = _chain(settings.get("codecs", ()), dtype, tuple(inner), document)
            return pieces, settings.get("index_location", "end") == "start"
    return _chain(codecs, dtype, chunk, document), None


def _divides(inner: Sequence[int], chunk: Shape) -> bool:
    return len(inner) == len(chunk) and all(n > 0 and c % n == 0 for c, n in zip(chunk, inner, strict=True))


def _is_plain_index(codecs: Sequence[Codec]) -> bool:
    names = tuple(codec.get("name") for codec in codecs)
    return names == _INDEX_CODECS and is_little(codecs[0])


def _chain(codecs: Sequence[Codec], dtype: DType, shape: Shape, document: Mapping[str, Any]) -> Coding:
    """What a chain of codecs makes of a piece: plain or zstd in some order of axes, or whatever it is."""
    axes, rest = list(range(len(shape))), list(codecs)
    order: Any = axes
    if rest and rest[0].get("name") == "transpose":
        order = configuration_of(rest.pop(0)).get("order")
    names = [codec.get("name") for codec in rest]
    if isinstance(order, list) and sorted(order) == axes and names[:1] == ["bytes"] and is_little(rest[0]):
        if len(names) == 1:
            return plain(shape, order)
        if names[1:] == ["zstd"]:
            return zstd(shape, order, dtype)
    return by_tensorstore(shape, dtype, "zarr3", {**document, "codecs": list(codecs)})
