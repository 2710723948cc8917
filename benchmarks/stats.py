"""`ckpt inspect stats` as a process against `pread` of the same bytes into reused buffers.

    python benchmarks/stats.py [--directory DIR] [--rounds N]

The checkpoint has the shapes of Llama 3.2 1B (2.47 GB, bfloat16) and is in the page cache. Bytes are read by
as many threads as there are cores. Target: a ratio of at least 0.25.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from pairs import ckpt, remove, seconds

from ckpttools.testing.models import LlamaSizes, write_llama

_AT_ONCE = 8 << 20


def read_all(path: Path) -> None:
    """Every byte of a file, on every core."""
    size, threads = path.stat().st_size, len(os.sched_getaffinity(0))
    places = iter(range(0, size, _AT_ONCE))
    lock = threading.Lock()
    descriptor = os.open(path, os.O_RDONLY)

    def work() -> None:
        buffer = bytearray(_AT_ONCE)
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return
            os.preadv(descriptor, [buffer], place)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(descriptor)


def stats(*arguments: str | Path) -> None:
    """Runs `ckpt inspect stats …` as a user would."""
    command = [Path(sys.executable).with_name("ckpt"), "inspect", "stats", *arguments, "--json"]
    subprocess.run(command, check=True, capture_output=True)


def against_reading(weights: Path, rounds: int, *arguments: str | Path) -> None:
    """Alternates reading `weights` and `ckpt inspect stats ARGUMENTS`; prints every pair and the medians."""
    print(" ".join(map(str, arguments[1:])) or "no options", flush=True)
    reads, looks = [], []
    read_all(weights)
    for _ in range(rounds):
        reads.append(seconds(lambda: read_all(weights))[0])
        looks.append(seconds(lambda: stats(*arguments))[0])
        print(f"    pread {reads[-1]:5.2f} s   ckpt {looks[-1]:5.2f} s   ratio {reads[-1] / looks[-1]:.2f}")
    read, look = statistics.median(reads), statistics.median(looks)
    speed = weights.stat().st_size / look / 1e9
    print(f"  medians: pread {read:.2f} s, ckpt {look:.2f} s ({speed:.2f} GB/s), ratio {read / look:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 5 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        weights = write_llama(directory / "hf", LlamaSizes(layers=arguments.layers))
        print("safetensors", flush=True)
        against_reading(weights, arguments.rounds, weights)
        against_reading(weights, arguments.rounds, weights, "--histogram")
        ckpt("hf-to-maxtext", weights.parent, directory / "orbax")
        remove(weights.parent)
        print("Orbax, layers stacked", flush=True)
        (data,) = (path for path in (directory / "orbax").rglob("d/*") if path.stat().st_size > _AT_ONCE)
        against_reading(data, arguments.rounds, directory / "orbax", "--per-layer")


if __name__ == "__main__":
    main()
