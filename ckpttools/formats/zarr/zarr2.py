"""The metadata document of one zarr v2 array, `.zarray`, as tensorstore reads and writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape
from ckpttools.formats.json_file import parse_json
from ckpttools.formats.zarr.chain import LITTLE, Chain
from ckpttools.formats.zarr.codecs import (
    Coding,
    ZarrArray,
    by_tensorstore,
    checked_grid,
    checked_keys,
    fill_element,
    plain,
    zstd,
)

DOCUMENT = ".zarray"
# numpy's own types are spelled as numpy's array interface spells them. The others, which zarr v2 does not
# know, have plain names in tensorstore (0.1.86) and so in every checkpoint that Orbax has written.
_LETTERS = {"bool": "b", "int": "i", "uint": "u", "float": "f", "complex": "c"}
_PLAIN = {"int2", "int4", "bfloat16"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}


def parse_array(data: bytes, place: str) -> ZarrArray:
    """Reads a `.zarray`.

    Raises:
        FormatError: it is not the document of an array with a known dtype.
    """
    try:
        document = parse_json(data)
        shape, chunk = checked_grid(document["shape"], document["chunks"], place)
        name, order = document["dtype"], document.get("order", "C")
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            "not the metadata of a zarr v2 array", place=place, got=f"{type(error).__name__}: {error}"
        ) from error
    dtype = _dtype(name) if isinstance(name, str) else None
    if dtype is None:
        raise FormatError("an unknown zarr data type", place=place, got=name)
    if order not in ("C", "F") or document.get("filters"):
        raise FormatError("an unknown order or filter", place=place, got=[order, document.get("filters")])
    keys = checked_keys("", document.get("dimension_separator", "."), place)
    fill = fill_element(document.get("fill_value"), dtype, place)
    coding = _coding(document, dtype, chunk)
    return ZarrArray(shape, dtype, chunk, keys, coding, None, fill, _chain(document, coding))


def _dtype(name: str) -> DType | None:
    """The dtype of numpy's spelling (`<f4`, `|b1`), or of tensorstore's, which is the name (`bfloat16`)."""
    if name in DTYPES or name[:1] not in "<>|":
        return DTYPES.get(name)
    kind, size = name[1:2], name[2:]
    if name == "|b1":
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


def _chain(document: Mapping[str, Any], coding: Coding) -> Chain | None:
    """The codecs that zarr v3 has for the same bytes; None where these are big-endian or of another kind."""
    compressor = document.get("compressor")
    if compressor is None and coding.opener is None:
        return Chain(coding.order, (LITTLE,))
    if (
        not isinstance(compressor, dict)
        or compressor.get("id") != "zstd"
        or document["dtype"].startswith(">")
    ):
        return None
    level = {"checksum": False, "level": compressor.get("level", 0)}
    return Chain(coding.order, (LITTLE, {"configuration": level, "name": "zstd"}))


def spelling(dtype: DType) -> str | None:
    """`dtype` in a `.zarray`: `<f4`, `|b1`, `bfloat16`; None where neither zarr v2 nor tensorstore has it."""
    if dtype.name.startswith("float6_"):
        return None
    if dtype.name in _PLAIN or "_" in dtype.name:
        return dtype.name
    order = "|" if dtype.itemsize == 1 else "<"
    return f"{order}{_LETTERS[dtype.kind]}{dtype.itemsize}"


def encode(shape: Shape, dtype: DType, chunk: Shape, compressor: Mapping[str, Any] | None) -> bytes:
    """The bytes of a `.zarray`, keys in a fixed order, for chunks named `0.1` in C order, little-endian.

    Args:
        shape: of the array.
        dtype: one that `spelling` knows.
        chunk: shape of the grid's cells.
        compressor: such as `{"id": "zstd", "level": 3}`; None for raw chunks.
    """
    document = {
        "chunks": list(chunk),
        "compressor": None if compressor is None else dict(compressor),
        "dimension_separator": ".",
        "dtype": spelling(dtype),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def chunk_key(index: Shape) -> str:
    """The key of a chunk below its array: `0.3`, or `0` for an array of rank 0."""
    return ".".join(map(str, index)) or "0"
