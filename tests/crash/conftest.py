"""One zygote, one place and one set of sources for all tests of this directory."""

import pytest

from crash.runner import runner
from crash.scenarios import make_sources
from crash.verdict import Case


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    directory = tmp_path_factory.mktemp("crash")
    with runner(directory / "root", directory / "notes") as made:
        make_sources(made)
        yield made


@pytest.fixture(scope="session")
def cases(commands):
    """The case of a scenario, made once."""
    known = {}

    def of(scenario):
        if scenario not in known:
            known[scenario] = Case(commands, scenario)
        return known[scenario]

    return of
