"""Elements as bytes: one after the other, little-endian or big-endian."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttools.codecs.base import CodecSpec
from ckpttools.codecs.streams import Stream, Swapped
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType

LITTLE: CodecSpec = {"configuration": {"endian": "little"}, "name": "bytes"}


@dataclass(frozen=True)
class BytesCodec:
    """The codec `bytes` of zarr v3, the order of bytes in a `dtype` of v2.

    Attributes:
        is_little: whether they are little-endian; elements of one byte need not say.
    """

    is_little: bool = True

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> BytesCodec:
        return cls(settings.get("endian", "little") == "little")

    def names(self, chunk: object) -> tuple[str, ...]:
        """The codec in words; none for what goes without saying."""
        return () if self.is_little else ("big-endian",)

    def decoded(self, stream: Stream, dtype: DType) -> Stream:
        """The elements as they are in memory."""
        return stream if self.is_little else Swapped(stream, dtype.number_bytes)


LITTLE_ENDIAN = BytesCodec()
