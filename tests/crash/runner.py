"""Start commands in a zygote, and collect their results."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.locations import TESTS

from crash.handlers import Fault
from crash.jobs import Job, Notes

# A command that hangs is killed; these take 0.1 s.
_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a command.

    Attributes:
        code: Exit code.
        out, err: Output.
        notes: Recorded calls.
    """

    code: int
    out: str
    err: str
    notes: Notes

    def __str__(self) -> str:
        return f"exit {self.code}: {self.err.strip() or self.out.strip()}"


@dataclass(frozen=True, slots=True)
class Running:
    """A started command."""

    process: int
    notes: Path


class Runner:
    """Runs commands whose calls below `root` are intercepted."""

    def __init__(self, zygote: subprocess.Popen[str], root: Path, notes: Path) -> None:
        self.root = root
        self._zygote = zygote
        self._notes = notes
        self._count = 0

    def run(self, *args: str, fault: Fault | None = None, exchange: bool = True) -> Ended:
        return self.wait(self.start(*args, fault=fault, exchange=exchange))

    def start(
        self, *args: str, fault: Fault | None = None, turns: str | None = None, exchange: bool = True
    ) -> Running:
        self._count += 1
        notes = self._notes / str(self._count % 4)
        notes.mkdir(parents=True, exist_ok=True)
        job = Job(args, str(self.root), str(notes), fault, turns, exchange)
        return Running(int(self._ask(f"fork {pickle.dumps(job).hex()}")), notes)

    def wait(self, running: Running) -> Ended:
        code = int(self._ask(f"wait {running.process}"))
        out, err = ((running.notes / name).read_text() for name in ("out", "err"))
        notes: Notes = pickle.loads((running.notes / "notes").read_bytes())
        if notes.modules:
            self._ask(f"learn {' '.join(notes.modules)}")
        return Ended(code, out, err, notes)

    def practise(self, *args: str) -> None:
        """Run a command in the zygote itself, so that forks inherit its caches."""
        self._ask(f"practise {' '.join(args)}")

    def _ask(self, line: str) -> str:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(line + "\n")
        self._zygote.stdin.flush()
        return self._zygote.stdout.readline()


@contextmanager
def runner(root: Path, notes: Path) -> Iterator[Runner]:
    """Yield a runner that stops with the block."""
    known = os.pathsep.join((str(TESTS), *filter(None, sys.path)))
    environment = {**os.environ, "PYTHONPATH": known, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "crash.zygote"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=TESTS
    ) as zygote:
        yield Runner(zygote, root, notes)
        assert zygote.stdin is not None
        zygote.stdin.close()
