"""Loads checkpoints onto a mesh of eight devices and saves them again.

python -m support.resaved_script JOBS RESULTS, of a JSON list of [source, destination, mesh, options of save]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import ckpttools


def main(asked: str, declared: str) -> None:
    for source, destination, mesh, options in json.loads(Path(asked).read_text()):
        state = ckpttools.load(source, rules="maxtext", mesh=mesh)
        ckpttools.save(state, destination, **options)
    Path(declared).write_text("[]")


if __name__ == "__main__":
    main(*sys.argv[1:])
