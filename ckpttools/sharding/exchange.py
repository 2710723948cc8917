"""Move elements from the processes that read them to the devices that need them, in jitted functions.

Elements travel as unsigned integers of the same size and are converted back at the end. On the CPU, a jitted
transpose of bfloat16 changes bits of NaN, and a sum with zeros turns -0.0 into 0.0; both are exact for
unsigned integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from ckpttools.core.dtypes import DType
from ckpttools.core.region import Region
from ckpttools.sharding.assignments import ArrayTarget
from ckpttools.sharding.fetch_plan import Homes, Stretches, first_readers, shards_from_boxes
from ckpttools.sharding.mesh import mesh_axes, spec_from_entries, to_partition_spec
from ckpttools.sharding.scatter import Parts
from ckpttools.sharding.shards import Shards

_PROCESS, _DEVICE = "process", "device"


def regions_of(target: ArrayTarget) -> Homes:
    """Return the regions of an array on the devices of each process."""
    result: dict[int, list[Region]] = {}
    placed: Mapping[Any, Any] = target.sharding.devices_indices_map(target.shape)
    for device, index in placed.items():
        result.setdefault(device.process_index, []).append(_region(index, target))
    return result


def _region(index: Any, target: ArrayTarget) -> Region:
    start = tuple(item.start or 0 for item in index or ())
    return Region(start, tuple(a + n for a, n in zip(start, target.part, strict=True)))


def is_movable(target: ArrayTarget) -> bool:
    """Return whether elements of this dtype can be exchanged between the devices of the sharding."""
    dtype = target.dtype
    # JAX cannot convert elements smaller than one byte, or complex numbers, to a carrier.
    has_carrier = dtype.value_bits in (None, 1) and not dtype.packed and dtype.kind != "complex"
    return has_carrier and isinstance(target.sharding, NamedSharding)


def devices_per_process(target: ArrayTarget) -> int | None:
    """Return the devices per process if all have the same number, contiguous in the mesh, or None."""
    order = [device.process_index for device in _devices(target)]
    count = order.count(order[0])
    is_contiguous = all(len(set(order[k : k + count])) == 1 for k in range(0, len(order), count))
    return count if len(order) == count * len(set(order)) and is_contiguous else None


def _devices(target: ArrayTarget) -> list[Any]:
    sharding = target.sharding
    if not isinstance(sharding, NamedSharding):
        return list(sharding.device_set)
    return list(sharding.mesh.devices.reshape(-1))


def stretch_target(target: ArrayTarget, cut: Stretches, devices: int) -> ArrayTarget:
    """Return the target of an array's carriers after each process has read its stretch."""
    mesh = _auto_mesh(np.array(_devices(target)).reshape(-1, devices), (_PROCESS, _DEVICE))
    spec: list[tuple[str, ...]] = [()] * len(target.shape)
    spec[cut.over_processes] += (_PROCESS,)
    spec[cut.over_devices] += (_DEVICE,)
    return ArrayTarget(target.shape, target.dtype, NamedSharding(mesh, to_partition_spec(tuple(spec))))


def exchange_parts(parts: Parts, read: ArrayTarget, target: ArrayTarget) -> jax.Array:
    """Assemble an array from the stretches that processes have read.

    All processes must make these calls in the same order.
    """
    carriers = _global_array(parts, read)
    return _to_target(_mover(_auto_sharding(target.sharding))(carriers), target)


def first_replicas(target: ArrayTarget) -> Shards:
    """Return the parts that this process reads for all: those that no earlier process needs."""
    local_regions = first_readers(regions_of(target)).get(jax.process_index(), [])
    return Shards(target.shape, target.part, shards_from_boxes(target.shape, local_regions).local)


def broadcast_parts(parts: Parts, target: ArrayTarget) -> jax.Array:
    """Assemble an array from parts that were each read by one process.

    All processes must make these calls in the same order.

    Args:
        parts: The parts of `first_replicas`.
        target: Target of the array, with several devices per part.
    """
    sharding = target.sharding
    assert isinstance(sharding, NamedSharding)
    spec = spec_from_entries(sharding.spec, None)
    copies = tuple(name for name in sharding.mesh.axis_names if name not in mesh_axes(spec))
    auto = _auto_sharding(sharding)
    above = NamedSharding(auto.mesh, to_partition_spec((copies, *spec)))
    count = int(np.prod([sharding.mesh.shape[name] for name in copies]))
    carrier = target.dtype.carrier
    zeros = np.zeros(target.part, carrier)
    left = dict(parts)
    buffers = []
    for device, cell in target.homes:
        own = left.pop(cell, None)
        buffers.append(jax.device_put((zeros if own is None else own)[None], device))
    global_array = jax.make_array_from_single_device_arrays((count, *target.shape), above, buffers)
    return _to_target(_summer(carrier, auto)(global_array), target)


def _global_array(parts: Parts, read: ArrayTarget) -> jax.Array:
    """Return the global array of carriers that all processes have read."""
    device_arrays = [jax.device_put(parts[cell], device) for device, cell in read.homes]
    return jax.make_array_from_single_device_arrays(read.shape, read.sharding, device_arrays)


def _to_target(moved: jax.Array, target: ArrayTarget) -> jax.Array:
    """Convert carriers on their devices to the array's dtype and memory kind."""
    typed = _from_carrier(moved, target.dtype)
    device_arrays = [shard.data for shard in typed.addressable_shards]
    if target.sharding.memory_kind not in (None, typed.sharding.memory_kind):
        kind = target.sharding.memory_kind
        locations = [
            jax.sharding.SingleDeviceSharding(next(iter(single.devices())), memory_kind=kind)
            for single in device_arrays
        ]
        device_arrays = jax.device_put(device_arrays, locations)
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, device_arrays)


def _from_carrier(array: jax.Array, dtype: DType) -> jax.Array:
    if dtype.numpy == dtype.carrier:
        return array
    typed: jax.Array = _convert_carrier(array, dtype.numpy)
    return typed


# Cached because compiling a new jitted function takes 75 to 170 ms per array.


@partial(jax.jit, static_argnames="dtype")
def _convert_carrier(array: jax.Array, dtype: Any) -> jax.Array:
    return array.astype(dtype) if dtype.kind == "b" else jax.lax.bitcast_convert_type(array, dtype)


@lru_cache(maxsize=256)
def _mover(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a function that moves an array to a sharding, donating the input."""
    return jax.jit(lambda array: array, out_shardings=sharding, donate_argnums=0)


@lru_cache(maxsize=256)
def _summer(carrier: np.dtype[Any], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a function that sums an array over its first axis, in its own dtype."""
    return jax.jit(partial(jax.numpy.sum, axis=0, dtype=carrier), out_shardings=sharding)


def _auto_sharding(sharding: Any) -> NamedSharding:
    """Return the sharding on a mesh with automatic axis types, so that the compiler decides on transfers."""
    return NamedSharding(_auto_mesh(sharding.mesh.devices, sharding.mesh.axis_names), sharding.spec)


def _auto_mesh(devices: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
