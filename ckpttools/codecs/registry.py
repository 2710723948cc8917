"""The registry of codecs by name; codecs that are not built in come from entry points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import ckpttools.codecs as package
from ckpttools.codecs.base import Codec, CodecSpec, Unknown, WritableCodec, configuration_of
from ckpttools.codecs.bytes import BytesCodec
from ckpttools.codecs.sharding import ShardingCodec
from ckpttools.codecs.transpose import Transpose
from ckpttools.core.errors import UsageError
from ckpttools.core.options import Option
from ckpttools.core.plugins import load_group

# Name in zarr -> module and class of this package, imported when a checkpoint or user names it.
_BUILT_IN = {
    "zstd": ("zstd", "Zstd"),
    "gzip": ("gzip", "Gzip"),
    "zlib": ("gzip", "Zlib"),
    "bz2": ("bzip2", "Bz2"),
    "blosc": ("blosc", "Blosc"),
    "crc32c": ("crc32c", "Crc32c"),
}

_MAX_DIGITS = 9

CodecStep = Transpose | BytesCodec | ShardingCodec | Codec
"""A step in a chain of codecs: from elements to elements, from elements to bytes, or from bytes to bytes."""


@cache
def _plug_ins() -> tuple[type[Codec], ...]:
    return tuple(item for item in load_group("ckpttools.codecs", type).values() if issubclass(item, Codec))


def _find(attribute: str, name: str) -> type[Codec] | None:
    """Return the codec whose `zarr3` or `zarr2` attribute is this name."""
    own = name.removeprefix("numcodecs.")
    result = _load(own) if own in _BUILT_IN else None
    if result is not None and getattr(result, attribute) == name:
        return result
    # Plug-ins are searched last, because that takes 30 ms and most checkpoints do not need them.
    return next((item for item in _plug_ins() if getattr(item, attribute) == name), None)


def _load(name: str) -> type[Codec]:
    module, kind = _BUILT_IN[name]
    result: type[Codec] = getattr(import_module(f"{package.__name__}.{module}"), kind)
    return result


def codec_steps(codecs: Iterable[CodecSpec]) -> tuple[CodecStep, ...]:
    """Return the codecs listed in a `zarr.json`."""
    return tuple(map(_step, codecs))


def _step(spec: CodecSpec) -> CodecStep:
    name, settings = str(spec.get("name")), configuration_of(spec)
    match name:
        case "transpose":
            return Transpose.parse(settings)
        case "bytes":
            return BytesCodec.parse(settings)
        case "sharding_indexed":
            codecs, index = settings.get("codecs", ()), settings.get("index_codecs", ())
            piece, location = settings.get("chunk_shape", ()), settings.get("index_location", "end")
            return ShardingCodec(piece, codecs, codec_steps(codecs), codec_steps(index), location == "start")
        case _:
            return _create_codec(_find("zarr3", name), name, settings)


def flat_steps(steps: Iterable[CodecStep]) -> Iterator[CodecStep]:
    """Yield steps, including those of inner chunks in shards."""
    for step in steps:
        yield step
        yield from flat_steps(step.steps) if isinstance(step, ShardingCodec) else ()


def compressor_of(compressor: Mapping[str, Any]) -> Codec:
    """Return the codec of a `compressor` in a `.zarray`."""
    name = str(compressor.get("id"))
    return _create_codec(_find("zarr2", name), name, compressor)


def _create_codec(kind: type[Codec] | None, name: str, settings: Mapping[str, Any]) -> Codec:
    return kind.parse(settings) if kind else replace(Unknown.parse(settings), named=name)


def parse_compression(value: object) -> WritableCodec | None:
    """Parse a compression such as `none`, `zstd` or `zstd:9`, or accept a codec; None means uncompressed.

    Raises:
        UsageError: The codec or level does not exist. The message lists the supported ones.
    """
    if value == "none":
        return None
    if isinstance(value, WritableCodec):
        return value
    name, colon, level = value.partition(":") if isinstance(value, str) else ("", "", "")
    kind = _find("zarr2", name) or _find("zarr3", name)
    if kind and issubclass(kind, WritableCodec):
        if not colon:
            return kind()
        if level.isdecimal() and len(level) <= _MAX_DIGITS and int(level) in kind.levels:
            return kind(int(level))
    raise UsageError(f"unknown compression {value!r}", expected=_known_codecs_text())


def _known_codecs_text() -> str:
    kinds = [item for item in (*map(_load, _BUILT_IN), *_plug_ins()) if issubclass(item, WritableCodec)]
    named = (
        f"{kind().kind} or {kind().kind}:LEVEL with a level from {kind.levels[0]} to {kind.levels[-1]}"
        for kind in kinds
    )
    return f"none, {', '.join(named)}"


COMPRESSION = Option(
    "compression",
    parse_compression,
    "none",
    "Compress chunks: smaller on disk, but slower to write and load.",
    "none|zstd[:N]",
)
