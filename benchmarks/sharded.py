"""`ckpttools.load` onto a mesh of eight simulated devices against other ways to the same arrays.

    python benchmarks/sharded.py [--directory DIR] [--layers N] [--vocab N] [--rounds N]

Each way is a process of its own, in alternation, each round in another order; what is measured begins when
JAX is there and ends when all shards are: wall and CPU seconds, how many of these are the kernel's, and the
peak of memory above what the arrays themselves take. The model has the shapes of Llama 3.2 1B and is made of
noise (2.47 GB with all its layers); files are in the page cache.
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

MESH = "fsdp=2,tensor=4"
FLOOR_BYTES, FLOOR_READ = 32 << 20, 8 << 20
WAYS: dict[str, Callable[[Path], Any]] = {}
EXPLAINED = {
    "ckpt": "ckpttools.load, into MaxText's layout",
    "ckpt_names": "ckpttools.load, names and layout of the file",
    "ckpt_orbax": "ckpttools.load of the converted checkpoint",
    "floor": "the same bytes, read into fresh memory and put, nothing else",
    "whole": "arrays read whole by ckpttools, and device_put",
    "put": "safetensors' load_file, then stack, transpose, device_put",
    "orbax": "Orbax restores the converted checkpoint",
    "safetensors": "Orbax v1 loads safetensors, names and layout of the file",
    "maxtext": "Orbax v1 with maximal shardings, then stack, transpose, put",
}


def way(load: Callable[[Path], Any]) -> Callable[[Path], Any]:
    WAYS[load.__name__] = load
    return load


@way
def ckpt(directory: Path) -> Any:
    import ckpttools

    return ckpttools.load(directory / "hf", to="maxtext", rules="maxtext", mesh=MESH)


@way
def ckpt_names(directory: Path) -> Any:
    import ckpttools

    return ckpttools.load(directory / "hf", rules="maxtext", mesh=MESH)


@way
def ckpt_orbax(directory: Path) -> Any:
    import ckpttools

    return ckpttools.load(directory / "maxtext", rules="maxtext", mesh=MESH, keep="params/*")


@way
def floor(directory: Path) -> Any:
    """What no way gets around: the file's bytes into memory that the kernel has to clear, on two threads."""
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    import jax
    import numpy as np

    file = next((directory / "hf").glob("*.safetensors"))
    descriptor, size = os.open(file, os.O_RDONLY), file.stat().st_size

    def read(start: int) -> np.ndarray:
        nbytes = min(FLOOR_BYTES, size - start)
        buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for first in range(0, nbytes, FLOOR_READ):
            os.preadv(descriptor, [memoryview(buffer)[first : first + FLOOR_READ]], start + first)
        return np.frombuffer(buffer, np.uint8)

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(read, range(0, size, FLOOR_BYTES)))
    locations = [jax.devices()[number % 8] for number in range(len(parts))]
    return jax.block_until_ready(jax.device_put(parts, locations))


@way
def whole(directory: Path) -> Any:
    import jax

    import ckpttools

    leaves = ckpttools.load.plan(directory / "hf", to="maxtext", rules="maxtext", mesh=MESH).request.arrays
    arrays = (jax.device_put(leaf.array.read(), leaf.target.sharding) for leaf in leaves)
    return jax.block_until_ready(list(arrays))


@way
def put(directory: Path) -> Any:
    import jax
    from safetensors.flax import load_file

    import ckpttools

    tree = in_memory(load_file(next((directory / "hf").glob("*.safetensors"))), directory)
    leaves = ckpttools.load.plan(tree, to="maxtext", rules="maxtext", mesh=MESH).request.arrays
    return jax.block_until_ready(put_all(leaves))


@way
def orbax(directory: Path) -> Any:
    import jax
    import orbax.checkpoint as ocp

    like = structs(directory / "maxtext", "params/*")
    restore = ocp.checkpoint_utils.construct_restore_args(like)
    handler = ocp.PyTreeCheckpointHandler()
    args = ocp.args.PyTreeRestore(like, restore_args=restore, partial_restore=True)
    with ocp.Checkpointer(handler) as checkpointer:
        return jax.block_until_ready(checkpointer.restore(directory / "maxtext" / "0" / "items", args))


@way
def safetensors(directory: Path) -> Any:
    import jax
    from orbax.checkpoint import v1

    like = structs(directory / "hf", "*")
    with v1.Context(checkpoint_layout=v1.options.CheckpointLayout.SAFETENSORS):
        return jax.block_until_ready(v1.load_pytree(directory / "hf", like))


