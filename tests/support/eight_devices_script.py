"""Saves sharded arrays on 8 simulated devices and loads them again; run by test_eight_devices.py.

A process of its own, since JAX must be told of the devices before it starts. Reads a JSON list of names of
functions here and in `support.sharded_checks`, and a directory; writes a JSON object: name -> "" or what was
wrong.
"""

from __future__ import annotations

import json
import os
import re
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
import optax
import orbax.checkpoint as ocp
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpttools
from ckpttools import DTYPES as DTYPES_OF
from ckpttools import (
    CheckpointError,
    ConfigError,
    DestinationExistsError,
    FormatError,
    MemoryBudgetError,
    Region,
    SourceChangedError,
    UnknownNameError,
    UsageError,
)
from ckpttools.sharding import save_shards
from ckpttools.stores.publishing import LockedError
from ckpttools.transforms.cast import cast as cast_to
from support.eight_devices import by_path
from support.locations import GOLDEN, ROOT
from support.sharded_checks import CHECKS

MESHES = {
    "8": Mesh(np.array(jax.devices()), ("x",)),
    "2x4": Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y")),
    "2x2x2": Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z")),
    "backwards": Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("x", "y")),
}
P = PartitionSpec
SPECS = {
    "8": [P(), P("x"), P(None, "x")],
    "2x4": [P(), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x")), P("y")],
    "2x2x2": [P(("x", "z"), "y"), P("z"), P(None, "x")],
    "backwards": [P("x", "y"), P(None, "y")],
}
RNG = np.random.default_rng(7)
WHOLE = "bool int4 uint8 int8 int16 uint16 int32 uint32"
DTYPES = f"{WHOLE} float8_e4m3fn float8_e5m2 float16 bfloat16 float32 complex64"


def patterns(dtype: str, *shape: int) -> np.ndarray:
    """Elements of every pattern of bits: NaNs with payloads, both zeros, infinities."""
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    if dtype == "int4":
        return RNG.integers(-8, 8, shape).astype(ml_dtypes.int4)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    return RNG.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)


def put(array: Any, mesh: str, spec: PartitionSpec) -> jax.Array:
    return jax.device_put(array, NamedSharding(MESHES[mesh], spec))


def bits(array: Any) -> tuple[Any, ...]:
    if isinstance(array, str):
        return (array,)
    if hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.dtype, array.shape, array.tobytes()


def same(result: Any, expected: Any) -> None:
    """Bits and structure."""
    assert jax.tree.structure(result) == jax.tree.structure(expected), jax.tree.structure(result)
    pairs = zip(jax.tree_util.tree_leaves_with_path(result), jax.tree.leaves(expected), strict=True)
    wrong = [jax.tree_util.keystr(path) for (path, a), b in pairs if bits(a) != bits(b)]
    assert wrong == [], wrong


def refused(error: type[BaseException], *words: str) -> Callable[[Callable[[], object]], None]:
    def check(call: Callable[[], object]) -> None:
        try:
            call()
        except error as raised:
            assert all(word in str(raised) for word in words), raised
            return
        raise AssertionError(f"nothing was refused, where {error.__name__} was expected")

    return check


def everything() -> dict[str, Any]:
    """One leaf of each kind, cut in many ways."""
    grid = {
        f"{mesh} {number}": put(patterns("bfloat16", 16, 24), mesh, spec)
        for mesh, specs in SPECS.items()
        for number, spec in enumerate(specs)
    }
    dtypes = {name: put(patterns(name, 8, 16), "2x4", P("x", "y")) for name in DTYPES.split()}
    return {
        "grid": grid,
        "dtypes": dtypes,
        "pinned": jax.device_put(
            patterns("float32", 8, 8), NamedSharding(MESHES["8"], P("x"), memory_kind="pinned_host")
        ),
        "scalar": put(np.float32(-0.0), "2x4", P()),
        "number": 7,
        "fraction": 0.5,
        "numpy": patterns("float32", 6, 8)[::2, ::-1],
        "list": [put(np.arange(8), "8", P("x")), None, {}, [], (), "text"],
        "key": jax.random.key(3),
        "keys": put(jax.random.split(jax.random.key(4, impl="rbg"), 8), "8", P("x")),
        "optimizer": optax.adamw(1e-3).init({"w": put(patterns("float32", 8, 8), "2x4", P("x", "y"))}),
    }


