"""`ckpt inspect stats` against `pread` of the same bytes into reused buffers, in alternation.

    python benchmarks/stats.py [--directory DIR] [--rounds N] [--layers N]

The checkpoint has the shapes of Llama 3.2 1B (2.47 GB, bfloat16) and is in the page cache. Target: a ratio of
at least 0.25, which against buffers that stay in the cache (8 MiB) is reached in some runs only. Last, the
time of the command as a process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path

from hash import CORES, MEMORY, against_pread
from pairs import ckpt, command, remove, seconds

import ckpttools
from ckpttools.inspection.stats import inspect_stats
from ckpttools.testing.models import LlamaSizes, write_llama


def stats(path: Path, *, per_layer: bool = False, histograms: bool = False) -> object:
    tree = ckpttools.open(path)
    return inspect_stats(tree, memory=MEMORY, jobs=CORES, per_layer=per_layer, histograms=histograms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 5 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory, rounds = Path(name), arguments.rounds
        model = write_llama(directory / "hf", LlamaSizes(layers=arguments.layers)).parent
        scanned = directory / "scanned"
        against_pread("stats of safetensors", [model], partial(stats, model), rounds)
        against_pread("with histograms", [model], partial(stats, model, histograms=True), rounds)
        times = [seconds(partial(command, "inspect", "stats", model))[0] for _ in range(rounds)]
        print(f"as a process: {statistics.median(times):.2f} s", flush=True)
        ckpt("hf-to-maxtext", model, scanned)
        remove(model)
        against_pread("stacked, each layer", [scanned], partial(stats, scanned, per_layer=True), rounds)


if __name__ == "__main__":
    main()
