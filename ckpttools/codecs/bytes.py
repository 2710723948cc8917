"""Conversion of elements to bytes, little-endian or big-endian."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttools.codecs.base import CodecSpec
from ckpttools.codecs.streams import Stream, SwappedStream
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType

LITTLE: CodecSpec = {"configuration": {"endian": "little"}, "name": "bytes"}


@dataclass(frozen=True)
class BytesCodec:
    """The codec `bytes` of zarr v3, or the byte order in a `dtype` of v2.

    Attributes:
        is_little: Whether elements are little-endian; one-byte elements need not specify this.
    """

    is_little: bool = True

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> BytesCodec:
        return cls(settings.get("endian", "little") == "little")

    def names(self, chunk: object) -> tuple[str, ...]:
        """Return the codec's name; empty for the usual little-endian order."""
        return () if self.is_little else ("big-endian",)

    def decoded(self, stream: Stream, dtype: DType) -> Stream:
        """Return a stream of elements in native byte order."""
        return stream if self.is_little else SwappedStream(stream, dtype.number_bytes)


LITTLE_ENDIAN = BytesCodec()
