"""Copy between two views of equal shape and different memory order, at memory speed.

numpy copies a transposed 16-bit matrix one element at a time: at 0.3 GB/s in one call, at 1.0 GB/s in tiles.
This module first interleaves k rows into 16-byte elements and then transposes those, so that the same strided
loop moves k elements at once. Measured on one core (4096 x 14336, 16 bits): 2.1 to 3.4 GB/s on different days
on the same machine.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from ckpttools.array.scratch import Scratch, round_up_to_page

# The source, interleaved buffer and target of one tile together fit in a core's L2 cache. Measured with
# 16-bit elements and tiles of 128, 256, 512 and 1024 KiB, before rows were spread (_LINE_BYTES): a plain
# transpose reaches 3.4 GB/s with all sizes; RoPE's row order 2.5, 3.6, 2.9 and 4.0; rows of an odd length
# 2.1, 2.1, 1.3 and 1.3. Converting 2.47 GB back to safetensors with four workers on two cores, where fewer
# calls mean less waiting for the interpreter lock, takes 1.94, 1.80 and 1.83 s with 256, 512 and 1024 KiB.
_TILE_BYTES = 512 * 1024
# Upper bound for what rounding up rows and columns adds to a tile.
_EDGE_BYTES = 16 * 1024
# If the target's rows are on separate pages, each row is written in one run. Writing to uncached memory with
# rows 64 KiB apart reaches 2.6 GB/s this way, but only 1.2 to 1.4 GB/s without a tile in between.
_FAR_BYTES = 4096
# Columns are read from the interleaved buffer. If its row stride were a power of two, all cache lines of a
# column would share a few cache sets. For 512 x 512 elements that gives 6 GB/s; an odd number of lines per
# row gives 23 to 32.
_LINE_BYTES = 64
# Below this length, transposing only along the source's contiguous axis moves too little at a time: 0.1 GB/s
# with pairs of 16-bit elements, compared to 1.7 to 2.2 with longer runs.
_SHORT_AXIS = 16
_WIDEST = np.dtype("<c16")


def _side(itemsize: int) -> int:
    """Return the side length of a square tile, in elements."""
    return int((_TILE_BYTES // itemsize) ** 0.5)


def scratch_bytes() -> int:
    """Return the maximum scratch memory of one `copy`, in bytes."""
    return 3 * round_up_to_page(_TILE_BYTES + _EDGE_BYTES)


def copy(target: np.ndarray, source: np.ndarray, scratch: Scratch) -> None:
    """Compute target[...] = source for arrays of the same shape and dtype, with any strides."""
    axes = _merged_axes(target, source)
    target = np.lib.stride_tricks.as_strided(
        target, [a.length for a in axes], [a.target for a in axes], writeable=True
    )
    source = np.lib.stride_tricks.as_strided(
        source, [a.length for a in axes], [a.source for a in axes], writeable=False
    )
    fast = _contiguous_axis(source)
    if fast is None or fast == target.ndim - 1 or _contiguous_axis(target) != target.ndim - 1:
        target[...] = source
        return
    run = _run_axes(source, fast)
    if len(run) > 1 and source.shape[fast] < _SHORT_AXIS:
        _copy_scattered(target, source, run, scratch)
    else:
        _copy_transposed(target, source, fast, scratch)


class _Axis(NamedTuple):
    length: int
    target: int
    source: int


def _merged_axes(target: np.ndarray, source: np.ndarray) -> list[_Axis]:
    """Merge axes that are contiguous in both arrays; return the rest in the target's memory order."""
    triples = zip(target.shape, target.strides, source.strides, strict=True)
    axes = sorted((_Axis(*t) for t in triples if t[0] != 1), key=lambda a: -a.target)
    merged: list[_Axis] = []
    for axis in axes:
        if merged:
            last = merged[-1]
            if last.target == axis.target * axis.length and last.source == axis.source * axis.length:
                merged[-1] = _Axis(last.length * axis.length, axis.target, axis.source)
                continue
        merged.append(axis)
    return merged


def _contiguous_axis(array: np.ndarray) -> int | None:
    """Return the axis along which neighbors are adjacent in memory, or None."""
    return next((k for k, s in enumerate(array.strides) if s == array.itemsize), None)


def _copy_transposed(target: np.ndarray, source: np.ndarray, fast: int, scratch: Scratch) -> None:
    """Copy when the source's contiguous axis `fast` is not the target's last axis.

    The target's trailing axes form the rows of a matrix whose columns run along `fast`.
    """
    rows_from = _first_row_axis(target, fast)
    lead = [k for k in range(rows_from) if k != fast]
    for index in np.ndindex(*(target.shape[k] for k in lead)):
        where: list[int | slice] = [slice(None)] * target.ndim
        for k, i in zip(lead, index, strict=True):
            where[k] = i
        position = sum(1 for k in range(fast) if k not in lead)
        block_target = np.moveaxis(target[tuple(where)], position, 0)
        block_source = np.moveaxis(source[tuple(where)], position, -1)
        _copy_matrix(block_target, block_source, scratch)


