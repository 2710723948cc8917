"""What checks of `ckpttools.load` on eight devices share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ckpttools import Tree
from ckpttools.stores.local.file import LocalFile

MESHES = ("fsdp=8", "fsdp=2,tensor=4", "data=2,fsdp=4")
CHECKS: dict[str, Callable[[], None]] = {}


def check(test: Callable[[], None]) -> Callable[[], None]:
    CHECKS[test.__name__] = test
    return test


def mesh_of(text: str) -> Any:
    import jax

    pairs = [word.split("=") for word in text.split(",")]
    kinds = (jax.sharding.AxisType.Auto,) * len(pairs)
    return jax.make_mesh(tuple(int(n) for _, n in pairs), tuple(name for name, _ in pairs), axis_types=kinds)


def fitting(shape: tuple[int, ...], mesh: Any, first: int) -> Any:
    """A sharding that cuts as many axes as can be: mesh axes are dealt out from the array axis `first` on."""
    from jax.sharding import NamedSharding, PartitionSpec

    entries: list[Any] = [None] * len(shape)
    order = [(first + k) % len(shape) for k in range(len(shape))] if shape else []
    for name, length in mesh.shape.items():
        free = [axis for axis in order if entries[axis] is None and shape[axis] % length == 0]
        if free:
            entries[free[0]] = name
    return NamedSharding(mesh, PartitionSpec(*entries))


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def same(loaded: dict[Any, Any], tree: Tree) -> None:
    """Bits of each shard are those of the same elements of the checkpoint."""
    for path, array in tree.arrays.items():
        value = loaded[path]
        want = array.read()
        assert value.shape == array.shape, (path, value.shape)
        for shard in value.addressable_shards:
            assert bits(shard.data) == bits(want[shard.index]), (path, shard)


def by_path(node: Any, path: tuple[Any, ...] = ()) -> dict[Any, Any]:
    if isinstance(node, dict):
        return {k: v for key, item in node.items() for k, v in by_path(item, (*path, key)).items()}
    if isinstance(node, list):
        return {k: v for n, item in enumerate(node) for k, v in by_path(item, (*path, n)).items()}
    return {path: node}


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that are read from files meanwhile."""
    read, count = LocalFile.read_into, [0]

    def counting(self: LocalFile, offset: int, out: Any) -> None:
        count[0] += memoryview(out).nbytes
        read(self, offset, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFile, "read_into", counting)
        # It reads the header once more.
        patch.setattr(LocalFile, "check_unchanged", lambda self: None)
        yield count


def nest(flat: dict[Any, Any]) -> Any:
    root: dict[Any, Any] = {}
    for path, value in flat.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return root
