"""`ckpttools.load` on eight simulated devices: the checks of `support.sharded_checks`, all in one process."""

from __future__ import annotations

import pytest
from support.scripts import answers
from support.sharded_checks import CHECKS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return answers("sharded_checks", list(CHECKS), tmp_path_factory.mktemp("load"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_eight_devices(results, name):
    assert results[name] == "", results[name]
