"""What a codec is: a step from bytes to bytes, which answers for itself to all who ask about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ckpttools.codecs.streams import ByteRange, InMemory, Stream
from ckpttools.core.errors import CheckpointError, FormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DECODED_AT_ONCE = 1 << 20

Spec = Mapping[str, Any]
"""A codec as `zarr.json` lists it: its name and its configuration."""


@dataclass(frozen=True)
class Codec:
    """A codec from bytes to bytes, with the settings that one array has for it.

    Reading asks for `decoded`, planning for `decoding_bytes`, `ckpt doctor` for `is_whole`, `ckpt inspect
    chunks` for `name`. One that is also written has `levels`, `encode` and `working_bytes`.

    Attributes:
        zarr3, zarr2: its name in a `zarr.json`, its `id` in a `.zarray`; None where that has no such codec.
        compresses: whether it makes data smaller.
        adds: bytes that it puts behind the data, which it leaves as it is; None where it changes the data.
        levels: those that a user may have chunks written with.
        level: how hard it tried, or is to try, where that is said.
    """

    zarr3: ClassVar[str | None] = None
    zarr2: ClassVar[str | None] = None
    compresses: ClassVar[bool] = True
    adds: ClassVar[int | None] = None
    levels: ClassVar[range] = range(0)

    level: int | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Codec:
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
        """As other steps of a chain tell their words."""
        return (self.name,)

    def decoding_bytes(self, nbytes: int) -> int:
        """Memory that decoding to `nbytes` bytes takes, beside whatever reads them from the stream."""
        return 3 * nbytes

    def decoded(self, encoded: Stream, most: int) -> Stream:
        """The stream of what an encoded stream decodes to; arguments and errors as of `decode`.

        All at once, unless a codec does better.
        """
        try:
            return InMemory(self.decode(encoded.rest(), most))
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            raise self.damaged(error) from error

    def decode(self, data: bytes, most: int) -> Buffer:
        """What data decodes to.

        Args:
            data: all of it.
            most: bytes that it can be; more are refused by who asked, but need not be made.

        Raises:
            FormatError: it is damaged. Other errors are taken for that, too.
        """
        raise NotImplementedError

    def damaged(self, reason: object) -> FormatError:
        return FormatError(f"the {self.kind} data is damaged", got=reason)

    def is_whole(self, chunk: ByteRange, decoded: int | None) -> bool:
        """Whether nothing tells that the data is cut or something else.

        Reads little, and decodes only where what is read says something else than is wanted.

        Args:
            chunk: as it is stored; not empty.
            decoded: bytes that it decodes to, None where that is not known.

        Raises:
            FormatError, StorageError: the file cannot be read.
        """
        return True

    @property
    def zarr3_spec(self) -> Spec | None:
        """The codec as `zarr.json` lists it; None for one that is not written."""
        return {"configuration": {"level": self.level}, "name": self.zarr3} if self.levels else None

    @property
    def zarr2_spec(self) -> Mapping[str, Any] | None:
        """The compressor as `.zarray` has it; None for one that is not written."""
        return {"id": self.zarr2, "level": self.level} if self.levels else None

    @property
    def working_bytes(self) -> int:
        """Memory that encoding a chunk takes at most, beside its input and output."""
        raise NotImplementedError

    def encode(self, data: memoryview) -> bytes:
        """The bytes to store: the same for the same data, whatever thread encodes them."""
        raise NotImplementedError


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
class Unknown(Codec):
    """One that nobody here knows."""

    named: str = ""
    compresses = False

    @property
    def kind(self) -> str:
        return self.named

    def decode(self, data: bytes, most: int) -> Buffer:
        hint = "a package may add it under the entry point ckpttools.codecs"
        raise FormatError("an unknown codec", got=self.named, hint=hint)


def configuration_of(spec: Spec) -> Mapping[str, Any]:
    """The settings of a codec; none where it says nothing sensible."""
    found = spec.get("configuration")
    return found if isinstance(found, dict) else {}
