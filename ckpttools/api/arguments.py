"""What users say, as text where its meaning is clear, and what the library takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from ckpttools.api.sources import Reading as Reading
from ckpttools.api.sources import Source as Source
from ckpttools.array.tree import Tree
from ckpttools.core.budget import parse_size
from ckpttools.core.dtypes import DType, parse_dtype
from ckpttools.core.errors import UsageError
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.registry import open_tree
from ckpttools.formats.zarr.chunk_codecs import CompressionSpec, parse_compression

Size = int | str
"""Bytes: a number, or text such as "512MiB" and "2GB"."""
Patterns = str | Sequence[str]
"""A glob of paths, or several; see `ckpttools.array.patterns`."""


class Storing(TypedDict, total=False):
    """How Orbax and zarr store what is written.

    Attributes:
        ocdbt: few data files under an index (the default), or a file for each chunk.
        zarr3: version 3 of zarr (the default), or 2.
        compression: "none" (the default), "zstd" or "zstd:9".
        target_data_file_size: with OCDBT, begin another data file at this size.
        reference: share bytes with the source by hard links wherever that can be expressed (True), or write
            all of them (False). None shares zarr chunks that stay as they are where a command changes the
            tree rather than the layout, unless another of these options says how they are to be stored.
    """

    ocdbt: bool | None
    zarr3: bool | None
    compression: str | CompressionSpec | None
    target_data_file_size: Size | None
    reference: bool | None


def opened(source: Source, read: ReadOptions | None = None) -> Tree:
    """The tree of a source; headers and indexes are read, no array.

    Raises:
        UsageError: options of reading for a tree, which is open already.
        CheckpointError: as `ckpttools.open`.
    """
    if not isinstance(source, Tree):
        return open_tree(Path(source), read)
    if read not in (None, ReadOptions()):
        raise UsageError(
            "the source is a tree, which is open already",
            got=read,
            hint="say what is to be opened to ckpttools.open",
        )
    return source


def read_options(said: Mapping[str, Any]) -> ReadOptions:
    """What `Reading` says."""
    sizes = {name: parse_size(said[name]) for name in ("max_header_bytes", "max_index_bytes") if name in said}
    return ReadOptions(step=said.get("step"), **sizes)


def dtype_of(dtype: DType | str | None) -> DType | None:
    """An element type or its name.

    Raises:
        UnknownNameError: no dtype has this name.
    """
    return parse_dtype(dtype) if isinstance(dtype, str) else dtype


def patterns_of(patterns: Patterns) -> tuple[str, ...]:
    """One pattern or several, as a tuple."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def compression_of(compression: str | CompressionSpec | None) -> CompressionSpec | None:
    """A codec or its name; None for none."""
    return parse_compression(compression) if isinstance(compression, str) else compression


def text_of(path: str | Path | None) -> str | None:
    """A name or a file, as text."""
    return None if path is None else str(path)
