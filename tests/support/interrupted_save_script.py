"""Saves sharded arrays in a process that does not get to the end of its script; run by test_sharded_save.py.

interrupted_save_script killed DIRECTORY     is killed when four arrays are written
interrupted_save_script left DIRECTORY       ends while two saves are under way, of which one fails
interrupted_save_script logged DIRECTORY     the same, with a log of its own
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpttools

MESH = Mesh(np.array(jax.devices()), ("x",))
TREE = {
    f"w{number}": jax.device_put(
        np.full((512, 1024), number, np.float32), NamedSharding(MESH, PartitionSpec("x"))
    )
    for number in range(8)
}


def main() -> None:
    how, directory = sys.argv[1], Path(sys.argv[2])
    done = 0

    def observe(event: object) -> None:
        nonlocal done
        done += type(event).__name__ == "TaskDone"
        if how == "killed" and done == 4:
            time.sleep(0.8)  # until what is done is noted
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)

    if how == "killed":
        ckpttools.save(TREE, directory / "killed", jobs=1, observe=observe)
    if how == "logged":
        logging.basicConfig(filename=directory / "log")
    ckpttools.save_async(TREE, directory / "whole", observe=observe, compression="zstd")
    ckpttools.save_async(TREE, directory / "taken")
    (directory / "taken").write_text("somebody else's")


if __name__ == "__main__":
    main()
