"""`ckpt convert hf-to-maxtext` against the least that could be done: a copy that rearranges nothing.

    python benchmarks/bare_copy.py [--directory DIR] [--rounds N]

The copy is a process of its own: four threads read 16 MiB each from the page cache and write it past it
(`O_DIRECT`), into a file that has its room already, and the file is synced. Prints every pair, the ratio, and
where the conversion's time goes that the copy does not take. The target is a ratio of 0.85.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from pairs import ckpt, remove, seconds

from ckpttools.testing.models import LlamaSizes, write_llama

THREADS, PART = 4, 16 << 20
_BLOCK = 4096


def copy_past_the_cache(source: Path, target: Path) -> None:
    """Copies one file; a last part of less than a block goes through the cache."""
    size = source.stat().st_size
    read = os.open(source, os.O_RDONLY)
    write = os.open(target, os.O_WRONLY | os.O_CREAT, 0o666)
    direct = os.open(target, os.O_WRONLY | os.O_DIRECT)
    os.posix_fallocate(write, 0, size)
    offsets = iter(range(0, size, PART))
    lock = threading.Lock()

    def work() -> None:
        buffer = memoryview(mmap.mmap(-1, PART))
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            count = os.preadv(read, [buffer], offset)
            whole = count // _BLOCK * _BLOCK
            os.pwrite(direct, buffer[:whole], offset)
            os.pwrite(write, buffer[whole:count], offset + whole)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fdatasync(write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 8 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--copy", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="only copy a file")
    arguments = parser.parse_args()
    if arguments.copy:
        copy_past_the_cache(*arguments.copy)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        model = write_llama(directory / "hf", LlamaSizes())
        target, output = directory / "copy", directory / "out"
        copies, conversions, ratios = [], [], []
        words = [sys.executable, __file__, "--copy", str(model), str(target)]
        for _ in range(arguments.rounds):
            copies.append(seconds(lambda: subprocess.run(words, check=True))[0])
            remove(target)
            conversions.append(seconds(lambda: ckpt("hf-to-maxtext", model.parent, output))[0])
            remove(output)
            ratios.append(copies[-1] / conversions[-1])
            print(
                f"  copy {copies[-1]:5.2f} s   ckpt {conversions[-1]:5.2f} s   ratio {ratios[-1]:.2f}",
                flush=True,
            )
        print(
            f"medians: copy {statistics.median(copies):.2f} s, ckpt {statistics.median(conversions):.2f} s, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
