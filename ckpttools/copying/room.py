"""The number of workers of a copy, and their memory."""

from __future__ import annotations

from ckpttools.copying.pieces import BLOCK_BYTES
from ckpttools.core.budget import baseline_bytes, memory_error
from ckpttools.core.dataclass import dataclass
from ckpttools.stores.base import Store

# Memory of a file besides its name in listings, statuses and pieces; and of a character of the name.
_BYTES_PER_FILE, _BYTES_PER_CHARACTER = 2048, 6
# A worker with less waits more for requests; more gains nothing (16 requests of 4 MiB at once).
_LARGEST_BUFFER, _GOOD_BUFFER = 32 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class CopyRoom:
    """Memory and workers for a copy.

    Attributes:
        jobs: workers.
        buffer_bytes: that each of them has to read into.
    """

    jobs: int
    buffer_bytes: int


def room_for(
    names: list[str], held: int, source: Store, destination: Store, memory: int, jobs: int
) -> CopyRoom:
    """Return how many workers fit into the memory.

    Args:
        names: of the files.
        held: bytes of files that stay in memory until all others are complete.
        source, destination: stores.
        memory: bytes that may be resident.
        jobs: workers at most.

    Raises:
        MemoryBudgetError: it does not suffice for one worker.
    """
    listed = len(names) * _BYTES_PER_FILE + sum(map(len, names)) * _BYTES_PER_CHARACTER
    base = baseline_bytes() + source.costs.memory + listed + held
    if destination is not source:
        base += destination.costs.memory
    streams = destination.streams.memory if destination.streams else 0
    for least in (_GOOD_BUFFER, BLOCK_BYTES):
        count = min(jobs, (memory - base) // (streams + least))
        if count > 0:
            share = (memory - base) // count - streams
            return CopyRoom(count, min(_LARGEST_BUFFER, share) // BLOCK_BYTES * BLOCK_BYTES)
    raise memory_error("the copy does not fit into the memory allowed", memory, base + streams + BLOCK_BYTES)
