"""The metadata document of one zarr v2 array, `.zarray`, as tensorstore reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttools.dtypes import DTYPES, DType
from ckpttools.errors import FormatError
from ckpttools.formats.zarr_codecs import (
    ChunkKeys,
    Coding,
    ZarrArray,
    by_tensorstore,
    checked_grid,
    fill_element,
    plain,
    zstd,
)
from ckpttools.region import Shape

DOCUMENT = ".zarray"
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}


def parse_array(data: bytes, place: str) -> ZarrArray:
    """Reads a `.zarray`.

    Raises:
        FormatError: it is not the document of an array with a known dtype.
    """
    try:
        document = json.loads(data)
        shape, chunk = checked_grid(document["shape"], document["chunks"], place)
        spelling, order = document["dtype"], document.get("order", "C")
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            "not the metadata of a zarr v2 array", place=place, got=f"{type(error).__name__}: {error}"
        ) from error
    dtype = _dtype(spelling) if isinstance(spelling, str) else None
    if dtype is None:
        raise FormatError("an unknown zarr data type", place=place, got=spelling)
    if order not in ("C", "F") or document.get("filters"):
        raise FormatError("an unknown order or filter", place=place, got=[order, document.get("filters")])
    keys = ChunkKeys("", document.get("dimension_separator", "."))
    fill = fill_element(document.get("fill_value"), dtype, place)
    return ZarrArray(shape, dtype, chunk, keys, _coding(document, dtype, chunk), None, fill)


def _dtype(spelling: str) -> DType | None:
    """The dtype of numpy's spelling (`<f4`, `|b1`), or of tensorstore's, which is the name (`bfloat16`)."""
    if spelling in DTYPES or spelling[:1] not in "<>|":
        return DTYPES.get(spelling)
    kind, size = spelling[1:2], spelling[2:]
    if spelling == "|b1":
        return DTYPES["bool"]
    return DTYPES.get(f"{_KINDS.get(kind)}{8 * int(size)}") if size.isdigit() else None


def _coding(document: Mapping[str, Any], dtype: DType, chunk: Shape) -> Coding:
    axes = range(len(chunk))
    order = list(axes) if document.get("order", "C") == "C" else list(reversed(axes))
    compressor = document.get("compressor")
    if not document["dtype"].startswith(">"):
        if compressor is None:
            return plain(chunk, order)
        if isinstance(compressor, dict) and compressor.get("id") == "zstd":
            return zstd(chunk, order, dtype)
    return by_tensorstore(chunk, dtype, "zarr", document)
