"""`ckpt convert hf-to-maxtext` against `cp` + `sync` of the same file, whole processes in alternation.

    python benchmarks/convert.py [--directory DIR] [--rounds N] [--quick]

Prints seconds, the ratio of each pair, and peak memory. The target is a ratio of at least 0.8 and a peak of
at most 1 GiB. The model has the shapes of Llama 3.2 1B and is made of noise (2.47 GB).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ckpttools.testing.models import LlamaSizes, write_llama

T = TypeVar("T")
ONE_B = LlamaSizes()
FOUR_B = LlamaSizes(layers=64)
GIANT_LEAF = LlamaSizes(layers=4, hidden=8192, mlp=65536, heads=8, kv_heads=2, head_dim=64, vocab=1000)


def seconds(run: Callable[[], T]) -> tuple[float, T]:
    """Wall time of a call and its result; nothing is left to be written before it starts."""
    os.sync()
    start = time.monotonic()
    result = run()
    return time.monotonic() - start, result


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", source, target], check=True)
    os.sync()


def convert(source: Path, target: Path, *options: str) -> dict[str, float]:
    """Runs the command as a user would; returns its receipt."""
    command = [Path(sys.executable).with_name("ckpt"), "convert", "hf-to-maxtext", source, target]
    done = subprocess.run([*command, "--json", *options], check=True, capture_output=True, text=True)
    os.sync()
    receipt: dict[str, float] = json.loads(done.stdout)
    return receipt


def pairs(model: Path, directory: Path, rounds: int, *options: str) -> None:
    """Alternates `cp` and the conversion; prints every pair and the medians."""
    target, output = directory / "copy", directory / "out"
    copied, converted, ratios, peaks = [], [], [], []
    for _ in range(rounds):
        copied.append(seconds(lambda: copy(model, target))[0])
        target.unlink()
        taken, receipt = seconds(lambda: convert(model.parent, output, *options))
        converted.append(taken)
        shutil.rmtree(output)
        ratios.append(copied[-1] / taken)
        peaks.append(receipt["peak_bytes"] / 2**30)
        print(f"    cp + sync {copied[-1]:5.2f} s   ckpt {converted[-1]:5.2f} s   ratio {ratios[-1]:.2f}")
    print(
        f"  medians: cp + sync {statistics.median(copied):.2f} s, ckpt {statistics.median(converted):.2f} s, "
        f"ratio {statistics.median(ratios):.2f}; best: {min(copied):.2f} s, {min(converted):.2f} s, "
        f"ratio {min(copied) / min(converted):.2f}; peak {max(peaks):.2f} GiB",
        flush=True,
    )


def peak_of(sizes: LlamaSizes, directory: Path, *options: str) -> None:
    """Converts a model whose data is a hole, for its memory only."""
    model = write_llama(directory / "hole", sizes, sparse=True)
    receipt = convert(model.parent, directory / "out", *options)
    print(
        f"  {receipt['bytes_out'] / 1e9:.2f} GB, {' '.join(options) or 'default options'}: "
        f"peak {receipt['peak_bytes'] / 2**20:.0f} MiB",
        flush=True,
    )
    shutil.rmtree(directory / "out")
    shutil.rmtree(model.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 16 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="only the pairs with the 2.47 GB model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        model = write_llama(directory / "hf", ONE_B)
        for options in ((), ("--no-scan",)):
            print(f"Llama 3.2 1B shapes, 2.47 GB, {' '.join(options) or 'scanned'}", flush=True)
            pairs(model, directory, arguments.rounds, *options)
        if not arguments.quick:
            shutil.rmtree(model.parent)
            print("Peak memory")
            peak_of(ONE_B, directory)
            peak_of(FOUR_B, directory)
            peak_of(GIANT_LEAF, directory, "--memory", "512MiB")


if __name__ == "__main__":
    main()
