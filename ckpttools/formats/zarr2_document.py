"""Writing the metadata document of one zarr v2 array, `.zarray`, as tensorstore reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttools.dtypes import DType
from ckpttools.region import Shape

DOCUMENT = ".zarray"
# numpy's own types are spelled as numpy's array interface spells them. The others, which zarr v2 does not
# know, have plain names in tensorstore (0.1.86) and so in every checkpoint that Orbax has written.
_LETTERS = {"bool": "b", "int": "i", "uint": "u", "float": "f", "complex": "c"}
_PLAIN = {"int2", "int4", "bfloat16"}


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
