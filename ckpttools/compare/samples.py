"""A few elements of an array, to rule out hypotheses quickly."""

from __future__ import annotations

import random
from math import prod

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stored, elementwise
from ckpttools.array.scratch import Scratch
from ckpttools.compare.measure import as_doubles, block_elements, coarser, deviation
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Region, Shape, split_evenly
from ckpttools.mapping.values import Cast
from ckpttools.stores.memory import Bytes

# Number of elements in a box, with most on the last axis, whose neighbors are contiguous in memory.
_BOX, _LAST, _SIDE = 2048, 128, 8
_BOXES = 4
# If reading a sample costs more than this, hypotheses are tried on a copy in memory.
_EXPENSIVE_READ = 1 << 20


def boxes(shape: Shape) -> list[Region]:
    """Return the regions of a sample: both ends and two places between. Equal shapes give equal regions."""
    if 0 in shape:
        return []
    sides = _sides(shape)
    locations = random.Random(repr(shape))
    starts = [
        tuple(0 for _ in shape),
        tuple(length - side for length, side in zip(shape, sides, strict=True)),
        *(
            tuple(locations.randint(0, length - side) for length, side in zip(shape, sides, strict=True))
            for _ in range(_BOXES - 2)
        ),
    ]
    return [
        Region(start, tuple(a + side for a, side in zip(start, sides, strict=True)))
        for start in dict.fromkeys(starts)
    ]


def _sides(shape: Shape) -> Shape:
    """Return the shape of a box: as much of the last axis as allowed, and of the others as fits."""
    sides = [min(shape[-1], _LAST if len(shape) > 1 else _BOX)] if shape else []
    for length in reversed(shape[:-1]):
        sides.append(max(1, min(length, _BOX // prod(sides), _SIDE)))
    return tuple(reversed(sides))


def load_for_sampling(array: LazyArray, room: int) -> LazyArray:
    """Copy an array to memory if its samples are expensive to read; return other arrays unchanged.

    Args:
        array: Any array.
        room: Maximum bytes of a copy.
    """
    read = sum(array.read_cost(box).nbytes for box in boxes(array.shape))
    if read < _EXPENSIVE_READ or array.nbytes > room:
        return array
    return Stored(array.shape, array.dtype, Bytes("memory", array.read().tobytes()), 0, whole_bytes=True)


def read_samples(array: LazyArray) -> list[np.ndarray]:
    """Return the elements of an array's sample, as carriers."""
    return [array.read(box).view(array.dtype.carrier) for box in boxes(array.shape)]


def is_equal_within(region: Region, left: LazyArray, right: LazyArray, ulps: int) -> bool:
    """Return whether two arrays differ by at most `ulps` units in the last place within a small region."""
    values = [item.read(region).view(item.dtype.carrier) for item in (left, right)]
    return close(values[0], values[1], (left.dtype, right.dtype), ulps)


def close(
    a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType], ulps: int, scratch: Scratch | None = None
) -> bool:
    """Return whether carriers of the dtypes differ by at most `ulps` units in the last place.

    For `scratch`, see `ckpttools.compare.measure.deviation`.
    """
    for block in split_evenly(Region.whole(a.shape), block_elements(dtypes)):
        index = block.slices if a.ndim else ()
        blocks = np.ascontiguousarray(a[index]), np.ascontiguousarray(b[index])
        result = deviation(*blocks, dtypes, scratch=scratch)
        if result.num_differing and (result.nan or result.max_ulp is None or result.max_ulp > ulps):
            return False
    return True


def to_common_dtype(a: LazyArray, b: LazyArray) -> tuple[LazyArray, LazyArray]:
    """Return both arrays in the coarser dtype, if they have different floating-point dtypes."""
    if a.dtype == b.dtype or not (a.dtype.is_float and b.dtype.is_float):
        return a, b
    dtype = coarser(a.dtype, b.dtype)
    return as_dtype(a, dtype), as_dtype(b, dtype)


def as_dtype(array: LazyArray, dtype: DType) -> LazyArray:
    """Cast floating-point numbers to another floating-point dtype."""
    return array if array.dtype == dtype else elementwise(array, Cast(dtype))


def read_sample_values(array: LazyArray) -> np.ndarray:
    """Return the elements of an array's sample as float64, one after the other."""
    parts = [as_doubles(item.reshape(-1), array.dtype) for item in read_samples(array)]
    return np.concatenate(parts) if parts else np.empty(0)
