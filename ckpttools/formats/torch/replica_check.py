"""Check the values of processes: replicas must be equal, different parts must differ.

Nothing in these files identifies their save or step. Processes with the same tensor have the same values,
and no
two processes have the same values in different parts; otherwise files are mixed up.
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

# Elements at either end: opening a checkpoint of 400 tensors with 8 replicas reads about 50 MB for that.
_ENDS = 4096
# Number of further ranges to compare in files that look alike.
_MOST_SPANS = 64

_Look = tuple[Shape, int, bytes]
"""A part's shape, bytes of an element, and elements at both ends."""
_Looks = Mapping[str, _Look]


@dataclass(frozen=True, slots=True)
class Twins:
    """Two processes' copies of the same values.

    Attributes:
        what: name of the values, for messages.
        ranks: the two processes.
        arrays: their arrays.
    """

    what: str
    ranks: tuple[int, int]
    arrays: tuple[LazyArray, LazyArray]

    def problem(self) -> str | None:
        """Return how they differ at both ends; None if they are equal."""
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
    """Return the first and last elements of an array; all elements of a small array."""
    length = _stretch(array.shape)
    first = Region((0,) * array.ndim, length)
    last = Region(tuple(n - k for n, k in zip(array.shape, length, strict=True)), array.shape)
    return b"".join(array.read(fromkey).tobytes() for fromkey in dict.fromkeys((first, last)))


def _stretch(shape: Shape) -> Shape:
    """Return the shape of a box with few elements, complete along the last axes."""
    lengths: list[int] = []
    room = _ENDS
    for length in reversed(shape):
        lengths.insert(0, min(length, max(1, room)))
        room //= max(1, length)
    return tuple(lengths)


@dataclass(frozen=True, slots=True)
class ProcessFile:
    """The part of the checkpoint that one process saved.

    Attributes:
        parts: its parts of some arrays, by name; each other process has another part.
        file: the file with the parts.
        spans: returns offset and length in bytes of everything in it; called for few files.
    """

    parts: Mapping[str, LazyArray]
    file: ByteSource
    spans: Callable[[], Set[tuple[int, int]]]


def refuse_copies(files: Mapping[str, ProcessFile], location: Location, hint: str) -> None:
    """Raise an error if two processes have equal values in different parts.

    Parts may legitimately be equal: of constant values, such as new moments, or of experts that started as
        copies
    of each other. So files count as copies only if everything compared is equal, and not only of this kind.
    Args:
        files: files of the processes, by name.
        location, hint: for messages.

    Raises:
        FormatError: two files are copies.
    """

    def looked_at(name: str) -> _Looks:
        parts = files[name].parts.items()
        return {what: (item.shape, item.dtype.itemsize, ends_of(item)) for what, item in parts}

    looks = dict(zip(files, map_concurrently(location.store, looked_at, files), strict=True))
    groups: dict[tuple[_Look, ...], list[str]] = {}
    for name, result in looks.items():
        if not all(_is_of_one_number(ends, itemsize) for _, itemsize, ends in result.values()):
            groups.setdefault(tuple(result.values()), []).append(name)
    twice = [
        " = ".join(names)
        for suspect in groups.values()
        if len(suspect) > 1 and not _are_experts([files[name].parts for name in suspect], looks.values())
        for names in _alike(files, suspect)
    ]
    if twice:
        raise FormatError(
            "files of several processes have equal values in different parts:" + listing(twice),
            location=location,
            expected="the file of each process once",
            hint=hint,
        )


def _alike(files: Mapping[str, ProcessFile], names: Sequence[str]) -> list[list[str]]:
    """Return which files agree wherever one of them has data: only those can be replicas."""

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
        # Compare one range of each length: weights of one shape may be equal, those of other shapes are
        # other weights.
        looked_at = sorted({span[1]: span for span in spans}.values(), key=lambda span: -span[1])[
            :_MOST_SPANS
        ]
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


def _are_experts(alike: Sequence[Mapping[str, LazyArray]], looks: Collection[_Looks]) -> bool:
    """Return whether the equal data of several files are experts that are copies of each other.

    Their rows repeat in each file, or all files (three or more) that have any of these arrays have equal
    matrices
    of them.

    Args:
        alike: the equal data of these files.
        looks: the compared data of all files.
    """
    first = alike[0]

    def are_copies(what: str) -> bool:
        result = [look[what] for look in looks if what in look]
        return first[what].ndim > 2 and len(result) > 2 and len({*result}) == 1

    if all(map(_is_repeated, first.values())):
        return True
    return all(item.keys() == first.keys() for item in alike) and all(map(are_copies, first))


def _is_repeated(array: LazyArray) -> bool:
    """Return whether the first and last of several rows are equal, as in experts that are copies."""
    if array.ndim < 2 or array.shape[0] < 2:
        return False
    row, rest = (1, *array.shape[1:]), (0,) * (array.ndim - 1)
    return ends_of(window(array, (0, *rest), row)) == ends_of(window(array, (array.shape[0] - 1, *rest), row))


def _is_of_one_number(data: bytes, itemsize: int) -> bool:
    return data == data[:itemsize] * (len(data) // max(1, itemsize))
