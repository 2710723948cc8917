"""Saves sharded arrays in processes that do not get to the end of what they do; run by test_eight_devices.py.

interrupted_save_script DIRECTORY: forks one for each of WAYS, which works in a directory of that name, with
its messages in `declared`. Writes to DIRECTORY/ended.json how each ended. Only JAX's import is shared.
"""

from __future__ import annotations

import json
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

# Killed when four arrays are written; at its end while two saves are under way, of which one fails; the same
# with a log of its own.
WAYS = ("killed", "left", "logged")


def interrupted(how: str, directory: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    tree = {f"w{k}": jax.device_put(np.full((512, 1024), k, np.float32), sharding) for k in range(8)}
    done = 0

    def observe(event: object) -> None:
        nonlocal done
        done += type(event).__name__ == "TaskDone"
        if how == "killed" and done == 4:
            time.sleep(0.8)  # until what is done is noted
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)

    if how == "killed":
        ckpttools.save(tree, directory / "out", jobs=1, observe=observe)
    if how == "logged":
        logging.basicConfig(filename=directory / "log")
    ckpttools.save_async(tree, directory / "whole", observe=observe, compression="zstd")
    ckpttools.save_async(tree, directory / "taken")
    (directory / "taken").write_text("somebody else's")


def forked(how: str, directory: Path) -> int:
    directory.mkdir()
    number = os.fork()
    if number == 0:
        os.dup2(os.open(directory / "said", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
        interrupted(how, directory)
        sys.exit()
    return number


def main(directory: Path) -> None:
    numbers = {how: forked(how, directory / how) for how in WAYS}
    ended = {how: os.waitstatus_to_exitcode(os.waitpid(item, 0)[1]) for how, item in numbers.items()}
    (directory / "ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
