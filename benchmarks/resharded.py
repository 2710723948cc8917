"""Orbax restores a checkpoint that was resharded for a mesh, and the same as MaxText's converter writes it.

    python benchmarks/resharded.py [--directory DIR] [--layers N] [--vocab N] [--rounds N] [--mesh MESH]
                                   [--processes N] [--api v0|v1]
                                   [--store local|gs] [--latency SECONDS] [--bandwidth SIZE]

MaxText 0.2.5 writes through Orbax, zarr3 in OCDBT with zstd: arrays over 16 simulated devices, on their first
axis or else on their second one, or whole where it is told of one device. Each restore is a process of its
own with a target on a mesh of eight simulated devices, in alternation; what is measured begins when JAX is
there and ends when all shards are: wall and CPU seconds, and the peak above what the arrays themselves take.
With --processes the eight devices are those of so many processes of one job, as of hosts: wall seconds are of
the slowest, CPU seconds of all together.
The arrays are those of Llama 3.2 1B, of noise (2.47 GB with all layers); files are in the page cache, or,
with `--store gs`, in a bucket: the server of the tests, which waits before each answer and has one line of so
many bytes in a second for all that ask. What it sent is printed, and how often that is what the devices hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import buckets

from ckpttools.core.memory_limit import parse_size

LAYOUTS = {
    "devices": "MaxText's default, written by 16 devices",
    "whole": "MaxText's, written by one device",
    "resharded": "ckpt reshard",
    "compressed": "ckpt reshard --compression zstd",
}
WRITERS = {"devices": 16, "whole": 1}
LEAST = 3.0


def item(directory: Path, layout: str) -> Path:
    return directory / layout / "0" / "items"


def write(directory: Path, layout: str) -> None:
    """As MaxText's `save_weights_to_checkpoint` does; the process has as many devices as the layout."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import ckpttools

    count = WRITERS[layout]
    mesh = Mesh(np.array(jax.devices()[:count]), ("checkpoint",))

    def put(array: Any) -> Any:
        if count == 1:
            return np.asarray(array)
        axis = next((n for n in range(min(2, array.ndim)) if array.shape[n] % count == 0), None)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "checkpoint")
        return jax.device_put(array, NamedSharding(mesh, spec))

    tree = jax.tree.map(put, ckpttools.load(directory / "converted", keep="params/*"))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.CheckpointManager(directory / layout, item_handlers={"items": handler}) as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))


def stored_item(directory: Path, layout: str, store: str) -> Any:
    """Where Orbax finds it."""
    if store == "local":
        return item(directory, layout)
    from etils import epath
    from support import orbax_gs_script

    orbax_gs_script.emulate()
    return epath.Path(f"gs://bucket/{layout}/0/items")


def restore(directory: Path, layout: str, mesh: str, api: str, store: str) -> dict[str, Any]:
    """One restore in this process: seconds, bytes, and a digest of the values."""
    import jax

    import ckpttools
    from ckpttools.core.process_memory import current_bytes, peak_bytes

    source = stored_item(directory, layout, store)
    request = ckpttools.load.plan(
        item(directory, layout), rules="maxtext", mesh=mesh, keep="params/*"
    ).request
    like = request.filled(
        [
            jax.ShapeDtypeStruct(array.target.shape, array.target.dtype.numpy, sharding=array.target.sharding)
            for array in request.arrays
        ]
    )
    here = jax.local_devices()
    jax.block_until_ready(jax.device_put([1.0] * len(here), here))
    Path("/proc/self/clear_refs").write_text("5")
    before, wall, cpu = current_bytes() or 0, time.monotonic(), time.process_time()
    loaded = jax.block_until_ready(APIS[api](source, like))
    taken = {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}
    arrays = jax.tree.leaves(loaded)
    parts = {s.data.unsafe_buffer_pointer(): s.data.nbytes for a in arrays for s in a.addressable_shards}
    above = (peak_bytes() or 0) - before - sum(parts.values())
    return {**taken, "above": above, "result": sum(parts.values()), "digest": digest(arrays)}


def by_v0(source: Any, like: Any) -> Any:
    import orbax.checkpoint as ocp

    how = ocp.args.PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(source, how)


def by_v1(source: Any, like: Any) -> Any:
    from orbax.checkpoint import v1

    return v1.load_pytree(source.parent, like, checkpointable_name="items")


APIS = {"v0": by_v0, "v1": by_v1}


def digest(arrays: list[Any]) -> str:
    """Of the bits of all shards."""
    import numpy as np

    result = hashlib.sha256()
    for array in arrays:
        for shard in array.addressable_shards:
            result.update(np.ascontiguousarray(np.asarray(shard.data)).view(np.uint8).data)
    return result.hexdigest()