TREE = everything()


def plain(tree: Any) -> Any:
    """The same in memory of the host, cut nowhere."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )


def without_keys(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in tree.items() if name not in ("key", "keys")}


# What is saved loads in Orbax.


def orbax_structure_is_its_own(work: Path) -> None:
    ckpttools.save(TREE, work / "ours")
    ocp.PyTreeCheckpointer().save(work / "theirs", TREE)
    ours, theirs = (
        json.loads((location / "_METADATA").read_text())["tree_metadata"]
        for location in (work / "ours" / "0" / "items", work / "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name]["key_metadata"] == theirs[name]["key_metadata"] for name in ours)
    same(
        ocp.StandardCheckpointer().restore(work / "ours" / "0" / "items"),
        ocp.StandardCheckpointer().restore(work / "theirs"),
    )
    assert ckpttools.diff(work / "ours", work / "theirs").equal


def standard_checkpointer_with_target(work: Path) -> None:
    tree = {**TREE, "list": TREE["list"][:-1]}  # which takes no text
    ckpttools.save(tree, work / "out")
    result = ocp.StandardCheckpointer().restore(work / "out" / "0" / "items", abstract(tree))
    same(result, tree)
    assert result["grid"]["2x4 1"].sharding == TREE["grid"]["2x4 1"].sharding


def pytree_handler_without_ocdbt(work: Path) -> None:
    tree = without_keys(TREE)
    ckpttools.save(tree, work / "out", ocdbt=False, zarr3=False)
    result = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(work / "out" / "0" / "items")
    same([*jax.tree.leaves(result)], [*jax.tree.leaves(tree)])


def checkpoint_manager(work: Path) -> None:
    state = {"params": TREE["grid"], "opt": TREE["optimizer"]}
    ckpttools.save(state, work / "run", as_step=300, item="default", compression="zstd")
    with ocp.CheckpointManager(work / "run") as manager:
        assert manager.all_steps() == [300]
        same(manager.restore(300, args=ocp.args.StandardRestore(abstract(state))), state)
        without = manager.restore(300, args=ocp.args.StandardRestore())
        same([*jax.tree.leaves(without)], [*jax.tree.leaves(state)])
    ckpttools.save(state, work / "run" / "400", level="step", item="default", custom={"tokens": 5})
    ckpttools.save_async(state, work / "run" / "500", level="step", item="default").wait()
    with ocp.CheckpointManager(work / "run") as manager:
        assert manager.all_steps() == [300, 400, 500]
        same(manager.restore(500, args=ocp.args.StandardRestore(abstract(state))), state)
    opened = ckpttools.open(work / "run", 400)
    assert opened.metadata.custom == {"tokens": 5} and opened.metadata.step == 400
    assert ckpttools.doctor(work / "run").healthy
    refused(DestinationExistsError, "is not in <step>/<item>")(
        lambda: ckpttools.save(state, work / "run" / "500", overwrite=True)
    )
    refused(DestinationExistsError, "is not in <item>")(
        lambda: ckpttools.save(state, work / "run", level="step", overwrite=True)
    )
    changed = {"params": jax.tree.map(lambda leaf: leaf[::-1], TREE["grid"]), "opt": TREE["optimizer"]}
    ckpttools.save(changed, work / "run" / "500", level="step", item="default", overwrite=True)
    (work / "run" / "400" / "notes").write_text("mine")
    refused(DestinationExistsError, "notes")(
        lambda: ckpttools.save(state, work / "run" / "400", level="step", overwrite=True)
    )
    with ocp.CheckpointManager(work / "run") as manager:
        assert manager.all_steps() == [300, 400, 500]
        same(manager.restore(500, args=ocp.args.StandardRestore(abstract(changed))), changed)


def an_item(work: Path) -> None:
    ckpttools.save(TREE["optimizer"], work / "item", level="item", compression="zstd")
    same(ocp.StandardCheckpointer().restore(work / "item", abstract(TREE["optimizer"])), TREE["optimizer"])
    assert ckpttools.diff(work / "item", ckpttools.save.plan(TREE["optimizer"], work / "x").plan.tree).equal
    assert ckpttools.doctor(work / "item").healthy
    other = jax.tree.map(lambda leaf: leaf + 1, TREE["optimizer"])
    ckpttools.save(other, work / "item", level="item", overwrite=True)
    same(ocp.StandardCheckpointer().restore(work / "item", abstract(other)), other)
    (work / "item" / "notes").write_text("mine")
    refused(DestinationExistsError, "notes")(
        lambda: ckpttools.save(other, work / "item", level="item", overwrite=True)
    )
    refused(UsageError, "is the item", "as_step")(
        lambda: ckpttools.save(TREE, work / "no", level="item", as_step=3)
    )


class Block(nnx.Module):
    def __init__(self, width: int) -> None:
        self.kernel = nnx.Param(patterns("float32", width, 16))
        self.bias = nnx.Param(patterns("bfloat16", 16))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = Block(8)
        self.blocks = nnx.List([Block(16) for _ in range(2)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def flax_nnx(work: Path) -> None:
    model = Model(nnx.Rngs(0))
    split = jax.tree.map(
        lambda leaf: put(leaf, "2x4", P("x", "y")) if leaf.ndim == 2 else leaf, nnx.state(model)
    )
    nnx.update(model, split)
    ckpttools.save(model, work / "module")
    ckpttools.save({"model": nnx.state(model)}, work / "state")
    state = nnx.state(model)
    result = ocp.StandardCheckpointer().restore(work / "module" / "0" / "items", abstract(state))
    same(result, state)
    result = ocp.StandardCheckpointer().restore(work / "state" / "0" / "items", {"model": abstract(state)})
    same(result, {"model": state})
    restored = Model(nnx.Rngs(7))
    ckpttools.load(work / "module", like=restored)
    first, second = (
        list(map(bits, jax.tree.leaves(item["dropout"]))) for item in (nnx.state(restored), state)
    )
    assert first != second
    nnx.update(restored, ckpttools.load(work / "module", like=nnx.state(restored)))
    same(nnx.state(restored), state)


def flax_linen(work: Path) -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            kernel = linen.with_partitioning(linen.initializers.normal(), ("x", None))
            return linen.Dense(4, kernel_init=kernel)(x)

    variables = Net().init(jax.random.PRNGKey(0), jnp.ones((2, 8)))
    ckpttools.save(variables, work / "out")
    result = ocp.StandardCheckpointer().restore(work / "out" / "0" / "items", abstract(variables))
    same(result, variables)


def loaded_again(work: Path) -> None:
    tree = {**TREE, "list": TREE["list"][:-1]}  # which takes no text
    for format, options in (("orbax", {}), ("orbax", {"compression": "zstd"}), ("zarr3", {})):
        location = work / f"{format}{len(options)}"
        ckpttools.save(tree, location, format, **options)
        result = ckpttools.load(location, like=tree)
        same(result, tree)
        assert result["grid"]["backwards 0"].sharding == TREE["grid"]["backwards 0"].sharding


def as_it_lies_on_its_mesh(work: Path) -> None:
    """Orbax restores it so without a target; chunks are cut within shards."""
    large = put(patterns("float32", 2048, 4096), "2x4", P("x", "y"))
    tree = {name: TREE["grid"][name] for name in ("8 1", "2x4 1", "2x4 4", "2x4 0", "backwards 0")}
    tree["large"] = large
    tree |= {"key": TREE["key"], "numpy": TREE["numpy"], "single": jnp.arange(3.0)}
    ckpttools.save(tree, work / "out", keep_sharding=True)
    result = ocp.StandardCheckpointer().restore(work / "out" / "0" / "items")
    same(result, tree)
    assert all(result[name].sharding == tree[name].sharding for name in tree if name[0] in "82lb")
    chunks = {array.path: array.chunk_shape for array in ckpttools.chunks(work / "out").arrays}
    assert chunks["large"] == (1024, 1024)
    same(ocp.StandardCheckpointer().restore(work / "out" / "0" / "items", abstract(tree)), tree)
    refused(UsageError, "only Orbax")(lambda: ckpttools.save(tree, work / "no", "zarr3", keep_sharding=True))


# What is saved is what ckpttools writes from files.


def as_from_a_file(work: Path) -> None:
    tree = {**TREE["grid"], **{k: v for k, v in TREE["dtypes"].items() if k != "int4"}}
    ckpttools.save(tree, work / "sharded.st", "safetensors")
    ckpttools.save(plain(tree), work / "plain.st", "safetensors")
    assert content(work / "sharded.st") == content(work / "plain.st")
    for format, options in (("orbax", {"as_step": 0}), ("zarr3", {}), ("zarr3", {"compression": "zstd"})):
        name = f"{format}{len(options)}"
        opened = ckpttools.open(work / "sharded.st")
        in_order = ckpttools.Tree(dict(sorted(opened.items()))).with_metadata(format=format)
        ckpttools.save(in_order, work / f"{name}-file", format, **options)
        ckpttools.save(tree, work / f"{name}-memory", format, **options)
        assert content(work / f"{name}-file") == content(work / f"{name}-memory"), name


def content(directory: Path) -> dict[str, bytes]:
    """Every file; times of day are not compared."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in files
        if path.name != "_CHECKPOINT_METADATA"
    }


