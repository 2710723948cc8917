"""Ctrl-C, SIGTERM and SIGHUP: at any instant a word and the code of the signal, and never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpttools.cli import signals
from ckpttools.cli.error_boundary import exit_code_of
from ckpttools.cli.signals import IS_DONE, MESSAGE, RESUMES, Stopped

CKPT = (sys.executable, "-m", "ckpttools")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MIB = 1 << 20
# Runs the script's own function, and sends itself a signal when the n-th module is about to be imported.
AT_AN_IMPORT = """
import os, sys
from ckpttools.__main__ import main
number, *sys.argv[1:] = sys.argv[1:]

class Finder:
    def __init__(self, left, number):
        self.left, self.number = left, number
    def find_spec(self, *_):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), self.number)

for left in range(2, 1000, 13):
    child = os.fork()
    if not child:
        sys.meta_path.insert(0, Finder(left, int(number)))
        main()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(1, f"{code}\\n".encode())
    if not code:
        break
"""
SLOW_TO_END = """
import time
from ckpttools.cli import signals

signals.install_early_handlers()
with signals.raise_on_signal():
    try:
        print("begun", flush=True)
        time.sleep(30)
    finally:
        print("ending", flush=True)
        time.sleep(30)
"""
WHEN_ALL_IS_WRITTEN = """
import os, signal, time
from ckpttools.__main__ import main
from ckpttools.cli import write

def asked_to_stop(receipt, **_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)

write.finish = asked_to_stop
main()
"""
IN_A_FINALIZER = """
import os, signal, time
from ckpttools.cli import signals

class Closing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # an instant at which the handler can run

try:
    with signals.raise_on_signal():
        Closing()
        time.sleep(30)
except signals.Stopped as end:
    raise SystemExit(end.exit_code)
"""


def start(*words: object, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CKPT, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def ends(process: subprocess.Popen[str], seconds: float) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=seconds)
    return process.returncode, stdout, stderr


def finished_tasks(staging: Path) -> int:
    """How many are entered in the journal, behind the line that names the plan; at first there is none."""
    journal = staging / "journal.ckpttools"
    return max(0, journal.read_text().count("\n") - 1) if journal.exists() else 0


def wait_for(something: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not something():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def bytes_read(process: subprocess.Popen[str]) -> int:
    """How many a process has read, of which this package's code is a few."""
    assert process.poll() is None
    declared = Path(f"/proc/{process.pid}/io").read_text()
    return int(declared.partition("rchar:")[2].split()[0])


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of noise that take zstd at its hardest 1.4 s: what is done is entered after 0.5 s."""
    path = tmp_path_factory.mktemp("slow") / "model.safetensors"
    noise = np.random.default_rng(0).integers(0, 256, (64, MIB // 2), np.uint8)
    save_file({f"w{number}": row for number, row in enumerate(noise)}, path)
    return path


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of 64 GB, all of it a hole in its file."""
    path = tmp_path_factory.mktemp("huge") / "model.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [16, 10**9], "data_offsets": [0, 64 * 10**9]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + 64 * 10**9)
    return path


