"""Saving arrays that are sharded over 8 simulated devices: `ckpttools.save` against Orbax's own save.

    python benchmarks/sharded_save.py [--directory DIR] [--rounds N] [--megabytes N]

Parameters of the shapes of Llama in bfloat16, stacked as MaxText has them, on fsdp=2, tensor=4. Each save
is a process of its own, whose start is not counted. Prints seconds until all is on the disk, CPU seconds,
the peak of resident memory above what was there before, and the seconds until saves in the background return.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pairs import remove

_MEMORY = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
LAYERS = 16


def parameters(megabytes: int) -> Any:
    """Parameters of about that size in all, on 8 devices."""
    import jax
    import ml_dtypes
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tensor"))
    generator = np.random.default_rng(0)
    # 2 (2 for attention, 3 * 4 for the MLP) embed ** 2 bytes a layer.
    embed = int((megabytes * 1e6 / (28 * LAYERS)) ** 0.5) // 64 * 64

    def array(spec: tuple[str | None, ...], *shape: int) -> jax.Array:
        values = generator.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    mlp = {name: array(("fsdp", None, "tensor"), embed, LAYERS, 4 * embed) for name in ("wi_0", "wi_1")}
    mlp["wo"] = array(("tensor", None, "fsdp"), 4 * embed, LAYERS, embed)
    attention = {name: array(("fsdp", None, "tensor"), embed, LAYERS, embed) for name in ("query", "out")}
    norms = {name: array((None, None), embed, LAYERS) for name in ("pre", "post")}
    return {"params": {"params": {"decoder": {"layers": {"mlp": mlp, "attention": attention, **norms}}}}}


def with_ckpttools(tree: Any, location: Path) -> Callable[[], object]:
    import ckpttools

    ckpttools.save(tree, location)
    return lambda: None


def with_ckpttools_in_the_background(tree: Any, location: Path) -> Callable[[], object]:
    import ckpttools

    return ckpttools.save_async(tree, location).wait


def with_orbax(tree: Any, location: Path) -> Callable[[], object]:
    import orbax.checkpoint as ocp

    ocp.Checkpointer(ocp.StandardCheckpointHandler()).save(location, args=ocp.args.StandardSave(tree))
    return lambda: None


def with_orbax_in_the_background(tree: Any, location: Path) -> Callable[[], object]:
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(location, tree)
    return checkpointer.wait_until_finished


WAYS = {
    "ckpttools.save": with_ckpttools,
    "Orbax": with_orbax,
    "ckpttools.save_async": with_ckpttools_in_the_background,
    "Orbax, in the background": with_orbax_in_the_background,
}


def measured(way: str, megabytes: int, location: Path) -> dict[str, float]:
    """Saves, in this process."""
    tree = parameters(megabytes)
    # What is imported or compiled at the first save is not counted.
    import jax

    WAYS[way](jax.tree.map(lambda item: item[:1, :1], tree), location.with_name("first"))()
    os.sync()
    _RESET.write_text("5")
    before, wall, cpu = _kilobytes("VmRSS:"), time.monotonic(), time.process_time()
    wait = WAYS[way](tree, location)
    returned = time.monotonic() - wall
    wait()
    os.sync()
    return {
        "seconds": time.monotonic() - wall,
        "returned": returned,
        "cpu": time.process_time() - cpu,
        "peak": (_kilobytes("VmHWM:") - before) / 1024,
    }


def _kilobytes(field: str) -> int:
    return next(int(line.split()[1]) for line in _MEMORY.read_text().splitlines() if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "PLACE"), help="only save once")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one[0], arguments.megabytes, Path(arguments.one[1]))))
        return
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        for _ in range(arguments.rounds):
            for way, result in results.items():
                location = Path(name) / "saved"
                words = [sys.executable, __file__, "--one", way, str(location)]
                words += ["--megabytes", str(arguments.megabytes)]
                done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
                result.append(json.loads(done.stdout.splitlines()[-1]))
                remove(location)
                remove(location.with_name("first"))
    for way, result in results.items():
        middle = {key: statistics.median(item[key] for item in result) for key in result[0]}
        print(
            f"{way:26} {middle['seconds']:5.2f} s, returned after {middle['returned']:5.2f} s, "
            f"{middle['cpu']:5.2f} s of CPU, peak +{middle['peak']:5.0f} MiB"
        )


if __name__ == "__main__":
    main()