def arrays_without_elements(work: Path) -> None:
    tree = {"none": put(np.zeros((0, 8), np.float32), "8", P(None, "x")), "w": TREE["grid"]["8 1"]}
    ckpttools.save(tree, work / "zarr", "zarr3")
    ckpttools.save(tree, work / "st", "safetensors")
    assert ckpttools.open(work / "zarr")["none"].shape == (0, 8)
    assert ckpttools.open(work / "st")["none"].shape == (0, 8)
    refused(FormatError, "Orbax cannot store arrays without elements", "none")(
        lambda: ckpttools.save(tree, work / "out")
    )


def the_whole_tree_is_an_array(work: Path) -> None:
    ckpttools.save(TREE["grid"]["2x4 3"], work / "out")
    assert bits(ckpttools.open(work / "out")[()].read()) == bits(TREE["grid"]["2x4 3"])


def far_devices(work: Path) -> None:
    """As from accelerators: cut on the device, in pieces, as carriers."""
    is_on_host, nbytes = save_shards.Shard.is_on_host, save_shards.PIECE_BYTES
    save_shards.Shard.is_on_host = property(lambda self: isinstance(self.data, np.ndarray))
    save_shards.PIECE_BYTES = 50
    some = ("int4", "float8_e4m3fn", "bfloat16", "complex64")  # each shape is compiled for each device
    tree = {**{name: TREE["dtypes"][name] for name in some}, "scalar": TREE["scalar"]}
    try:
        ckpttools.save(tree, work / "out")
        ckpttools.save_async(tree, work / "async").wait()
        with jax.enable_x64(True):
            wide = {name: put(patterns(name, 8, 8), "8", P("x")) for name in ("float64", "int64")}
        ckpttools.save(wide, work / "wide")
    finally:
        save_shards.Shard.is_on_host, save_shards.PIECE_BYTES = is_on_host, nbytes
    ckpttools.save(tree, work / "near")
    assert content(work / "out") == content(work / "near") == content(work / "async")
    ckpttools.save(wide, work / "wide-near")
    assert content(work / "wide") == content(work / "wide-near")


