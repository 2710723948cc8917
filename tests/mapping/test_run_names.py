"""New steps of a run are named like the existing ones, so that one manager restores all of them."""

from __future__ import annotations

import shutil
import warnings

import numpy as np
import pytest
from support.command_line import doctor

import ckpttools
from ckpttools import UnlistedStepWarning, UsageError

TREE = {"w": np.arange(6, dtype=np.float32)}


def steps(run, names, item="default"):
    """Write existing steps with the same call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnlistedStepWarning)
        for name in names:
            ckpttools.save(TREE, run.parent / "made" / name, level="step", item=item)
            run.mkdir(exist_ok=True)
            (run.parent / "made" / name).rename(run / name)
    return run


def items_of(step):
    return [item.name for item in step.iterdir() if item.is_dir()]


def result(path):
    return [(finding.level, finding.location, finding.what) for finding in doctor(path).findings]


def test_orbax_restores_steps_saved_next_to_its_own(tmp_path):
    import orbax.checkpoint as ocp

    run = tmp_path / "run"
    with ocp.CheckpointManager(run) as manager:
        manager.save(5, args=ocp.args.StandardSave(TREE))
    ckpttools.save(TREE, run / "7", level="step")
    for how in ({}, {"args": ocp.args.StandardRestore()}):
        with ocp.CheckpointManager(run) as manager:
            assert manager.all_steps() == [5, 7]
            for step in (5, 7):
                assert manager.restore(step, **how)["w"].tolist() == TREE["w"].tolist()
    # Orbax before 0.12 writes no commit file on local disks.
    assert [what for _, _, what in result(run) if what != "no commit_success.txt"] == []


@pytest.mark.parametrize(
    ("names", "destination"),
    [
        (["1", "20"], "3"),
        (["step_1"], "step_2"),
        (["0001", "0002"], "0013"),
        (["1"], "1000"),
        (["a_1"], "b_1"),
    ],
)
def test_item_name_is_taken_from_the_run(tmp_path, names, destination):
    run = steps(tmp_path / "run", names)
    ckpttools.save(TREE, run / destination, level="step")
    is_of_run = destination != "b_1"  # somebody's files called by a word and a number are no steps
    assert items_of(run / destination) == ["default" if is_of_run else "items"]


def test_item_name_of_run_overrides_that_of_tree(tmp_path):
    tree = ckpttools.open(steps(tmp_path / "source", ["4"], item="state"))
    ckpttools.save(tree, steps(tmp_path / "run", ["1"]) / "2", level="step")
    ckpttools.save(tree, tmp_path / "alone" / "2", level="step")
    assert items_of(tmp_path / "run" / "2") == ["default"]
    assert items_of(tmp_path / "alone" / "2") == ["state"]


def test_different_item_name_is_warned_about(tmp_path):
    run = steps(tmp_path / "run", ["1"])
    with pytest.warns(UnlistedStepWarning, match="named items, but in step 1 default"):
        ckpttools.save(TREE, run / "2", level="step", item="items")
    assert items_of(run / "2") == ["items"]
    [(level, location, what)] = result(run)
    assert (level, location) == ("warning", str(run))
    assert what == "the trees of the steps have different names: default in 1; items in 2"


@pytest.mark.parametrize(
    ("names", "destination"), [(["1"], "final"), (["0001"], "2"), (["1"], "007"), (["1"], "step_2")]
)
def test_unlisted_step_name_is_refused(tmp_path, names, destination):
    run = steps(tmp_path / "run", names)
    with pytest.raises(UsageError, match=f"does not list a step named {destination}"):
        ckpttools.save.plan(TREE, run / destination, level="step")


def test_unnumbered_step_outside_a_run_is_warned_about(tmp_path):
    with pytest.warns(UnlistedStepWarning, match="'final' has no number"):
        ckpttools.save.plan(TREE, tmp_path / "final", level="step")


def test_unnamed_tree_among_named_items_is_refused(tmp_path):
    run = steps(tmp_path / "run", ["1"])
    with pytest.raises(UsageError, match=r"have named items: default"):
        ckpttools.save.plan(TREE, run / "2", level="item")
    ckpttools.save.plan(TREE, run / "weights", level="item")
    ckpttools.save(TREE, tmp_path / "bare" / "1", level="item")
    with pytest.raises(UsageError, match="items themselves"):
        ckpttools.save.plan(TREE, tmp_path / "bare" / "2", level="step")
    ckpttools.save(TREE, tmp_path / "bare" / "2", level="item")


def test_ambiguous_item_must_be_chosen(tmp_path):
    run = steps(tmp_path / "run", ["1"])
    shutil.copytree(run / "1" / "default", run / "1" / "average")
    with pytest.raises(UsageError, match="several items: average, default"):
        ckpttools.save.plan(TREE, run / "2", level="step")
    ckpttools.save.plan(TREE, run / "2", level="step", item="average")
    ckpttools.save.plan(ckpttools.open(run / "1" / "default"), run / "2", level="step")


def test_doctor_reports_trees_with_different_names(tmp_path):
    run = steps(tmp_path / "run", ["1", "2"])
    steps(run, ["3", "best"], item="items")
    [apart, unlisted] = result(run)
    assert apart[2] == "the trees of the steps have different names: default in {1..2}; items in 3"
    assert unlisted[:2] == ("info", str(run / "best"))
    [finding, _] = doctor(run).findings
    assert finding.command is not None
    assert finding.command.endswith(f"{run}/3/items {tmp_path}/run.renamed/3 --level step --item default")
    shutil.copytree(run / "3" / "items", run / "3" / "default")
    assert "different names" not in str(result(run))
