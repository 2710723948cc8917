"""One zygote, one place and one set of sources for all tests of this directory."""

import tempfile
from pathlib import Path

import pytest

from crash.runner import runner
from crash.scenarios import make_sources
from crash.verdict import Case


@pytest.fixture(scope="session")
def commands():
    """In memory where there is such a place: what a disk would hold is worked out, not looked at."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="crash-", dir=memory if memory.is_dir() else None) as name:
        directory = Path(name)
        with runner(directory / "root", directory / "notes") as built:
            make_sources(built)
            yield built


@pytest.fixture(scope="session")
def cases(commands):
    """The case of a scenario, made once."""
    known = {}

    def of(scenario):
        if scenario not in known:
            known[scenario] = Case(commands, scenario)
        return known[scenario]

    return of
