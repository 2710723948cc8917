"""Worker processes: the same bytes as threads make, and nothing lost or left behind, however they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

import ckpttools
from ckpttools.run.threads import WorkerThread, join_threads, start_threads
from ckpttools.testing.models import LlamaSizes, write_llama

# What a user runs, but for the least that is worth a process, and what happens before the third task.
DRIVER = """
import os, signal, sys
import ckpttools.cli
from ckpttools.run import execution, worker_processes

class Watched(worker_processes.ProcessRunner):
    asked = 0
    def __call__(self, number, sink):
        Watched.asked += 1
        if Watched.asked == 3:
            before_third(self)
        return super().__call__(number, sink)
    def __init__(self, *arguments):
        super().__init__(*arguments)
        print("forked", self._process.pid, file=sys.stderr, flush=True)

def before_third(worker):
    {happens}

execution._MIN_PROCESS_BYTES = 1
worker_processes.ProcessRunner = Watched
from ckpttools.__main__ import main
main()
"""


def run(*words: object, happens: str = "pass") -> subprocess.CompletedProcess[str]:
    """`ckpt …` in a session of its own."""
    driver = DRIVER.format(happens=happens)
    return subprocess.run(
        [sys.executable, "-c", driver, *map(str, words)],
        capture_output=True,
        text=True,
        start_new_session=True,
    )


def forked(done: subprocess.CompletedProcess[str]) -> list[int]:
    return [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("forked ")]


def is_at_work(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def are_gone(pids: list[int], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(is_at_work, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_at_work, pids))


Models: TypeAlias = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two models that differ, with numbers of which the mean underflows; and where their mean is."""
    directory = tmp_path_factory.mktemp("models")
    sizes = LlamaSizes(layers=2, hidden=256, mlp=512, heads=4, kv_heads=2, vocab=2048)
    result = [write_llama(directory / name, sizes).parent for name in "ab"]
    for number, model in enumerate(result):
        with (model / "model.safetensors").open("r+b") as file:
            file.seek(-(1 << 16), os.SEEK_END)
            file.write(np.full(1 << 15, number, np.uint16).tobytes())
    return result[0], result[1], directory / "mean"


@pytest.fixture(scope="module")
def receipt(models: Models) -> ckpttools.Receipt:
    """Of the mean of both, which threads have made."""
    return ckpttools.average(models[0], models[2], others=[models[1]], jobs=2)


