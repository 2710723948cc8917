"""Why an array of a checkpoint cannot be loaded as the caller wants it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jax
import numpy as np

from ckpttools.core.dtypes import DType
from ckpttools.core.errors import CheckpointError
from ckpttools.core.text import type_text
from ckpttools.sharding.assigned import Assigned
from ckpttools.sharding.mesh import MeshShape
from ckpttools.sharding.specs import shard_shape, spec_of

# What numbers of Python are made of without loss.
_KINDS: Mapping[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: ("int", "uint"),
    float: ("float", "int", "uint"),
    complex: ("complex", "float", "int", "uint"),
}


def reasons(assigned: Assigned, stored_impl: str | None) -> Iterator[str]:
    """Why an array cannot be loaded as wanted.

    Args:
        assigned: the array, and what the caller wants of it.
        stored_impl: of PRNG keys the name of their implementation, as it is stored.
    """
    array, name, wanted = assigned.array, assigned.name, assigned.wanted
    if wanted.shape is not None and wanted.shape != array.shape:
        yield f"{name}: has the shape {list(array.shape)}, wanted {list(wanted.shape)}"
        return
    if wanted.dtype is not None and wanted.dtype != array.dtype:
        yield f"{name}: is {array.dtype}, wanted {wanted.dtype}"
    if stored_impl and wanted.key_impl and stored_impl != wanted.key_impl:
        yield f"{name}: is a key of {stored_impl}, wanted one of {wanted.key_impl}"
    if assigned.number is None:
        yield from _no_array(assigned)
    elif array.size != 1:
        yield f"{name}: is {type_text(array.dtype, array.shape)}, wanted a number"
    elif array.dtype.kind not in _KINDS[assigned.number]:
        yield f"{name}: is {array.dtype}, wanted a {assigned.number.__name__}"


def _no_array(assigned: Assigned) -> Iterator[str]:
    """Why it cannot be an array of JAX on its devices."""
    dtype, name = assigned.array.dtype, assigned.name
    config: Any = jax.config
    if dtype.number_bytes == 8 and not config.jax_enable_x64:
        yield f"{name}: {dtype} needs jax_enable_x64; without it JAX would keep half of its bits"
    elif not _holds(dtype):
        yield f"{name}: JAX {jax.__version__} has no {dtype}"
    yield from _uneven(assigned)


def _uneven(assigned: Assigned) -> Iterator[str]:
    target = assigned.target
    try:
        if isinstance(target.sharding, jax.sharding.NamedSharding):
            spec = spec_of(target.sharding.spec, None)
            shard_shape(target.shape, spec, MeshShape(dict(target.sharding.mesh.shape)))
        _ = target.part
    except CheckpointError as error:
        yield f"{assigned.name}: {error.message}: {error.got}; wanted {error.wanted}"
    except ValueError as error:
        yield f"{assigned.name}: {error}"


@cache
def _holds(dtype: DType) -> bool:
    """Whether JAX has arrays of a dtype."""
    try:
        jax.device_put(np.zeros((0,), dtype.numpy), jax.local_devices()[0])
    except Exception:  # what it raises differs by version and dtype
        return False
    return True
