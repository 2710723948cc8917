"""`ckpt convert to-safetensors` and `to-orbax` against `cp` + `sync`, and reading Orbax's default chunks.

    python benchmarks/formats.py [--directory DIR] [--rounds N]

The checkpoint has the shapes of Llama 3.2 1B (2.47 GB). Targets: a ratio of at least 0.8 to `cp`; decoding
zstd chunks at most 1.2 times as long as tensorstore alone takes; a peak of at most 1 GiB.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from pairs import against_copy, ckpt, remove, seconds

import ckpttools
from ckpttools.ir.scratch import Scratch
from ckpttools.region import split_to
from ckpttools.testing.models import LlamaSizes, write_llama


def write_orbax_default(place: Path) -> None:
    """A stacked array of 1.07 GB as Orbax itself writes it: OCDBT, zarr v3, sharding_indexed, zstd 3."""
    import ml_dtypes
    import orbax.checkpoint as ocp

    noise = np.random.default_rng(0).standard_normal((2048, 32, 8192), np.float32) * np.float32(0.02)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    save_args = {"kernel": ocp.SaveArgs(chunk_byte_size=32 << 20)}
    tree = {"kernel": noise.astype(ml_dtypes.bfloat16)}
    ocp.Checkpointer(handler).save(place, args=ocp.args.PyTreeSave(tree, save_args=save_args))


def read_with_tensorstore(place: Path) -> None:
    import tensorstore as ts

    kvstore = {"driver": "ocdbt", "base": f"file://{place}/", "path": "kernel/"}
    context = ts.Context({"data_copy_concurrency": {"limit": 1}})
    ts.open({"driver": "zarr3", "kvstore": kvstore}, context=context).result().read().result()


def read_with_ckpttools(place: Path) -> None:
    """All of it, 64 MiB at a time, as a conversion reads it."""
    array = ckpttools.open(place)["kernel",]
    assert isinstance(array, ckpttools.LazyArray)
    scratch = Scratch(array.scratch_bytes)
    for region in split_to(ckpttools.Region.whole(array.shape), 32 << 20):
        array.read_into(region, np.empty(region.shape, array.dtype.carrier), scratch)


def decoding(directory: Path, rounds: int) -> None:
    place = directory / "default"
    write_orbax_default(place)
    for _ in range(rounds):
        theirs, ours = (
            seconds(lambda read=read: read(place))[0] for read in (read_with_tensorstore, read_with_ckpttools)
        )
        print(
            f"    tensorstore {theirs:5.2f} s   ckpttools {ours:5.2f} s   {ours / theirs:.2f} times",
            flush=True,
        )
    remove(place)


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
        print("Reading Orbax's default zstd chunks, 1.07 GB", flush=True)
        decoding(directory, arguments.rounds)


if __name__ == "__main__":
    main()
