"""bz2, whose data can only be verified by decoding it."""

from __future__ import annotations

import bz2

from ckpttools.codecs.base import Codec, SingleMemberStream
from ckpttools.codecs.streams import READ_BYTES, Stream
from ckpttools.core.dataclass import dataclass


@dataclass(frozen=True)
class Bz2(Codec):
    """bz2, with blocks of up to 900 kB."""

    zarr2, zarr3 = "bz2", "numcodecs.bz2"

    def decoding_bytes(self, nbytes: int) -> int:
        # According to its manual: 100 kB, and 4 bytes per byte of a block; plus two buffers each for I/O.
        return 4 * READ_BYTES + (6 << 20)

    def decoded(self, encoded: Stream, limit: int) -> Stream:
        return SingleMemberStream(self, encoded, bz2.BZ2Decompressor(), OSError)
