"""How much a chunk decodes to, before it is decoded whole: a small file may say that it becomes anything.

zstd alone is streamed into the buffer that wants it, and cannot be too much. What goes to tensorstore, which
decodes all that it is given, is decoded here first, a piece at a time, and only counted.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable, Iterator, Sequence

from ckpttools.core.errors import FormatError

_AT_ONCE = 1 << 20
# What a compressor may add to data in which it finds nothing to save; one beneath it may have added as much.
_SLACK, _SHARE = 1 << 10, 64
_CRC_BYTES = 4
_Parts = Iterator[bytes]


def refuse_more(codecs: Sequence[str], data: bytes, nbytes: int) -> None:
    """Refuses a chunk that decodes to more than its elements take.

    Args:
        codecs: names of those that make bytes of bytes, the first one first; an unknown one ends the check.
        data: what they made.
        nbytes: of the elements.

    Raises:
        FormatError: it decodes to more.
    """
    most = nbytes + nbytes // _SHARE + _SLACK
    for place, codec in reversed(list(enumerate(codecs))):
        if codec == "crc32c":
            data = data[:-_CRC_BYTES]
        elif codec == "blosc":
            _refuse(int.from_bytes(data[4:8], "little"), most)
            return
        elif codec in _DECODERS:
            data = _counted(_DECODERS[codec], data, most, is_needed=place > 0)
        else:
            return


def _counted(decode: Callable[[bytes], _Parts], data: bytes, most: int, *, is_needed: bool) -> bytes:
    """What data decodes to, where that is needed."""
    kept, total = [], 0
    try:
        for part in decode(data):
            total += len(part)
            _refuse(total, most)
            kept += [part] if is_needed else []
    except (zlib.error, OSError, EOFError, ValueError):
        return b""  # said by who decodes it
    return b"".join(kept)


def _refuse(got: int, most: int) -> None:
    if got > most:
        raise FormatError(
            "a chunk decodes to more than its shape wants",
            got=f"{got} bytes or more",
            wanted=f"{most} at most",
        )


def _inflated(data: bytes) -> _Parts:
    """Of gzip or zlib; gzip may have several members."""
    while data:
        stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
        while not stream.eof:
            part = stream.decompress(data, _AT_ONCE)
            data = stream.unconsumed_tail
            if not (part or data or stream.eof):
                return
            yield part
        data = stream.unused_data


def _bunzipped(data: bytes) -> _Parts:
    while data:
        stream = bz2.BZ2Decompressor()
        while not stream.eof:
            part = stream.decompress(data, _AT_ONCE)
            data = b""
            if not (part or stream.eof) and stream.needs_input:
                return
            yield part
        data = stream.unused_data


def _unzstd(data: bytes) -> _Parts:
    import zstandard

    reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
    try:
        while part := reader.read(_AT_ONCE):
            yield part
    except zstandard.ZstdError as error:
        raise ValueError from error


_DECODERS: dict[str, Callable[[bytes], _Parts]] = {
    "gzip": _inflated,
    "zlib": _inflated,
    "bz2": _bunzipped,
    "zstd": _unzstd,
}
