"""Read and write `zarr.json`, the metadata document of a zarr v3 array, as tensorstore does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttools.codecs.base import CodecSpec, WritableCodec, configuration_of
from ckpttools.codecs.bytes import LITTLE
from ckpttools.codecs.coding import parse_coding
from ckpttools.codecs.registry import codec_steps
from ckpttools.core.dtypes import DType, from_zarr3
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape
from ckpttools.formats.zarr.array import (
    ZARR3_DOCUMENT,
    ChunkKeys,
    ZarrArray,
    fill_element,
    parse_chain,
    parse_chunk_keys,
    parse_grid,
)

DOCUMENT = ZARR3_DOCUMENT
KEYS = ChunkKeys("c", "/")


def encode(shape: Shape, dtype: DType, chunk: Shape, codecs: Sequence[CodecSpec]) -> bytes:
    """Encode a `zarr.json` with sorted keys; see `ZarrArray` for the arguments."""
    document = {
        "chunk_grid": {"configuration": {"chunk_shape": list(chunk)}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [dict(codec) for codec in codecs],
        "data_type": dtype.zarr3,
        "fill_value": _zero(dtype),
        "node_type": "array",
        "shape": list(shape),
        "zarr_format": 3,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def written_codecs(compression: WritableCodec | None) -> tuple[CodecSpec, ...]:
    """Return the codecs for writing chunks, as they appear in the document."""
    return (LITTLE, compression.zarr3_spec) if compression else (LITTLE,)


def _zero(dtype: DType) -> object:
    """Return the fill value 0 in zarr's notation for this dtype."""
    zeros: dict[str, object] = {"bool": False, "float": 0.0, "complex": [0.0, 0.0]}
    return zeros.get(dtype.kind, 0)


def parse_array(document: Mapping[str, Any], location: str) -> ZarrArray:
    """Parse a `zarr.json` document.

    Raises:
        FormatError: The document is not that of an array with a regular grid and a known dtype, or its shape,
            keys or fill value are invalid.
        KeyError, TypeError: A field is missing or has another type.
    """
    if document["zarr_format"] != 3 or document["chunk_grid"]["name"] != "regular":
        got = f"zarr_format {document['zarr_format']}, chunk_grid {document['chunk_grid']['name']!r}"
        expected = "zarr_format 3, and a regular grid"
        raise FormatError("an unknown kind of array", location=location, got=got, expected=expected)
    grid = document["chunk_grid"]["configuration"]["chunk_shape"]
    lengths, name, codec_documents = document["shape"], document["data_type"], document["codecs"]
    dtype = from_zarr3(name) if isinstance(name, str) else None
    if dtype is None:
        raise FormatError("an unknown zarr data type", location=location, got=name)
    shape, chunk = parse_grid(lengths, grid, location)
    codecs = tuple(codec_documents)
    coding, shard = parse_coding(codecs, chunk, dtype, document)
    fill = fill_element(document.get("fill_value"), dtype, location)
    steps, chain = codec_steps(codecs), parse_chain(codecs, chunk)
    return ZarrArray(shape, dtype, chunk, _keys(document, location), coding, shard, fill, steps, chain)


def _keys(document: Mapping[str, Any], location: str) -> ChunkKeys:
    encoding = document.get("chunk_key_encoding", {"name": "default"})
    names = {"default": KEYS, "v2": ChunkKeys("", ".")}
    if not isinstance(encoding, dict) or encoding.get("name") not in names:
        raise FormatError("an unknown encoding of chunk keys", location=location, got=encoding)
    keys = names[encoding["name"]]
    return parse_chunk_keys(
        keys.prefix, configuration_of(encoding).get("separator", keys.separator), location
    )
