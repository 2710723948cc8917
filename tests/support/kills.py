"""Commands that are killed at moments of chance."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from typing import Any


def killed_several_times(words: list[str], server: Any, times: int = 3) -> None:
    """Begins a command that writes to a bucket, and kills it soon after its first request; again and again.

    Args:
        words: of the command.
        server: of the emulated store, which is slow meanwhile.
        times: how often.
    """
    server.latency = 0.01
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": server.url}
    rng = random.Random(1)
    for _ in range(times):
        process = subprocess.Popen([sys.executable, "-m", "ckpttools", *words], env=environment)
        started = len(server.log)
        while len(server.log) == started and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        process.wait()
    server.latency = 0
