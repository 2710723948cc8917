"""The mutation check: which changes it knows, which tests it asks, and what it makes of their answers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ckpttools
from mutation.mutants import mutants_of
from mutation.run import CAUGHT, SURVIVED, UNSURE, Outcome, Timed, _end, _try, asked, confirmed
from mutation.waiting import ASLEEP, BUSY, ended

SOURCE = '''
"""Text == other text."""
from functools import cache
_LARGE = 4 << 20
_ENTRIES = 512
LIMIT: int | None = 3

@cache(maxsize=2)
def f(a: int | str, b=1) -> int | None:
    """a + b"""
    if a in (b, "é") and not b:
        print(min(a, b))
        raise ValueError(f"{a + b} of {b}", 1 + 1)
    return a

class C:
    def g(self):
        return True
'''
CHANGES = [
    ("<module>", "3", "4"),
    ("f", "1", "2"),
    ("f", 'a in (b, "é") and not b', 'not (a in (b, "é") and not b)'),
    ("f", "in", "not in"),
    ("f", "and", "or"),
    ("f", "not", ""),
    ("f", "print(min(a, b))", "pass"),
    ("f", "min", "max"),
    ("f", 'raise ValueError(f"{a + b} of {b}", 1 + 1)', "pass"),
    ("f", "a", "None"),
    ("C.g", "True", "False"),
]


def test_expected_code_is_mutated(tmp_path):
    (tmp_path / "x.py").write_text(SOURCE)
    built = mutants_of(tmp_path, "x.py")
    assert [(item.function, item.before, item.after) for item in built] == CHANGES
    assert built[3].statement == 'if a in (b, "é") and not b:'
    assert built[3].line == 11
    changed = built[4].applied(SOURCE.encode()).decode()
    assert changed == SOURCE.replace('"é") and not', '"é") or not')


def test_every_mutant_is_valid_and_differs():
    root = Path(ckpttools.__file__).parents[1]
    for file in ("ckpttools/plan/plan.py", "ckpttools/formats/placement.py", "ckpttools/core/region.py"):
        source = (root / file).read_bytes()
        same = ast.dump(ast.parse(source))
        built = mutants_of(root, file)
        assert len(built) > 50
        assert len({item.key for item in built}) == len(built)
        for item in built:
            assert ast.dump(ast.parse(item.applied(source))) != same, item


def test_quickest_tests_of_the_function_are_selected(tmp_path):
    (tmp_path / "x.py").write_text(SOURCE)
    constant, of_f = mutants_of(tmp_path, "x.py")[:2]
    slow, middle, quick = (
        Timed(name, seconds) for name, seconds in (("slow", 5), ("middle", 2), ("quick", 1))
    )
    entered = {"x.py:f": [quick, middle, slow], "x.py:C.g": [slow], "y.py:f": [Timed("other", 0)]}
    assert asked(of_f, entered, 3.5) == [quick, middle]
    assert asked(of_f, {"x.py:f": [slow]}, 1) == [slow]
    assert asked(constant, entered, 60) == [quick, middle, slow]
    assert asked(constant, {}, 60) == []


def test_mutant_is_caught_or_survives_and_is_reverted(tmp_path):
    tree = tmp_path / "tree"
    (tree / "room").mkdir(parents=True)
    source = "def f(a):\n    return a == 1 or a == 1\n"
    (tree / "room" / "x.py").write_text(source)
    (tree / "test_x.py").write_text("from room.x import f\ndef test_f():\n    assert f(1)\n")
    built = {item.before: item for item in mutants_of(tree, "room/x.py")}
    for before, state in (("or", SURVIVED), ("a == 1 or a == 1", CAUGHT)):
        outcome = _try(tree, built[before], "", [Timed("test_x.py::test_f", 0.1)], ())
        assert (outcome.state, "test_f" in outcome.how) == (state, state == CAUGHT)
        assert (tree / "room" / "x.py").read_text() == source


LOOP = "while True: pass"
BESIDE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOOP!r}])"


@pytest.mark.skipif(sys.platform != "linux", reason="what processes do is read from /proc")
@pytest.mark.parametrize(
    ("script", "how"),
    [("", ""), (LOOP, BUSY), (BESIDE, BUSY), ("import time; time.sleep(60)", ASLEEP)],
    ids=["it ends", "it is busy", "another is busy", "it sleeps"],
)
def test_endless_process_is_detected(script, how):
    process = subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True)
    try:
        assert ended(process, cpu_seconds=1, asleep_seconds=2) == how
        assert (process.poll() is None) == bool(how)
    finally:
        _end(process)


def test_tests_that_fail_without_the_mutant_are_ignored(monkeypatch):
    mutant = mutants_of(Path(ckpttools.__file__).parents[1], "ckpttools/core/region.py")[0]
    ids = ("test_outcomes_have_expected_exit_codes.py::test_none", "test_region.py::test_none[a b]")
    hows = [f"FAILED tests/{name} - assert 1 == 2" for name in ids]
    monkeypatch.setattr("mutation.run._copy", lambda location: location / "tree")
    monkeypatch.setattr("mutation.run._tested", lambda *_: (1, f".F\n{hows[1]} seconds\n1 failed"))
    outcomes = [Outcome(mutant, "", CAUGHT, how, 1) for how in [*hows, BUSY]]
    assert [item.state for item in confirmed(outcomes)] == [CAUGHT, UNSURE, CAUGHT]