def _run_axes(source: np.ndarray, fast: int) -> list[int]:
    """Return the axes of the source's shortest useful run, outermost first, `fast` last.

    The target's contiguous axis, which is the last one, is excluded.
    """
    run, length = [fast], source.shape[fast]
    while length < _side(source.itemsize):
        stride = length * source.itemsize
        others = (k for k in range(source.ndim - 1) if k not in run and source.strides[k] == stride)
        axis = next(others, None)
        if axis is None:
            break
        run.insert(0, axis)
        length *= source.shape[axis]
    return run


def _copy_scattered(target: np.ndarray, source: np.ndarray, run: list[int], scratch: Scratch) -> None:
    """Copy when a run of the source spans several axes that the target orders differently.

    An example is RoPE's pairs, which are not adjacent in the target: runs are transposed first, then rows are
    moved.
    """
    last = target.ndim - 1
    lead = [k for k in range(last) if k not in run]
    order = (*lead, *run, last)
    for index in np.ndindex(*(target.shape[k] for k in lead)):
        _scatter(target.transpose(order)[index], source.transpose(order)[index], scratch)


def _scatter(target: np.ndarray, source: np.ndarray, scratch: Scratch) -> None:
    """Compute target[*r, c] = source[*r, c], where `r` is contiguous in the source and `c` in the target."""
    columns, inner = source.shape[-1], prod(source.shape[1:-1])
    side = _side(source.itemsize)
    step = max(1, side // inner)
    for first in range(0, source.shape[0], step):
        for left in range(0, columns, side):
            part = source[first : first + step, ..., left : left + side]
            rows = prod(part.shape[:-1])
            with scratch.take((rows, part.shape[-1]), target.dtype) as transposed:
                _interleave(transposed, np.moveaxis(part, -1, 0).reshape(-1, rows), scratch)
                target[first : first + step, ..., left : left + side] = transposed.reshape(part.shape)


def _first_row_axis(target: np.ndarray, fast: int) -> int:
    """Return the first of the trailing axes, without `fast`, that form one contiguous run of the target."""
    axis = target.ndim - 1
    run = target.itemsize * target.shape[axis]
    while axis - 1 > fast and target.strides[axis - 1] == run:
        axis -= 1
        run *= target.shape[axis]
    return axis


def _copy_matrix(target: np.ndarray, source: np.ndarray, scratch: Scratch) -> None:
    """Compute target[c, *r] = source[*r, c], with contiguous rows in the target and columns in the source."""
    columns = target.shape[0]
    rows = target.size // columns
    flat = target.reshape(columns, rows)
    side = _side(target.itemsize)
    inner = rows // source.shape[0]
    if inner > side and source.ndim > 2:
        for i in range(source.shape[0]):
            _copy_matrix(flat[:, i * inner : (i + 1) * inner], source[i], scratch)
        return
    step = max(1, side // inner)
    for first in range(0, source.shape[0], step):
        last = min(first + step, source.shape[0])
        for left in range(0, columns, side):
            right = min(left + side, columns)
            _copy_tile(
                flat[left:right, first * inner : last * inner],
                source[first:last, ..., left:right],
                scratch,
            )


def _copy_tile(target: np.ndarray, source: np.ndarray, scratch: Scratch) -> None:
    columns, rows = target.shape
    if source.ndim == 2:
        _interleave(target, source, scratch)
        return
    with scratch.take((rows, columns), target.dtype) as gathered:
        gathered.reshape(source.shape)[...] = source
        _interleave(target, gathered, scratch)


def _interleave(target: np.ndarray, source: np.ndarray, scratch: Scratch) -> None:
    """Compute target = source.T, through a tile if the target's rows are far apart or not aligned."""
    rows, columns = source.shape
    width = _WIDEST.itemsize // target.itemsize
    if width == 1 or rows < width:
        target[...] = source.T
        return
    if target.strides[0] < _FAR_BYTES and _is_aligned(target):
        _interleave_near(target, source, scratch)
        return
    with scratch.take((columns, -(-rows // width) * width), target.dtype) as transposed:
        near = transposed[:, :rows]
        _interleave_near(near, source, scratch)
        target[...] = near


def _interleave_near(target: np.ndarray, source: np.ndarray, scratch: Scratch) -> None:
    """Compute target = source.T through wide elements; copy the rows that do not fill one separately."""
    rows, columns = source.shape
    width = _WIDEST.itemsize // target.itemsize
    even = rows // width * width
    with scratch.take((even // width, _round_up_to_odd_lines(columns), width), target.dtype) as buffer:
        groups = source[:even].reshape(even // width, width, columns)
        for k in range(width):
            buffer[:, :columns, k] = groups[:, k, :]
        target[:, :even].view(_WIDEST)[...] = buffer.view(_WIDEST)[:, :columns, 0].T
    if even < rows:
        target[:, even:] = source[even:].T


def _round_up_to_odd_lines(columns: int) -> int:
    """Round up to a number of wide elements that spans an odd number of cache lines."""
    line = _LINE_BYTES // _WIDEST.itemsize
    lines = -(-columns // line)
    return (lines + 1 - lines % 2) * line


def _is_aligned(target: np.ndarray) -> bool:
    """Return whether every row of the target can be viewed as wide elements."""
    return all(item % _WIDEST.itemsize == 0 for item in (target.ctypes.data, target.strides[0]))
