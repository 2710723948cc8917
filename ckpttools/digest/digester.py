"""Compute the digests of many arrays from parts that come in any order, from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.scratch import Scratch
from ckpttools.array.tree import Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.memory_limit import estimate_names_bytes, format_size
from ckpttools.core.region import Region, Shape, ceil_div, contiguous_runs, count_runs, split_evenly
from ckpttools.digest.digest import BLOCK_BYTES, Digest, algorithm_named, block_count
from ckpttools.digest.stacks import WholeArray, cheapest_reads, complete_arrays
from ckpttools.plan.pieces import Item, Tiles, consecutive, fit_pieces
from ckpttools.run.events import Watch
from ckpttools.run.scanning import scan

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

    def add(self, array: WholeArray, region: Region, values: np.ndarray) -> None:
        """Add a region that has not been added before. May be called from any thread.

        Args:
            array: An array that contains arrays of the digester.
            region: Region of the array.
            values: Elements of the region, as carriers of the dtype; they may be overwritten afterwards.
        """
        for name, inner, view in array.split(region, values):
            self._hashers[name].add(inner, view)

    def watching(self, tree: Tree) -> Watch:
        """Return the callback for running a plan for `tree`, which must be called with all computed data.

        Args:
            tree: Tree of the plan. The digester's arrays are arrays of the tree, or parts of them.
        """
        by_array = {id(complete.array): complete for complete in complete_arrays(self._arrays)}
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
        missing = self._incomplete_arrays()
        while missing:
            self._read(cheapest_reads(missing), memory, jobs, observe)
            still = self._incomplete_arrays()
            if len(still) == len(missing):
                raise MemoryBudgetError("the parts of no array fit into the memory", got=format_size(memory))
            missing = still
        return {name: hasher.digest() for name, hasher in self._hashers.items()}

    def _incomplete_arrays(self) -> dict[str, LazyArray]:
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
        items: list[Item] = [(array.array,) for array in reads]
        reserved = ROOM_BYTES + self.nbytes
        fit = fit_pieces(items, memory=memory, jobs=jobs, scratch=0, reserved=reserved)
        self._room.nbytes = memory - fit.projected_peak + ROOM_BYTES
        largest = {id(array.array): self._largest(array) for array in reads}
        tiles = Tiles()

        def cut(item: Item, limit: int) -> Iterator[Region]:
            # Pieces that are cheap to read may be columns, which must be kept until the array is complete.
            fits = largest[id(item[0])] <= self._room.nbytes
            return (tiles if fits else consecutive)(item, limit)

        def visit(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> None:
            self.add(reads[index], region, values[0])

        results = scan(
            items,
            visit,
            memory=memory,
            jobs=jobs,
            reserved=reserved,
            cut=cut,
            observe=observe,
            name=lambda index: reads[index].name,
        )
        for _ in results:
            pass

    def _largest(self, array: WholeArray) -> int:
        return max(self._hashers[part.name].nbytes for part in array.parts)


class Room:
    """Memory that several hashers share for data that cannot be hashed yet.

    Attributes:
        nbytes: Size of the memory in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._used = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Reserve bytes. Returns False if not enough are free."""
        with self._lock:
            if self._used + nbytes > self.nbytes:
                return False
            self._used += nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Release reserved bytes."""
        with self._lock:
            self._used -= nbytes


@dataclass
class _Fragment:
    """A partly received block: its bytes, and the number of missing bytes."""

    data: bytearray
    missing: int


