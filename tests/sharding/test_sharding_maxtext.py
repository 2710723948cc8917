"""MaxText's real restore path, with `ckpttools.load` in the place of its own loader.

Runs where MaxText is installed, in this Python or in the one that CKPTTOOLS_MAXTEXT_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from support.locations import HF, TESTS

PYTHON = os.environ.get("CKPTTOOLS_MAXTEXT_PYTHON") or (sys.executable if find_spec("maxtext") else "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="MaxText is not installed")


@pytest.fixture(scope="module")
def restored(tmp_path_factory):
    declared = tmp_path_factory.mktemp("maxtext") / "said.json"
    command = [PYTHON, "-m", "support.maxtext_restores", str(HF), str(declared)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(declared.read_bytes())


def values(arrays):
    return {path: item["values"] for path, item in arrays.items()}


def test_weights_are_loaded_with_the_requested_sharding(restored):
    loaded = restored["dynamic"]
    assert len(loaded) == 12
    assert {path: item["spec"] for path, item in loaded.items()} == restored["asked"]
    assert {item["dtype"] for item in loaded.values()} == {"float32"}


def test_conversion_function_gives_the_same_values(restored):
    assert values(restored["function"]) == values(restored["dynamic"])


def test_maxtext_preset_shards_like_maxtext(restored):
    assert restored["rules"] == restored["dynamic"]
