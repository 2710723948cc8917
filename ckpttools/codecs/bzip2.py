"""bz2, whose data cannot be checked without decoding it."""

from __future__ import annotations

import bz2

from ckpttools.codecs.base import Codec, OneMember
from ckpttools.codecs.streams import READ_BYTES, Stream
from ckpttools.core.dataclass import dataclass


@dataclass(frozen=True)
class Bz2(Codec):
    """bz2, of up to 900 kB at once."""

    zarr2, zarr3 = "bz2", "numcodecs.bz2"

    def decoding_bytes(self, nbytes: int) -> int:
        # As its manual says: 100 kB, and 4 bytes for each of a block; and what is read and decoded, twice.
        return 4 * READ_BYTES + (6 << 20)

    def decoded(self, encoded: Stream, limit: int) -> Stream:
        return OneMember(self, encoded, bz2.BZ2Decompressor(), OSError)
