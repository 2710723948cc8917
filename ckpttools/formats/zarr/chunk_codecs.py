"""What chunks can be compressed with when they are written, and how a user names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpttools.core.errors import UsageError

# Level 3 is zstd's own default and Orbax's for zarr v3. From level 20 on a compressor takes hundreds of MiB.
DEFAULT_LEVEL, HIGHEST_LEVEL = 3, 19
WANTED = f"none, zstd or zstd:LEVEL with a level from 1 to {HIGHEST_LEVEL}"
# Every worker holds a chunk that it encodes twice, as it is and as it becomes.
LARGEST_ENCODED = 16 << 20
_ZSTD = re.compile(r"zstd(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Zstd:
    """Zstandard: the same bytes for the same data, whatever thread compresses them.

    Attributes:
        level: 1 is fastest, 19 smallest.
    """

    level: int = DEFAULT_LEVEL

    @property
    def name(self) -> str:
        return f"zstd:{self.level}"

    @property
    def zarr3(self) -> Mapping[str, Any]:
        """The codec as `zarr.json` lists it."""
        return {"configuration": {"checksum": False, "level": self.level}, "name": "zstd"}

    @property
    def zarr2(self) -> Mapping[str, Any]:
        """The compressor as `.zarray` has it."""
        return {"id": "zstd", "level": self.level}

    @property
    def working_bytes(self) -> int:
        """Memory that a compressor takes at most while it works, beside its input and output."""
        import zstandard

        parameters = zstandard.ZstdCompressionParameters.from_level(self.level, source_size=LARGEST_ENCODED)
        return parameters.estimated_compression_context_size()

    def encode(self, data: memoryview) -> bytes:
        """One zstd frame that states the size of its content; other threads run meanwhile."""
        import zstandard

        # A compressor must not serve two threads; making one takes microseconds, a chunk milliseconds.
        return zstandard.ZstdCompressor(level=self.level).compress(data)


CompressionSpec = Zstd
"""What a user can have chunks compressed with."""


def parse_compression(text: str) -> CompressionSpec | None:
    """The codec that a user names: `none`, `zstd`, `zstd:9`. None stands for raw chunks.

    Raises:
        UsageError: no such codec or level; says which there are.
    """
    if text == "none":
        return None
    match = _ZSTD.fullmatch(text)
    level = int(match[1] or DEFAULT_LEVEL) if match else 0
    if not 1 <= level <= HIGHEST_LEVEL:
        raise UsageError(f"unknown compression {text!r}", wanted=WANTED)
    return Zstd(level)
