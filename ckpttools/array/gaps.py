"""Missing chunks of arrays. Inspections report them; commands that read complete arrays refuse them."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Chunked, distinct_arrays
from ckpttools.array.stored import Gaps
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import listing

_MAX_FAULTS = 3


@dataclass(frozen=True, slots=True)
class MissingChunks:
    """The missing chunks of several arrays.

    Attributes:
        missing, chunks: Number of missing chunks and of all chunks in the incomplete arrays.
        arrays: The gaps of each incomplete array.
        hint: A suggestion for finding the chunks.
    """

    missing: int
    chunks: int
    arrays: tuple[Gaps, ...]
    hint: str

    @property
    def summary(self) -> str:
        """Format as `6 of 12 chunks of 3 arrays are missing, such as w/c/1/0`, with the files concerned."""
        number, faults = len(self.arrays), self._faults
        of = f"{self.missing:,} of {self.chunks:,} chunks of {number:,} array{'s' * (number != 1)}"
        are = "cannot be read" if faults else "is missing" if self.missing == 1 else "are missing"
        more = f" and {len(faults) - _MAX_FAULTS:,} more files" if len(faults) > _MAX_FAULTS else ""
        faults_text = f" ({'; '.join(faults[:_MAX_FAULTS])}{more})" if faults else ""
        return f"{of} {are}, such as {self.arrays[0].first}{faults_text}"

    @property
    def _faults(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(fault for array in self.arrays for fault in array.faults))


def missing_chunks(arrays: Iterable[LazyArray]) -> MissingChunks | None:
    """Return the missing chunks of the arrays' stored sources, or None if all arrays are complete."""
    gaps = tuple(array.gaps for array in distinct_arrays(arrays) if isinstance(array, Chunked) and array.gaps)
    if not gaps:
        return None
    return MissingChunks(sum(g.missing for g in gaps), sum(g.chunks for g in gaps), gaps, gaps[0].hint)


def refuse_incomplete(arrays: Iterable[LazyArray], location: str) -> None:
    """Raise an error that lists all arrays with missing chunks.

    Raises:
        FormatError, StorageError: Chunks are missing; the class is the one that reading the first such array
            would raise.
    """
    missing = missing_chunks(arrays)
    if missing is not None:
        lines = [f"{array.array}: {array.missing:,} of {array.chunks:,} chunks" for array in missing.arrays]
        error = missing.arrays[0].error
        raise error(missing.summary + listing(lines), location=location, hint=missing.hint)
