"""Hashing an array whose parts come in any order, from several threads, in little memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Region, Shape, ceil_div, contiguous_runs, count_runs, split_evenly
from ckpttools.digest.digest import BLOCK_BYTES, Digest, algorithm_named, block_count


class Room:
    """Memory that several hashers share for data that cannot be hashed yet.

    Attributes:
        nbytes: how much of it there is.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._used = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Reserves bytes; whether there were enough."""
        with self._lock:
            if self._used + nbytes > self.nbytes:
                return False
            self._used += nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Release bytes."""
        with self._lock:
            self._used -= nbytes


@dataclass
class _Fragment:
    """A part of a block: its bytes, and how many of them are missing."""

    data: bytearray
    missing: int


class BlockHasher:
    """The digest of one array while its parts arrive; they must be disjoint.

    A part that is contiguous in C order is hashed at once, except for blocks that it only partly covers:
    those wait for the rest. If other parts arrive, such as columns, the array is kept until it is whole. If
    the memory does not suffice for pending parts, the array is dropped and must be passed again.

    Attributes:
        nbytes: of the array.
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
        "_lock",
        "_missing",
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
        self._missing = prod(self._shape)
        count = block_count(self.nbytes)
        self._digests = bytearray(count * self._digest_bytes)
        self._entered = bytearray(count)
        self._fragments: dict[int, _Fragment] = {}
        self._whole: np.ndarray | None = None
        self._given_up = False

    @property
    def is_complete(self) -> bool:
        """Whether all elements have arrived."""
        return self._missing == 0

    @property
    def digests_bytes(self) -> int:
        """Bytes of the digests of its blocks."""
        return len(self._digests)

    def digest(self) -> Digest:
        """Return the digest, once the array is complete."""
        return Digest.of(self._algorithm, self._dtype.name, self._shape, bytes(self._digests))

    def restart(self) -> None:
        """Forget all parts, which will be passed again."""
        self._drop()
        self._begin()

    def add(self, region: Region, values: np.ndarray) -> None:
        """Take a part.

        Args:
            region: its place in the array; not passed before, unless the array is complete.
            values: of the region's shape, as carriers of the dtype, any strides; copied if kept.
        """
        if self._given_up or self.is_complete or region.size == 0:
            return
        if self._whole is None and count_runs(self._shape, region) == 1:
            done = all(self._add_run(part, stretch) for part, stretch in _contiguous(region, values))
        else:
            done = self._add_box(region, values)
        with self._lock:
            if done and not self._given_up:
                self._missing -= region.size
                if self._missing == 0 and self._whole is not None:
                    self._hash_whole(self._whole)
            else:
                self._give_up()

    def _add_run(self, region: Region, values: np.ndarray) -> bool:
        """Add a part that is contiguous in C order; return whether there was memory for pending parts."""
        data = values.reshape(-1).view(np.uint8).data
        start = next(contiguous_runs(self._shape, region))[0] * self._dtype.itemsize
        stop = start + len(data)
        # Blocks from `first` up to `last` are complete in this stretch; the array's last block is shorter.
        first = ceil_div(start, BLOCK_BYTES)
        last = stop // BLOCK_BYTES if stop < self.nbytes else block_count(stop)
        if last < first:
            return self._add_fragment(last, start % BLOCK_BYTES, data)
        locations = range(first * BLOCK_BYTES - start, last * BLOCK_BYTES - start, BLOCK_BYTES)
        self._enter(first, [self._hash(data[location : location + BLOCK_BYTES]) for location in locations])
        before, behind = data[: max(0, locations.start)], data[locations.stop :]
        return (not before or self._add_fragment(first - 1, start % BLOCK_BYTES, before)) and (
            not behind or self._add_fragment(last, 0, behind)
        )

    def _span(self, number: int) -> tuple[int, int]:
        """Return the bytes of a block."""
        return number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.nbytes)

    def _enter(self, number: int, digests: Sequence[bytes]) -> None:
        """Notes the digests of blocks from a number on."""
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
                if not self._take(last - first):
                    return False
                fragment = self._fragments[number] = _Fragment(bytearray(last - first), last - first)
            fragment.data[offset : offset + len(part)] = part
            fragment.missing -= len(part)
            if fragment.missing == 0:
                self._enter(number, [self._hash(fragment.data)])
                self._give(len(self._fragments.pop(number).data))
        return True

    def _take(self, nbytes: int) -> bool:
        taken = self._room.take(nbytes)
        self._held += nbytes if taken else 0
        return taken

    def _give(self, nbytes: int) -> None:
        self._held -= nbytes
        self._room.give(nbytes)

    def _add_box(self, region: Region, values: np.ndarray) -> bool:
        """Take any other part; whether there is room for the whole array."""
        with self._lock:
            whole = self._whole if self._whole is not None or self._given_up else self._make_whole()
        if whole is None:
            return False
        whole[region.slices] = values
        return True

    def _make_whole(self) -> np.ndarray | None:
        if not self._take(self.nbytes - self._held):
            return None
        self._whole = np.empty(self._shape, self._dtype.carrier)
        data = _bytes(self._whole)
        for number, fragment in self._fragments.items():
            # The bytes that a fragment lacks come to their places in the whole.
            first, last = self._span(number)
            data[first:last] = fragment.data
        self._fragments.clear()
        return self._whole

    def _hash_whole(self, whole: np.ndarray) -> None:
        """Hashes the blocks that were not hashed when they came."""
        data = _bytes(whole)
        for number in range(len(self._entered)):
            if not self._entered[number]:
                first, last = self._span(number)
                self._enter(number, [self._hash(data[first:last])])
        self._drop()

    def _drop(self) -> None:
        """Release everything that was kept."""
        self._whole = None
        self._fragments.clear()
        self._give(self._held)

    def _give_up(self) -> None:
        self._given_up = True
        self._drop()


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _contiguous(region: Region, values: np.ndarray) -> Iterator[tuple[Region, np.ndarray]]:
    """Yield the part in contiguous pieces; other data is copied, one block at a time."""
    if values.flags.c_contiguous:
        yield region, values
        return
    for piece in split_evenly(region, BLOCK_BYTES // values.itemsize):
        yield piece, np.ascontiguousarray(values[piece.relative_to(region).slices])
