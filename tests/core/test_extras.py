"""Packages that only some functions need: everything else works without them."""

import subprocess
import sys

import pytest
from support.locations import GOLDEN

import ckpttools
from ckpttools import MissingPackageError
from ckpttools.core.extras import missing_package

BLOCK = """
import sys

NAMES = ("jax", "jaxlib", "orbax", "flax", "obstore", "boto3", "resvg_py", "pandas")
sys.modules.update(dict.fromkeys(NAMES))
"""
COMMANDS = f"""
import os
from pathlib import Path
from click.testing import CliRunner
from ckpttools.cli.main import main

source = {str(GOLDEN / "qwen3" / "hf")!r}
for line in (
    "convert hf-to-maxtext SRC maxtext",
    "convert maxtext-to-hf maxtext back",
    "inspect tree maxtext",
    "inspect stats maxtext",
    "inspect chunks maxtext --mesh fsdp=2",
    "diff back SRC",
    "verify back --against SRC",
    "hash back",
    "doctor maxtext",
    "cast back half --dtype float16",
    "unstack maxtext layers",
    "maxtext-config maxtext",
    "families",
):
    done = CliRunner().invoke(main, line.replace("SRC", source).split())
    assert done.exit_code == 0, (line, done.output)
"""
CALLS = f"""
import numpy as np
import ckpttools

tree = ckpttools.open({str(GOLDEN / "qwen3" / "hf")!r})
assert len(ckpttools.inspect(tree).arrays) == len(tree)
for call, package, extra in (
    (lambda: ckpttools.load(tree), "jax", "ckpttools[jax]"),
    (lambda: ckpttools.save({{"a": np.zeros(3)}}, "saved"), "jax", "ckpttools[jax]"),
    (lambda: ckpttools.inspect(tree).to_pandas(), "pandas", "pip install pandas"),
    (lambda: ckpttools.open("gs://bucket/model"), "obstore", "ckpttools[cloud]"),
):
    try:
        call()
    except ckpttools.MissingPackageError as error:
        assert package in error.message and extra in error.hint, error
        assert error.exit_code == 2 and isinstance(error, ImportError)
    else:
        raise AssertionError(package)
"""


@pytest.mark.parametrize("work", [COMMANDS, CALLS], ids=["commands", "calls"])
def test_core_needs_no_extra(work, tmp_path):
    command = [sys.executable, "-c", BLOCK + work]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_modules_of_the_user_are_not_attributed_to_extras():
    with pytest.raises(ModuleNotFoundError) as caught:
        import no_such_package_of_the_user  # noqa: F401
    error = missing_package(caught.value)
    assert isinstance(error, MissingPackageError)
    assert "no_such_package_of_the_user is not installed" in error.message
    assert "your modules import" in error.hint
    assert ckpttools.MissingPackageError is MissingPackageError
