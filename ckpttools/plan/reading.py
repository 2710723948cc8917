"""What reading arrays takes where they lie."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from ckpttools.array.lazy import LazyArray, ReadCost
from ckpttools.stores.base import File
from ckpttools.stores.costs import Costs

# What starting a read costs on a local disk, in bytes of a long one: one from the cache is a system call.
_READ_RUN = 4 << 10


class Prices(NamedTuple):
    """What reading takes, in bytes of a long read from a local disk.

    Attributes:
        byte: each byte that is fetched.
        read: each read beside them.
    """

    byte: int = 1
    read: int = _READ_RUN

    def of(self, cost: ReadCost) -> int:
        """What this takes."""
        return self.byte * cost.nbytes + self.read * cost.reads


def prices(array: LazyArray) -> Prices:
    """What reading an array takes, all of which lies in one store."""
    source = next(array.sources(), None)
    if not isinstance(source, File) or source.price == 1:
        return Prices()
    return Prices(source.price, source.price * source.gap)


def reading_costs(arrays: Iterable[LazyArray]) -> Costs:
    """What the stores take together in which the arrays lie, each array in one."""
    files = (file for array in arrays for file in islice(array.sources(), 1) if isinstance(file, File))
    result = {(type(file), file.costs) for file in files}
    requests = max((costs.requests or 0 for _, costs in result), default=0)
    return Costs(requests or None, sum(costs.memory for _, costs in result))


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def readers(costs: Costs) -> int:
    """Workers for reading alone: one per core, or as many as reads are of use where these take their time."""
    # More share the cache and wait for the interpreter's lock: two cores, hashing 2.47 GB, two workers
    # 24 GB/s from the page cache, four 15; from the disk 1.48 and 1.38 s.
    return max(min(16, cores()), costs.requests or 0)
