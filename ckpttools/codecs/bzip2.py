"""The codec bz2, whose data can be verified only by decoding it."""

from __future__ import annotations

import bz2

from ckpttools.codecs.base import Codec, SingleMemberStream
from ckpttools.codecs.streams import READ_BYTES, Stream
from ckpttools.core.dataclass import dataclass


@dataclass(frozen=True)
class Bz2(Codec):
    """The codec bz2, with blocks of up to 900 kB."""

    zarr2, zarr3 = "bz2", "numcodecs.bz2"

    def decoding_bytes(self, nbytes: int) -> int:
        # As stated in the manual of bzip2: 100 kB, and 4 bytes per byte of a block. Two buffers each for
        # input and output are added.
        return 4 * READ_BYTES + (6 << 20)

    def decoded(self, encoded: Stream, limit: int) -> Stream:
        return SingleMemberStream(self, encoded, bz2.BZ2Decompressor(), OSError)
