"""Compute the digests of many arrays from parts of stored arrays, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.scratch import Scratch
from ckpttools.array.tree import Path, Tree
from ckpttools.core.budget import estimate_names_bytes, format_size
from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.region import Region
from ckpttools.digest.block_hasher import BlockHasher, Room
from ckpttools.digest.digest import Digest
from ckpttools.digest.stacks import WholeArray, cheapest_reads, wholes
from ckpttools.plan.pieces import Item, Tiles, consecutive, fit_pieces
from ckpttools.run.events import Watch
from ckpttools.run.scanning import scan

if TYPE_CHECKING:
    import numpy as np

# Minimum memory for parts that wait for other parts of an array.
ROOM_BYTES = 16 << 20
# Memory of an array's digest and of the state of computing it.
_BYTES_PER_NAME = 512


class Digester:
    """Computes the digests of named arrays.

    Args:
        arrays: Arrays by name.
        algorithm: One of `ckpttools.digest.digest.ALGORITHMS`.
        room: Bytes for parts that wait for other parts of their array.
    """

    def __init__(self, arrays: Mapping[str, LazyArray], algorithm: str, room: int = ROOM_BYTES) -> None:
        self._arrays = arrays
        self._room = Room(room)
        self._hashers = {
            name: BlockHasher(array.shape, array.dtype, algorithm, self._room)
            for name, array in arrays.items()
        }

    @property
    def nbytes(self) -> int:
        """Memory that the digester itself uses, in addition to the arrays and the room, in bytes."""
        digests = sum(hasher.digests_bytes for hasher in self._hashers.values())
        return estimate_names_bytes(self._arrays) + len(self._arrays) * _BYTES_PER_NAME + 4 * digests

    def add(self, whole: WholeArray, region: Region, values: np.ndarray) -> None:
        """Add a region that has not been added before. May be called from any thread.

        Args:
            whole: An array that contains arrays of the digester.
            region: Region of the array.
            values: Elements of the region, as carriers of the dtype; they may be overwritten afterwards.
        """
        for name, inner, view in whole.split(region, values):
            self._hashers[name].add(inner, view)

    def watching(self, tree: Tree) -> Watch:
        """Return the callback for running a plan for `tree`, which must be called with all computed data.

        Args:
            tree: Tree of the plan. The digester's arrays are arrays of the tree, or parts of them.
        """
        by_array = {id(whole.array): whole for whole in wholes(self._arrays)}
        result = {path: by_array[id(array)] for path, array in tree.arrays.items() if id(array) in by_array}

        def watch(path: Path, region: Region, values: np.ndarray) -> None:
            if path in result:
                self.add(result[path], region, values)

        return watch

    def digests(
        self, *, memory: int, jobs: int | None, observe: Callable[[int], None] = lambda nbytes: None
    ) -> dict[str, Digest]:
        """Return the digests of all arrays, in order. Incomplete arrays are read.

        Args:
            memory: Maximum resident bytes.
            jobs: Number of workers.
            observe: Called with the bytes of each piece that was read.

        Raises:
            MemoryBudgetError: The memory is too small.
            CheckpointError: An array cannot be read.
        """
        missing = self._missing()
        while missing:
            self._read(cheapest_reads(missing), memory, jobs, observe)
            still = self._missing()
            if len(still) == len(missing):
                raise MemoryBudgetError("the parts of no array fit into the memory", got=format_size(memory))
            missing = still
        return {name: hasher.digest() for name, hasher in self._hashers.items()}

    def _missing(self) -> dict[str, LazyArray]:
        """Return the incomplete arrays, reset to be read from the beginning."""
        missing = {
            name: self._arrays[name] for name, hasher in self._hashers.items() if not hasher.is_complete
        }
        for name in missing:
            self._hashers[name].restart()
        return missing

    def _read(
        self, reads: list[WholeArray], memory: int, jobs: int | None, observe: Callable[[int], None]
    ) -> None:
        """Read arrays once. Some may stay incomplete for lack of memory."""
        items: list[Item] = [(whole.array,) for whole in reads]
        reserved = ROOM_BYTES + self.nbytes
        fit = fit_pieces(items, memory=memory, jobs=jobs, scratch=0, reserved=reserved)
        self._room.nbytes = memory - fit.projected_peak + ROOM_BYTES
        largest = {id(whole.array): self._largest(whole) for whole in reads}
        tiles = Tiles()

        def cut(item: Item, limit: int) -> Iterator[Region]:
            # Pieces that are cheap to read may be columns, which must be kept until the array is complete.
            fits = largest[id(item[0])] <= self._room.nbytes
            return (tiles if fits else consecutive)(item, limit)

        def visit(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> None:
            self.add(reads[index], region, values[0])

        seen = scan(
            items,
            visit,
            memory=memory,
            jobs=jobs,
            reserved=reserved,
            cut=cut,
            observe=observe,
            name=lambda index: reads[index].name,
        )
        for _ in seen:
            pass

    def _largest(self, whole: WholeArray) -> int:
        return max(self._hashers[part.name].nbytes for part in whole.parts)
