"""Reading what is held of arrays into memory for each part, every byte once, whatever the parts are.

The memory is made for this and never used again: `jax.device_put` on CPU makes an array of memory that is
aligned to 64 bytes without copying it, even where it was told not to (jax 0.10 and 0.12).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ckpttools.array.scratch import Scratch
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region
from ckpttools.run.scanning import scan
from ckpttools.sharding.buffers import Parts as Parts
from ckpttools.sharding.buffers import buffers
from ckpttools.sharding.cutting import Cutter
from ckpttools.sharding.fresh import Populating
from ckpttools.sharding.held import HeldParts


@dataclass(frozen=True, slots=True)
class ReadResources:
    """What reading may take, and who is told of it.

    Attributes:
        memory, jobs, reserved, observe: of `ckpttools.run.scanning.scan`.
        lost: is told of values that their new dtype cannot hold: the array's name, and how many of them by
            what they became.
    """

    memory: int
    jobs: int | None
    reserved: int = 0
    observe: Callable[[int], None] = lambda nbytes: None
    lost: Callable[[str, Mapping[str, float]], None] = lambda name, counts: None


def read_parts(held: Sequence[HeldParts], reading: ReadResources) -> Iterator[tuple[int, Parts]]:
    """The parts of all arrays, each array as soon as all of it was read.

    Args:
        held: the arrays, best in the order in which they lie in their files.
        reading: memory beside the parts, workers, and who is told of the bytes that were read.

    Yields:
        The number of an array, and its parts.

    Raises:
        MemoryBudgetError: the memory does not suffice even for one worker.
        CheckpointError: as `scan`, after the arrays before the one that cannot be read.
    """
    made = dict(enumerate(map(buffers, held)))
    wanted = [each.held for each in made.values()]
    fresh = [Populating(each.memory) for each in made.values()]
    left = [each.shards.size for each in held]
    cutter = Cutter(wanted)

    def into(index: int, region: Region) -> np.ndarray | None:
        fresh[index].help()
        part = wanted[index].shards.only_part(region)
        return None if part is None else made[index].place(part, region)

    def visit(
        index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch
    ) -> Mapping[str, float]:
        shards = wanted[index].shards
        if shards.only_part(region) is None:
            for part, common in shards.parts_of(region):
                made[index].place(part, common)[...] = values[0][common.relative_to(region).slices]
        return scratch.take_counts()

    yield from ((index, made.pop(index).parts) for index, count in enumerate(left) if count == 0)
    seen = scan(
        cutter.items,
        visit,
        memory=reading.memory,
        jobs=reading.jobs,
        cut=cutter,
        reserved=reading.reserved,
        observe=reading.observe,
        name=lambda index: held[index].name,
        into=into,
    )
    for each in seen:
        if each.result:
            reading.lost(held[each.index].name, each.result)
        left[each.index] -= each.region.size
        if left[each.index] == 0:
            yield each.index, made.pop(each.index).parts
