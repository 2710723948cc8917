"""Arrays of JAX on 8 simulated devices, loaded, and saved as every format: asked of one process for all."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support.locations import TESTS
from support.scripts import answers
from support.sharded_checks import CHECKS

import ckpttools
from ckpttools import UsageError

CASES = (
    "orbax_structure_is_its_own",
    "standard_checkpointer_with_target",
    "pytree_handler_without_ocdbt",
    "checkpoint_manager",
    "an_item",
    "flax_nnx",
    "flax_linen",
    "loaded_again",
    "as_it_lies_on_its_mesh",
    "as_from_a_file",
    "arrays_without_elements",
    "the_whole_tree_is_an_array",
    "far_devices",
    "a_plan_of_shapes",
    "what_is_no_array",
    "uneven_as_jax",
    "models",
    "what_is_resharded",
    "what_failed_goes_on_with_the_same_arrays",
    "memory",
    "in_the_background",
    "a_tree_of_the_user",
    "what_is_given_back_is_not_read",
    "errors_come_out_of_wait",
    "one_save_to_a_place",
    "the_budget_of_the_host",
    "the_page",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded")
    work = directory / "work"
    work.mkdir()
    jobs = [[*CHECKS, *CASES], str(work)]
    # What is compiled here makes arrays, and proves nothing: optimizing it took 4 CPU seconds of 19.
    return answers("eight_devices_script", jobs, directory, JAX_DISABLE_MOST_OPTIMIZATIONS="1")


@pytest.mark.parametrize("case", CHECKS)
def test_arrays_load_onto_eight_devices(results, case):
    assert results[case] == "", results[case]


@pytest.mark.parametrize("case", CASES)
def test_arrays_save_from_eight_devices(results, case):
    assert results[case] == "", results[case]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Where processes have worked that did not get to the end, and how they ended."""
    directory = tmp_path_factory.mktemp("interrupted")
    command = [sys.executable, "-m", "support.interrupted_save_script", str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return directory, json.loads((directory / "ended.json").read_bytes())


def test_killed_save_leaves_no_checkpoint(interrupted):
    location = interrupted[0] / "killed"
    assert interrupted[1]["killed"] == -9, (location / "said").read_text()
    assert {path.name for path in location.iterdir()} == {"out.partial", "said"}
    tree = {"w": np.ones((4, 4), np.float32)}
    with pytest.raises(UsageError, match="contains the beginning of another conversion"):
        ckpttools.save(tree, location / "out")
    assert ckpttools.save(tree, location / "out", overwrite=True).tasks_resumed == 0
    assert ckpttools.open(location / "out").arrays.keys() == {("w",)}


@pytest.mark.parametrize("how", ["left", "logged"])
def test_process_exits_after_its_saves(interrupted, how):
    location = interrupted[0] / how
    declared = (location / "said").read_text()
    assert interrupted[1][how] == 0, declared
    assert len(ckpttools.open(location / "whole").arrays) == 8
    assert declared.count("taken was not saved: ") == 1
    assert how == "left" or "taken was not saved: " in (location / "log").read_text()
    assert (location / "taken").read_text() == "somebody else's"
