"""Whether numbers that processes saved are as they must be: copies alike, different parts different.

Nothing in these files says of which save or step they are. Processes that hold the same tensor have the same
numbers of it, and no two have the same in different parts: else files are mixed up.
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

# Elements at either end: opening a checkpoint of 400 tensors in 8 copies reads some 50 MB for that.
_ENDS = 4096
# Places of files that look alike which are looked at as well.
_MOST_SPANS = 64

_Look = tuple[Shape, int, bytes]
"""A part's shape, bytes of an element, and elements at both ends."""
_Looks = Mapping[str, _Look]


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
    """Return the first and the last elements of an array; all of a small one."""
    length = _stretch(array.shape)
    first = Region((0,) * array.ndim, length)
    last = Region(tuple(n - k for n, k in zip(array.shape, length, strict=True)), array.shape)
    return b"".join(array.read(fromkey).tobytes() for fromkey in dict.fromkeys((first, last)))


def _stretch(shape: Shape) -> Shape:
    """Return lengths of a box of few elements, whole along the last axes."""
    lengths: list[int] = []
    room = _ENDS
    for length in reversed(shape):
        lengths.insert(0, min(length, max(1, room)))
        room //= max(1, length)
    return tuple(lengths)


@dataclass(frozen=True, slots=True)
class ProcessFile:
    """What one process saved.

    Attributes:
        parts: of some arrays, by name, what it has; each other process has another part.
        file: it lies in.
        spans: gives offset and length in bytes of all that is in it, which is asked of few files.
    """

    parts: Mapping[str, LazyArray]
    file: ByteSource
    spans: Callable[[], Set[tuple[int, int]]]


def refuse_copies(files: Mapping[str, ProcessFile], location: Location, hint: str) -> None:
    """Look at what different processes have of different numbers.

    Parts may be alike where they are right: of one number, as new moments, or experts that began as copies of
    each other. So files are copies where all that is looked at is alike, and it is not of that kind alone.

    Args:
        files: of processes, by name.
        location, hint: for messages.

    Raises:
        FormatError: two files are alike.
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
            "files of several processes have the same numbers, which are of different parts:"
            + listing(twice),
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
        # One of each length: weights of one shape may be alike, those of others are other weights.
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
    """Return whether what files have alike are experts that are copies of each other.

    Its rows repeat in each file; or it is of the same arrays, and all files with any of these, three or more,
    have matrices of them that are alike.

    Args:
        alike: what each of these files has.
        looks: how that of all files looks.
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
