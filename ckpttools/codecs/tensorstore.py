"""Decoding by tensorstore, for codecs and codec chains that are not implemented here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttools.codecs.base import CodecSpec
from ckpttools.codecs.streams import ByteRange, BytesStream, RangeStream, Stream
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape

# Number of copies of a chunk in memory: its bytes, the value in tensorstore's store, the decoded array, and
# ours.
COPIES = 4


@dataclass(frozen=True)
class CompleteChunkDecoder:
    """Decodes single chunks with tensorstore.

    Attributes:
        key: Key of the chunk.
        text: The `zarr.json` of an array with only this chunk.
    """

    key: str
    text: str

    def memory(self, nbytes: int) -> int:
        """Return the memory for decoding a chunk of this size, in bytes."""
        return COPIES * nbytes

    def decoded(self, stored: ByteRange, extent: Shape) -> Stream:
        """Return the chunk's elements, with zeros outside `extent`, the part that is inside the array."""
        values = {"zarr.json": self.text.encode(), self.key: RangeStream(stored).rest()}
        return BytesStream(_decode("zarr3", values, extent))


def complete_chunk_decoder(
    codecs: Sequence[CodecSpec], chunk: Shape, document: Mapping[str, Any]
) -> CompleteChunkDecoder:
    """Return a decoder for chunks with this shape and these codecs, from an array with this `zarr.json`."""
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    encoding = {"name": "default", "configuration": {"separator": "/"}}
    single = {**document, "codecs": list(codecs), "shape": chunk}
    single |= {"chunk_grid": grid, "chunk_key_encoding": encoding}
    single.pop("dimension_names", None)
    return CompleteChunkDecoder("/".join(["c", *["0"] * len(chunk)]), json.dumps(single, sort_keys=True))


def decode_bytes(compressor: Mapping[str, Any], data: bytes, nbytes: int) -> memoryview:
    """Decode the data of a zarr v2 compressor to `nbytes` bytes."""
    document = {
        "chunks": [nbytes],
        "compressor": compressor,
        "dtype": "|u1",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": [nbytes],
        "zarr_format": 2,
    }
    return _decode("zarr", {".zarray": json.dumps(document).encode(), "0": data}, (nbytes,))


def _decode(driver: str, values: dict[str, bytes], extent: Shape) -> memoryview:
    """Decode the only chunk of an array that is given by keys and values, with zeros outside `extent`."""
    import numpy as np
    import tensorstore as ts

    # A separate store for each chunk leaves nothing behind. A single copier is enough, because callers have
    # their own threads.
    context = ts.Context({"data_copy_concurrency": {"limit": 1}})
    try:
        store = ts.KvStore.open({"driver": "memory"}, context=context).result()
        while values:
            store.write(*values.popitem()).result()
        spec = {"driver": driver, "kvstore": {"driver": "memory"}, "fill_missing_data_reads": False}
        array = ts.open(spec, context=context, open=True, read=True).result()
        part = array[tuple(map(slice, extent))].read().result()
    except (ValueError, NotImplementedError, OSError) as error:
        reason = str(error).partition(" [")[0]
        raise FormatError("tensorstore cannot decode the chunk", got=reason) from error
    if part.shape != array.shape:
        part = np.pad(part, [(0, n - m) for n, m in zip(array.shape, part.shape, strict=True)])
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
