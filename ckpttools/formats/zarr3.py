"""The metadata document of one zarr v3 array, `zarr.json`, as tensorstore reads and writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpttools.dtypes import DType, from_zarr3
from ckpttools.errors import FormatError
from ckpttools.region import Shape


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

    @property
    def is_raw(self) -> bool:
        """Whether a chunk's bytes are its elements in C order, little-endian."""
        return [codec.get("name") for codec in self.codecs] == ["bytes"] and (
            self.codecs[0].get("configuration", {}).get("endian", "little") == "little"
        )

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


RAW_CODECS: tuple[Mapping[str, Any], ...] = ({"configuration": {"endian": "little"}, "name": "bytes"},)


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
        document = json.loads(data)
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
