"""Fuzzes the parsers: `python tests/fuzz/run.py [--seconds N] [--seed N] [--jobs N] [TARGET ...]`.

Each target runs in a process of its own. Exits with 1 if one found something: the input is then in
tests/fuzz/found, where tests/test_fuzz.py runs it from then on.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
_LAST_LINES = 25
_STARTING = 120  # seconds that a target may take beside its own


def fuzz(name: str, seconds: float, seed: int, corpus: Path) -> tuple[str, int, str]:
    """Runs one target: its name, exit status and last words."""
    words = [sys.executable, HERE / "child.py", name, seconds, seed, corpus / name, HERE / "found"]
    try:
        ended = subprocess.run(
            list(map(str, words)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds + _STARTING,
        )
    except subprocess.TimeoutExpired:
        return name, -1, "did not end"
    return name, ended.returncode, "\n".join(ended.stdout.splitlines()[-_LAST_LINES:])


def main() -> int:
    sys.path.insert(0, str(HERE))
    from targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60, help="of each target")
    parser.add_argument("--seed", type=int, default=None, help="a fixed one, so that runs are alike")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--corpus", type=Path, help="where inputs that reach new code are kept between runs")
    asked = parser.parse_args()
    seed = random.randrange(1, 1 << 31) if asked.seed is None else asked.seed
    if unknown := set(asked.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(asked.jobs) as pool:
        corpus = asked.corpus or Path(temporary)
        names = asked.targets or list(TARGETS)
        failed = 0
        for name, status, words in pool.map(lambda name: fuzz(name, asked.seconds, seed, corpus), names):
            failed += status != 0
            sys.stdout.write(f"{name}: {'nothing found' if status == 0 else words}\n")
            sys.stdout.flush()
    sys.stdout.write(f"seed {seed}, {asked.seconds:g} s each\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