def a_plan_of_shapes(work: Path) -> None:
    prepared = ckpttools.save.plan(abstract(TREE), work / "out")
    real = ckpttools.save.plan(TREE, work / "out")
    assert prepared.plan.bytes_out == real.plan.bytes_out > 0
    assert prepared.plan.layout.files == real.plan.layout.files
    refused(UsageError, "has no elements", "dtypes/bfloat16")(
        lambda: ckpttools.save({"dtypes": abstract(TREE["dtypes"])}, work / "out")
    )
    assert not (work / "out").exists()


def what_is_no_array(work: Path) -> None:
    refused(UsageError, "is not an array", "a/0", "object")(
        lambda: ckpttools.save({"a": [object()]}, work / "o")
    )
    refused(UnknownNameError, "dtype", "words")(
        lambda: ckpttools.save({"words": np.array(["a"])}, work / "o")
    )
    refused(UsageError, "a path is not a tree", "ckpttools.open")(lambda: ckpttools.save(work, work / "o"))
    refused(UsageError, "no array to save")(lambda: ckpttools.save({"a": {}}, work / "o"))
    masked = np.ma.array([1.0, 2.0], mask=[True, False])
    refused(UsageError, "masked", "m")(lambda: ckpttools.save({"m": masked}, work / "o"))
    gone = jnp.arange(8.0)
    gone.delete()
    refused(SourceChangedError, "deleted", "gone")(lambda: ckpttools.save({"gone": gone}, work / "o"))
    refused(TypeError, "did you mean 'compression'")(
        lambda: ckpttools.save(TREE, work / "o", compresion="zstd")
    )
    refused(UsageError, "`to` cannot be this", "torch")(lambda: ckpttools.save(TREE, work / "o", to="torch"))
    assert [*work.iterdir()] == []


