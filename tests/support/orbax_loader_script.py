"""Loads checkpoints through Orbax's public loaders on 8 simulated devices; run by test_orbax_loads.py.

A process of its own, since JAX must be told of the devices before it starts, and since no other test needs
JAX. Reads a JSON list of [name, run directory, expected, cases], where expected is a map of leaves, or a
nested tree for the checkpoint "every-leaf". Writes a JSON object: name -> case -> "" or what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp_v1

from support.golden_data import described
from support.orbax_loads import EVERY_CASE

Expected = dict[str, Any]
Nested = dict[str, Any]
MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("long", "short"))


# Targets: what is asked for.


def one_device(shape: tuple[int, ...]) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[3])


def first_axis(shape: tuple[int, ...]) -> NamedSharding:
    return sharded(shape, 0)


def last_axis(shape: tuple[int, ...]) -> NamedSharding:
    return sharded(shape, len(shape) - 1)


def replicated(shape: tuple[int, ...]) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec())


def sharded(shape: tuple[int, ...], axis: int) -> NamedSharding:
    """One axis over 8 devices, or over 4 or 2 of them where it is too short for more."""
    spec: list[Any] = [None] * len(shape)
    for names in (("long", "short"), ("long",), ("short",)):
        if shape and shape[axis] % np.prod([MESH.shape[name] for name in names]) == 0:
            spec[axis] = names
            break
    return NamedSharding(MESH, PartitionSpec(*spec))


def target_of(
    expected: Expected, sharding: Callable[[tuple[int, ...]], Any] | None, dtype: str | None = None
) -> Nested:
    """A tree of `jax.ShapeDtypeStruct`; `step` is int32, as in a train state."""
    leaves = {}
    for path, leaf in expected.items():
        if isinstance(leaf, str):
            leaves[path] = {}
            continue
        shape = tuple(leaf["shape"])
        name = "int32" if path == "step" else dtype or leaf["dtype"]
        leaves[path] = jax.ShapeDtypeStruct(
            shape, jnp.dtype(name), sharding=sharding(shape) if sharding else None
        )
    return nested(leaves)


def numpy_target(expected: Expected) -> Nested:
    """A tree of arrays of numpy, which Orbax v1 takes as a target, too."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), target_of(expected, None))


def nested(leaves: dict[str, Any]) -> Nested:
    root: Nested = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = root
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return root


TARGETS: dict[str, Callable[[tuple[int, ...]], Any] | None] = {
    "unsharded": None,
    "one_device": one_device,
    "first_axis": first_axis,
    "last_axis": last_axis,
    "replicated": replicated,
}


# Loaders: each gets the run directory and the target, or None for no target.


def standard(run: Path, target: Nested | None) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        item = run / "0" / "items"
        return checkpointer.restore(item) if target is None else checkpointer.restore(item, target)


def pytree(run: Path, target: Nested | None) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        item = run / "0" / "items"
        if target is None:
            return checkpointer.restore(item)
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        return checkpointer.restore(item, item=target, restore_args=arguments)


def manager_bare(run: Path, target: Nested | None) -> Any:
    """The item's kind is told by `_CHECKPOINT_METADATA` alone."""
    with ocp.CheckpointManager(run) as manager:
        if target is None:
            return manager.restore(0)["items"]
        arguments = ocp.args.Composite(items=ocp.args.StandardRestore(target))
        return manager.restore(0, args=arguments)["items"]


def manager_named(run: Path, target: Nested | None) -> Any:
    with ocp.CheckpointManager(run, item_names=("items",)) as manager:
        arguments = ocp.args.StandardRestore(target) if target else ocp.args.StandardRestore()
        return manager.restore(0, args=ocp.args.Composite(items=arguments))["items"]


def manager_pytree(run: Path, target: Nested | None) -> Any:
    """As MaxText resumes: a handler for `items`, restore arguments for each leaf, partial restore."""
    handlers = {"items": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)}
    with ocp.CheckpointManager(run, item_names=("items",), item_handlers=handlers) as manager:
        arguments = ocp.args.PyTreeRestore()
        if target is not None:
            restore_args = ocp.checkpoint_utils.construct_restore_args(target)
            arguments = ocp.args.PyTreeRestore(item=target, restore_args=restore_args, partial_restore=True)
        return manager.restore(0, args=ocp.args.Composite(items=arguments))["items"]


