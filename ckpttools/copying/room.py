"""The number of workers of a copy, and their memory."""

from __future__ import annotations

from ckpttools.copying.pieces import BLOCK_BYTES
from ckpttools.core.budget import baseline_bytes, memory_error
from ckpttools.core.dataclass import dataclass
from ckpttools.stores.base import Store

# Memory of a file in listings, statuses and pieces, without its name; and of a character of the name.
_BYTES_PER_FILE, _BYTES_PER_CHARACTER = 2048, 6
# With a smaller buffer, a worker waits more for requests. A larger one gains nothing (16 concurrent requests
# of 4 MiB).
_LARGEST_BUFFER, _GOOD_BUFFER = 32 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class CopyRoom:
    """The memory and workers of a copy.

    Attributes:
        jobs: Number of workers.
        buffer_bytes: Size of each worker's read buffer.
    """

    jobs: int
    buffer_bytes: int


def room_for(
    names: list[str], held: int, source: Store, destination: Store, memory: int, jobs: int
) -> CopyRoom:
    """Return the number of workers that fit into the memory, and their buffers.

    Args:
        names: Names of the files.
        held: Bytes of files that stay in memory until all others are complete.
        source, destination: The stores.
        memory: Maximum resident bytes.
        jobs: Maximum number of workers.

    Raises:
        MemoryBudgetError: The memory does not suffice for one worker.
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
