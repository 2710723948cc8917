"""What is left to tensorstore: codecs that are not implemented here, and rare chains of codecs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttools.codecs.base import CodecSpec
from ckpttools.codecs.streams import ByteRange, BytesStream, Fetched, Stream
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape

# A chunk that tensorstore decodes is in memory as bytes, in its store, decoded, and copied to us.
COPIES = 4


@dataclass(frozen=True)
class WholeChunkDecoder:
    """How tensorstore decodes one chunk.

    Attributes:
        key: of the chunk.
        text: the `zarr.json` of an array that has no other.
    """

    key: str
    text: str

    def decoded(self, stored: ByteRange, extent: Shape) -> Stream:
        """The elements of the chunk; zeros beyond `extent`, the part that is inside the array."""
        values = {"zarr.json": self.text.encode(), self.key: Fetched(stored).rest()}
        return BytesStream(_decoded("zarr3", values, extent))


def whole_chunk_decoder(
    codecs: Sequence[CodecSpec], chunk: Shape, document: Mapping[str, Any]
) -> WholeChunkDecoder:
    """For chunks of this shape that these codecs make, of an array with this `zarr.json`."""
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    encoding = {"name": "default", "configuration": {"separator": "/"}}
    single = {**document, "codecs": list(codecs), "shape": chunk}
    single |= {"chunk_grid": grid, "chunk_key_encoding": encoding}
    single.pop("dimension_names", None)
    return WholeChunkDecoder("/".join(["c", *["0"] * len(chunk)]), json.dumps(single, sort_keys=True))


def decoded_bytes(compressor: Mapping[str, Any], data: bytes, nbytes: int) -> memoryview:
    """What a compressor of zarr v2 made `nbytes` bytes of."""
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
    return _decoded("zarr", {".zarray": json.dumps(document).encode(), "0": data}, (nbytes,))


def _decoded(driver: str, values: dict[str, bytes], extent: Shape) -> memoryview:
    """The elements of the one chunk of an array given as the values of its keys; zeros beyond `extent`."""
    import numpy as np
    import tensorstore as ts

    # A store of its own for every chunk: nothing stays behind. One copier: the caller has its own threads.
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
