"""Whether a destination holds a part already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttools.copying.files import files_below
from ckpttools.copying.part import FileGroup
from ckpttools.copying.pieces import BLOCK_BYTES
from ckpttools.core.dataclass import dataclass
from ckpttools.stores.at_once import at_once
from ckpttools.stores.base import Status
from ckpttools.stores.place import Place
from ckpttools.stores.sharing import is_of_repository

# Files of so many bytes, and so many of them, are compared to the last byte: metadata, which has the times of
# the save, is among them.
_LARGEST, _MOST = 1 << 20, 64


@dataclass(frozen=True, slots=True)
class CopyComparison:
    """How a destination differs from a part.

    Attributes:
        difference: in words; None where there is none.
        bytes_compared: what was read of both; of the rest names and sizes are the same.
    """

    difference: str | None
    bytes_compared: int = 0


def compared_part(part: FileGroup, place: Place, *, verify: bool) -> CopyComparison | None:
    """Compares a part with what is at its place.

    Args:
        part, place: of a copy.
        verify: whether all bytes are read.

    Returns:
        None where nothing is there.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    if not place.is_dir():
        return None
    found = files_below(place)
    there = {
        name: each for name, each in found.items() if name in part.files or not is_of_repository(place, name)
    }
    if not there:
        return None
    difference = _by_size(part, there)
    if difference:
        return CopyComparison(difference)
    names = list(part.files) if verify else _telling(part)
    equal = at_once(place.store, lambda name: equal_files(part, place, name), names)
    for name, is_equal in zip(names, equal, strict=True):
        if not is_equal:
            return CopyComparison(f"{name} is not the same")
    return CopyComparison(None, sum(part.files[name].size for name in names))


def _by_size(part: FileGroup, there: Mapping[str, Status]) -> str | None:
    extra = sorted(there.keys() - part.files.keys() - set(part.commits))
    if extra:
        return f"{extra[0]} is there, and not in what is copied"
    for name, found in part.files.items():
        if name not in there:
            return f"{name} is missing"
        if there[name].size != found.size:
            return f"{name} has {there[name].size} bytes, not {found.size}"
    missing = [name for name in part.commits if name not in there and name in part.files]
    return f"{missing[0]} is missing" if missing else None


def _telling(part: FileGroup) -> list[str]:
    """Names of files that tell one checkpoint from another, small ones."""
    small = [name for name, found in part.files.items() if found.size <= _LARGEST]
    telling = set(part.last)
    return sorted(small, key=lambda name: (name not in telling, -part.files[name].size, name))[:_MOST]


def equal_files(part: FileGroup, place: Place, name: str) -> bool:
    """Whether a file at a place has the bytes of the part's; errors as of reading."""
    with (part.source / name).open(part.files[name]) as ours, (place / name).open() as theirs:
        return all(ours.read(*block) == theirs.read(*block) for block in _blocks(ours.size))


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(BLOCK_BYTES, size - start)) for start in range(0, size, BLOCK_BYTES))
