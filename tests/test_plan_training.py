"""Plans of a training: MaxText's formulas and rules, intervals that lose least, shares of hosts."""

from __future__ import annotations

import json
import re
from math import sqrt
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import ckpt, succeed
from support.hf_models import write_llama
from support.pages import run_page
from support.places import DOCS, FIXTURES, TRAINED
from support.trees import tree_with

import ckpttools
from ckpttools.core.duration import parse_duration
from ckpttools.core.errors import UsageError
from ckpttools.maxtext.planning.intervals import Tier, kept_checkpoints
from ckpttools.maxtext.planning.ramdisk import BYTES_PER_PARAMETER, ramdisk
from ckpttools.maxtext.planning.rules import refusals

ACCEPTED = json.loads((FIXTURES / "maxtext-0.2.5-checkpointing.json").read_bytes())


def test_the_ramdisk_is_that_of_the_documentation():
    size = ramdisk(70_000_000_000 * BYTES_PER_PARAMETER, 32, None)
    # Its text, which rounds on the way, says 60.3 GB.
    assert size.documented == pytest.approx(60.375e9) and size.exact is None
    assert size.setting == "57579Mi" and 57579 * 2**20 >= size.documented > 57578 * 2**20


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: str(len(case["settings"])))
def test_settings_are_refused_as_maxtext_refuses_them(case):
    assert (not list(refusals(case["settings"]))) == case["accepted"]
    # And as words of a command line.
    words = {name: "null" if each is None else str(each).lower() for name, each in case["settings"].items()}
    assert (not list(refusals(words))) == case["accepted"]


def test_the_cases_are_of_both_kinds():
    accepted = sum(case["accepted"] for case in ACCEPTED)
    assert len(ACCEPTED) == 200 and 40 < accepted < 160


@given(st.floats(0.1, 500), st.floats(1000, 1e7), st.floats(0.05, 20))
def test_no_interval_loses_less_than_the_best(save, failures, factor):
    tier = Tier("local", save, failures)
    best, other = tier.best_seconds, tier.best_seconds * factor
    # Daly's interval is of a model with further terms: to first order it is near Young's.
    assert tier.lost(tier.young_seconds) <= tier.lost(other) + 1e-12
    assert tier.lost(best) <= tier.lost(tier.young_seconds) * (
        1 + save / failures + sqrt(save / failures) / 2
    )
    assert best >= save


@given(st.floats(1, 100), st.floats(1e4, 1e6), st.floats(0.5, 60), st.integers(1, 50))
def test_steps_are_the_multiple_that_loses_least(save, failures, step, multiple):
    tier = Tier("persistent", save, failures)
    steps = tier.best_steps(step, multiple)
    assert steps % multiple == 0 and steps > 0
    near = [n * multiple for n in (steps // multiple - 1, steps // multiple + 1) if n > 0]
    wanted = tier.best_seconds / step
    if abs(wanted - steps) < multiple / 2:
        return
    assert all(tier.lost(steps * step) <= tier.lost(n * step) * 1.2 for n in near)


def test_a_run_keeps_what_it_is_told():
    assert kept_checkpoints(1000, 100, None) == 10
    assert kept_checkpoints(1050, 100, None) == 11
    assert kept_checkpoints(1050, 100, 3) == 3


@pytest.mark.parametrize(
    ("said", "seconds"), [(90, 90), ("90", 90), ("1.5h", 5400), ("30min", 1800), ("7d", 604800)]
)
def test_times_are_as_they_are_written(said, seconds):
    assert parse_duration(said) == seconds


@pytest.mark.parametrize("said", ["", "x", "-1", "0s", "1y", "nan", "inf"])
def test_other_times_are_refused(said):
    with pytest.raises(UsageError, match="no length of time"):
        parse_duration(said)


def test_a_host_holds_its_part_and_all_that_is_replicated(tmp_path, monkeypatch):
    jax = pytest.importorskip("jax")
    assert jax is not None
    from ckpttools.api import plan_training as module
    from ckpttools.array.shardings import Sharding

    values = {("params", "w"): np.zeros((64, 8), np.float32), ("params", "b"): np.zeros(100, np.float32)}
    values |= {
        ("opt_state", 0, m, "params", *path[1:]): each for m in ("mu", "nu") for path, each in values.items()
    }
    values["opt_state", 0, "count"] = np.int32(0)
    tree = tree_with(values)
    mesh = (("data", 2), ("fsdp", 4))

    def sharded(given):
        return {
            path: Sharding("NamedSharding", mesh, (("fsdp",), ()) if each.ndim == 2 else ())
            for path, each in given.arrays.items()
        }

    monkeypatch.setattr(module, "stored_shardings", sharded)
    made = ckpttools.plan_training(tree, hosts=2, slices=2)
    # Two devices of a slice of four: half of the rows, and all of the rest.
    assert made.host_bytes == 3 * (64 * 8 * 4 // 2 + 400) + 4
    assert made.ramdisk.exact == pytest.approx(2.3 * made.host_bytes)
    wider = ckpttools.plan_training(tree, hosts=4, slices=2, mesh="data=2,fsdp=16")
    assert wider.host_bytes == 3 * (64 * 8 * 4 // 4 + 400) + 4
    with pytest.raises(UsageError, match="without such axes"):
        ckpttools.plan_training(tree, hosts=2, mesh="tensor=2")
    uneven = ckpttools.plan_training(tree, hosts=3)
    assert "cannot share evenly" in uneven.remarks[0] and uneven.ramdisk.exact is None


def test_a_stored_state_is_counted_as_it_is():
    made = ckpttools.plan_training(TRAINED, hosts=1)
    assert made.is_exact and made.state_bytes == ckpttools.open(TRAINED).nbytes
    assert made.mode == "persistent" and made.settings["checkpoint_period"] == "N" and not made.refusals


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_llama(Path("hf/llama"))
    Path("run").symlink_to(TRAINED)
    Path("maxtext.yml").write_text("base_config: base.yml\nweight_dtype: float32\n")


def test_the_page_is_true(places):
    printed = run_page("plan-training.md")
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "plan-training.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    assert "multi_tier_checkpointing_backup_interval_steps=" in printed[1]
    assert "8.03 B parameters, a full state of 96.4 GB" in printed[2]
    assert "enable_emergency_checkpoint=true" in printed[2]
    drawn = ElementTree.parse("lost.svg").getroot()
    assert len([each for each in drawn if each.tag.endswith("polyline")]) == 2


def test_settings_of_the_user_are_checked_with_those_of_the_plan(places):
    words = ["plan-training", "hf/llama/config.json", "--hosts", 2, "--slices", 2, "--json"]
    report = json.loads(succeed(*words).stdout)
    assert report["refusals"] == [] and report["host_bytes"] == report["state_bytes"] // 2
    refused = ckpt(*words[:-1], "multi_tier_checkpointing_backup_interval_minutes=5")
    assert refused.exit_code == 1 and "not both" in refused.output
    assert "int" in ckpt(*words[:-1], "checkpoint_period=often").output
    again = ckpt(*words[:-1], "--mtbf", "6h", "--plot", "hf/x.png")
    assert again.exit_code == 2 and "ends in .svg" in again.output
