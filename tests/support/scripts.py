"""Questions for a process of its own: one is started for all of them, since each costs seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.locations import TESTS


def answers(
    script: str, jobs: Sequence[Any], directory: Path, *, attempts: int = 1, **environment: str
) -> Any:
    """What a script of this package says of a list of jobs, both as JSON in a directory that is there.

    More than one attempt is for scripts in which a native library of somebody else may crash.
    """
    asked, declared = directory / "jobs.json", directory / "results.json"
    asked.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", f"support.{script}", str(asked), str(declared)]
    variables = {**os.environ, **environment}
    for _ in range(attempts):
        ended = subprocess.run(
            command, capture_output=True, text=True, cwd=TESTS, env=variables, timeout=500, check=False
        )
        # Killed by a signal, not ended by an error.
        if ended.returncode >= 0:
            break
    assert ended.returncode == 0, f"{ended.returncode}: {ended.stderr}"
    return json.loads(declared.read_bytes())