class TestSignalsDuringImport:
    @pytest.mark.parametrize("number", SIGNALS)
    def test_signal_gives_a_message_and_its_exit_code(self, number: signal.Signals):
        command = [sys.executable, "-c", AT_AN_IMPORT, str(int(number)), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        *codes, last = [int(line) for line in done.stdout.splitlines() if line.lstrip("-").isdigit()]
        assert len(codes) > 3
        # Until there is a handler, which takes twenty modules of Python's own, the system ends the process.
        early = codes.count(-number)
        assert early <= (0 if number == signal.SIGINT else 2)
        assert codes == [-number] * early + [128 + number] * (len(codes) - early)
        assert last == 0
        assert set(done.stderr.splitlines()) == {"Stopped."}


class TestConversions:
    @pytest.mark.parametrize("number", SIGNALS)
    def test_stop_between_two_tasks_can_be_resumed(self, slow: Path, tmp_path: Path, number: signal.Signals):
        words = ("convert", "to-orbax", slow, tmp_path / "out", "--compression=zstd:19", "--jobs=1", "--json")
        process = start(*words)
        wait_for(lambda: finished_tasks(tmp_path / "out.partial"))
        process.send_signal(number)
        code, output, message = ends(process, 60)
        assert (code, message) == (128 + number, f"{MESSAGE} {RESUMES}\n")
        assert json.loads(output)["error"]["exit_code"] == code
        assert not (tmp_path / "out").exists()
        if number == signal.SIGTERM:
            code, receipt, _ = ends(start(*words), 60)
            assert code == 0
            built = json.loads(receipt)
            assert 0 < built["tasks_resumed"] < built["tasks"]

    def test_first_of_several_conversions_is_not_the_complete_output(self, tmp_path: Path):
        sources = [tmp_path / "a", tmp_path / "b"]
        for source in sources:
            source.mkdir()
            save_file({"w": np.ones(4, "float32")}, source / "model.safetensors")
        words = ["convert", "to-orbax", *sources, "--into", tmp_path / "out"]
        command = [sys.executable, "-c", WHEN_ALL_IS_WRITTEN, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (130, f"{MESSAGE} {RESUMES}")
        assert [item.name for item in (tmp_path / "out").iterdir()] == ["a"]

    def test_complete_run_is_not_resumed_after_interrupt(self, tmp_path: Path):
        source, destination = tmp_path / "in.safetensors", tmp_path / "out"
        save_file({"w": np.ones(4, "float32")}, source)
        words = ["convert", "to-orbax", source, destination, "--json"]
        command = [sys.executable, "-c", WHEN_ALL_IS_WRITTEN, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (130, f"{MESSAGE} {IS_DONE}\n")
        assert destination.exists() and not destination.with_name("out.partial").exists()


class TestReadCommands:
    @pytest.mark.parametrize("command", ["hash", "inspect stats", "diff"])
    def test_signal_stops_soon_and_prints_no_report(self, huge: Path, command: str):
        both = [huge, huge.parent] if command == "diff" else [huge]
        process = start(*command.split(), *both, "--json", "--memory=300MiB", "--no-progress")
        wait_for(lambda: bytes_read(process) > 128 * MIB)
        process.send_signal(signal.SIGTERM)
        code, output, message = ends(process, 3)
        assert (code, message) == (143, MESSAGE + "\n")
        assert json.loads(output)["error"]["exit_code"] == code

    def test_closed_pipe_stops_the_output(self, tmp_path: Path):
        tensors = {f"layer_{number}_of_many": np.zeros(1, np.uint8) for number in range(3000)}
        save_file(tensors, tmp_path / "model.safetensors")
        process = start("inspect", "tree", tmp_path, "--json", pipesize=4096)
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(10).startswith('{"schema"')
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 141

    @pytest.mark.parametrize("words", ["--help", "hash --help", "nonsense"])
    def test_closed_pipe_ends_help_output(self, words: str):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [*CKPT, *words.split()], stdout=writing, stderr=writing, timeout=30, check=False
        )
        os.close(writing)
        assert done.returncode == (2 if words == "nonsense" else 141)


class TestHandlers:
    def test_ignored_signals_stay_ignored(self):
        """As nohup starts a command."""
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW_TO_END],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ending\n"
        process.kill()
        process.communicate()

    def test_second_signal_exits_immediately(self):
        command = [sys.executable, "-c", SLOW_TO_END]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.SIGTERM)
        assert ends(process, 60) == (143, "", "Stopped.\n")

    def test_signal_lost_in_a_finalizer_is_raised_again(self):
        command = [sys.executable, "-c", IN_A_FINALIZER]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (143, "")

    def test_signal_handlers_are_restored(self):
        before = [signal.getsignal(number) for number in SIGNALS], sys.unraisablehook
        with pytest.raises(Stopped), signals.raise_on_signal():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        assert ([signal.getsignal(number) for number in SIGNALS], sys.unraisablehook) == before

    def test_interrupt_is_not_a_catchable_error(self):
        assert not issubclass(Stopped, Exception)
        assert [exit_code_of(Stopped(number), traceback=False) for number in SIGNALS] == [130, 143, 129]
