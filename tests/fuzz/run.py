"""Fuzzes the parsers: `python tests/fuzz/run.py [--seconds N] [--seed N] [--jobs N] [TARGET ...]`.

Each target runs in a process of its own. Exits with 1 if one found something: the input is then in
tests/fuzz/found, where tests/fuzz/test_fuzz.py runs it from then on.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
_LAST_LINES = 30
_WIDTH = 1000  # of a line of base64
_STARTING = 120  # seconds that a target may take beside its own


def fuzz(name: str, seconds: float, runs: int, seed: int, corpus: Path) -> tuple[str, int, str]:
    """Runs one target: its name, exit status and last words."""
    words = [sys.executable, HERE / "child.py", name, seconds, runs, seed, corpus / name, HERE / "found"]
    try:
        ended = subprocess.run(
            list(map(str, words)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # The order of sets is part of what is run through.
            env={**os.environ, "PYTHONHASHSEED": "0"},
            check=False,
            timeout=seconds + _STARTING,
        )
    except subprocess.TimeoutExpired:
        return name, -1, "did not end"
    return name, ended.returncode, ended.stdout


def told(name: str, words: str) -> str:
    """What was found: the exception, and the input in a form that survives a machine that is thrown away."""
    raised = words[max(0, words.find("Uncaught Python exception")) :]
    lines = [splitline for splitline in raised.splitlines() if not splitline.startswith(("stat::", "INFO:"))]
    result = [Path(item) for item in re.findall(r"Test unit written to (\S+)", words)]
    inputs = [
        base64.b64encode(zlib.compress(item.read_bytes(), 9)).decode() for item in result if item.is_file()
    ]
    for item in inputs:
        cuts = range(0, len(item), _WIDTH)
        lines += [f"zlib in base64, {at} of {len(item)}: {item[at : at + _WIDTH]}" for at in cuts]
    return "\n".join([f"{name}: found", *lines[-_LAST_LINES:]])


def main() -> int:
    sys.path.insert(0, str(HERE))
    from targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60, help="of each target")
    parser.add_argument(
        "--runs",
        type=Path,
        help="JSON with a number of inputs for each target, at most: with the same seed these are the same,\n"
        "so that what is found depends on no machine's speed; --record writes it anew",
    )
    parser.add_argument(
        "--record", action="store_true", help="write --runs with what the seconds sufficed for"
    )
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
        limit = json.loads(asked.runs.read_text()) if asked.runs and not asked.record else {}
        done: dict[str, int] = {}
        failed: list[str] = []

        def one(name: str) -> tuple[str, int, str]:
            return fuzz(name, asked.seconds, limit.get(name, -1), seed, corpus)

        for name, status, words in pool.map(one, names):
            executed = re.search(r"number_of_executed_units: (\d+)", words)
            done[name] = int(executed[1]) if executed else 0
            if status:
                failed.append(told(name, words))
            sys.stdout.write(f"{name}: {'found something' if status else 'nothing found'}\n")
            sys.stdout.flush()
    if asked.record and asked.runs and not failed:
        asked.runs.write_text(json.dumps(done, indent=1) + "\n")
    sys.stdout.write(f"seed {seed}, {asked.seconds:g} s each\n")
    sys.stdout.writelines(f"{item}\n" for item in failed)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
