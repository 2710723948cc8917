"""`ckpt hash` and `ckpt verify` against `pread` of the same bytes into a reused buffer, in alternation.

    python benchmarks/hash.py [--directory DIR] [--rounds N] [--layers N]

The checkpoint has the shapes of Llama 3.2 1B (2.47 GB; fewer layers on demand), as safetensors and as scanned
Orbax. Everything is in the page cache. `pread` runs on as many threads as there are cores, into buffers that
stay in the cache (8 MiB) and into such as a conversion has (64 MiB).
Target: hash at 0.4 of its speed. For `verify` the bytes of both sides count. Last, what `--manifest` adds
to a conversion.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pairs import remove, seconds

import ckpttools
from ckpttools.api.hf_to_maxtext import plan_to_maxtext
from ckpttools.api.tree_plan import plan_tree
from ckpttools.compare.verify import compare
from ckpttools.digest.canonical import Selection
from ckpttools.digest.hashing import hash_tree
from ckpttools.digest.pairing import Pairing
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.testing.models import LlamaSizes, write_llama

CORES = len(os.sched_getaffinity(0))
MEMORY = 1 << 30
_BUFFERS = (8 << 20, 64 << 20)


def pread(paths: list[Path], block: int) -> None:
    """All bytes of files, or of all below directories, each thread into a buffer of `block` bytes."""
    below = (item for path in paths for item in (path, *path.rglob("*")))
    files = [item for item in below if item.is_file()]
    blocks = iter([(file, at) for file in files for at in range(0, file.stat().st_size, block)])
    opened = {file: os.open(file, os.O_RDONLY) for file in files}
    lock = threading.Lock()

    def work() -> None:
        buffer = memoryview(bytearray(block))
        while True:
            with lock:
                file, offset = next(blocks, (None, 0))
            if file is None:
                return
            os.preadv(opened[file], [buffer], offset)

    threads = [threading.Thread(target=work) for _ in range(CORES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for descriptor in opened.values():
        os.close(descriptor)


def against_pread(title: str, paths: list[Path], look: Callable[[], object], rounds: int) -> None:
    """Alternates reading `paths` and looking at them; prints the medians and their ratios."""
    nbytes = sum(ckpttools.open(path).nbytes for path in paths)
    reads: dict[int, list[float]] = {block: [] for block in _BUFFERS}
    looks: list[float] = []
    look()
    for _ in range(rounds):
        for block, times in reads.items():
            times.append(seconds(partial(pread, paths, block))[0])
        looks.append(seconds(look)[0])
    print(f"{title}: {nbytes / statistics.median(looks) / 1e9:.1f} GB/s", flush=True)
    for block, times in reads.items():
        ratio = statistics.median(a / b for a, b in zip(times, looks, strict=True))
        speed = nbytes / statistics.median(times) / 1e9
        print(f"  against pread into {block >> 20} MiB, {speed:.1f} GB/s: ratio {ratio:.2f}", flush=True)


def hashed(path: Path, algorithm: str = "xxh3-128") -> object:
    return hash_tree(ckpttools.open(path), algorithm=algorithm, memory=MEMORY, jobs=CORES)


def compared(mine: Path, expected: Path) -> None:
    sides = [Selection().arrays(ckpttools.open(path)) for path in (mine, expected)]
    assert not compare(Pairing(*sides), memory=MEMORY, jobs=CORES)


def manifests(source: Path, directory: Path, rounds: int) -> None:
    """A conversion without and with a manifest."""
    output, manifest = directory / "out", directory / "out.json"
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for expected, taken in times.items():
            conversion = plan_tree(ckpttools.open(source), OrbaxWriter())
            carry_out = partial(conversion.run, output, manifest=manifest if expected else None)
            taken.append(seconds(carry_out)[0])
            remove(output)
            manifest.unlink(missing_ok=True)
    without, with_manifest = (statistics.median(taken) for taken in times.values())
    print(f"to-orbax: {without:.2f} s, with --manifest {with_manifest:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 10 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory, rounds = Path(name), arguments.rounds
        model = write_llama(directory / "hf", LlamaSizes(layers=arguments.layers)).parent
        scanned, apart = directory / "scanned", directory / "apart"
        plan_to_maxtext(model).run(scanned)
        against_pread("hash safetensors", [model], lambda: hashed(model), rounds)
        against_pread("hash scanned Orbax", [scanned], lambda: hashed(scanned), rounds)
        against_pread("hash --algorithm sha256", [model], lambda: hashed(model, "sha256"), rounds)
        plan_tree(ckpttools.open(scanned), OrbaxWriter()).run(apart)
        against_pread("verify --against", [apart, scanned], lambda: compared(apart, scanned), rounds)
        remove(apart)
        manifests(model, directory, rounds)


if __name__ == "__main__":
    main()
