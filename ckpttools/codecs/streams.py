"""Sequential byte streams from files, decoders and memory."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ckpttools.array.lazy import ByteSource
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Number of encoded bytes to fetch at a time: 128 KiB to 4 MiB decode equally fast. A stream reuses one buffer
# for all fetches, because a new `bytes` for each takes 1.4 times as long.
READ_BYTES = 1 << 18


class Stream(ABC):
    """A sequential stream of bytes."""

    _buffer = memoryview(b"")

    @abstractmethod
    def readinto(self, out: memoryview) -> int:
        """Fill a part of `out` and return its length, which is 0 only at the end."""

    def file(self) -> io.BufferedReader:
        """Return the stream as a file object."""
        return io.BufferedReader(_RawReader(self), READ_BYTES)

    def read(self, size: int) -> memoryview:
        """Return up to `size` bytes, which are valid until the next call; empty only at the end."""
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(self._max_buffer_size(size)))
        return self._buffer[: self.readinto(self._buffer[:size])]

    def _max_buffer_size(self, size: int) -> int:
        """Return the largest useful buffer size, at most `size`."""
        return size

    def rest(self) -> bytes:
        """Return all remaining bytes."""
        parts = []
        while part := bytes(self.read(READ_BYTES)):
            parts.append(part)
        return b"".join(parts)


class _RawReader(io.RawIOBase):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, out: Buffer) -> int:
        return self._stream.readinto(memoryview(out).cast("B"))


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A byte range of a file.

    Attributes:
        source: The file.
        offset: Start of the range in bytes.
        nbytes: Length of the range in bytes.
    """

    source: ByteSource
    offset: int
    nbytes: int

    def number(self, position: int, size: int) -> int | None:
        """Return a little-endian integer of `size` bytes at a position in the range; None past its end."""
        data = self.part(position, size)
        return int.from_bytes(data, "little") if len(data) == size else None

    def part(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes from a position in the range."""
        out = bytearray(max(0, min(size, self.nbytes - position)))
        self.source.read_into(self.offset + position, out)
        return bytes(out)

    def without_end(self, size: int) -> ByteRange:
        """Return the range without its last `size` bytes."""
        return ByteRange(self.source, self.offset, self.nbytes - size)


class RangeStream(Stream):
    """A stream of a byte range of a file."""

    def __init__(self, stored: ByteRange) -> None:
        self._source = stored.source
        self._position, self._end = stored.offset, stored.offset + stored.nbytes

    def readinto(self, out: memoryview) -> int:
        count = min(len(out), self._end - self._position)
        if count:
            self._source.read_into(self._position, out[:count])
        self._position += count
        return count

    def _max_buffer_size(self, size: int) -> int:
        return min(size, self._end - self._position)

    def rest(self) -> bytes:
        out = bytearray(self._end - self._position)
        self.readinto(memoryview(out))
        return bytes(out)


class BytesStream(Stream):
    """A stream of bytes in memory."""

    def __init__(self, data: Buffer) -> None:
        self._rest = memoryview(data).cast("B")

    def readinto(self, out: memoryview) -> int:
        count = min(len(out), len(self._rest))
        out[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class ConstantChunk(Stream):
    """A stream of one repeated element, for an omitted piece that contains nothing else."""

    def __init__(self, element: bytes, nbytes: int) -> None:
        self._element, self._left = element, nbytes

    def readinto(self, out: memoryview) -> int:
        """See `Stream.readinto`. `out` must have room for whole elements."""
        count = min(len(out), self._left)
        out[:count] = self._element * (count // len(self._element))
        self._left -= count
        return count


class SwappedStream(Stream):
    """A stream of elements with reversed byte order."""

    def __init__(self, stream: Stream, number_bytes: int) -> None:
        self._stream, self._size = stream, number_bytes

    def readinto(self, out: memoryview) -> int:
        import numpy as np

        count = more = self._stream.readinto(out)
        while more and count % self._size and count < len(out):
            more = self._stream.readinto(out[count:])
            count += more
        # A partial element can only occur after the last element.
        full_elements = out[: count - count % self._size]
        np.frombuffer(full_elements, f"u{self._size}").byteswap(inplace=True)
        return count


class ExactReader:
    """A reader for a stream that must have an exact length; tracks the position."""

    def __init__(self, stream: Stream, nbytes: int) -> None:
        self._stream, self._nbytes = stream, nbytes
        self.position = 0

    def fill(self, out: memoryview) -> None:
        """Fill all of `out`.

        Raises:
            FormatError: The data ends too early.
        """
        while out:
            count = self._stream.readinto(out)
            if count == 0:
                got = f"{self.position} bytes"
                raise FormatError(
                    "a chunk decodes to fewer bytes than its shape needs",
                    got=got,
                    expected=f"{self._nbytes} bytes",
                )
            self.position += count
            out = out[count:]

    def skip(self, position: int, discard: memoryview) -> None:
        """Skip to a position, reading into memory that may be overwritten."""
        while self.position < position:
            self.fill(discard[: position - self.position])

    def finish(self) -> None:
        """Read to the end, so that the decoder performs its final checks.

        Raises:
            FormatError: There is more data.
        """
        if self._stream.readinto(memoryview(bytearray(1))):
            raise FormatError(
                "a chunk decodes to more bytes than its shape needs", expected=f"{self._nbytes} bytes"
            )