def uneven_as_jax(work: Path) -> None:
    refused(ValueError, "divi")(lambda: put(np.zeros((9, 8), np.float32), "8", P("x")))


# Models.


def sharded(array: np.ndarray) -> jax.Array:
    """Over 8 devices by the axes that their number divides."""
    spec: list[Any] = [None] * array.ndim
    for name in ("y", "x"):
        size = MESHES["2x4"].shape[name]
        axis = next((k for k in range(array.ndim) if not spec[k] and array.shape[k] % size == 0), None)
        if axis is not None:
            spec[axis] = name
    return put(array, "2x4", P(*spec))


def on_devices(location: Path) -> Any:
    return jax.tree.map(lambda array: sharded(array.read()), ckpttools.open(location).nested())


def models(work: Path) -> None:
    for family in ("llama3.1", "gemma2", "qwen3-moe"):
        hf, built = GOLDEN / family / "hf", work / f"{family}-maxtext"
        ckpttools.hf_to_maxtext(hf, built)
        ckpttools.maxtext_to_hf(built, work / f"{family}-hf", like=hf)
        ckpttools.save(on_devices(built), work / f"{family}-again", to="hf", model=hf)
        assert content(work / f"{family}-hf") == content(work / f"{family}-again"), family
        ckpttools.save(on_devices(hf), work / f"{family}-stacked", to="maxtext", model=hf)
        arrays = (
            content(built / "0" / "items" / "d"),
            content(work / f"{family}-stacked" / "0" / "items" / "d"),
        )
        assert arrays[0] == arrays[1], family
        assert not ckpttools.verify(work / f"{family}-stacked", hf).differences
    state = nnx_state(on_devices(work / "llama3.1-maxtext"))
    ckpttools.save(state, work / "nnx", to="hf", model=GOLDEN / "llama3.1" / "hf" / "config.json")
    weights = "model.safetensors"
    assert (work / "nnx" / weights).read_bytes() == (work / "llama3.1-hf" / weights).read_bytes()
    loaded = ckpttools.load(GOLDEN / "llama3.1" / "hf", to="maxtext", rules="maxtext", mesh="fsdp=4,tensor=2")
    ckpttools.save(loaded, work / "loaded", to="hf", model=GOLDEN / "llama3.1" / "hf")
    assert content(work / "loaded") == content(work / "llama3.1-hf")
    refused(ConfigError, "config.json")(lambda: ckpttools.save(on_devices(hf), work / "no", to="maxtext"))
    refused(UsageError, "written as safetensors")(
        lambda: ckpttools.save(state, work / "no", "orbax", to="hf")
    )


