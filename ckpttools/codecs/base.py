"""Base classes of codecs, which convert bytes to bytes and describe their cost and integrity checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from ckpttools.codecs.streams import READ_BYTES, ByteRange, BytesStream, Stream
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DECODE_BYTES = 1 << 20

CodecSpec = Mapping[str, Any]
"""A codec as `zarr.json` lists it: its name and its configuration."""


@dataclass(frozen=True)
class Codec(ABC):
    """A codec from bytes to bytes, with the settings of one array.

    Reads use `decoded`, plans use `decoding_bytes`, `ckpt doctor` uses `is_whole`, and `ckpt inspect chunks`
    uses `name`.

    Attributes:
        zarr3, zarr2: The name in a `zarr.json`, and the `id` in a `.zarray`; None if the format lacks the
            codec.
        compresses: Whether the codec compresses data.
        adds: Number of bytes that the codec appends to otherwise unchanged data; None if it changes the data.
        level: Compression level; None if unspecified.
    """

    zarr3: ClassVar[str | None] = None
    zarr2: ClassVar[str | None] = None
    compresses: ClassVar[bool] = True
    adds: ClassVar[int | None] = None

    level: int | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Create the codec from a zarr v3 `configuration` or a v2 `compressor`."""
        return cls(settings.get("level", settings.get("clevel")))

    @property
    def kind(self) -> str:
        """The name of the codec without settings."""
        return self.zarr2 or self.zarr3 or ""

    @property
    def name(self) -> str:
        """The name of the codec with settings, such as "zstd:3"."""
        return self.kind if self.level is None else f"{self.kind}:{self.level}"

    def names(self, chunk: object) -> tuple[str, ...]:
        """Return names for the description of a codec chain; see `ShardingCodec.names`."""
        return (self.name,)

    def decoding_bytes(self, nbytes: int) -> int:
        """Return the memory for decoding to `nbytes` bytes, in bytes and without the reader's buffer."""
        return 3 * nbytes

    @abstractmethod
    def decoded(self, encoded: Stream, limit: int) -> Stream:
        """Return a stream that decodes an encoded stream.

        Args:
            encoded: The full encoded data.
            limit: Maximum number of decoded bytes. The caller rejects more, so they need not be produced.

        Raises:
            FormatError: The data is damaged. The error may be raised here or while the stream is read.
        """

    def damaged(self, reason: object) -> FormatError:
        return FormatError(f"the {self.kind} data is damaged", got=reason)

    def is_whole(self, chunk: ByteRange, decoded: int | None) -> bool:
        """Return whether the data shows no sign of truncation or foreign content.

        Reads little, and decodes only to confirm a contradiction.

        Args:
            chunk: The encoded chunk; not empty.
            decoded: Number of decoded bytes; None if unknown.

        Raises:
            FormatError, StorageError: The file cannot be read.
        """
        return True

    @property
    def zarr3_spec(self) -> CodecSpec | None:
        """The codec's entry in `zarr.json`; None if it cannot be written."""
        return None


class BufferedCodec(Codec):
    """A codec that decodes all its data at once."""

    @abstractmethod
    def decode(self, data: bytes, limit: int) -> Buffer:
        """Decode data; arguments as for `decoded`. Any error is reported as damaged data."""

    def decoded(self, encoded: Stream, limit: int) -> Stream:
        try:
            return BytesStream(self.decode(encoded.rest(), limit))
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            raise self.damaged(error) from error


class WritableCodec(Codec):
    """A codec that can also encode chunks.

    Attributes:
        levels: The levels that users can choose.
    """

    levels: ClassVar[range]

    @property
    def zarr3_spec(self) -> CodecSpec:
        return {"configuration": {"level": self.level}, "name": self.zarr3}

    @property
    def zarr2_spec(self) -> Mapping[str, Any]:
        """The compressor's entry in `.zarray`."""
        return {"id": self.zarr2, "level": self.level}

    @property
    @abstractmethod
    def working_bytes(self) -> int:
        """Maximum memory for encoding a chunk in bytes, excluding input and output."""

    @abstractmethod
    def encode(self, data: memoryview) -> bytes:
        """Encode data; the result must not depend on the thread."""


class Decompressor(Protocol):
    """The decompressor interface of `zlib` and `bz2`."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class SingleMemberStream(Stream):
    """Decodes a stream with exactly one member and no trailing data, as tensorstore requires for zarr v2.

    Files of gzip and bz2 may have several members. `fault` is the decompressor's error for damaged data.
    """

    def __init__(
        self, codec: Codec, encoded: Stream, decompressor: Decompressor, fault: type[Exception]
    ) -> None:
        self._codec, self._encoded, self._decompressor, self._fault = codec, encoded, decompressor, fault
        self._left = b""

    def readinto(self, out: memoryview) -> int:
        try:
            while not self._decompressor.eof:
                result = self._decompressor.decompress(self._left, min(len(out), _DECODE_BYTES))
                # Input that zlib has not consumed. bz2 keeps such input internally.
                self._left = getattr(self._decompressor, "unconsumed_tail", b"")
                if result:
                    out[: len(result)] = result
                    return len(result)
                if not (self._left or self._decompressor.eof):
                    self._left = bytes(self._encoded.read(READ_BYTES))
                    if not self._left:
                        raise self._codec.damaged("the data ends too early")
        except self._fault as error:
            raise self._codec.damaged(error) from error
        if self._decompressor.unused_data or self._encoded.read(1):
            raise self._codec.damaged("trailing data")
        return 0


class Decoder(Stream):
    """A stream of another library's decoder, with that decoder's errors for damaged data in `faults`."""

    def __init__(self, codec: Codec, reader: Any, *faults: type[Exception]) -> None:
        self._codec, self._reader, self._faults = codec, reader, faults

    def readinto(self, out: memoryview) -> int:
        try:
            # Some decoders allocate a second buffer of this size.
            return int(self._reader.readinto(out[:_DECODE_BYTES]))
        except self._faults as error:
            raise self._codec.damaged(error) from error


@dataclass(frozen=True)
class Unknown(BufferedCodec):
    """A codec that is neither built in nor provided by a plug-in."""

    named: str = ""
    compresses = False

    @property
    def kind(self) -> str:
        return self.named

    def decode(self, data: bytes, limit: int) -> Buffer:
        hint = "a package may add it under the entry point ckpttools.codecs"
        raise FormatError("an unknown codec", got=self.named, hint=hint)


def configuration_of(spec: CodecSpec) -> Mapping[str, Any]:
    """Return the settings of a codec; empty if they are missing or invalid."""
    result = spec.get("configuration")
    return result if isinstance(result, dict) else {}
