"""`ckpt average` of n models against `cp` + `sync` of one of them: whole processes, in alternation.

    python benchmarks/average.py [--directory DIR] [--rounds N] [--counts 2,5]

Prints every pair and the medians. The target is a time of at most (n + 1) / 2 that of the copy: n models are
read and one is written. Models have 8 layers of the shapes of Llama 3.2 1B (1.50 GB of bfloat16).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
from pairs import command, copy, remove, seconds

from ckpttools.testing.models import LlamaSizes, write_llama

SIZES = LlamaSizes(layers=8)


def write_models(directory: Path, count: int) -> list[Path]:
    """Models of noise that differ."""
    models = [write_llama(directory / f"model-{k}", SIZES).parent for k in range(count)]
    for number, model in enumerate(models):
        with (model / "model.safetensors").open("r+b") as file:
            file.seek(-(1 << 20), os.SEEK_END)
            file.write(np.random.default_rng(number).bytes(1 << 20))
    return models


def against_copy(models: list[Path], directory: Path, rounds: int, *options: str) -> None:
    """Alternates `cp` of a model and the mean of all."""
    target, output, copies, means = directory / "copy", directory / "out", [], []
    words = ["average", *map(str, models), str(output), "--json", *options]
    limit, peak = (len(models) + 1) / 2, 0.0
    for _ in range(rounds):
        copies.append(seconds(lambda: copy(models[0], target))[0])
        remove(target)
        taken, declared = seconds(lambda: command(*words))
        os.sync()
        remove(output)
        means.append(taken)
        peak = max(peak, json.loads(declared)["peak_bytes"] / 2**30)
        print(f"    cp + sync {copies[-1]:5.2f} s   ckpt {taken:5.2f} s   {taken / copies[-1]:.2f} times")
    ratios = [mean / item for mean, item in zip(means, copies, strict=True)]
    print(
        f"  {len(models)} models {' '.join(options)}: cp + sync {statistics.median(copies):.2f} s, ckpt "
        f"{statistics.median(means):.2f} s, {statistics.median(ratios):.2f} times, target {limit}; "
        f"peak {peak:.2f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 12 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", default="2,5", help="how many models, with commas between")
    arguments = parser.parse_args()
    counts = [int(item) for item in arguments.counts.split(",")]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        models = write_models(Path(name), max(counts))
        for count in counts:
            against_copy(models[:count], Path(name), arguments.rounds)
            against_copy(models[:count], Path(name), arguments.rounds, "--decay", "sqrt")


if __name__ == "__main__":
    main()
