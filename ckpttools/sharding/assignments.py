"""The device placement of each array, from shardings, rules or a template, and its JAX array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.region import Shape
from ckpttools.sharding.mesh import MeshShape, Spec, to_partition_spec
from ckpttools.sharding.rules import AppliedRules, NamedArray, Rules, mesh_axis_rules
from ckpttools.sharding.scatter import Parts
from ckpttools.sharding.shards import Shards
from ckpttools.sharding.templates import ExpectedLeaf


@dataclass(frozen=True)
class DeviceOptions:
    """The caller's choice of devices: `shardings`, otherwise rules, otherwise the shardings of the template.

    Attributes:
        shardings: A sharding for all arrays, or one for each path of the caller's tree.
        rules: Sharding rules; they require `mesh`.
        mesh: The devices.
        memory_kind: Memory kind such as "pinned_host"; None for that of the shardings.
    """

    shardings: jax.sharding.Sharding | Mapping[Path, jax.sharding.Sharding] | None = None
    rules: Rules | None = None
    mesh: jax.sharding.Mesh | None = None
    memory_kind: str | None = None

    def lacks_sharding(self, expected: ExpectedLeaf) -> bool:
        """Return whether shardings are given by path and this leaf has none."""
        return isinstance(self.shardings, Mapping) and expected.path not in self.shardings


@dataclass(frozen=True, slots=True)
class Assignment:
    """An array to load.

    Attributes:
        path: Path in the checkpoint, after all transforms.
        array: The source.
        target: The destination.
        key_impl: The implementation of PRNG keys; None for other arrays.
        number: The Python type, for an array that becomes a Python number.
        expected: The caller's leaf.
    """

    path: Path
    array: LazyArray
    target: ArrayTarget
    key_impl: str | None = None
    number: type | None = None
    expected: ExpectedLeaf = field(default_factory=lambda: ExpectedLeaf((), None, None))

    @property
    def name(self) -> str:
        """The name in the caller's tree."""
        return self.expected.name


class Assigner:
    """Resolves the placement of each array of a tree.

    Raises:
        UsageError: Rules are given without a mesh, or name axes that the mesh lacks.
    """

    def __init__(self, tree: Tree, devices: DeviceOptions) -> None:
        self._tree = tree
        self._devices = devices
        self._default: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(_default_device())
        self._mesh = MeshShape(dict(devices.mesh.shape)) if devices.mesh is not None else None
        self._rules: AppliedRules | None = None
        if devices.rules is not None:
            if self._mesh is None:
                raise UsageError("rules need a mesh", hint=f"also give {option('mesh')}")
            self._rules = AppliedRules(devices.rules, tree, self._mesh)

    def assigned(self, path: Path, expected: ExpectedLeaf) -> Assignment:
        """Return the placement of an array."""
        array = self._tree.arrays[path]
        metadata = self._tree.metadata
        is_data = expected.key_impl is None and expected.dtype is not None
        was_number = path in metadata.scalars and not is_data
        number = expected.number or (_number_type(array.dtype) if was_number else None)
        key_impl = expected.key_impl or (None if is_data else metadata.key_impls.get(path))
        target = ArrayTarget(array.shape, array.dtype, self._sharding(path, expected))
        return Assignment(path, array, target, key_impl, number, expected)

    def remarks(self, arrays: Iterable[Assignment]) -> Iterator[str]:
        """Yield remarks on arrays that match no rule."""
        if self._rules is not None:
            yield from self._rules.remarks(
                {self._named_array(array.path, array.expected): array.array.ndim for array in arrays}
            )

    def unmatched_share(self, arrays: Sequence[Assignment]) -> float:
        """Return the fraction of all bytes in arrays that match no rule, as in `remarks`."""
        if self._rules is None:
            return 0.0
        ruled = [(self._named_array(item.path, item.expected), item.array) for item in arrays]
        uncut = sum(array.nbytes for item, array in ruled if self._rules.is_unmatched(item, array.ndim))
        return uncut / max(1, sum(item.array.nbytes for item in arrays))

    def _named_array(self, path: Path, expected: ExpectedLeaf) -> NamedArray:
        assert self._rules is not None
        return self._rules.named_array(path, expected.path, expected.axes)

    def _sharding(self, path: Path, expected: ExpectedLeaf) -> jax.sharding.Sharding:
        result = self._requested_sharding(path, expected) or self._default
        kind = self._devices.memory_kind
        try:
            return result if kind is None else result.with_memory_kind(kind)
        except ValueError as error:
            raise UsageError(
                "this memory kind does not exist", got=option("memory_kind", kind), expected=error
            ) from error

    def _requested_sharding(self, path: Path, expected: ExpectedLeaf) -> jax.sharding.Sharding | None:
        shardings = self._devices.shardings
        if isinstance(shardings, jax.sharding.Sharding):
            return shardings
        if shardings is not None:
            return shardings.get(expected.path)
        if self._rules is not None:
            return self._named_sharding(self._rules.spec(self._named_array(path, expected)))
        if expected.sharding is None and expected.axes and self._mesh is not None:
            return self._named_sharding(
                mesh_axis_rules(self._mesh).spec(expected.path, expected.axes, self._mesh)
            )
        if is_abstract(expected.sharding):
            return jax.sharding.NamedSharding(self._concrete_mesh(expected), expected.sharding.spec)
        result: jax.sharding.Sharding | None = expected.sharding
        return result

    def _named_sharding(self, spec: Spec) -> jax.sharding.Sharding:
        assert self._devices.mesh is not None
        return jax.sharding.NamedSharding(self._devices.mesh, to_partition_spec(spec))

    def _concrete_mesh(self, expected: ExpectedLeaf) -> jax.sharding.Mesh:
        """Return a mesh with devices for a sharding over an abstract mesh."""
        mesh = self._devices.mesh if self._devices.mesh is not None else jax.sharding.get_mesh()
        if not set(expected.sharding.mesh.axis_names) <= set(mesh.axis_names):
            raise UsageError(
                "a sharding is over a mesh without devices",
                location=expected.name,
                got=expected.sharding,
                hint=f"also give {option('mesh')}, or load within `jax.set_mesh`",
            )
        return mesh