def v1_load(run: Path, target: Nested | None) -> Any:
    return ocp_v1.load(run / "0", target)


def v1_load_item(run: Path, target: Nested | None) -> Any:
    return ocp_v1.load(run / "0", target, checkpointable_name="items")


def v1_load_checkpointables(run: Path, target: Nested | None) -> Any:
    targets = None if target is None else {"items": target}
    return ocp_v1.load_checkpointables(run / "0", targets)["items"]


V1_LOADERS = (v1_load, v1_load_item, v1_load_checkpointables)
V1_TARGETS = {"numpy": "numpy"} | {name: by for name, by in TARGETS.items() if by}
LOADERS = (standard, pytree, manager_bare, manager_named, manager_pytree, *V1_LOADERS)


def check_values(loaded: Any, reference: Expected, target: Nested | None) -> None:
    """Every leaf is there with the reference bits and, where one was asked for, the sharding."""
    leaves = flat(loaded)
    assert sorted(leaves) == sorted(reference), (sorted(leaves), sorted(reference))
    expected = {} if target is None else flat(target)
    for path, leaf in reference.items():
        got = leaves[path]
        if isinstance(leaf, str):
            assert got == {}, f"{path}: {got!r} instead of an empty dictionary"
        elif path == "step":
            assert np.shape(got) == () and int(got) == 0, f"{path}: {got!r}"
        else:
            assert described(np.asarray(got)) == leaf, path
            check_placement(path, got, expected.get(path))


def check_placement(path: str, got: Any, expected: Any) -> None:
    """Without a sharding in the target the arrays are numpy's, as they were saved."""
    if getattr(expected, "sharding", None) is None:
        assert isinstance(got, np.ndarray), f"{path}: {type(got).__name__}"
        return
    assert isinstance(got, jax.Array), f"{path}: {type(got).__name__}"
    assert got.sharding.is_equivalent_to(expected.sharding, got.ndim), f"{path}: {got.sharding}"
    whole = np.asarray(got)
    for shard in got.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), whole[shard.index]), f"{path}: {shard.index}"


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by path; an empty dictionary is a leaf."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    built = {}
    for key, value in tree.items():
        built |= flat(value, f"{prefix}/{key}" if prefix else key)
    return built


# The exact calls MaxText makes.


def maxtext_parameters(run: Path, expected: Expected, sharding: Any, dtype: str | None = None) -> None:
    """`load_parameters_path`: only the parameters, dtypes of the model, into any sharding."""
    parameters = {path: leaf for path, leaf in expected.items() if path.startswith("params/")}
    target = target_of(parameters, sharding, dtype)["params"]
    handler = ocp.PyTreeCheckpointHandler(
        restore_concurrent_gb=96, save_concurrent_gb=96, use_ocdbt=True, use_zarr3=True
    )
    restored = ocp.Checkpointer(handler).restore(
        run / "0" / "items",
        item={"params": target},
        transforms={},
        restore_args={"params": ocp.checkpoint_utils.construct_restore_args(target)},
    )
    assert sorted(restored) == ["params"]
    if dtype:
        leaves = flat(restored)
        assert {array.dtype.name for array in leaves.values()} == {dtype}
        narrow = {path: np.asarray(array).astype(ml_dtypes.bfloat16) for path, array in leaves.items()}
        restored, target = nested(narrow), None
    check_values(restored, parameters, {"params": target} if target else None)


def maxtext_metadata(run: Path, expected: Expected) -> None:
    """Where MaxText looks for `scan_layers`, and where its documentation says it is."""
    scan = any("/layers/" in path for path in expected)
    for path in (run / "0" / "items", run / "0"):
        with ocp.StandardCheckpointer() as checkpointer:
            custom = checkpointer.metadata(path).custom_metadata
        # What unstack notes lies beside it, below a key of its own.
        noted = {"ckpttools": custom["ckpttools"]} if "ckpttools" in custom else {}
        assert custom == {"scan_layers": scan, **noted}, f"{path}: {custom}"


