"""`ckpt convert to-safetensors` and `to-orbax` against `cp` + `sync`, and reading Orbax's default chunks.

    python benchmarks/formats.py [--directory DIR] [--rounds N]

The checkpoint has the shapes of Llama 3.2 1B (2.47 GB). Targets: a ratio of at least 0.8 to `cp`; decoding
zstd chunks at most 1.2 times as long as tensorstore alone takes; a peak of at most 1 GiB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pairs import against_copy, ckpt, remove, seconds

from ckpttools.testing.models import LlamaSizes, write_llama

# A stacked array of 1.07 GB, saved by Orbax as it does by default: OCDBT, zarr v3, sharding_indexed, zstd 3;
# from 16 devices, as MaxText converts, so that its first axis is cut by 16.
SAVE = """
import sys
import jax, ml_dtypes, numpy as np
import orbax.checkpoint as ocp
noise = np.random.default_rng(0).standard_normal((2048, 32, 8192), np.float32) * np.float32(0.02)
mesh = jax.make_mesh((16,), ("x",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
kernel = jax.device_put(noise.astype(ml_dtypes.bfloat16), sharding)
handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
ocp.Checkpointer(handler).save(sys.argv[1], args=ocp.args.PyTreeSave({"kernel": kernel}))
"""


def save_with_orbax(location: Path) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
    subprocess.run(
        [sys.executable, "-c", SAVE, str(location)], check=True, env=environment, capture_output=True
    )


def read_with_tensorstore(location: Path) -> None:
    """All of it into memory, on as many threads as there are cores."""
    import tensorstore as ts

    kvstore = {"driver": "ocdbt", "base": f"file://{location}/", "path": "kernel/"}
    ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()


def decoding(directory: Path, rounds: int) -> None:
    """Reading by tensorstore alone against reading and writing by the command, a whole process."""
    location, output = directory / "default", directory / "out"
    save_with_orbax(location)
    ratios = []
    for _ in range(rounds):
        theirs, _ = seconds(lambda: read_with_tensorstore(location))
        ours, receipt = seconds(lambda: ckpt("to-safetensors", location, output))
        remove(output)
        ratios.append(ours / theirs)
        print(
            f"    tensorstore reads {theirs:5.2f} s   ckpt reads and writes {ours:5.2f} s   "
            f"{ratios[-1]:.2f} times   peak {receipt['peak_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )
    print(f"  median {statistics.median(ratios):.2f} times", flush=True)
    remove(location)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 12 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        model = write_llama(directory / "hf", LlamaSizes())
        orbax, flat = directory / "orbax", directory / "flat"
        ckpt("hf-to-maxtext", model.parent, orbax)
        remove(model.parent)
        print("Orbax (raw) to safetensors", flush=True)
        against_copy(orbax, directory, arguments.rounds, "to-safetensors", orbax)
        ckpt("to-safetensors", orbax, flat)
        remove(orbax)
        print("safetensors to Orbax (raw)", flush=True)
        against_copy(flat, directory, arguments.rounds, "to-orbax", flat)
        remove(flat)
        print("Orbax's default zstd chunks to safetensors, 1.07 GB", flush=True)
        decoding(directory, arguments.rounds)


if __name__ == "__main__":
    main()
