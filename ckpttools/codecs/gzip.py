"""gzip and zlib: DEFLATE with one header or the other."""

from __future__ import annotations

import gzip
import zlib

from ckpttools.codecs.base import Codec, Decoder, WholeCodec
from ckpttools.codecs.streams import READ_BYTES, ByteRange, ExactReader, Fetched, Stream
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError

_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Gzip(Codec):
    """gzip, of one member as both writers of zarr make it, or of several, with zeros behind them or not."""

    zarr3 = zarr2 = "gzip"

    def decoding_bytes(self, nbytes: int) -> int:
        # What is read and what is decoded, each twice, and a window.
        return 4 * READ_BYTES + (2 << 20)

    def decoded(self, encoded: Stream, most: int) -> Stream:
        reader = gzip.GzipFile(fileobj=encoded.file())
        return Decoder(self, reader, EOFError, OSError, zlib.error)

    def is_whole(self, chunk: ByteRange, decoded: int | None) -> bool:
        """The last four bytes are the number of decoded ones; where they are not, only decoding can tell."""
        if chunk.part(0, len(_MAGIC)) != _MAGIC:
            return False
        if decoded is None or chunk.number(chunk.nbytes - 4, 4) == decoded % (1 << 32):
            return True
        return self._decodes_to(chunk, decoded)

    def _decodes_to(self, chunk: ByteRange, nbytes: int) -> bool:
        reading = ExactReader(self.decoded(Fetched(chunk), nbytes), nbytes)
        try:
            reading.skip(nbytes, memoryview(bytearray(min(nbytes, READ_BYTES))))
            reading.finish()
        except FormatError:
            return False
        return True


@dataclass(frozen=True)
class Zlib(WholeCodec):
    """zlib, whose data cannot be checked without decoding it."""

    zarr2, zarr3 = "zlib", "numcodecs.zlib"

    def decode(self, data: bytes, most: int) -> bytes:
        decoder = zlib.decompressobj()
        made = decoder.decompress(data, most)
        if len(made) < most and (decoder.unused_data or not decoder.eof):
            raise self.damaged("more data behind it" if decoder.eof else "it ends too early")
        return made
