"""The mutation check: which changes it knows, which tests it asks, and what it makes of their answers."""

import ast
from pathlib import Path

from mutation.mutants import mutants_of
from mutation.run import CAUGHT, SURVIVED, Timed, _try, asked

import ckpttools

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


def test_what_is_changed_and_what_is_left_alone(tmp_path):
    (tmp_path / "x.py").write_text(SOURCE)
    made = mutants_of(tmp_path, "x.py")
    assert [(each.function, each.before, each.after) for each in made] == CHANGES
    assert made[3].statement == 'if a in (b, "é") and not b:'
    assert made[3].line == 11
    changed = made[4].applied(SOURCE.encode()).decode()
    assert changed == SOURCE.replace('"é") and not', '"é") or not')


def test_every_change_of_real_code_is_code_and_another():
    root = Path(ckpttools.__file__).parents[1]
    for file in ("ckpttools/plan/plan.py", "ckpttools/formats/placement.py", "ckpttools/core/region.py"):
        source = (root / file).read_bytes()
        same = ast.dump(ast.parse(source))
        made = mutants_of(root, file)
        assert len(made) > 50
        assert len({each.key for each in made}) == len(made)
        for each in made:
            assert ast.dump(ast.parse(each.applied(source))) != same, each


def test_the_quickest_tests_of_the_function_are_asked(tmp_path):
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


def test_a_change_is_caught_or_survives_and_is_taken_back(tmp_path):
    tree = tmp_path / "tree"
    (tree / "room").mkdir(parents=True)
    source = "def f(a):\n    return a == 1 or a == 1\n"
    (tree / "room" / "x.py").write_text(source)
    (tree / "test_x.py").write_text("from room.x import f\ndef test_f():\n    assert f(1)\n")
    made = {each.before: each for each in mutants_of(tree, "room/x.py")}
    for before, state in (("or", SURVIVED), ("a == 1 or a == 1", CAUGHT)):
        outcome = _try(tree, made[before], "", [Timed("test_x.py::test_f", 0.1)], ())
        assert (outcome.state, "test_f" in outcome.how) == (state, state == CAUGHT)
        assert (tree / "room" / "x.py").read_text() == source
