"""`ckpt diff` against `pread` of the same bytes into reused buffers, in alternation.

    python benchmarks/diff.py [--directory DIR] [--rounds N] [--layers N]

Checkpoints have the shapes of Llama 3.2 1B (2.47 GB; fewer layers on demand) and lie in the page cache. The
bytes of both sides count. Target: equal checkpoints at 0.5 of the speed of `pread`. Besides: scanned against
unscanned, Hugging Face against scanned (which maps every array), and checkpoints in which all numbers differ.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from hash import CORES, MEMORY, against_pread
from pairs import ckpt, remove

import ckpttools
from ckpttools.compare.align import align
from ckpttools.compare.diff import diff as compare
from ckpttools.compare.explain import explain
from ckpttools.testing.models import LlamaSizes, write_llama


def diff(a: Path, b: Path, *, why: bool) -> None:
    """What `ckpt diff` does between opening and printing."""
    both = align(ckpttools.open(a), ckpttools.open(b))
    result = compare(both, memory=MEMORY, jobs=CORES)
    if why and not all(item.is_equal for item in result):
        explain(result, both, memory=MEMORY, jobs=CORES)


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
        directory = Path(name)

        def compared(title: str, a: Path, b: Path, why: bool = True) -> None:
            against_pread(title, [a, b], lambda: diff(a, b, why=why), arguments.rounds)

        sizes = LlamaSizes(layers=arguments.layers)
        first, second = (write_llama(directory / item, sizes) for item in ("a", "b"))
        compared("equal safetensors", first, second)
        disturb(second)
        compared("all numbers differ, no causes", first, second, why=False)
        compared("all numbers differ", first, second)
        remove(second.parent)
        scanned, apart = directory / "scanned", directory / "apart"
        ckpt("hf-to-maxtext", first.parent, scanned)
        compared("Hugging Face against scanned", first.parent, scanned)
        ckpt("hf-to-maxtext", first.parent, apart, "--no-scan")
        remove(first.parent)
        compared("scanned against unscanned", scanned, apart)


if __name__ == "__main__":
    main()
