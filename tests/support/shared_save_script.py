"""One of several processes of a job with 8 simulated devices in all, which save together.

    shared_save_script PORT NUMBER COUNT DIRECTORY BUCKET

Run by test_shared_save.py, which looks at what is there. Writes what went wrong to DIRECTORY/NUMBER.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // int(sys.argv[3])}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpttools
from ckpttools import DTYPES, CheckpointError, OtherProcessError
from ckpttools.transforms.cast import cast
from support.locations import HF
from support.shared_save import SPECS, values

PORT, NUMBER, COUNT, DIRECTORY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
BUCKET = sys.argv[5]


def on_the_mesh(mesh: Mesh) -> Any:
    """Each process makes what its own devices have."""
    result: dict[str, Any] = {}
    for name, array in values().items():
        spec = SPECS.get(name)
        if spec is None:
            result[name] = array
        else:
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            result[name] = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
    return result


class FailedError(Exception):
    pass


def main() -> None:
    jax.distributed.initialize(f"127.0.0.1:{PORT}", COUNT, NUMBER)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    tree = on_the_mesh(mesh)
    receipt = ckpttools.save(tree, DIRECTORY / "saved")
    assert receipt.arrays == len(tree)
    saving = ckpttools.save_async(tree, DIRECTORY / "background", level="item")
    step = jax.jit(lambda array: (array * 2).sum())(tree["large"])  # which takes all processes, too
    assert np.isfinite(step)
    saving.wait()
    ckpttools.save(tree, DIRECTORY / "compressed", compression="zstd")
    ckpttools.save(tree, f"{BUCKET}/raw", memory="256MiB")
    ckpttools.save(tree, f"{BUCKET}/compressed", compression="zstd")
    ckpttools.save(tree, f"{BUCKET}/zarr", "zarr3")
    one_cannot_plan(tree)
    one_has_deleted(mesh, tree)
    one_has_everything()
    converted(mesh)
    one_fails(tree)
    one_has_no_memory(tree)
    others(tree)


def one_fails(tree: Any) -> None:
    def observe(event: object) -> None:
        if NUMBER == 1 and type(event).__name__ == "TaskDone":
            raise FailedError("no power")

    try:
        ckpttools.save(tree, DIRECTORY / "again", observe=observe)
    except FailedError:
        assert NUMBER == 1
    except OtherProcessError as error:
        assert NUMBER != 1 and "process 1: FailedError: no power" in str(error), error
    else:
        raise AssertionError("the process that failed was not missed")
    assert not (DIRECTORY / "again").exists()
    resumed = ckpttools.save(tree, DIRECTORY / "again").tasks_resumed
    assert resumed > 0 or NUMBER == 1, resumed


def one_cannot_plan(tree: Any) -> None:
    """All hear of it, and what they say of the next save is not taken for what they said of this one."""
    for save in (ckpttools.save, ckpttools.save_async):
        words = "does not fit" if NUMBER == 1 else "process 1: MemoryBudgetError"
        refused(
            words, lambda save=save: save(tree, DIRECTORY / "no", memory="1KiB" if NUMBER == 1 else "1GiB")
        )
    assert not (DIRECTORY / "no").exists()


def one_has_deleted(mesh: Mesh, tree: Any) -> None:
    rows = values()["rows"]
    gone = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, PartitionSpec("x")), rows.__getitem__)
    if NUMBER == 1:
        gone.delete()
    for save in (ckpttools.save, ckpttools.save_async):
        words = "was deleted" if NUMBER == 1 else "process 1: SourceChangedError"
        refused(words, lambda save=save: save({**tree, "gone": gone}, DIRECTORY / "no"))
    assert not (DIRECTORY / "no").exists()


def converted(mesh: Mesh) -> None:
    """Each process lays out anew what it has; chunks of which none has everything are refused."""
    weights = ckpttools.open(HF).nested()
    rows = cut(weights, mesh, 0)
    trees = {"replicated": cut(weights, mesh, None), "rows": rows, "columns": cut(weights, mesh, -1)}
    for name, tree in trees.items():
        ckpttools.save(tree, DIRECTORY / f"{name}-maxtext", to="maxtext", model=HF)
    stacked = ckpttools.open(DIRECTORY / "rows-maxtext").nested()
    embedded = cut(stacked, mesh, 0)
    ckpttools.save_async(embedded, DIRECTORY / "rows-hf", to="hf", model=HF).wait()
    ckpttools.save(cut(stacked, mesh, -1), DIRECTORY / "columns-hf", to="hf", model=HF)
    held = ckpttools.save.plan(rows, DIRECTORY / "no").plan.tree
    refused("other processes have some elements", lambda: next(iter(held.arrays.values())).read())
    wide = ckpttools.Tree({path: cast(array, DTYPES["float64"]) for path, array in held.arrays.items()})
    ckpttools.save(wide, DIRECTORY / "cast", "orbax")
    no, bucket = DIRECTORY / "no", f"{BUCKET}/no"
    for save in (ckpttools.save, ckpttools.save_async):
        none_has_all(save, wide, no, "orbax", compression="zstd")
        none_has_all(save, rows, no, to="maxtext", model=HF, compression="zstd")
        none_has_all(save, rows, bucket, to="maxtext", model=HF)
        none_has_all(save, embedded, bucket, to="hf", model=HF)
    assert not no.exists()


def none_has_all(save: Callable[..., object], *args: Any, **options: Any) -> None:
    refused("no process has all", lambda: save(*args, **options))


def cut(tree: Any, mesh: Mesh, axis: int | None) -> Any:
    """The arrays of a tree over both processes along an axis, or another one that can be cut so."""

    def put(lazy: Any) -> jax.Array:
        array = lazy.read()
        axes = [] if axis is None else [axis % max(1, array.ndim), *range(array.ndim)]
        chosen = next((item for item in axes if array.ndim and array.shape[item] % 4 == 0), None)
        spec = ["x" if item == chosen else None for item in range(array.ndim)]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree.map(put, tree)


def one_has_no_memory(tree: Any) -> None:
    try:
        room = "1KiB" if NUMBER == 1 else "1GiB"
        ckpttools.save_async(tree, DIRECTORY / "no-room", host_memory=room).wait()
    except CheckpointError as error:
        words = "host_memory" if NUMBER == 1 else "process 1: MemoryBudgetError"
        assert words in str(error), error
    else:
        raise AssertionError("the process that has no memory was not missed")


def others(tree: Any) -> None:
    """What is refused, in all processes."""
    different = {**tree, f"of {NUMBER}": np.ones(3)}
    location = DIRECTORY / "refused"
    refused("do not save the same arrays", lambda: ckpttools.save(different, location))
    refused("plan or destination", lambda: ckpttools.save(tree, DIRECTORY / f"of {NUMBER}"))
    refused("manifest", lambda: ckpttools.save(tree, location, manifest=DIRECTORY / "manifest.json"))
    grid = {"grid": tree["grid"]}
    refused("only one process can write", lambda: ckpttools.save(grid, f"{BUCKET}/refused", "safetensors"))
    assert not location.exists()
    refused("exists", lambda: ckpttools.save(tree, DIRECTORY / "saved"))


def one_has_everything() -> None:
    """It saves alone; whoever has nothing is told so, and nobody waits for anybody."""
    devices = [device for device in jax.devices() if device.process_index == COUNT - 1]
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    array = jax.make_array_from_callback((8,), sharding, np.arange(8.0).__getitem__, np.float32)
    for save in (ckpttools.save, ckpttools.save_async):
        if NUMBER < COUNT - 1:
            refused(
                "only on devices of another process", lambda save=save: save({"w": array}, DIRECTORY / "one")
            )
    if NUMBER == COUNT - 1:
        ckpttools.save({"w": array}, DIRECTORY / "one")


def wait_for_others() -> None:
    """Until all have written what went wrong; none lives longer than its caller waits."""
    ended = time.monotonic() + 60
    while time.monotonic() < ended and not all((DIRECTORY / str(item)).exists() for item in range(COUNT)):
        time.sleep(0.01)


def refused(words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except CheckpointError as error:
        assert words in str(error), error
    else:
        raise AssertionError("nothing was refused")


if __name__ == "__main__":
    told = ""
    try:
        main()
    except BaseException:
        told = traceback.format_exc()
    (DIRECTORY / str(NUMBER)).write_text(told)
    if not told and NUMBER == 0:
        # JAX ends the others with it.
        wait_for_others()
    # Not in order: the others may not get to the end of theirs.
    os._exit(bool(told))
