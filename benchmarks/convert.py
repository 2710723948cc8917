"""`ckpt convert hf-to-maxtext` and `maxtext-to-hf` against `cp` + `sync` of the same bytes, as processes.

    python benchmarks/convert.py [--directory DIR] [--rounds N] [--quick]

Prints seconds, the ratio of each pair, and peak memory. The target is a ratio of at least 0.8 and a peak of
at most 1 GiB. The model has the shapes of Llama 3.2 1B and is made of noise (2.47 GB).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pairs import against_copy, ckpt, remove

from ckpttools.testing.models import LlamaSizes, write_llama

ONE_B = LlamaSizes()
FOUR_B = LlamaSizes(layers=64)
GIANT_LEAF = LlamaSizes(layers=4, hidden=8192, mlp=65536, heads=8, kv_heads=2, head_dim=64, vocab=1000)


def peak_of(sizes: LlamaSizes, directory: Path, *options: str) -> None:
    """Converts a model whose data is a hole, for its memory only."""
    model, output = write_llama(directory / "hole", sizes, sparse=True), directory / "out"
    receipt = ckpt("hf-to-maxtext", model.parent, output, *options)
    print(
        f"  {receipt['bytes_out'] / 1e9:.2f} GB, {' '.join(options) or 'default options'}: "
        f"peak {receipt['peak_bytes'] / 2**20:.0f} MiB",
        flush=True,
    )
    remove(output)
    remove(model.parent)


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
            against_copy(model, directory, arguments.rounds, "hf-to-maxtext", model.parent, *options)
        for options in ((), ("--no-scan",)):
            built = directory / "maxtext"
            ckpt("hf-to-maxtext", model.parent, built, *options)
            print(f"and back, {' '.join(options) or 'scanned'}", flush=True)
            against_copy(built, directory, arguments.rounds, "maxtext-to-hf", built)
            remove(built)
        if not arguments.quick:
            remove(model.parent)
            print("Peak memory")
            peak_of(ONE_B, directory)
            peak_of(FOUR_B, directory)
            peak_of(GIANT_LEAF, directory, "--memory", "512MiB")


if __name__ == "__main__":
    main()
