"""Convert tensor records of a pickle to lazy arrays, which view storages with any strides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import Constant, Stored, concat, relayout, window
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.region import Shape
from ckpttools.formats.torch.pickled import Global, Persistent, Record, describe_briefly

# Names of `torch.<X>Storage` and of `torch.<dtype>` in torch 2.13 (torch/storage.py, torch/_utils.py).
# Quantized types such as QInt8Storage are not included, because they store quantized values.
_STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_DTYPES = {
    **{name: name for name in DTYPES},
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "float4_e2m1fn_x2": "uint8",
}


@dataclass(frozen=True, slots=True)
class StorageRange:
    """The byte range of a storage.

    Attributes:
        file: The file.
        start: Byte offset in the file.
        nbytes: Number of bytes.
    """

    file: ByteSource
    start: int
    nbytes: int


class NotReadableError(Exception):
    """A tensor cannot be read as an array. The message states the reason."""


def dtype_named(value: Any) -> DType | None:
    """Return the dtype named, for example, `torch.bfloat16` or `torch.BFloat16Storage`; else None."""
    if not isinstance(value, Global):
        return None
    name = _STORAGES.get(value.name) or _DTYPES.get(value.name)
    return DTYPES[name] if name else None


def is_tensor(value: Any) -> bool:
    """Return whether a record is a tensor, even an unreadable one such as FSDP's `ShardedTensor`."""
    if not isinstance(value, Record):
        return False
    return value.name.startswith(("_rebuild_", "_tensor_rebuild")) or value.name.endswith("Tensor")


def lazy_tensor(record: Record, storages: Mapping[str, StorageRange]) -> LazyArray:
    """Return the array that a tensor record describes.

    Args:
        record: The call with which torch would restore the tensor.
        storages: Byte range of each storage, by name.

    Raises:
        NotReadableError: The tensor is not dense, not numeric, or extends beyond its storage.
    """
    record = _unwrap(record)
    kind, args = record.name, record.args
    if kind not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_tensor") or len(args) < 4:
        raise NotReadableError(f"made by {record.made_by}, which is not a dense tensor")
    untyped = kind.endswith("v3")
    _refuse_lazy(args[7:] if untyped else args[6:])
    name, dtype = _storage(args[0], args[6] if untyped and len(args) > 6 else None)
    offset, shape, stride = args[1], _as_shape(args[2]), _as_shape(args[3])
    if type(offset) is not int or offset < 0 or len(shape) != len(stride):
        raise NotReadableError("its location in the storage is damaged")
    if name not in storages:
        raise NotReadableError(f"its storage {name!r} is not in the file")
    return strided(storages[name], dtype, offset, shape, stride)


def _refuse_lazy(declared: Sequence[Any]) -> None:
    """Reject views with pending conjugation or negation, which torch marks only by a flag."""
    marks = declared[0] if declared and isinstance(declared[0], dict) else {}
    lazy = sorted(str(mark) for mark in ("conj", "neg") if marks.get(mark))
    if lazy:
        raise NotReadableError(
            f"its values are stored before a pending operation ({', '.join(lazy)}): "
            "save tensor.resolve_conj().resolve_neg()"
        )


def _unwrap(record: Record) -> Record:
    """Return the tensor inside a parameter, or inside a tensor subclass that adds nothing."""
    for _ in range(8):
        inner: Any = None
        if record.name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            inner = record.args[0] if record.args else None
        elif record.name == "_rebuild_from_type_v2" and len(record.args) > 2:
            made_by, args = record.args[0], record.args[2]
            if isinstance(made_by, Global) and isinstance(args, tuple):
                inner = Record(made_by, args)
        else:
            return record
        if not isinstance(inner, Record):
            raise NotReadableError(f"{record.made_by} of an object that is not a tensor")
        record = inner
    raise NotReadableError("nested too deep")


def _storage(value: Any, declared: Any) -> tuple[str, DType]:
    """Return the name and dtype of a tensor's storage."""
    if not isinstance(value, Persistent) or not isinstance(value.key, tuple) or len(value.key) < 5:
        raise NotReadableError("its storage is not in this file")
    _, kind, name, *_ = value.key
    dtype = dtype_named(declared if declared is not None else kind)
    if not isinstance(name, str) or dtype is None:
        raise NotReadableError(f"unknown dtype: {describe_briefly(kind if declared is None else declared)}")
    return name, dtype


def _as_shape(value: Any) -> Shape:
    lengths = torch_lengths(value)
    if lengths is None:
        raise NotReadableError("its shape or strides are damaged")
    return lengths


def torch_lengths(value: Any) -> Shape | None:
    """Parse a `torch.Size` or a tuple of lengths; return None for anything else."""
    if isinstance(value, Record) and value.name == "Size":
        value = value.args[0] if value.args else ()
    if not isinstance(value, tuple | list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)


