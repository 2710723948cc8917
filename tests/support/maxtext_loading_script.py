"""Checkpoints in many places, and whether the calls that MaxText makes load them.

The calls are those of its checkpointing.py at e591f30 ("v0": Orbax's older API) and in 0.2.5 ("v1").
Arguments: a JSON list with a directory to make them in, and a file for the answer: case -> "" or the error.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from itertools import product
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as v0
from orbax.checkpoint import v1

from support.maxtext_loading import PATHS, RULES, RUNS

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])
WEIGHTS = {"w": np.ones((2, 3), np.float32)}
PARAMETERS = {"params": {"params": WEIGHTS}}
ADAM = [{"count": np.int32(3), "mu": {"params": WEIGHTS}, "nu": {"params": WEIGHTS}}, None, None]
FULL = {"step": np.int32(5), **PARAMETERS, "opt_state": ADAM}


RUN = "checkpoints"


def handler():
    return v0.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)


def save(run: Path, step: int, tree, item: str = "items") -> None:
    manager = v0.CheckpointManager(run, item_names=(item,), item_handlers={item: handler()})
    manager.save(step, args=v0.args.Composite(**{item: v0.args.PyTreeSave(tree)}))
    manager.close()


def make(root: Path) -> None:
    save(root / "full" / RUN, 5, FULL)
    save(root / "converted" / RUN, 0, {"step": 0, **PARAMETERS, "opt_state": {}})
    save(root / "parameters" / RUN, 1, PARAMETERS)
    save(root / "other" / RUN, 3, FULL, "default")
    save(root / "tunix", 3, {"model_params": WEIGHTS}, "model_params")
    v0.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=True).save(root / "bare", PARAMETERS)
    v1.save(root / "v1" / "4", PARAMETERS, checkpointable_name="items")
    item = root / "full" / RUN / "5" / "items"
    shutil.copytree(item, root / "copied" / "item")
    shutil.copytree(item, root / "copied_items" / "items")
    for name in ("cut", "unnoted", "begun", "empty_step"):
        shutil.copytree(root / "full", root / name)
    for name in ("manifest.ocdbt", "_METADATA"):
        (root / "cut" / RUN / "5" / "items" / name).unlink()
    (root / "unnoted" / RUN / "5" / "_CHECKPOINT_METADATA").unlink()
    (root / "begun" / RUN / "5").rename(root / "begun" / RUN / "5.orbax-checkpoint-tmp")
    (root / "empty_step" / RUN / "12").mkdir()
    for name in ("2", "007", "step_9"):
        shutil.copytree(item.parent, root / "named" / RUN / name)


def expected(tree):
    def leaf(array):
        return jax.ShapeDtypeStruct(np.shape(array), np.asarray(array).dtype, sharding=SHARDING)

    return jax.tree.map(leaf, tree)


def check(tree) -> None:
    """MaxText's own: weights that are not there come back as they were asked for."""
    if any(isinstance(item, jax.ShapeDtypeStruct) for item in jax.tree.leaves(tree)):
        raise ValueError("Checkpoint does not match the model")


def asked_for(name: str):
    return ("model_params", WEIGHTS) if name == "model_params" else ("params", PARAMETERS["params"])


def load_v0(rule: str, path: str) -> None:
    name = path.rpartition("/")[2]
    checkpointer = v0.Checkpointer(handler())
    if rule == "load_parameters_path":
        key, inner = asked_for(name)
        target = {key: expected(inner)}
        args = {key: v0.checkpoint_utils.construct_restore_args(target[key])}
        check(checkpointer.restore(path, item=target, transforms={}, restore_args=args))
        return
    check(checkpointer.restore(path, args=restored(expected(FULL)))["params"])


def restored(target):
    args = v0.checkpoint_utils.construct_restore_args(target)
    return v0.args.PyTreeRestore(item=target, restore_args=args, partial_restore=True)


def partially():
    context = v1.Context()
    context.pytree.loading.partial_load = True
    return context


def load_v1(rule: str, path: str) -> None:
    root = Path(path.rstrip("/").removesuffix("/items"))
    key, inner = (
        ("model_params", WEIGHTS) if root.name == "model_params" else ("params", PARAMETERS["params"])
    )
    target = expected({key: inner} if rule == "load_parameters_path" else FULL)
    with partially():
        name = "items" if (root / "items").exists() else None
        result = v1.load(root, target, checkpointable_name=name)
    check(result[key if rule == "load_parameters_path" else "params"])


def resume_v0(run: str) -> None:
    manager = v0.CheckpointManager(run, item_names=("items",), item_handlers={"items": handler()})
    step = manager.latest_step()
    if step is None:
        raise ValueError("no step")
    result = manager.restore(step, args=v0.args.Composite(items=restored(expected(FULL))))
    check(result["items"]["params"])


def resume_v1(run: str) -> None:
    manager = v1.training.Checkpointer(run, context=partially())
    if manager.latest is None:
        raise ValueError("no step")
    check(manager.load_checkpointables(manager.latest.step, {"items": expected(FULL)})["items"]["params"])


def outcome(function, *arguments: str) -> str:
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(asked: Path, declared: Path) -> None:
    (directory,) = json.loads(asked.read_bytes())
    make(Path(directory))
    calls = {"v0": (load_v0, resume_v0), "v1": (load_v1, resume_v1)}
    result = {}
    for api, (load, resume) in calls.items():
        for rule, path in product(RULES, PATHS):
            result[f"{rule} {api} {path}"] = outcome(load, rule, f"{directory}/{path}")
        for run in RUNS:
            result[f"resume {api} {run}"] = outcome(resume, f"{directory}/{run}/checkpoints")
    declared.write_text(json.dumps(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