def is_abstract(sharding: Any) -> bool:
    """Return whether a sharding is over a mesh without devices, like that of a traced array."""
    return isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)


def _default_device() -> jax.Device:
    config: Any = jax.config
    device = config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.local_devices()[0]


def _number_type(dtype: DType) -> type:
    return {"bool": bool, "float": float, "complex": complex}.get(dtype.kind, int)


# Number of parts put on devices in one call. For 512 small parts this took 25 ms, compared with 60 ms one by
# one.
_BATCH_PARTS = 256


@dataclass(frozen=True)
class ArrayTarget:
    """The shape, dtype and sharding of an array to load.

    Attributes:
        shape, dtype: Shape and dtype of the array.
        sharding: Sharding over the devices of all processes.
    """

    shape: Shape
    dtype: DType
    sharding: jax.sharding.Sharding

    @cached_property
    def homes(self) -> tuple[tuple[jax.Device, Shape], ...]:
        """The devices of this process, with the grid index of the part on each."""
        return _device_parts(self.sharding, self.shape, self.part)

    @cached_property
    def part(self) -> Shape:
        """The shape of each part. Raises ValueError if the parts are not equal, as JAX does."""
        return tuple(self.sharding.shard_shape(self.shape))

    @cached_property
    def shards(self) -> Shards:
        """The parts on the devices of this process."""
        return Shards(self.shape, self.part, tuple(dict.fromkeys(cell for _, cell in self.homes)))

    @property
    def nbytes(self) -> int:
        """Bytes on the devices of this process, counting each copy."""
        return len(self.homes) * int(np.prod(self.part, dtype=np.int64)) * self.dtype.itemsize

    @cached_property
    def is_aliased(self) -> bool:
        """Whether the array takes over aligned host memory without copying it."""
        devices: Any = self.sharding.addressable_devices
        kind = self.sharding.memory_kind
        return all(
            device.platform == "cpu" and kind in (None, device.default_memory().kind) for device in devices
        )


@lru_cache(maxsize=1024)
def _device_parts(
    sharding: jax.sharding.Sharding, shape: Shape, part: Shape
) -> tuple[tuple[jax.Device, Shape], ...]:
    # Cached because all layers have the same result.
    placed = sharding.addressable_devices_indices_map(shape)
    return tuple((device, _cell(index, part)) for device, index in placed.items())


def _cell(index: object, part: Shape) -> Shape:
    slices: tuple[slice, ...] = index if isinstance(index, tuple) else ()
    return tuple((item.start or 0) // max(1, n) for item, n in zip(slices, part, strict=True))


def device_arrays(built: Sequence[tuple[ArrayTarget, Parts]]) -> Iterator[jax.Array]:
    """Yield arrays assembled from parts. Parts on the CPU are not copied and belong to JAX from then on."""
    buffers: list[np.ndarray] = []
    locations: list[jax.sharding.Sharding] = []
    counts: list[int] = []
    for target, parts in built:
        device_parts = target.homes
        kind = target.sharding.memory_kind
        buffers += [parts[cell].view(target.dtype.numpy) for _, cell in device_parts]
        locations += [
            jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device, _ in device_parts
        ]
        counts.append(len(device_parts))
    device_buffers = iter(jax.device_put(buffers, locations) if buffers else [])
    for (target, _), count in zip(built, counts, strict=True):
        own = [next(device_buffers) for _ in range(count)]
        yield jax.make_array_from_single_device_arrays(
            target.shape, target.sharding, own, dtype=target.dtype.numpy
        )


class Batches:
    """Buffer of arrays that are put on devices in batches of at least `_BATCH_PARTS` parts."""

    def __init__(self) -> None:
        self._indices: list[int] = []
        self._arrays: list[tuple[ArrayTarget, Parts]] = []
        self._parts = 0

    def add(self, number: int, target: ArrayTarget, parts: Parts) -> Iterator[tuple[int, jax.Array]]:
        """Add an array, and yield the arrays that are put on devices now."""
        self._indices.append(number)
        self._arrays.append((target, parts))
        self._parts += len(parts)
        if self._parts >= _BATCH_PARTS:
            yield from self.flush()

    def flush(self) -> Iterator[tuple[int, jax.Array]]:
        """Yield the remaining arrays."""
        numbers, result = self._indices, self._arrays
        self._indices, self._arrays, self._parts = [], [], 0
        yield from zip(numbers, device_arrays(result), strict=True)
