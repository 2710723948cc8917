"""Commands against `cp` + `sync` of the same bytes: whole processes, in alternation."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def seconds(run: Callable[[], T]) -> tuple[float, T]:
    """Wall time of a call and its result; nothing is left to be written before it starts."""
    os.sync()
    start = time.monotonic()
    result = run()
    return time.monotonic() - start, result


def copy(source: Path, target: Path) -> None:
    """`cp -r` and `sync`."""
    subprocess.run(["cp", "-r", source, target], check=True)
    os.sync()


def command(*words: str | Path, accepted: tuple[int, ...] = (0,)) -> str:
    """Runs `ckpt …` as a user would; returns what it printed.

    Args:
        words: behind `ckpt`.
        accepted: exit codes that are not an error.
    """
    # As after an installation, the modules' byte code is there; making it takes 70 ms at every start.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    whole = [Path(sys.executable).with_name("ckpt"), *words]
    done = subprocess.run(whole, capture_output=True, text=True, env=environment)
    if done.returncode not in accepted:
        raise SystemExit(done.stderr)
    return done.stdout


def ckpt(*arguments: str | Path, group: str = "convert") -> dict[str, float]:
    """Runs `ckpt convert …`, or a command of another group; returns its receipt."""
    receipt: dict[str, float] = json.loads(command(group, *arguments, "--json"))
    os.sync()
    return receipt


def remove(path: Path) -> None:
    """Deletes a file or a directory."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def against_copy(copied: Path, directory: Path, rounds: int, *command: str | Path) -> None:
    """Alternates `cp` of `copied` and `ckpt convert COMMAND OUT`; prints every pair and the medians.

    Args:
        copied: what `cp` copies.
        directory: where both write.
        rounds: how many pairs.
        command: words after `ckpt convert`; OUT is put after the source, the second of them.
    """
    alternated(copied, directory, rounds, lambda output: ckpt(*command[:2], output, *command[2:]))


def alternated(copied: Path, directory: Path, rounds: int, run: Callable[[Path], dict[str, float]]) -> None:
    """As `against_copy`, of whatever writes to a path and returns a receipt."""
    target, output = directory / "copy", directory / "out"
    copies, conversions, ratios, peaks = [], [], [], []
    for _ in range(rounds):
        copies.append(seconds(lambda: copy(copied, target))[0])
        remove(target)
        taken, receipt = seconds(lambda: run(output))
        remove(output)
        conversions.append(taken)
        ratios.append(copies[-1] / taken)
        peaks.append(receipt["peak_bytes"] / 2**30)
        print(f"    cp + sync {copies[-1]:5.2f} s   ckpt {taken:5.2f} s   ratio {ratios[-1]:.2f}", flush=True)
    middle = [statistics.median(values) for values in (copies, conversions, ratios)]
    print(
        f"  medians: cp + sync {middle[0]:.2f} s, ckpt {middle[1]:.2f} s, ratio {middle[2]:.2f}; "
        f"best: {min(copies):.2f} s, {min(conversions):.2f} s, "
        f"ratio {min(copies) / min(conversions):.2f}; peak {max(peaks):.2f} GiB",
        flush=True,
    )
