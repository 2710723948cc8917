"""gzip and zlib: DEFLATE with different headers."""

from __future__ import annotations

import zlib

from ckpttools.codecs.base import Codec, SingleMemberStream
from ckpttools.codecs.streams import READ_BYTES, ByteRange, Stream
from ckpttools.core.dataclass import dataclass

_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Zlib(Codec):
    """The codec zlib, whose data can be verified only by decoding it."""

    zarr2, zarr3 = "zlib", "numcodecs.zlib"

    def decoding_bytes(self, nbytes: int) -> int:
        # Two input buffers, two output buffers, and a window.
        return 4 * READ_BYTES + (2 << 20)

    def decoded(self, encoded: Stream, limit: int) -> Stream:
        return SingleMemberStream(self, encoded, zlib.decompressobj(), zlib.error)


@dataclass(frozen=True)
class Gzip(Zlib):
    """The codec gzip with a single member, as all zarr writers produce it."""

    zarr3 = zarr2 = "gzip"

    def decoded(self, encoded: Stream, limit: int) -> Stream:
        return SingleMemberStream(self, encoded, zlib.decompressobj(16 + zlib.MAX_WBITS), zlib.error)

    def is_whole(self, chunk: ByteRange, decoded: int | None) -> bool:
        """Compare the last four bytes, which contain the number of decoded bytes."""
        is_one = chunk.part(0, len(_MAGIC)) == _MAGIC
        return is_one and (decoded is None or chunk.number(chunk.nbytes - 4, 4) == decoded % (1 << 32))
