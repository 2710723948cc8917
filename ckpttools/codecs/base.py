"""What a codec is: a step from bytes to bytes, which answers for itself to all who ask about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from ckpttools.codecs.streams import READ_BYTES, ByteRange, BytesStream, Stream
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DECODED_AT_ONCE = 1 << 20

CodecSpec = Mapping[str, Any]
"""A codec as `zarr.json` lists it: its name and its configuration."""


@dataclass(frozen=True)
class Codec(ABC):
    """A codec from bytes to bytes, with the settings that one array has for it.

    Reading asks for `decoded`, planning for `decoding_bytes`, `ckpt doctor` for `is_whole`, `ckpt inspect
    chunks` for `name`.

    Attributes:
        zarr3, zarr2: its name in a `zarr.json`, its `id` in a `.zarray`; None where that has no such codec.
        compresses: whether it makes data smaller.
        adds: bytes that it appends to the data, which it leaves as it is; None where it changes the data.
        level: how hard it tried, or is to try, where that is stated.
    """

    zarr3: ClassVar[str | None] = None
    zarr2: ClassVar[str | None] = None
    compresses: ClassVar[bool] = True
    adds: ClassVar[int | None] = None

    level: int | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """The codec with the settings of a `configuration` of zarr v3 or of a `compressor` of v2."""
        return cls(settings.get("level", settings.get("clevel")))

    @property
    def kind(self) -> str:
        """The codec without its settings."""
        return self.zarr2 or self.zarr3 or ""

    @property
    def name(self) -> str:
        """The codec in a word, such as "zstd:3"."""
        return self.kind if self.level is None else f"{self.kind}:{self.level}"

    def names(self, chunk: object) -> tuple[str, ...]:
        """As other steps of a chain name themselves."""
        return (self.name,)

    def decoding_bytes(self, nbytes: int) -> int:
        """Memory that decoding to `nbytes` bytes takes, beside whatever reads them from the stream."""
        return 3 * nbytes

    @abstractmethod
    def decoded(self, encoded: Stream, limit: int) -> Stream:
        """The stream of what an encoded stream decodes to.

        Args:
            encoded: all of the data.
            limit: bytes that it can decode to; more are refused by the caller, but need not be made.

        Raises:
            FormatError: it is damaged; here, or while the stream is read.
        """

    def damaged(self, reason: object) -> FormatError:
        return FormatError(f"the {self.kind} data is damaged", got=reason)

    def is_whole(self, chunk: ByteRange, decoded: int | None) -> bool:
        """Whether nothing shows that the data is truncated or something else.

        Reads little, and decodes only where what is read contradicts what is expected.

        Args:
            chunk: as it is stored; not empty.
            decoded: bytes that it decodes to, None where that is not known.

        Raises:
            FormatError, StorageError: the file cannot be read.
        """
        return True

    @property
    def zarr3_spec(self) -> CodecSpec | None:
        """The codec as `zarr.json` lists it; None for one that is not written."""
        return None


class WholeCodec(Codec):
    """A codec that decodes all of its data at once."""

    @abstractmethod
    def decode(self, data: bytes, limit: int) -> Buffer:
        """What data decodes to; arguments as of `decoded`. Any error is taken for damaged data."""

    def decoded(self, encoded: Stream, limit: int) -> Stream:
        try:
            return BytesStream(self.decode(encoded.rest(), limit))
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            raise self.damaged(error) from error


class WritableCodec(Codec):
    """A codec that chunks can be written with, too.

    Attributes:
        levels: those that a user may choose.
    """

    levels: ClassVar[range]

    @property
    def zarr3_spec(self) -> CodecSpec:
        return {"configuration": {"level": self.level}, "name": self.zarr3}

    @property
    def zarr2_spec(self) -> Mapping[str, Any]:
        """The compressor as `.zarray` has it."""
        return {"id": self.zarr2, "level": self.level}

    @property
    @abstractmethod
    def working_bytes(self) -> int:
        """Memory that encoding a chunk takes at most, beside its input and output."""

    @abstractmethod
    def encode(self, data: memoryview) -> bytes:
        """The bytes to store: the same for the same data, whatever thread encodes them."""


class Decompressor(Protocol):
    """What `zlib` and `bz2` decompress with."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class OneMember(Stream):
    """What a stream decompresses to that has one member and nothing behind it, as tensorstore wants zarr v2.

    Files of gzip and bz2 may have several; `fault` is what the decompressor raises of damaged data.
    """

    def __init__(
        self, codec: Codec, encoded: Stream, decompressor: Decompressor, fault: type[Exception]
    ) -> None:
        self._codec, self._encoded, self._decompressor, self._fault = codec, encoded, decompressor, fault
        self._left = b""

    def readinto(self, out: memoryview) -> int:
        try:
            while not self._decompressor.eof:
                built = self._decompressor.decompress(self._left, min(len(out), _DECODED_AT_ONCE))
                # What zlib has not looked at; bz2 keeps that.
                self._left = getattr(self._decompressor, "unconsumed_tail", b"")
                if built:
                    out[: len(built)] = built
                    return len(built)
                if not (self._left or self._decompressor.eof):
                    self._left = bytes(self._encoded.read(READ_BYTES))
                    if not self._left:
                        raise self._codec.damaged("it ends too early")
        except self._fault as error:
            raise self._codec.damaged(error) from error
        if self._decompressor.unused_data or self._encoded.read(1):
            raise self._codec.damaged("more data behind it")
        return 0


class Decoder(Stream):
    """What a decoder of another library makes of a stream; `faults` are what it raises of damaged data."""

    def __init__(self, codec: Codec, reader: Any, *faults: type[Exception]) -> None:
        self._codec, self._reader, self._faults = codec, reader, faults

    def readinto(self, out: memoryview) -> int:
        try:
            # Some make as much again to copy it from.
            return int(self._reader.readinto(out[:_DECODED_AT_ONCE]))
        except self._faults as error:
            raise self._codec.damaged(error) from error


@dataclass(frozen=True)
class Unknown(WholeCodec):
    """A codec that neither this package nor a plug-in has."""

    named: str = ""
    compresses = False

    @property
    def kind(self) -> str:
        return self.named

    def decode(self, data: bytes, limit: int) -> Buffer:
        hint = "a package may add it under the entry point ckpttools.codecs"
        raise FormatError("an unknown codec", got=self.named, hint=hint)


def configuration_of(spec: CodecSpec) -> Mapping[str, Any]:
    """The settings of a codec; none where it says nothing sensible."""
    result = spec.get("configuration")
    return result if isinstance(result, dict) else {}
