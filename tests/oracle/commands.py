"""`ckpt` as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.locations import ROOT

from oracle.worker import StepError

_MOST_WORDS = 600


def ckpt(*words: str | Path) -> str:
    """What a command prints.

    Raises:
        StepError: it did not end with 0.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ckpttools", *words]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode:
        said = " ".join(ended.stderr.split())[:_MOST_WORDS]
        raise StepError(f"ckpt {words[0]} ended with {ended.returncode}: {said}")
    return ended.stdout