def in_processes(count: int, *words: str | Path) -> dict[str, Any]:
    """One restore by so many processes with eight devices together."""
    if count == 1:
        result: dict[str, Any] = json.loads(in_a_process(8, *words).splitlines()[-1])
        return result
    with socket.socket() as free:
        free.bind(("localhost", 0))
        location = f"localhost:{free.getsockname()[1]}"
    with ThreadPoolExecutor(count) as pool:
        jobs = [
            pool.submit(in_a_process, 8 // count, *words, "--job", f"{location},{number},{count}")
            for number in range(count)
        ]
        declared = [json.loads(job.result().splitlines()[-1]) for job in jobs]
    return {
        "wall": max(entry["wall"] for entry in declared),
        "above": max(entry["above"] for entry in declared),
        **{what: sum(entry[what] for entry in declared) for what in ("cpu", "result")},
        "digest": " ".join(entry["digest"] for entry in declared),
    }


def in_a_process(devices: int, *words: str | Path) -> str:
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return done.stdout


def compare(directory: Path, rounds: int, processes: int, bucket: Any, how: Mapping[str, str]) -> bool:
    """Prints all, and says whether the resharded one is restored as fast as it must be."""
    options = [word for name, value in how.items() for word in (f"--{name}", value)]
    result: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYOUTS}
    for _ in range(rounds):
        for name, entry in result.items():
            words = ("--restore", name, "--directory", directory, *options)
            before = buckets.sent(bucket) if bucket else {}
            run = in_processes(processes, *words)
            after = buckets.sent(bucket) if bucket else {}
            entry.append({**run, **{what: after[what] - before[what] for what in after}})
    digests = {run["digest"] for entry in result.values() for run in entry}
    if len(digests) != 1:
        raise SystemExit("the layouts give different values")
    ours = {what: median(result["resharded"], what) for what in ("wall", "cpu")}
    for name, entry in result.items():
        wall, cpu, above, outcome = (median(entry, what) for what in ("wall", "cpu", "above", "result"))
        stored = sum(path.stat().st_size for path in item(directory, name).rglob("*") if path.is_file())
        print(
            f"  {LAYOUTS[name]:42} {wall:6.2f} s ({wall / ours['wall']:5.2f})  CPU {cpu:6.2f} s "
            f"({cpu / ours['cpu']:5.2f})  {above / 2**20:6.0f} MiB above {outcome / 2**20:.0f}  "
            f"{stored / 1e9:.2f} GB stored{traffic(entry, outcome)}",
            flush=True,
        )
    ratio = median(result["devices"], "wall") / ours["wall"]
    print(f"  resharded: {ratio:.1f} times as fast as MaxText's default, at least {LEAST:.0f} wanted")
    return ratio >= LEAST


def traffic(result: list[dict[str, Any]], seconds: float) -> str:
    """What the bucket sent for one restore, in words; none without a bucket."""
    if "bytes" not in result[0]:
        return ""
    nbytes, requests = median(result, "bytes"), median(result, "requests")
    return f", {nbytes / 1e9:.2f} GB sent ({nbytes / seconds:.2f} of the arrays), {requests:.0f} requests"


def median(result: list[dict[str, Any]], what: str) -> float:
    return statistics.median(entry[what] for entry in result)


def make(directory: Path, layers: int, vocab: int, mesh: str) -> None:
    """The same arrays in all layouts."""
    import ckpttools
    from ckpttools.testing.models import LlamaSizes, write_llama

    write_llama(directory / "hf", LlamaSizes(layers=layers, vocab=vocab))
    ckpttools.hf_to_maxtext(directory / "hf", directory / "converted")
    for name, count in WRITERS.items():
        in_a_process(count, "--write", name, "--directory", directory)
    ckpttools.reshard(directory / "devices", directory / "resharded", mesh=mesh)
    ckpttools.reshard(directory / "devices", directory / "compressed", mesh=mesh, compression="zstd")


def upload(directory: Path) -> None:
    """All layouts to the bucket, byte for byte, each with what says there that it is whole."""
    import ckpttools

    for name in LAYOUTS:
        ckpttools.copy(directory / name, f"gs://bucket/{name}")


def join(job: str | None) -> None:
    """Makes this process one of a job: where they meet, which it is, and how many there are."""
    if job is not None:
        import jax

        location, number, count = job.split(",")
        jax.distributed.initialize(location, int(count), int(number))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with room for the model, six times")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mesh", default="fsdp=2,tensor=4")
    parser.add_argument("--processes", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--api", choices=APIS, default="v0")
    parser.add_argument("--store", choices=("local", "gs"), default="local")
    parser.add_argument(
        "--latency", type=float, default=0.02, help="seconds before each answer of the bucket"
    )
    parser.add_argument("--bandwidth", default="100MB", help="bytes in a second, of the bucket; 0: no limit")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--restore", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.write:
        write(asked.directory, asked.write)
        return 0
    if asked.restore:
        join(asked.job)
        print(json.dumps(restore(asked.directory, asked.restore, asked.mesh, asked.api, asked.store)))
        return 0
    bucket = None
    if asked.store == "gs":
        url, bucket = buckets.started(buckets.serve_bucket, asked.latency, parse_size(asked.bandwidth))
        os.environ.update(buckets.clients(url))
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        make(Path(name), asked.layers, asked.vocab, asked.mesh)
        if bucket:
            upload(Path(name))
        print(
            f"Llama 3.2 1B shapes, {asked.layers} layers, restored by Orbax ({asked.api}) onto {asked.mesh}, "
            f"{asked.processes} processes",
            flush=True,
        )
        how = {"mesh": asked.mesh, "api": asked.api, "store": asked.store}
        return 0 if compare(Path(name), asked.rounds, asked.processes, bucket, how) else 1


if __name__ == "__main__":
    sys.exit(main())
