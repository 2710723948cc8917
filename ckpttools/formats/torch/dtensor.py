"""Locate one process's part of a distributed tensor (`DTensor`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Region, Shape, ceil_div
from ckpttools.formats.torch.pickled import Global, Record
from ckpttools.formats.torch.tensors import (
    NotReadableError,
    StorageRange,
    dtype_named,
    lazy_tensor,
    torch_lengths,
)

# Classes moved from `torch.distributed._tensor` to `torch.distributed.tensor`; only the last name component
# is stable.
_CLASS, _LOCAL, _SPEC = "DTensor", "_local_tensor", "_spec"


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The part of a tensor that one process has.

    Attributes:
        shape, dtype: Shape and dtype of the complete tensor.
        array: The elements of the part.
        coordinate: Coordinate of the process in the mesh.
        splits: The tensor axis and mesh axis of each split, outermost first.
    """

    shape: Shape
    dtype: DType
    array: LazyArray
    coordinate: Shape
    splits: tuple[tuple[int, int], ...]

    def box(self, mesh: Sequence[int]) -> Region:
        """Return the region of the part in the complete tensor, given the lengths of the mesh.

        Raises:
            NotReadableError: The part does not have the box's shape.
        """
        start, length = [0] * len(self.shape), list(self.shape)
        for axis, mesh_axis in self.splits:
            # As in torch.chunk, all parts except the last have the length of the first.
            part = ceil_div(length[axis], mesh[mesh_axis])
            before = min(self.coordinate[mesh_axis] * part, length[axis])
            start[axis] += before
            length[axis] = min(part, length[axis] - before)
        if tuple(length) != self.array.shape:
            raise NotReadableError(
                f"a process has shape {list(self.array.shape)}, not {list(length)} as in mesh {list(mesh)}"
            )
        return Region(tuple(start), tuple(a + n for a, n in zip(start, length, strict=True)))


def is_distributed(value: Any) -> bool:
    """Return whether a record stands for a distributed tensor."""
    if not (isinstance(value, Record) and value.name == "_rebuild_from_type_v2" and len(value.args) == 4):
        return False
    return isinstance(value.args[1], Global) and value.args[1].name == _CLASS


def local_part(value: Record, storages: Mapping[str, StorageRange]) -> LocalPart:
    """Return the part of a distributed tensor that the process has.

    Raises:
        NotReadableError: The tensor is a pending sum, is split in an unknown order, or is damaged.
    """
    _, _, made_of, state = value.args
    declared = (
        next((item for item in state if isinstance(item, dict)), {}) if isinstance(state, tuple) else state
    )
    local, spec = (declared.get(_LOCAL), declared.get(_SPEC)) if isinstance(declared, dict) else (None, None)
    mesh = spec.attribute("mesh") if isinstance(spec, Record) else None
    placements = spec.attribute("placements") if isinstance(spec, Record) else None
    coordinate = torch_lengths(mesh.attribute("_coordinate_on_dim")) if isinstance(mesh, Record) else None
    if not isinstance(made_of, tuple) or len(made_of) < 3 or not isinstance(local, Record):
        raise NotReadableError("a damaged distributed tensor")
    shape, dtype = torch_lengths(made_of[2]), dtype_named(made_of[1])
    if shape is None or dtype is None or coordinate is None or not isinstance(placements, tuple | list):
        raise NotReadableError("a distributed tensor without the location of its parts")
    splits = _splits(placements, spec.attribute("shard_order") if isinstance(spec, Record) else None)
    if len(placements) != len(coordinate) or any(axis >= len(shape) for axis, _ in splits):
        raise NotReadableError("a distributed tensor whose placements do not fit it")
    array = lazy_tensor(local, storages)
    if array.dtype != dtype:
        raise NotReadableError(f"a distributed tensor of {dtype} whose part is of {array.dtype}")
    return LocalPart(shape, dtype, array, coordinate, splits)


def _splits(placements: Sequence[Any], order: Any) -> tuple[tuple[int, int], ...]:
    """Return the (tensor axis, mesh axis) of each split in order; by default, the order of the mesh axes."""
    result = []
    for mesh_axis, placement in enumerate(placements):
        if not isinstance(placement, Record) or placement.name not in ("Shard", "Replicate"):
            name = placement.name if isinstance(placement, Record) else type(placement).__name__
            raise NotReadableError(f"placed as {name}, which no file explains how to assemble")
        axis = placement.attribute("dim")
        if placement.name == "Shard":
            if type(axis) is not int or axis < 0:
                raise NotReadableError("a split without an axis")
            result.append((axis, mesh_axis))
    expected = _ordered(order)
    return tuple(sorted(result, key=lambda split: expected.get(split, split[1])))


def _ordered(order: Any) -> dict[tuple[int, int], int]:
    """Return the declared order of the splits of each axis, which torch 2.9 and later store."""
    entries = order if isinstance(order, tuple | list) else ()
    return {
        (entry.args[0], mesh_axis): location
        for entry in entries
        if isinstance(entry, Record) and len(entry.args) == 2 and type(entry.args[0]) is int
        for location, mesh_axis in enumerate(torch_lengths(entry.args[1]) or ())
    }
