"""Arrays of JAX on 8 simulated devices, saved as every format: asked of one process for all."""

import subprocess
import sys

import numpy as np
import pytest
from support.places import TESTS
from support.scripts import answers

import ckpttools
from ckpttools.core.errors import UsageError

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
    # What is compiled here makes arrays, and proves nothing: optimising it took 4 CPU seconds of 19.
    return answers("sharded_save_script", [CASES, str(work)], directory, JAX_DISABLE_MOST_OPTIMIZATIONS="1")


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_save(results, case):
    assert results[case] == ""


def interrupted(how, directory):
    command = [sys.executable, "-m", "support.interrupted_save_script", how, str(directory)]
    return subprocess.run(command, capture_output=True, text=True, cwd=TESTS, timeout=120, check=False)


def test_a_process_that_is_killed_leaves_nothing_that_is_taken_for_a_checkpoint(tmp_path):
    assert interrupted("killed", tmp_path).returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == ["killed.partial"]
    tree = {"w": np.ones((4, 4), np.float32)}
    with pytest.raises(UsageError, match="holds the beginning of another conversion"):
        ckpttools.save(tree, tmp_path / "killed")
    assert ckpttools.save(tree, tmp_path / "killed", overwrite=True).tasks_resumed == 0
    assert ckpttools.open(tmp_path / "killed").arrays.keys() == {("w",)}


@pytest.mark.parametrize("how", ["left", "logged"])
def test_a_process_ends_when_its_saves_have(tmp_path, how):
    ended = interrupted(how, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len(ckpttools.open(tmp_path / "whole").arrays) == 8
    assert ended.stderr.count("taken was not saved: ") == 1
    assert how == "left" or "taken was not saved: " in (tmp_path / "log").read_text()
    assert (tmp_path / "taken").read_text() == "somebody else's"
