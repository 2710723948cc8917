"""Whether numbers that processes saved are as they must be: copies alike, different parts different.

Nothing in these files says of which save or step they are. Processes that hold the same tensor have the same
numbers of it, and no two have the same in different parts: else files are mixed up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.array.lazy import LazyArray
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.region import Region, Shape
from ckpttools.stores.at_once import at_once
from ckpttools.stores.place import Place

# Elements at either end: opening a checkpoint of 400 tensors in 8 copies reads some 50 MB for that.
_ENDS = 4096


@dataclass(frozen=True, slots=True)
class Twins:
    """What two processes have of the same numbers.

    Attributes:
        what: the numbers are, for messages.
        ranks: of the processes.
        arrays: of either.
    """

    what: str
    ranks: tuple[int, int]
    arrays: tuple[LazyArray, LazyArray]

    def problem(self) -> str | None:
        """How they differ, looked at in both ends; None if they do not."""
        one, other = self.arrays
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return (
                f"{self.what}: {one.dtype}{list(one.shape)} on rank {self.ranks[0]}, "
                f"{other.dtype}{list(other.shape)} on rank {self.ranks[1]}"
            )
        if ends_of(one) != ends_of(other):
            return f"{self.what}: rank {self.ranks[1]} has other numbers than rank {self.ranks[0]}"
        return None


def ends_of(array: LazyArray) -> bytes:
    """The first and the last elements of an array; all of a small one."""
    length = _stretch(array.shape)
    first = Region((0,) * array.ndim, length)
    last = Region(tuple(n - k for n, k in zip(array.shape, length, strict=True)), array.shape)
    return b"".join(array.read(each).tobytes() for each in dict.fromkeys((first, last)))


def _stretch(shape: Shape) -> Shape:
    """Lengths of a box of few elements, whole along the last axes."""
    lengths: list[int] = []
    room = _ENDS
    for length in reversed(shape):
        lengths.insert(0, min(length, max(1, room)))
        room //= max(1, length)
    return tuple(lengths)


def refuse_copies(parts: Mapping[str, Sequence[LazyArray]], place: Place, hint: str) -> None:
    """Looks at what different processes have of different numbers.

    Args:
        parts: name of a file -> arrays in it, of which none is a part of another file's.
        place, hint: for messages.

    Raises:
        FormatError: all of two files are alike, and not of one number alone: rows of a table of embeddings
            may be.
    """

    def looked_at(name: str) -> tuple[tuple[Shape, int, bytes], ...]:
        return tuple((each.shape, each.dtype.itemsize, ends_of(each)) for each in parts[name])

    files: dict[tuple[tuple[Shape, int, bytes], ...], list[str]] = {}
    for name, found in zip(parts, at_once(place.store, looked_at, parts), strict=True):
        if not all(_is_of_one_number(ends, itemsize) for _, itemsize, ends in found):
            files.setdefault(found, []).append(name)
    if twice := [" = ".join(group) for group in files.values() if len(group) > 1]:
        raise FormatError(
            "files of several processes have the same numbers, which are of different parts:"
            + listing(twice),
            place=place,
            wanted="the file of each process once",
            hint=hint,
        )


def _is_of_one_number(data: bytes, itemsize: int) -> bool:
    return data == data[:itemsize] * (len(data) // max(1, itemsize))
