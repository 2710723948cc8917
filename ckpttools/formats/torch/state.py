"""Convert the values of a pickle, distributed tensors (DTensor) among them, to the leaves of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import number_array
from ckpttools.array.tree import Empty, Leaf, Path, Text
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.region import Region, Shape, ceil_div
from ckpttools.formats.json_file import DEEPEST
from ckpttools.formats.torch.pickled import Global, Record, describe_briefly
from ckpttools.formats.torch.tensors import (
    NotReadableError,
    StorageRange,
    dtype_named,
    is_tensor,
    lazy_tensor,
    torch_lengths,
)

# Values may contain one another: a pickle of a kilobyte can have more leaves than any checkpoint. Normally,
# each leaf takes at least one byte, and few leaves are shared.
_MIN_LEAVES_PER_LEVEL = 1000
# A leaf takes about 300 bytes.
_MAX_LEAVES = 2_000_000
_KEYS_PER_LEAF = 32
_PART = "one process's part of a distributed tensor (DTensor)"
_PARTIAL_CLASSES = (
    "for files named model_world_size_N_rank_R.pt, pass the directory with those of all processes; "
    "otherwise save each as tensor.full_tensor()"
)

Tensor = Callable[[Record], LazyArray]


@dataclass
class State:
    """The values of a pickle as leaves of a tree.

    Attributes:
        leaves: Leaves by path.
        scalars: Paths of leaves that were Python numbers.
        others: Kinds of all other objects (not arrays, numbers or texts), by path.
        unreadable: Why each unreadable tensor cannot be read, by path.
    """

    leaves: dict[Path, Leaf] = field(default_factory=dict)
    scalars: set[Path] = field(default_factory=set)
    others: dict[Path, str] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)

    def refuse_unreadable(self, location: str) -> None:
        """Raise FormatError if tensors are unreadable; the message lists all of them."""
        if self.unreadable:
            lines = [f"{'.'.join(map(str, path))}: {reason}" for path, reason in self.unreadable.items()]
            raise FormatError(
                "some tensors do not own plain numeric data:" + listing(lines),
                location=location,
                expected="dense tensors with all of their elements in the file",
                hint=_PARTIAL_CLASSES
                if _PART in self.unreadable.values()
                else "save each as tensor.detach().contiguous().clone()",
            )


def state_of(value: Any, nbytes: int, tensor: Tensor, location: str) -> State:
    """Convert a value to the leaves of a tree.

    Args:
        value: The value of a pickle.
        nbytes: Size of the pickle, in bytes.
        tensor: Returns the array for a tensor's record.
        location: The location for messages.

    Raises:
        FormatError: The value is nested too deep or cyclic, has keys that are neither strings nor numbers, or
            has a tensor that cannot be read.
    """
    state = State()
    for path, item in _walk(value, min(_MIN_LEAVES_PER_LEVEL + nbytes, _MAX_LEAVES), location):
        _put(state, path, item, tensor)
    state.refuse_unreadable(location)
    return state


def _walk(value: Any, limit: int, location: str) -> Iterator[tuple[Path, Any]]:
    """Yield leaves and empty containers in order, limiting their number and the length of their paths."""
    rest: list[tuple[Path, Any]] = [((), value)]
    visited, keys = 1, 0
    while rest:
        path, node = rest.pop()
        inside = len(node) if isinstance(node, list | tuple | dict) else 0
        visited += inside
        keys += inside * (len(path) + 1)
        if visited > limit or keys > _KEYS_PER_LEAF * limit:
            raise _unsupported_error(location, f"more than {limit:,} values, or one value in too many places")
        inner = _inner(node, location) if inside else {}
        if not inner:
            yield path, node
        elif len(path) >= DEEPEST:
            raise _unsupported_error(location, f"values nested more than {DEEPEST} levels deep")
        else:
            rest.extend(((*path, key), below) for key, below in reversed(list(inner.items())))


def _inner(value: Any, location: str) -> Mapping[Any, Any]:
    """Return the contents of a container by key; empty for other values."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if not isinstance(value, dict):
        return {}
    invalid_key = next((key for key in value if type(key) not in (str, int)), None)
    if invalid_key is not None:
        raise _unsupported_error(location, f"a {type(invalid_key).__name__} used as a key")
    return value


def _unsupported_error(location: str, problem: str) -> FormatError:
    return FormatError(
        "the pickle does not have the structure of weights",
        location=location,
        got=problem,
        expected="dictionaries of tensors by name",
        hint="if you trust its author, save only the weights: torch.save(model.state_dict(), FILE)",
    )


def _put(state: State, path: Path, value: Any, tensor: Tensor) -> None:
    if isinstance(value, Record) and is_tensor(value):
        try:
            state.leaves[path] = tensor(value)
        except NotReadableError as error:
            state.unreadable[path] = _PART if is_distributed(value) else str(error)
    elif (number := number_array(value)) is not None:
        state.leaves[path] = number
        state.scalars.add(path)
    elif isinstance(value, str):
        state.leaves[path] = Text(value)
    elif value is None:
        state.leaves[path] = Empty("None")
    elif isinstance(value, dict | list | tuple):
        state.leaves[path] = Empty(type(value).__name__.capitalize())
    else:
        state.others[path] = describe_briefly(value)


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
