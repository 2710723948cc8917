"""One of several processes of a job with 8 simulated devices in all, which save together.

    shared_save_script PORT NUMBER COUNT DIRECTORY BUCKET

Run by test_shared_save.py, which looks at what is there. Writes what went wrong to DIRECTORY/NUMBER.
"""

from __future__ import annotations

import os
import sys
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
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import CheckpointError, OtherProcessError
from ckpttools.transforms.cast import cast
from support.places import GOLDEN
from support.shared_save import SPECS, values

PORT, NUMBER, COUNT, DIRECTORY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
BUCKET = sys.argv[5]


def on_the_mesh(mesh: Mesh) -> Any:
    """Each process makes what its own devices have."""
    found: dict[str, Any] = {}
    for name, array in values().items():
        spec = SPECS.get(name)
        if spec is None:
            found[name] = array
        else:
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            found[name] = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
    return found


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
    """What is made of arrays is written by one process, which has all of them."""
    model = GOLDEN / "llama3.1" / "hf"
    arrays = {path: array.read() for path, array in ckpttools.open(model).arrays.items()}

    def put(array: np.ndarray, *spec: str) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    cut = {path[0]: put(array, "x") for path, array in arrays.items()}
    for save in (ckpttools.save, ckpttools.save_async):
        refused(
            "is written by one process",
            lambda save=save: save(cut, DIRECTORY / "no", to="maxtext", model=model),
        )
    held = ckpttools.save.plan(cut, DIRECTORY / "no").plan.tree
    wide = {path: cast(array, DTYPES["float64"]) for path, array in held.arrays.items()}
    refused("is made of others", lambda: ckpttools.save(ckpttools.Tree(wide), DIRECTORY / "no", "orbax"))
    refused("other processes have elements", lambda: next(iter(held.arrays.values())).read())
    assert not (DIRECTORY / "no").exists()
    whole = {path[0]: put(array) for path, array in arrays.items()}
    ckpttools.save(whole, DIRECTORY / "converted", to="maxtext", model=model)


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
    place = DIRECTORY / "refused"
    refused("do not save the same arrays", lambda: ckpttools.save(different, place))
    refused("manifest", lambda: ckpttools.save(tree, place, manifest=DIRECTORY / "manifest.json"))
    grid = {"grid": tree["grid"]}
    refused("by one process", lambda: ckpttools.save(grid, f"{BUCKET}/refused", "safetensors"))
    assert not place.exists()
    refused("exists", lambda: ckpttools.save(tree, DIRECTORY / "saved"))


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
    # Not in order: the others may not get to the end of theirs.
    os._exit(bool(told))