def what_is_resharded(work: Path) -> None:
    """Orbax restores it on that mesh where it is told nothing, and on another."""
    source, name = GOLDEN / "llama3.1" / "maxtext_scanned", "params params decoder layers mlp wi_0 kernel"
    ckpttools.reshard(source, work / "out", mesh="fsdp=4,tensor=2", subchunks="4KiB")
    whole = NamedSharding(MESHES["8"], P())
    with jax.enable_x64(True):
        reader = ocp.PyTreeCheckpointer()
        plain = reader.restore(work / "out" / "0" / "items")
        aims = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=whole), plain)
        aimed = reader.restore(work / "out" / "0" / "items", restore_args=aims)
    for result, spec in ((plain, P("fsdp", None, "tensor")), (aimed, P())):
        values = by_path(result)
        for path, array in ckpttools.open(source).arrays.items():
            assert bits(values[path]) == bits(array.read()), path
        assert values[tuple(name.split())].sharding.spec == spec
    assert dict(by_path(plain)[tuple(name.split())].sharding.mesh.shape) == {"fsdp": 4, "tensor": 2}


def nnx_state(parameters: Any) -> Any:
    """As MaxText's models in NNX have them."""
    return jax.tree.map(nnx.Param, parameters["params"]["params"])


# Failing, and going on.


def what_failed_goes_on_with_the_same_arrays(work: Path) -> None:
    tree = {f"w{k}": put(patterns("float32", 512, 1024), "2x4", P("x", "y")) for k in range(12)}
    fail_after(tree, work / "out", 4)
    assert not (work / "out").exists()
    receipt = ckpttools.save(tree, work / "out", resume=True)
    assert 0 < receipt.tasks_resumed < receipt.tasks
    same(ocp.StandardCheckpointer().restore(work / "out" / "0" / "items"), tree)
    others = {**tree, "w3": tree["w3"] + 1}
    fail_after(tree, work / "new", 4)
    refused(UsageError, "contains the beginning of another conversion")(
        lambda: ckpttools.save(others, work / "new")
    )
    assert ckpttools.save(others, work / "new", overwrite=True).tasks_resumed == 0
    same(ocp.StandardCheckpointer().restore(work / "new" / "0" / "items"), others)


class FailedError(Exception):
    pass


def fail_after(tree: Any, location: Path, tasks: int) -> None:
    """Saves until so many tasks are done and noted."""
    import time

    done = 0

    def observe(event: object) -> None:
        nonlocal done
        done += type(event).__name__ == "TaskDone"
        if done == tasks:
            time.sleep(0.8)
            raise FailedError

    refused(FailedError)(lambda: ckpttools.save(tree, location, observe=observe, jobs=1, memory="1GiB"))


def memory(work: Path) -> None:
    """A leaf larger than the budget, and many of them: what is resident grows by no more."""
    tree = {f"w{k}": put(np.full((4096, 8192), k, np.float32), "2x4", P("x", "y")) for k in range(2)}
    Path("/proc/self/clear_refs").write_text("5")
    before = current_peak()
    prepared = ckpttools.save.plan(tree, work / "out", memory="192MiB")
    assert prepared.plan.projected_peak <= 192 << 20 < tree["w0"].nbytes * 2
    prepared.run()
    assert current_peak() - before <= 192 << 20, (current_peak() - before) >> 20
    refused(MemoryBudgetError, "does not fit")(lambda: ckpttools.save(tree, work / "no", memory="1MiB"))


def current_peak() -> int:
    from ckpttools.core.process_memory import peak_bytes

    return peak_bytes() or 0


# In the background.


def in_the_background(work: Path) -> None:
    device = put(patterns("bfloat16", 64, 64), "2x4", P("x", "y"))
    host = patterns("float32", 64, 64)
    expected = {"device": np.array(device), "host": host.copy(), "step": 3}
    saving = ckpttools.save_async({"device": device, "host": host, "step": 3}, work / "out")
    device.delete()
    host[...] = 0
    receipt = saving.wait()
    assert saving.done and receipt.arrays == 3 and "done" in repr(saving)
    same(ocp.StandardCheckpointer().restore(work / "out" / "0" / "items"), expected)


