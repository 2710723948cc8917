"""Read and write `.zarray`, the metadata document of a zarr v2 array, as tensorstore does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttools.codecs.base import Codec
from ckpttools.codecs.bytes import LITTLE, BytesCodec
from ckpttools.codecs.coding import Coding
from ckpttools.codecs.registry import CodecStep, compressor_of
from ckpttools.codecs.transpose import Transpose
from ckpttools.core.dtypes import DType, from_zarr2
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape
from ckpttools.formats.zarr.array import (
    ZARR2_DOCUMENT,
    Chain,
    ChunkKeys,
    ZarrArray,
    fill_element,
    parse_chunk_keys,
    parse_grid,
)

DOCUMENT = ZARR2_DOCUMENT
KEYS = ChunkKeys("", ".")


def parse_array(document: Mapping[str, Any], location: str) -> ZarrArray:
    """Parse a `.zarray` document.

    Raises:
        FormatError: The document is not that of an array with a known dtype.
        KeyError, TypeError: A field is missing or has another type.
    """
    shape, chunk = parse_grid(document["shape"], document["chunks"], location)
    name, order = document["dtype"], document.get("order", "C")
    dtype = from_zarr2(name) if isinstance(name, str) else None
    if dtype is None:
        raise FormatError("an unknown zarr data type", location=location, got=name)
    if order not in ("C", "F") or document.get("filters"):
        raise FormatError(
            "an unknown order or filter", location=location, got=[order, document.get("filters")]
        )
    keys = parse_chunk_keys("", document.get("dimension_separator", "."), location)
    fill = fill_element(document.get("fill_value"), dtype, location)
    axes, compressor = tuple(range(len(chunk))), document.get("compressor")
    elements = BytesCodec(is_little=not name.startswith(">") or dtype.number_bytes == 1)
    codecs = (compressor_of(compressor),) if compressor is not None else ()
    coding = Coding(chunk, dtype, axes if order == "C" else axes[::-1], elements, codecs)
    order_codecs: tuple[CodecStep, ...] = () if order == "C" else (Transpose.fortran(len(axes)),)
    steps = (*order_codecs, elements, *codecs)
    return ZarrArray(shape, dtype, chunk, keys, coding, None, fill, steps, _chain(coding, codecs))


def _chain(coding: Coding, codecs: tuple[Codec, ...]) -> Chain | None:
    """Return the equivalent zarr v3 codecs; None for big-endian data and unknown compressors."""
    specs = [codec.zarr3_spec for codec in codecs]
    declared = tuple(spec for spec in specs if spec is not None)
    if not coding.elements.is_little or len(declared) < len(specs):
        return None
    return Chain(coding.order, (LITTLE, *declared))


def encode(shape: Shape, dtype: DType, chunk: Shape, compressor: Mapping[str, Any] | None) -> bytes:
    """Encode a `.zarray` with sorted keys, for little-endian chunks in C order named `0.1`.

    Args:
        shape: Shape of the array.
        dtype: A dtype that zarr v2 supports.
        chunk: Shape of a chunk.
        compressor: A configuration such as `{"id": "zstd", "level": 3}`; None for uncompressed chunks.
    """
    document = {
        "chunks": list(chunk),
        "compressor": None if compressor is None else dict(compressor),
        "dimension_separator": ".",
        "dtype": dtype.zarr2,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }
    return json.dumps(document, separators=(",", ":")).encode()
