"""What fuzzing has found, and what it starts from: as ordinary inputs of the same targets.

`make fuzz SECONDS=…` looks for more: tests/fuzz/README.md.
"""

import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "fuzz"
sys.path.insert(0, str(FUZZ))

from child import alarmed  # noqa: E402
from mutate import mutated  # noqa: E402
from targets import TARGETS, refused_or_done  # noqa: E402

FOUND = sorted((FUZZ / "found").glob("*-*"))


@pytest.mark.parametrize("name", TARGETS)
def test_recorded_inputs_are_handled(name):
    for path in FOUND:
        if path.name.startswith(f"{name}-"):
            with alarmed():
                refused_or_done(TARGETS[name], path.read_bytes())


def test_seeds_are_accepted_and_their_mutants_are_different():
    """A target whose seeds are all refused at once would look at nothing."""
    for name, target in TARGETS.items():
        seeds = target.seeds()
        accepted = [refused_or_done(target, seed) is None for seed in seeds]
        assert any(accepted), name
        changed = [
            mutated(seeds[0], 1 << 20, number, lambda data, limit: data[:limit]) for number in range(20)
        ]
        assert any(item != seeds[0] for item in changed) or name in ("family", "ocdbt", "chunk"), name


def test_recorded_inputs_have_a_target():
    assert all(path.name.partition("-")[0] in TARGETS for path in FOUND)