def a_tree_of_the_user(work: Path) -> None:
    """What is copied and given back is never what the user holds, whether it is saved or not."""
    held = ckpttools.save.plan(TREE, work / "out").plan.tree
    expected = {path: bits(array.read()) for path, array in held.arrays.items()}
    ckpttools.save_async(held, work / "one", "orbax").wait()
    refused(MemoryBudgetError, "host_memory")(
        lambda: ckpttools.save_async(held, work / "no", "orbax", host_memory="1KiB")
    )
    lazy = {"one": next(iter(held.arrays.values()))}
    ckpttools.save_async(lazy, work / "lazy").wait()
    ckpttools.save_async(held, work / "two", "orbax").wait()
    assert {path: bits(array.read()) for path, array in held.arrays.items()} == expected
    assert content(work / "one") == content(work / "two")
    grid = held.glob("grid/*").arrays.items()
    cast = ckpttools.Tree({path: cast_to(array, DTYPES_OF["float64"]) for path, array in grid})
    ckpttools.save_async(cast, work / "cast", "orbax").wait()
    ckpttools.save(cast, work / "cast-now", "orbax")
    assert content(work / "cast") == content(work / "cast-now")


def what_is_given_back_is_not_read(work: Path) -> None:
    """And what is not held is never taken for zeros."""
    array = ckpttools.save.plan({"w": TREE["grid"]["8 1"]}, work / "out").plan.tree["w"]
    rest = array.holder.clone()
    rest._shards = rest._shards[1:]
    out = np.empty(array.shape, array.dtype.carrier)
    refused(UsageError, "other processes have some elements", "w")(
        lambda: rest.read_into(Region.whole(array.shape), out)
    )
    array.holder.discard()
    refused(SourceChangedError, "released", "w")(array.holder.check)
    refused(SourceChangedError, "released", "w")(array.read)


def errors_come_out_of_wait(work: Path) -> None:
    def observe(event: object) -> None:
        if type(event).__name__ == "Started":
            raise FailedError

    saving = ckpttools.save_async(TREE, work / "out", observe=observe)
    refused(FailedError)(saving.wait)
    assert saving.done and "failed" in repr(saving)
    assert not (work / "out").exists()
    ckpttools.save_async(TREE, work / "out").wait()
    refused(CheckpointError, "exists")(lambda: ckpttools.save_async(TREE, work / "out"))


def one_save_to_a_place(work: Path) -> None:
    import threading

    go_on = threading.Event()

    def observe(event: object) -> None:
        if type(event).__name__ == "Started":
            go_on.wait(20)

    saving = ckpttools.save_async(TREE, work / "out", observe=observe)
    refused(LockedError, "earlier save of this process")(lambda: ckpttools.save_async(TREE, work / "out"))
    refused(LockedError)(lambda: ckpttools.save(TREE, work / "out"))
    refused(TimeoutError, "still being written")(lambda: saving.wait(0.01))
    refused(MemoryBudgetError, "host_memory", "running saves")(
        lambda: ckpttools.save_async(TREE, work / "other", host_memory=30_000)
    )
    assert not saving.done and "under way" in repr(saving)
    go_on.set()
    saving.wait()


def the_budget_of_the_host(work: Path) -> None:
    refused(MemoryBudgetError, "host_memory", "ckpttools.save")(
        lambda: ckpttools.save_async(TREE, work / "out", host_memory="1KiB")
    )
    assert [*work.iterdir()] == []
    ckpttools.save_async(TREE, work / "out", host_memory="1MiB").wait()


def the_page(work: Path) -> None:
    """The examples of docs/saving.md."""
    os.chdir(work)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "saving.md").read_text(), re.DOTALL):
        exec(block, names)
    assert {path.name for path in (work / "run").iterdir()} == {"1000", "2000"}


def main() -> None:
    names, directory = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for name in names:
        work = Path(directory) / name
        work.mkdir()
        try:
            CHECKS[name]() if name in CHECKS else globals()[name](work)
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
