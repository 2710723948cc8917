"""CRC-32C: a checksum after the data, which is verified before any of the data is used."""

from __future__ import annotations

from ckpttools.codecs.base import BufferedCodec
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError

NBYTES = 4


@dataclass(frozen=True)
class Crc32c(BufferedCodec):
    """The codec `crc32c`: a four-byte little-endian checksum after the data."""

    zarr3 = "crc32c"
    compresses = False
    adds = NBYTES

    def decoding_bytes(self, nbytes: int) -> int:
        return 2 * nbytes

    def decode(self, data: bytes, limit: int) -> bytes:
        return strip_checksum(data, "a chunk")


def strip_checksum(data: bytes, subject: str) -> bytes:
    """Verify a checksum and return the data without it.

    Raises:
        FormatError: The checksum does not match the data.
    """
    import google_crc32c

    body = data[:-NBYTES]
    stored, actual = int.from_bytes(data[-NBYTES:], "little"), google_crc32c.value(body)
    if len(data) < NBYTES or stored != actual:
        raise FormatError(
            f"the CRC-32C of {subject} does not match", got=f"{actual:#010x}", expected=f"{stored:#010x}"
        )
    return body