class BlockHasher:
    """Hashes one array while its parts arrive. The parts must be disjoint.

    A part that is contiguous in C order is hashed at once, except for blocks that it covers only partly,
    which wait for the rest. If other parts arrive, such as columns, the array is kept until it is complete.
    If the memory does not suffice for pending parts, the array is dropped and must be passed again.

    Attributes:
        nbytes: Size of the array in bytes.
    """

    # A checkpoint may have a hundred thousand arrays.
    __slots__ = (
        "_algorithm",
        "_digest_bytes",
        "_digests",
        "_dtype",
        "_entered",
        "_fragments",
        "_given_up",
        "_hash",
        "_held",
        "_incomplete_arrays",
        "_lock",
        "_room",
        "_shape",
        "_whole",
        "nbytes",
    )

    def __init__(self, shape: Shape, dtype: DType, algorithm: str, room: Room) -> None:
        self._shape, self._dtype = shape, dtype
        self._algorithm, self._hash = algorithm, algorithm_named(algorithm)
        self._room = room
        self._lock = threading.Lock()
        self._held = 0
        self._digest_bytes = len(self._hash(b""))
        self.nbytes = prod(shape) * dtype.itemsize
        self._begin()

    def _begin(self) -> None:
        self._incomplete_arrays = prod(self._shape)
        count = block_count(self.nbytes)
        self._digests = bytearray(count * self._digest_bytes)
        self._entered = bytearray(count)
        self._fragments: dict[int, _Fragment] = {}
        self._whole: np.ndarray | None = None
        self._given_up = False

    @property
    def is_complete(self) -> bool:
        """Whether all elements have arrived."""
        return self._incomplete_arrays == 0

    @property
    def digests_bytes(self) -> int:
        """Return the size of the block digests in bytes."""
        return len(self._digests)

    def digest(self) -> Digest:
        """Return the digest of the complete array."""
        return Digest.of(self._algorithm, self._dtype.name, self._shape, bytes(self._digests))

    def restart(self) -> None:
        """Forget all parts, which will be passed again."""
        self._drop()
        self._begin()

    def add(self, region: Region, values: np.ndarray) -> None:
        """Add a part.

        Args:
            region: Region of the part. It must not have been passed before, unless the array is complete.
            values: Elements of the region, as carriers of the dtype with any strides; copied if they are
                kept.
        """
        if self._given_up or self.is_complete or region.size == 0:
            return
        if self._whole is None and count_runs(self._shape, region) == 1:
            done = all(self._add_run(part, elements) for part, elements in _contiguous(region, values))
        else:
            done = self._add_box(region, values)
        with self._lock:
            if done and not self._given_up:
                self._incomplete_arrays -= region.size
                if self._incomplete_arrays == 0 and self._whole is not None:
                    self._hash_buffer(self._whole)
            else:
                self._discard_buffer()

    def _add_run(self, region: Region, values: np.ndarray) -> bool:
        """Add a part that is contiguous in C order. Returns whether there was memory for pending data."""
        data = values.reshape(-1).view(np.uint8).data
        start = next(contiguous_runs(self._shape, region))[0] * self._dtype.itemsize
        stop = start + len(data)
        # This part covers the blocks from `first` up to `last` completely; the last block of the array is
        # shorter.
        first = ceil_div(start, BLOCK_BYTES)
        last = stop // BLOCK_BYTES if stop < self.nbytes else block_count(stop)
        if last < first:
            return self._add_fragment(last, start % BLOCK_BYTES, data)
        locations = range(first * BLOCK_BYTES - start, last * BLOCK_BYTES - start, BLOCK_BYTES)
        self._enter(first, [self._hash(data[location : location + BLOCK_BYTES]) for location in locations])
        before, after = data[: max(0, locations.start)], data[locations.stop :]
        return (not before or self._add_fragment(first - 1, start % BLOCK_BYTES, before)) and (
            not after or self._add_fragment(last, 0, after)
        )

    def _span(self, number: int) -> tuple[int, int]:
        """Return the start and end of a block in bytes."""
        return number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.nbytes)

    def _enter(self, number: int, digests: Sequence[bytes]) -> None:
        """Record the digests of consecutive blocks, starting with block `number`."""
        stop = number + len(digests)
        self._digests[number * self._digest_bytes : stop * self._digest_bytes] = b"".join(digests)
        self._entered[number:stop] = b"\1" * len(digests)

    def _add_fragment(self, number: int, offset: int, part: memoryview) -> bool:
        first, last = self._span(number)
        with self._lock:
            if self._given_up:
                return False
            if self._whole is not None:
                _bytes(self._whole)[first + offset : first + offset + len(part)] = part
                return True
            fragment = self._fragments.get(number)
            if fragment is None:
                if not self._reserve(last - first):
                    return False
                fragment = self._fragments[number] = _Fragment(bytearray(last - first), last - first)
            fragment.data[offset : offset + len(part)] = part
            fragment.missing -= len(part)
            if fragment.missing == 0:
                self._enter(number, [self._hash(fragment.data)])
                self._release(len(self._fragments.pop(number).data))
        return True

    def _reserve(self, nbytes: int) -> bool:
        taken = self._room.take(nbytes)
        self._held += nbytes if taken else 0
        return taken

    def _release(self, nbytes: int) -> None:
        self._held -= nbytes
        self._room.give(nbytes)

    def _add_box(self, region: Region, values: np.ndarray) -> bool:
        """Add a part that is not contiguous. Returns whether there was memory for the complete array."""
        with self._lock:
            buffer = self._whole if self._whole is not None or self._given_up else self._allocate_buffer()
        if buffer is None:
            return False
        buffer[region.slices] = values
        return True

    def _allocate_buffer(self) -> np.ndarray | None:
        if not self._reserve(self.nbytes - self._held):
            return None
        self._whole = np.empty(self._shape, self._dtype.carrier)
        data = _bytes(self._whole)
        for number, fragment in self._fragments.items():
            # Missing bytes of the fragment will be written to the complete array when they arrive.
            first, last = self._span(number)
            data[first:last] = fragment.data
        self._fragments.clear()
        return self._whole

    def _hash_buffer(self, buffer: np.ndarray) -> None:
        """Hash the blocks that were not hashed on arrival."""
        data = _bytes(buffer)
        for number in range(len(self._entered)):
            if not self._entered[number]:
                first, last = self._span(number)
                self._enter(number, [self._hash(data[first:last])])
        self._drop()

    def _drop(self) -> None:
        """Release everything that was kept."""
        self._whole = None
        self._fragments.clear()
        self._release(self._held)

    def _discard_buffer(self) -> None:
        self._given_up = True
        self._drop()


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _contiguous(region: Region, values: np.ndarray) -> Iterator[tuple[Region, np.ndarray]]:
    """Yield the part in contiguous pieces. Other data is copied, one block at a time."""
    if values.flags.c_contiguous:
        yield region, values
        return
    for piece in split_evenly(region, BLOCK_BYTES // values.itemsize):
        yield piece, np.ascontiguousarray(values[piece.relative_to(region).slices])