def check_mean(models: Models, built: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        assert (built / name).read_bytes() == (models[2] / name).read_bytes()


def test_worker_processes_write_the_same_bytes_and_counts(
    models: Models, receipt: ckpttools.Receipt, tmp_path: Path
):
    done = run("average", *models[:2], tmp_path / "out", "--jobs", 3, "--memory", "400MiB", "--json")
    declared = json.loads(done.stdout)
    assert len(forked(done)) == 3 and are_gone(forked(done))
    assert declared["counts"] == receipt.counts != {}
    assert 0 < declared["peak_bytes"] < 400 << 20
    check_mean(models, tmp_path / "out")


def test_plugin_output_in_workers_is_kept(models: Models, receipt: object, tmp_path: Path):
    driver = DRIVER.format(happens="pass").replace(
        "from ckpttools.__main__", f"{SPEAKS}\nfrom ckpttools.__main__"
    )
    words = ("average", *models[:2], tmp_path / "out", "--jobs", 2)
    built = subprocess.run([sys.executable, "-c", driver, *map(str, words)], capture_output=True, text=True)
    assert built.returncode == 0 and len(forked(built)) == 2
    assert built.stdout.count("asked for a task") >= 3


# As a format does that is somebody else's, into a pipe.
SPEAKS = """
class Speaks(worker_processes.ThreadRunner):
    def __call__(self, number, sink):
        print("asked for a task")
        return super().__call__(number, sink)
worker_processes.ThreadRunner = Speaks
"""


@pytest.mark.parametrize(
    "words",
    [("--memory", "200MiB"), ("--jobs", "1"), ("--manifest", "digests.json"), ("--compression", "zstd")],
)
def test_threads_are_used_if_processes_do_not_fit(models: Models, tmp_path: Path, words: tuple[str, ...]):
    """Too little room; one worker; what is watched; chunks that have no place until they are encoded."""
    to = ("--to", "orbax") if "zstd" in words else ()
    words = tuple(str(tmp_path / word) if word.endswith(".json") else word for word in words)
    done = run("average", *models[:2], tmp_path / "out", *to, *words)
    assert (done.returncode, forked(done)) == (0, [])


def test_refused_fork_falls_back_to_threads(models: Models, receipt: object, tmp_path: Path):
    happens = "pass\ndef refused():\n    raise BlockingIOError(11, 'no more')\nos.fork = refused"
    done = run("average", *models[:2], tmp_path / "out", "--jobs", 2, happens=happens)
    assert (done.returncode, forked(done)) == (0, [])
    check_mean(models, tmp_path / "out")


def test_killed_worker_loses_nothing(models: Models, receipt: object, tmp_path: Path):
    words = ("average", *models[:2], tmp_path / "out", "--jobs", 2)
    done = run(*words, happens="os.kill(worker._process.pid, signal.SIGKILL)")
    assert done.returncode == 5
    assert "a worker process was killed" in done.stderr and "SIGKILL" in done.stderr
    assert are_gone(forked(done)) and not (tmp_path / "out").exists()
    again = run(*words, "--json")
    assert json.loads(again.stdout)["tasks_resumed"] >= 1
    check_mean(models, tmp_path / "out")


def test_killed_command_ends_its_workers(models: Models, receipt: object, tmp_path: Path):
    words = ("average", *models[:2], tmp_path / "out", "--jobs", 2)
    done = run(*words, happens="os.kill(os.getpid(), signal.SIGKILL)")
    again = run(*words)
    assert (done.returncode, again.returncode) == (-9, 0) and len(forked(done)) == 2
    assert are_gone(forked(done), 1.0)
    check_mean(models, tmp_path / "out")


def test_workers_leave_signals_to_the_command(models: Models, receipt: object, tmp_path: Path):
    """Ctrl-C goes to all processes of a terminal."""
    words = ("average", *models[:2], tmp_path / "out", "--jobs", 2)
    done = run(*words, happens="os.killpg(0, signal.SIGINT)")
    assert done.returncode == 130 and done.stderr.count("Stopped.") == 1 and "Traceback" not in done.stderr
    assert are_gone(forked(done))
    assert run(*words).returncode == 0
    check_mean(models, tmp_path / "out")


def test_worker_errors_match_local_errors(models: Models, tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("model.safetensors", "config.json"):
        (copy / name).write_bytes((models[0] / name).read_bytes())
    happens = f"os.truncate({str(copy / 'model.safetensors')!r}, 4096)"
    done = run("average", copy, models[1], tmp_path / "out", "--jobs", 2, happens=happens)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert str(copy / "model.safetensors") in done.stderr
    assert not (tmp_path / "out").exists()


def test_plan_part_uses_processes(models: Models, receipt: object, tmp_path: Path):
    plan = tmp_path / "mean.plan"
    assert run("plan", "-o", plan, "average", *models[:2], tmp_path / "out").returncode == 0
    for number in range(2):
        done = run("run", plan, "--part", f"{number}/2", "--jobs", 2)
        assert done.returncode == 0 and len(forked(done)) == 2
    assert run("run", plan, "--publish").returncode == 0
    check_mean(models, tmp_path / "out")


def test_pool_worker_uses_threads(models: Models, receipt: object, tmp_path: Path):
    """`multiprocessing` lets none of its daemons have processes."""
    happens = "pass\nimport multiprocessing\nmultiprocessing.current_process()._config['daemon'] = True"
    done = run("average", *models[:2], tmp_path / "out", "--jobs", 2, happens=happens)
    assert (done.returncode, forked(done)) == (0, [])
    check_mean(models, tmp_path / "out")


def test_thread_is_joined_until_it_ends():
    """Interrupted several times; CPython before 3.13 takes it for ended the first time."""
    ended: list[bool] = []

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        time.sleep(0.2)
        ended.append(True)

    thread = WorkerThread(work)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        thread.start()
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.05)
        with pytest.raises(KeyboardInterrupt):
            join_threads([thread])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ended


def test_thread_with_interrupted_start_is_joined():
    ended: list[bool] = []

    def work() -> None:
        time.sleep(0.05)
        ended.append(True)

    class Interrupted(WorkerThread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

    started: list[WorkerThread] = []
    with pytest.raises(KeyboardInterrupt):
        start_threads(lambda: Interrupted(work), 2, started)
    join_threads([*started, WorkerThread(work)])  # the second one was interrupted before there was a thread
    assert ended == [True]
