"""`ckpt diff` as a process against `pread` of the same bytes into reused buffers, in alternation.

    python benchmarks/diff.py [--directory DIR] [--rounds N] [--layers N]

Checkpoints have the shapes of Llama 3.2 1B (2.47 GB; fewer layers on demand) and lie in the page cache. The
bytes of both sides count. Target: equal checkpoints at 0.5 of the speed of `pread`. Besides: scanned against
unscanned, Hugging Face against scanned (which maps every array), and checkpoints in which all numbers differ.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from hash import pread
from pairs import ckpt, remove, seconds

from ckpttools.testing.models import LlamaSizes, write_llama


def diff(a: Path, b: Path, *options: str) -> None:
    """Runs `ckpt diff` as a user would; other exit codes than 0 and 1 are errors."""
    command = [Path(sys.executable).with_name("ckpt"), "diff", a, b, "--no-progress", *options]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode not in (0, 1):
        raise RuntimeError(found.stderr)


def against_pread(title: str, a: Path, b: Path, rounds: int, *options: str) -> None:
    """Alternates reading both checkpoints and comparing them; prints the medians and their ratio."""
    nbytes = sum(
        file.stat().st_size for path in (a, b) for file in [path, *path.rglob("*")] if file.is_file()
    )
    reads, looks = [], []
    pread(a)
    pread(b)
    for _ in range(rounds):
        reads.append(seconds(lambda: (pread(a), pread(b)))[0])
        looks.append(seconds(lambda: diff(a, b, *options))[0])
    read, look = statistics.median(reads), statistics.median(looks)
    ratio = statistics.median(r / d for r, d in zip(reads, looks, strict=True))
    speeds = f"pread {nbytes / read / 1e9:.2f} GB/s, ckpt {nbytes / look / 1e9:.2f} GB/s"
    print(f"{title}: {speeds}, ratio {ratio:.2f}", flush=True)


def disturb(path: Path) -> None:
    """Flips the lowest bit of every 16-bit number of a safetensors file."""
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start)
        while block := file.read(64 << 20):
            file.seek(-len(block), 1)
            file.write((np.frombuffer(block, np.uint16) ^ 1).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 10 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory, rounds = Path(name), arguments.rounds
        sizes = LlamaSizes(layers=arguments.layers)
        first, second = (write_llama(directory / each, sizes) for each in ("a", "b"))
        against_pread("equal safetensors", first, second, rounds)
        disturb(second)
        against_pread("all numbers differ, no causes", first, second, rounds, "--no-explain")
        against_pread("all numbers differ", first, second, rounds)
        remove(second.parent)
        scanned, apart = directory / "scanned", directory / "apart"
        ckpt("hf-to-maxtext", first.parent, scanned)
        against_pread("Hugging Face against scanned", first.parent, scanned, rounds)
        ckpt("hf-to-maxtext", first.parent, apart, "--no-scan")
        remove(first.parent)
        against_pread("scanned against unscanned", scanned, apart, rounds)


if __name__ == "__main__":
    main()