def item_metadata(run: Path, expected: Expected) -> None:
    """Shapes and dtypes without values."""
    with ocp.StandardCheckpointer() as checkpointer:
        check_metadata(checkpointer.metadata(run / "0" / "items").item_metadata.tree, expected)
    with ocp.CheckpointManager(run, item_names=("items",)) as manager:
        assert manager.latest_step() == 0
        assert manager.all_steps() == [0]
    handlers = {"items": ocp.StandardCheckpointHandler()}
    with ocp.CheckpointManager(run, item_names=("items",), item_handlers=handlers) as manager:
        check_metadata(manager.item_metadata(0)["items"].tree, expected)
        assert manager.metadata(0).custom_metadata == {
            "scan_layers": any("/layers/" in path for path in expected)
        }


def manager_metadata(run: Path, expected: Expected) -> None:
    """A manager that was told nothing; it looks for the item's handler when it first restores."""
    with ocp.CheckpointManager(run) as manager:
        assert manager.latest_step() == 0
        manager.restore(0)
        check_metadata(manager.item_metadata(0)["items"].tree, expected)


def v1_metadata(run: Path, expected: Expected) -> None:
    metadata = ocp_v1.metadata(run / "0")
    check_metadata(metadata.metadata, expected)
    assert metadata.custom_metadata == {"scan_layers": any("/layers/" in path for path in expected)}


def check_metadata(tree: Any, expected: Expected) -> None:
    leaves = flat(tree)
    assert sorted(leaves) == sorted(expected)
    for path, leaf in expected.items():
        if isinstance(leaf, dict) and path != "step":
            got = leaves[path]
            assert [list(got.shape), np.dtype(got.dtype).name] == [leaf["shape"], leaf["dtype"]], path


def cases() -> dict[str, Callable[[Path, Expected], None]]:
    """Every case by name."""
    built: dict[str, Callable[[Path, Expected], None]] = {}
    for loader in LOADERS:

        def untargeted(run: Path, expected: Expected, loader: Any = loader) -> None:
            check_values(loader(run, None), expected, None)

        built[f"{loader.__name__}-none"] = untargeted
        # Orbax v1 wants a sharding in every `jax.ShapeDtypeStruct`; its targets in numpy are arrays.
        shardings = TARGETS if loader not in V1_LOADERS else V1_TARGETS
        for name, sharding in shardings.items():

            def targeted(run: Path, expected: Expected, loader: Any = loader, by: Any = sharding) -> None:
                target = numpy_target(expected) if by == "numpy" else target_of(expected, by)
                check_values(loader(run, target), expected, target)

            built[f"{loader.__name__}-{name}"] = targeted
    for name in ("first_axis", "last_axis", "replicated"):

        def parameters(run: Path, expected: Expected, by: Any = TARGETS[name]) -> None:
            maxtext_parameters(run, expected, by)

        built[f"maxtext_parameters-{name}"] = parameters

    def as_float32(run: Path, expected: Expected) -> None:
        maxtext_parameters(run, expected, first_axis, "float32")

    built["maxtext_parameters-float32"] = as_float32
    for check in (maxtext_metadata, item_metadata, manager_metadata, v1_metadata):
        built[check.__name__] = check
    return built


def every_leaf_cases() -> dict[str, Callable[[Path, Any], None]]:
    """Each loader without a target, for a tree of every kind of leaf."""
    built: dict[str, Callable[[Path, Any], None]] = {}
    for loader in LOADERS:

        def check(run: Path, expected: Any, loader: Any = loader) -> None:
            got = spelled(loader(run, None))
            assert got == expected, (got, expected)

        built[loader.__name__] = check
    return built


def spelled(tree: Any) -> Any:
    """A tree as JSON can hold it: arrays described, tuples as lists."""
    if isinstance(tree, dict):
        return {key: spelled(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [spelled(value) for value in tree]
    return described(np.asarray(tree)) if isinstance(tree, np.ndarray | jax.Array) else tree


def main(jobs: list[tuple[str, str, Expected, list[str]]]) -> dict[str, dict[str, str]]:
    results: dict[str, dict[str, str]] = {}
    for name, run, expected, chosen in jobs:
        checks = every_leaf_cases() if name == "every-leaf" else cases()
        for case in chosen:
            try:
                checks[case](Path(run), expected)
                problem = ""
            except Exception:
                problem = traceback.format_exc()
            results.setdefault(name, {})[case] = problem
    return results


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    assert {*cases()} == {*EVERY_CASE}
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_bytes()))))
