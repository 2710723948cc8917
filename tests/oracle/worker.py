"""The other end of `serving`: a process in another environment, asked as if it were functions."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
# As MaxText's own stand-ins for its cloud clients want it.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "DECOUPLE_GCLOUD": "TRUE",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "HF_HUB_OFFLINE": "1",
    # Small functions are compiled again and again: loading a second time takes 60 % as long with these.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


# Tiny models compute at once and compile for long: training a Llama and taking it back takes 22 s of CPU with
# this, 29 s without.
QUICKLY_COMPILED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class StepError(Exception):
    """A step did not come out as it must; the message says why, in the words of who refused."""


class Worker:
    """One script of this directory, run by another Python."""

    def __init__(self, python: Path, script: str, directory: Path, *, devices: int = 1) -> None:
        """Starts it, with so many devices of JAX; what it logs is in `directory`."""
        self._script = script
        self.log = directory / f"{script}.log"
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICKLY_COMPILED}"}
        environment = {**os.environ, **ENVIRONMENT, **flags}
        environment.pop("PYTHONPATH", None)
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [python, HERE / f"{script}.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=directory,
                env=environment,
            )

    def __call__(self, function: str, **arguments: Any) -> Any:
        """What the function returns there.

        Raises:
            StepError: it raised, or its process ended.
        """
        assert self._process.stdin and self._process.stdout
        asked = json.dumps({"function": function, "arguments": arguments}, default=str)
        self._process.stdin.write(asked + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise StepError(f"{self._script}.py ended with {self._process.wait()}, see {self.log}")
        answer = json.loads(line)
        if "refused" in answer:
            raise StepError(answer["refused"])
        return answer["value"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
