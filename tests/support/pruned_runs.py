"""Runs to be pruned: six training steps with metrics, of which the loss falls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from support.orbax_items import LITTLE, write_item, zarr3

HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
JSON = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"


def write_run(
    run: Path,
    steps: Iterable[int] = range(1, 7),
    *,
    commits: bool = True,
    shape: tuple[int, ...] = (4, 2, 6),
) -> Path:
    """Tiny training states, as MaxText and a manager with metrics lay them out; kernels of this shape."""
    for step in steps:
        rng = np.random.default_rng(step)
        kernel = ("decoder", "layers", "mlp", "wi", "kernel")
        leaves = {
            ("step",): np.array(step, np.int32),
            ("params", "params", *kernel): rng.standard_normal(shape, np.float32),
            ("opt_state", "0", "count"): np.array(step, np.int32),
            (
                "opt_state",
                "0",
                "mu",
                "params",
                "decoder",
                "layers",
                "mlp",
                "wi",
                "kernel",
            ): rng.standard_normal(shape, np.float32),
        }
        arrays = {path: (zarr3([LITTLE], list(item.shape)), item) for path, item in leaves.items()}
        write_item(run / str(step) / "items", arrays)
        location = run / str(step) / "metrics"
        location.mkdir()
        (location / "metrics").write_text(json.dumps({"loss": 1 / step, "reward": step % 3}))
        handlers = {"items": HANDLER, "metrics": JSON}
        declared = {"item_handlers": handlers, "init_timestamp_nsecs": step, "commit_timestamp_nsecs": step}
        (run / str(step) / "_CHECKPOINT_METADATA").write_text(json.dumps(declared))
        for item in (location.parent, location, run / str(step) / "items") if commits else ():
            (item / "commit_success.txt").write_text("Checkpoint commit was successful")
    return run


def copied(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to))
