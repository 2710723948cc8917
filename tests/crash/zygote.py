"""Run commands in forks of a process with all imports done, which takes 50 ms instead of 500.

    python -m crash.zygote

Reads pickled `Job`s from stdin, one hexadecimal line each, and prints a line for each process that ends.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from crash.handlers import Counter, Failing, Recorder, Turns
from crash.jobs import Job, Notes
from crash.taps import Handler, Taps

# Small enough that the tiny models of these tests are many tasks, and that the journal gets many lines.
_LARGEST_TASK, _SMALLEST_TASK, _SYNC_SECONDS = 1 << 12, 1 << 9, 0.002
# They start threads, and a fork copies none.
_NOT_BEFORE_FORKS = ("tensorstore", "jax", "jaxlib", "orbax")


def _run(job: Job) -> int:
    """Run the command in the fork, as a separate process would."""
    from ckpttools.cli.main import main

    notes = Path(job.notes)
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(notes / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    _quicken()
    recorder, counter = Recorder(), Counter()
    handlers: list[Handler] = [counter, recorder]
    if job.turns is not None:
        handlers.insert(0, Turns(job.turns))
    if job.fault is not None:
        handlers.append(Failing(job.fault))
    before = set(sys.modules)
    Taps(job.root, handlers, job.exchange).install()
    try:
        main(list(job.args), prog_name="ckpt")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 70
    new = tuple(name for name in sys.modules if name not in before)
    (notes / "notes").write_bytes(pickle.dumps(Notes(tuple(recorder.calls), counter.counts, new)))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _quicken() -> None:
    """Use many small tasks, and do not sync."""
    from ckpttools.plan import plan
    from ckpttools.run import threads
    from ckpttools.stores.abilities import CopyIdentity
    from ckpttools.stores.local.store import LocalStore

    plan.LARGEST_TASK, plan._SMALLEST_TASK, threads._SYNC_SECONDS = (
        _LARGEST_TASK,
        _SMALLEST_TASK,
        _SYNC_SECONDS,
    )
    # Sources get another link in each state that is tried, and with it another time of status change.
    LocalStore.copy_identity = lambda self, key: CopyIdentity(  # type: ignore[method-assign]
        self.absolute(key)
    )
    os.fsync = os.fdatasync = lambda descriptor: None
    os.sync = lambda: None


def _fork(line: str) -> int:
    job: Job = pickle.loads(bytes.fromhex(line))
    child = os.fork()
    if child == 0:
        code = 71
        try:
            code = _run(job)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def _learn(names: list[str]) -> None:
    """Import the modules that a fork imported, for all later forks."""
    for name in names:
        if name.split(".")[0] not in _NOT_BEFORE_FORKS:
            with suppress(ModuleNotFoundError):  # Cython makes modules that no file is of
                importlib.import_module(name)


def _practise(words: list[str]) -> None:
    """Run a command here to fill caches: rules of all families, patterns, settings."""
    from ckpttools.cli.main import main

    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        main(words, standalone_mode=False)


def _require_one_thread(after: str) -> None:
    """Wait until only one thread is listed. The system lists joined threads a little longer."""
    until = time.monotonic() + 10
    while (count := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208
        if time.monotonic() > until:
            raise SystemExit(f"{count} threads after {after}: forks would lack them")
        time.sleep(0.001)


def _answer(value: object) -> None:
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until stdin ends: `fork JOB` returns a process id, and `wait PID` its exit code.

    `learn NAMES` imports modules, and `practise WORDS` runs a command.
    """
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "fork":
            _answer(_fork(rest))
        elif word == "wait":
            _answer(os.waitstatus_to_exitcode(os.waitpid(int(rest), 0)[1]))
        else:
            {"learn": _learn, "practise": _practise}[word](rest.split())
            _require_one_thread(line.strip())
            _answer("done")


if __name__ == "__main__":
    main()
