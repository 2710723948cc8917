"""Loads checkpoints of every storage layout through Orbax's public loaders; run by test_orbax_write.py.

A process of its own, since JAX must be told of the devices before it starts. Reads a JSON list of
[name, run directory, step, item, whether to give a target, expected nested tree, loaders]. Writes a JSON
object: name -> loader -> "" or what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp_v1

from support.golden_data import described

jax.config.update("jax_enable_x64", True)
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("all",))


def standard(step: Path, item: str, target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        location = step / item
        return checkpointer.restore(location) if target is None else checkpointer.restore(location, target)


def pytree(step: Path, item: str, target: Any) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        if target is None:
            return checkpointer.restore(step / item)
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        return checkpointer.restore(step / item, item=target, restore_args=arguments)


def manager(step: Path, item: str, target: Any) -> Any:
    """A manager that was told nothing: the item's kind is told by `_CHECKPOINT_METADATA` alone."""
    with ocp.CheckpointManager(step.parent) as each:
        assert each.latest_step() == int(step.name)
        if target is None:
            return each.restore(int(step.name))[item]
        arguments = ocp.args.Composite(**{item: ocp.args.StandardRestore(target)})
        return each.restore(int(step.name), args=arguments)[item]


def v1_load(step: Path, item: str, target: Any) -> Any:
    return ocp_v1.load(step, target)


LOADERS = {loader.__name__: loader for loader in (standard, pytree, manager, v1_load)}


def sharding_of(shape: tuple[int, ...]) -> NamedSharding:
    """The first axis that 8 devices can share, if there is one."""
    axis = next((axis for axis, length in enumerate(shape) if length % 8 == 0), None)
    return NamedSharding(MESH, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "all"))


def target_of(tree: Any) -> Any:
    def leaf(array: Any) -> Any:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding_of(array.shape))

    return jax.tree.map(leaf, tree)


def spelled(tree: Any) -> Any:
    """A tree as JSON can hold it: arrays described, typed keys with the name of their kind."""
    if isinstance(tree, dict):
        return {key: spelled(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [spelled(value) for value in tree]
    if isinstance(tree, jax.Array) and jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return {"impl": str(jax.random.key_impl(tree)), "data": spelled(jax.random.key_data(tree))}
    return described(np.asarray(tree)) if isinstance(tree, np.ndarray | jax.Array) else tree


def check(loader: Any, step: Path, item: str, targeted: bool, reference: Any) -> None:
    target = target_of(standard(step, item, None)) if targeted else None
    restored = loader(step, item, target)
    got = spelled(restored)
    assert got == reference, (got, reference)
    if target is not None:
        for array, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
            assert array.sharding.is_equivalent_to(expected.sharding, array.ndim), (array, expected)


def main(jobs: list[tuple[str, str, int, str, bool, Any, list[str]]]) -> dict[str, dict[str, str]]:
    results: dict[str, dict[str, str]] = {}
    for name, run, step, item, targeted, expected, chosen in jobs:
        for loader in chosen:
            try:
                check(LOADERS[loader], Path(run) / str(step), item, targeted, expected)
                problem = ""
            except Exception:
                problem = traceback.format_exc()
            results.setdefault(name, {})[loader] = problem
    return results


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_bytes()))))
