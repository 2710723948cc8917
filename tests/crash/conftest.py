"""One zygote, one directory and one set of sources for all tests here."""

import tempfile
from pathlib import Path

import pytest

from crash.runner import runner
from crash.scenarios import make_sources
from crash.verdict import Case


@pytest.fixture(scope="session")
def commands():
    """Run commands in memory if possible: states of the disk are computed, not read."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="crash-", dir=memory if memory.is_dir() else None) as name:
        directory = Path(name)
        with runner(directory / "root", directory / "notes") as built:
            make_sources(built)
            yield built


@pytest.fixture(scope="session")
def cases(commands):
    """Return a function that creates the case of a scenario once."""
    known = {}

    def of(scenario):
        if scenario not in known:
            known[scenario] = Case(commands, scenario)
        return known[scenario]

    return of