def strided(storage: StorageRange, dtype: DType, offset: int, shape: Shape, stride: Shape) -> LazyArray:
    """Return a strided view of a storage.

    Args:
        storage: The elements of the storage.
        dtype: Dtype of the elements.
        offset: Number of elements before the first one.
        shape, stride: Shape and strides of the view; strides are in elements.

    Raises:
        NotReadableError: The view extends beyond the storage, or its elements overlap.
    """
    if not prod(shape):
        return Constant(shape, dtype, bytes(dtype.itemsize))
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    available = storage.nbytes // dtype.itemsize
    if last >= available:
        raise NotReadableError(f"its last element has index {last:,} in a storage of {available:,}")
    if _is_contiguous(shape, stride):
        return Stored(shape, dtype, storage.file, storage.start + offset * dtype.itemsize)
    axes = sorted((axis for axis, length in enumerate(shape) if length > 1), key=lambda axis: -stride[axis])
    steps = [(shape[axis], stride[axis]) for axis in axes]
    box = _box(offset, steps, available)
    if box is None:
        # Examples are every third element of a row of ten, diagonals, and rows that end with the storage.
        rest = Stored((available - offset,), dtype, storage.file, storage.start + offset * dtype.itemsize)
        return _reorder_axes(_pick(rest, steps), axes, shape)
    stored = Stored(box.full, dtype, storage.file, storage.start + box.begin * dtype.itemsize)
    return _reorder_axes(window(stored, box.start, box.shape), axes, shape)


def _is_contiguous(shape: Shape, stride: Shape) -> bool:
    """Return whether elements are in C order, ignoring strides of axes of length one."""
    step = 1
    for length, expected in zip(reversed(shape), reversed(stride), strict=True):
        if length > 1 and expected != step:
            return False
        step *= length
    return True


@dataclass(frozen=True, slots=True)
class _Box:
    """Elements with decreasing strides, as a box in a C-ordered array.

    Attributes:
        full: Shape of the array.
        begin: Element of the storage at which the array starts.
        start, shape: Start and shape of the box.
    """

    full: Shape
    begin: int
    start: Shape
    shape: Shape


def _box(offset: int, axes: Sequence[tuple[int, int]], available: int) -> _Box | None:
    """Return the box for the given axes, or None if no array has a box with these strides.

    Axes are (length, stride) pairs with decreasing strides. An axis of length 1 is added unless the last
    stride is 1.
    """
    steps = [step for _, step in axes]
    if 0 in steps:
        raise NotReadableError("one of its axes repeats the same elements: an expanded tensor")
    if steps and steps[-1] > 1:
        axes, steps = [*axes, (1, 1)], [*steps, 1]
    pitches = [outer // inner for outer, inner in pairwise(steps)]
    wide = all(length <= pitch for (length, _), pitch in zip(axes[1:], pitches, strict=True))
    if not wide or any(outer % inner for outer, inner in pairwise(steps)):
        return None
    shape = tuple(length for length, _ in axes)
    full = (*shape[:1], *pitches)
    if offset + prod(full) <= available:
        return _Box(full, offset, (0,) * len(shape), shape)
    # The last row of the array would extend beyond the end, so the box is shifted in the array.
    left, inside = offset + prod(full) - available, []
    for (length, step), pitch in zip(axes[1:], pitches, strict=True):
        inside.append(min(pitch - length, left // step))
        left -= inside[-1] * step
    begin = offset - sum(at * step for at, step in zip(inside, steps[1:], strict=True))
    if left > 0 or begin < 0:
        return None
    return _Box(full, begin, (0, *inside), shape)


def _pick(base: LazyArray, axes: Sequence[tuple[int, int]]) -> LazyArray:
    """Select elements of the last axis of `base` with decreasing strides; adds an axis of length 1.

    Raises:
        NotReadableError: The elements overlap or interleave.
    """
    *outer, room = base.shape
    if not axes:
        return _slice_last_axis(base, 0, 1)
    (length, step), *inner = axes
    if 1 + sum((n - 1) * s for n, s in inner) > step:
        raise NotReadableError(f"its elements overlap or interleave: (length, stride) {list(axes)}")
    # The last part may be shorter than its stride.
    full_steps = min(length, room // step)
    parts = (
        [_pick(_split_last_axis(_slice_last_axis(base, 0, full_steps * step), full_steps), inner)]
        if full_steps
        else []
    )
    if full_steps < length:
        parts.append(
            _pick(
                _split_last_axis(_slice_last_axis(base, full_steps * step, room - full_steps * step), 1),
                inner,
            )
        )
    return concat(parts, len(outer))


def _slice_last_axis(base: LazyArray, start: int, length: int) -> LazyArray:
    """Return a range of the last axis."""
    if isinstance(base, Stored) and base.ndim == 1:
        return replace(base, shape=(length,), offset=base.offset + start * base.dtype.itemsize)
    return window(base, (*(0,) * (base.ndim - 1), start), (*base.shape[:-1], length))


def _split_last_axis(base: LazyArray, count: int) -> LazyArray:
    """Split the last axis in two; the first part gets length `count`."""
    *outer, room = base.shape
    shape = (*outer, count, room // count)
    if isinstance(base, Stored):
        return replace(base, shape=shape)
    split = [*((length,) for length in outer), (count, room // count)]
    return relayout(base, split, range(len(shape)), [1] * len(shape))


def _reorder_axes(source: LazyArray, axes: Sequence[int], shape: Shape) -> LazyArray:
    """Reorder the axes as in the view, and insert axes of length one."""
    merge = [0] * len(shape)
    for axis in axes:
        merge[axis] = 1
    order = [location for location, _ in sorted(enumerate(axes), key=lambda item: item[1])]
    if source.ndim > len(axes):
        if not axes:
            return source
        # The last axis, of length one, always comes last.
        merge[max(axes)] += 1
        order.append(len(axes))
    return relayout(source, [(length,) for length in source.shape], order, merge)
