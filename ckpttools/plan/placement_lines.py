"""Places of arrays as lists that JSON has, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckpttools.core.errors import FormatError
from ckpttools.formats.placement import Appended, ChunkFiles, DataFile, Placement
from ckpttools.plan.value_lines import CODECS, NotInLinesError, made_of, said_of
from ckpttools.stores.base import is_inside


def said_of_placement(placement: Placement) -> list[object]:
    """A place as a list. Raises NotInLinesError for one that writes nothing."""
    match placement.home:
        case DataFile(file, offset, per_file):
            home: list[object] = ["file", file, offset, per_file]
        case ChunkFiles(directory, prefix, separator):
            home = ["chunks", directory, prefix, separator]
        case Appended(file, limit):
            home = ["appended", file, limit]
        case other:
            raise NotInLinesError(f"{other!r:.80}")
    codec = None if placement.codec is None else said_of(placement.codec, CODECS)
    return [placement.shape, placement.itemsize, placement.chunk, home, codec]


def placement_of(declared: Any) -> Placement:
    """The inverse of `said_of_placement`. Raises FormatError where nothing is said of a place."""
    homes: Mapping[str, Callable[..., DataFile | ChunkFiles | Appended]] = {
        "file": DataFile,
        "chunks": ChunkFiles,
        "appended": Appended,
    }
    try:
        shape, itemsize, chunk, (kind, *home), codec = declared
        outside = [item for item in home if isinstance(item, str) and item and not is_inside(f"d/{item}")]
        if outside or str(home[0]).startswith("/"):
            raise ValueError(f"a file outside of the destination, {home}")
        built = None if codec is None else made_of(codec, CODECS)
        return Placement(tuple(shape), itemsize, tuple(chunk), homes[kind](*home), built)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError("a line of a plan says no place", got=error) from error