@way
def maxtext(directory: Path) -> Any:
    import jax
    from orbax.checkpoint import v1
    from orbax.checkpoint._src.arrays import sharding as shardings

    import ckpttools

    with v1.Context(checkpoint_layout=v1.options.CheckpointLayout.SAFETENSORS):
        result = v1.pytree_metadata(directory / "hf").metadata
        maximal = shardings.construct_maximal_shardings(result)
        like = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), result, maximal)
        loaded = jax.block_until_ready(v1.load_pytree(directory / "hf", like))
    leaves = ckpttools.load.plan(
        in_memory(loaded, directory), to="maxtext", rules="maxtext", mesh=MESH
    ).request.arrays
    return jax.block_until_ready(put_all(leaves))


def in_memory(loaded: Any, directory: Path) -> Any:
    """Arrays of JAX as a tree: what is made of them is made by JAX."""
    import ckpttools
    from ckpttools.transforms.functions import tree_of

    return tree_of(loaded).with_metadata(config=ckpttools.open(directory / "hf").metadata.config)


def put_all(leaves: Any) -> Any:
    import jax

    from ckpttools.transforms.functions import value_of

    return [jax.device_put(value_of(leaf.array), leaf.target.sharding) for leaf in leaves]


def structs(source: Path, keep: str) -> Any:
    """What the rules make of a checkpoint, without its arrays."""
    import jax

    import ckpttools

    request = ckpttools.load.plan(source, rules="maxtext", mesh=MESH, keep=keep).request
    leaves = [(leaf.target, leaf.target.dtype.numpy) for leaf in request.arrays]
    return request.filled(
        [jax.ShapeDtypeStruct(item.shape, dtype, sharding=item.sharding) for item, dtype in leaves]
    )


def measured(name: str, directory: Path) -> dict[str, float]:
    """One way, in this process."""
    import jax

    import ckpttools
    from ckpttools.core.process_memory import current_bytes, peak_bytes

    jax.block_until_ready(jax.device_put([1.0] * 8, jax.devices()))
    ckpttools.open(directory / "hf")
    Path("/proc/self/clear_refs").write_text("5")
    before, wall, cpu, kernel = current_bytes() or 0, time.monotonic(), time.process_time(), os.times().system
    loaded = WAYS[name](directory)
    taken = {
        "wall": time.monotonic() - wall,
        "cpu": time.process_time() - cpu,
        "kernel": os.times().system - kernel,
    }
    arrays = jax.tree.leaves(loaded)
    parts = {s.data.unsafe_buffer_pointer(): s.data.nbytes for a in arrays for s in a.addressable_shards}
    return {
        **taken,
        "result": sum(parts.values()),
        "above": (peak_bytes() or 0) - before - sum(parts.values()),
    }


def in_a_process(name: str, directory: Path) -> dict[str, float]:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, __file__, "--measure", name, "--directory", directory]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(directory: Path, rounds: int) -> None:
    result: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name in (*[*WAYS][number:], *[*WAYS][:number]):
            result[name].append(in_a_process(name, directory))
    best = min(median(result[name], "cpu") for name in ("whole", "put", "orbax", "safetensors", "maxtext"))
    for name, item in result.items():
        wall, cpu, above, outcome = (median(item, what) for what in ("wall", "cpu", "above", "result"))
        share = f"{median(item, 'kernel'):.2f} s of it the kernel's, {cpu / best:4.2f} of the best other"
        print(
            f"  {EXPLAINED[name]:58} {wall:6.2f} s  CPU {cpu:6.2f} s ({share})  "
            f"{above / 2**20:6.0f} MiB above {outcome / 2**20:.0f} ({above / outcome:5.1%})",
            flush=True,
        )


def median(result: list[dict[str, float]], what: str) -> float:
    return statistics.median(item[what] for item in result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with room for the model, twice")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure, arguments.directory)))
        return
    import ckpttools
    from ckpttools.testing.models import LlamaSizes, write_llama

    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        write_llama(directory / "hf", LlamaSizes(layers=arguments.layers, vocab=arguments.vocab))
        ckpttools.hf_to_maxtext(directory / "hf", directory / "maxtext")
        print(f"Llama 3.2 1B shapes, {arguments.layers} layers, {MESH}", flush=True)
        compare(directory, arguments.rounds)


if __name__ == "__main__":
    main()
