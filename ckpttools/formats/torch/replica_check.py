"""Check the values of processes: replicas must be equal, and different parts must differ.

These files do not record their save or step. If processes disagree on the same tensor, or two processes have
the same values in different parts, then files were mixed up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import cache

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import window
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.region import Region, Shape
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

# Number of elements to compare at either end: for a checkpoint of 400 tensors with 8 replicas, opening reads
# about 50 MB for this.
_ENDS = 4096
# Number of additional ranges to compare in files that look alike.
_MAX_SPANS = 64

_Examination = tuple[Shape, int, bytes]
"""A part's shape, its element size, and the elements at both ends."""
_Looks = Mapping[str, _Examination]


@dataclass(frozen=True, slots=True)
class Twins:
    """Copies of the same values from two processes.

    Attributes:
        what: Name of the values, for messages.
        ranks: The two processes.
        arrays: The copy of each process.
    """

    what: str
    ranks: tuple[int, int]
    arrays: tuple[LazyArray, LazyArray]

    def problem(self) -> str | None:
        """Return how the copies differ at either end; None if they are equal there."""
        one, other = self.arrays
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return (
                f"{self.what}: {one.dtype}{list(one.shape)} on rank {self.ranks[0]}, "
                f"{other.dtype}{list(other.shape)} on rank {self.ranks[1]}"
            )
        if ends_of(one) != ends_of(other):
            return f"{self.what}: rank {self.ranks[1]} has other values than rank {self.ranks[0]}"
        return None


def ends_of(array: LazyArray) -> bytes:
    """Read the first and last elements of an array; for a small array, all elements."""
    length = _stretch(array.shape)
    first = Region((0,) * array.ndim, length)
    last = Region(tuple(n - k for n, k in zip(array.shape, length, strict=True)), array.shape)
    return b"".join(array.read(fromkey).tobytes() for fromkey in dict.fromkeys((first, last)))


def _stretch(shape: Shape) -> Shape:
    """Return the shape of a box with few elements, which is complete along the last axes."""
    lengths: list[int] = []
    room = _ENDS
    for length in reversed(shape):
        lengths.insert(0, min(length, max(1, room)))
        room //= max(1, length)
    return tuple(lengths)


@dataclass(frozen=True, slots=True)
class ProcessFile:
    """The part of a checkpoint that one process saved.

    Attributes:
        parts: The process's part of some arrays, by name; other processes have other parts.
        file: The file that contains the parts.
        spans: Returns offset and length in bytes of everything in the file; called for few files.
    """

    parts: Mapping[str, LazyArray]
    file: ByteSource
    spans: Callable[[], Set[tuple[int, int]]]


def refuse_copies(files: Mapping[str, ProcessFile], location: Location, hint: str) -> None:
    """Raise an error if two processes have equal values in different parts.

    Parts may legitimately be equal: constant values such as new moments, or experts that started as copies of
    each other. Files therefore count as copies only if all compared data are equal and not of this kind.

    Args:
        files: Files of the processes, by name.
        location, hint: Location and hint of the error.

    Raises:
        FormatError: Two files are copies.
    """

    def looked_at(name: str) -> _Looks:
        parts = files[name].parts.items()
        return {what: (item.shape, item.dtype.itemsize, ends_of(item)) for what, item in parts}

    summaries = dict(zip(files, map_concurrently(location.store, looked_at, files), strict=True))
    groups: dict[tuple[_Examination, ...], list[str]] = {}
    for name, result in summaries.items():
        if not all(_is_of_one_number(ends, itemsize) for _, itemsize, ends in result.values()):
            groups.setdefault(tuple(result.values()), []).append(name)
    duplicates = [
        " = ".join(names)
        for suspect in groups.values()
        if len(suspect) > 1 and not _are_experts([files[name].parts for name in suspect], summaries.values())
        for names in _group_equal_files(files, suspect)
    ]
    if duplicates:
        raise FormatError(
            "files of several processes have equal values in different parts:" + listing(duplicates),
            location=location,
            expected="the file of each process once",
            hint=hint,
        )


def _group_equal_files(files: Mapping[str, ProcessFile], names: Sequence[str]) -> list[list[str]]:
    """Group files that agree wherever any of them has data; only these can be copies."""

    @cache
    def middle(name: str, span: tuple[int, int]) -> bytes:
        offset, nbytes = span
        result = bytearray(min(nbytes, _ENDS))
        files[name].file.read_into(offset + (nbytes - len(result)) // 2, result)
        return bytes(result)

    all_spans = {name: files[name].spans() for name in names}
    groups: dict[str, list[str]] = {}
    for name in names:
        spans = all_spans[name]
        # Compare one range of each length: weights of the same shape may be equal, but a different shape
        # means different weights.
        looked_at = sorted({span[1]: span for span in spans}.values(), key=lambda span: -span[1])[:_MAX_SPANS]
        for first in groups:
            within = all_spans[first]
            if (spans <= within or within <= spans) and all(
                span not in within or middle(first, span) == middle(name, span) for span in looked_at
            ):
                groups[first].append(name)
                break
        else:
            groups[name] = [name]
    return [group for group in groups.values() if len(group) > 1]


def _are_experts(equal_data: Sequence[Mapping[str, LazyArray]], summaries: Collection[_Looks]) -> bool:
    """Return whether the equal data of several files are experts that are copies of each other.

    This is the case if rows repeat in each file, or if three or more files have these arrays and all of them
    are equal.

    Args:
        equal_data: The equal data of the files.
        summaries: The compared data of all files.
    """
    first = equal_data[0]

    def are_copies(name: str) -> bool:
        result = [look[name] for look in summaries if name in look]
        return first[name].ndim > 2 and len(result) > 2 and len({*result}) == 1

    if all(map(_is_repeated, first.values())):
        return True
    return all(item.keys() == first.keys() for item in equal_data) and all(map(are_copies, first))


def _is_repeated(array: LazyArray) -> bool:
    """Return whether the first and last rows of several are equal, as in experts that are copies."""
    if array.ndim < 2 or array.shape[0] < 2:
        return False
    row, rest = (1, *array.shape[1:]), (0,) * (array.ndim - 1)
    return ends_of(window(array, (0, *rest), row)) == ends_of(window(array, (array.shape[0] - 1, *rest), row))


def _is_of_one_number(data: bytes, itemsize: int) -> bool:
    return data == data[:itemsize] * (len(data) // max(1, itemsize))
