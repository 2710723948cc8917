"""Blosc, decoded by tensorstore, which includes its library."""

from __future__ import annotations

from ckpttools.codecs import tensorstore
from ckpttools.codecs.base import BufferedCodec
from ckpttools.codecs.streams import ByteRange
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError

_HEADER, _DECODED_AT, _LENGTH_AT = 16, 4, 12


@dataclass(frozen=True)
class Blosc(BufferedCodec):
    """Blosc with any inner compressor and shuffle, which the data's header specifies."""

    zarr3 = zarr2 = "blosc"

    def decoding_bytes(self, nbytes: int) -> int:
        return tensorstore.COPIES * nbytes

    def decode(self, data: bytes, limit: int) -> memoryview:
        if len(data) < _HEADER:
            raise self.damaged(f"{len(data)} bytes")
        nbytes = int.from_bytes(data[_DECODED_AT : _DECODED_AT + 4], "little")
        if nbytes > limit:
            raise FormatError(
                "a chunk decodes to more bytes than its shape needs",
                got=f"{nbytes} bytes",
                expected=f"at most {limit}",
            )
        return tensorstore.decode_bytes({"id": "blosc"}, data, nbytes) if nbytes else memoryview(b"")

    def is_whole(self, chunk: ByteRange, decoded: int | None) -> bool:
        """Compare the encoded and decoded lengths in the header."""
        if chunk.nbytes < _HEADER or chunk.number(_LENGTH_AT, 4) != chunk.nbytes:
            return False
        return decoded is None or chunk.number(_DECODED_AT, 4) == decoded
