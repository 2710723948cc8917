"""The end of `ckpt`: nothing is lost by not taking memory apart, and whoever has to see the end sees it."""

import subprocess
import sys
from pathlib import Path

import pytest

from ckpttools.cli.process_exit import exit_process

ENDS = """
import sys
from ckpttools.cli.process_exit import exit_process
{}
exit_process(int(sys.argv[1]))
print("not reached")
"""


def ended(code, *lines):
    words = [sys.executable, "-c", ENDS.format("\n".join(lines)), str(code)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("code", [0, 1, 3, 70])
def test_exit_code_and_output_are_kept(code):
    done = ended(code, 'print("out", end="")', 'print("err", end="", file=sys.stderr)')
    assert (done.returncode, done.stdout, done.stderr) == (code, "out", "err")


def test_atexit_functions_run_and_errors_are_shown():
    lines = ["import atexit", 'atexit.register(print, "last", end="")', "atexit.register(lambda: 1 / 0)"]
    done = ended(3, *lines)
    assert (done.returncode, done.stdout) == (3, "last")
    assert "ZeroDivisionError" in done.stderr


def test_temporary_directories_are_removed():
    done = ended(0, "import tempfile", "kept = tempfile.TemporaryDirectory()", 'print(kept.name, end="")')
    assert done.stdout and not Path(done.stdout).exists()


def test_closed_or_missing_streams_are_handled():
    assert ended(1, "sys.stdout.close()", "sys.stderr = None").returncode == 1


def test_worker_process_exits_the_same_way():
    end = "from ckpttools.core.process_exit import end_process"
    lines = [end, 'print("out", end="")', "sys.stderr = None", 'atexit.register(print, "last")']
    done = ended(3, "import atexit", *lines, "end_process(4)")
    assert (done.returncode, done.stdout) == (4, "out")


def test_exit_waits_for_threads():
    late = 'threading.Thread(target=lambda: (time.sleep(0.3), print("late", end=""))).start()'
    done = ended(3, "import threading, time", late)
    assert (done.returncode, done.stdout) == (3, "late")


def test_exit_skips_object_teardown():
    lines = ["class Kept:", '    def __del__(self): print("taken apart")', "kept = Kept()"]
    assert ended(0, *lines).stdout == ""


def test_profiler_writes_its_results():
    words = [sys.executable, "-m", "cProfile", "-m", "ckpttools", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("ckpt ")
    assert "function calls" in done.stdout


def test_debugger_sees_the_exit():
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=60)
    assert "seen to the end 0" in done.stdout


def test_exit_message_is_shown_as_an_error():
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "no more\n")


SAYS = """
import ckpttools.cli.main
from ckpttools.__main__ import main

def ends(**_):
    raise SystemExit("no more")

ckpttools.cli.main.main = ends
main()
"""

TRACED = """
import sys
from ckpttools.__main__ import main
sys.settrace(lambda *_: None)
sys.argv = ["ckpt", "--version"]
try:
    main()
except SystemExit as end:
    sys.settrace(None)
    print("seen to the end", end.code)
"""


def test_exit_in_process_is_visible_to_debuggers(monkeypatch):
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    with pytest.raises(SystemExit) as end:
        exit_process(3)
    assert end.value.code == 3
