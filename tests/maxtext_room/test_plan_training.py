"""Plans of a training: MaxText's formulas and rules, intervals that lose least, shares of hosts."""

from __future__ import annotations

import json
import re
import struct
import sys
from functools import partial
from math import sqrt
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import ckpt, succeed
from support.hf_models import write_llama
from support.locations import DOCS, FIXTURES, ORBAX, TRAINED
from support.pages import run_page

import ckpttools
from ckpttools import FormatError, Tree, UsageError
from ckpttools.api.plan_training import parse_duration
from ckpttools.formats.registry import stored_shardings
from ckpttools.maxtext.training_plan import (
    BYTES_PER_PARAMETER,
    Tier,
    count_kept_checkpoints,
    invalid_combinations,
    ramdisk,
)

ACCEPTED = json.loads((FIXTURES / "maxtext-0.2.5-checkpointing.json").read_bytes())


def test_ramdisk_matches_the_documentation():
    size = ramdisk(70_000_000_000 * BYTES_PER_PARAMETER, 32, None)
    # Its text, which rounds on the way, says 60.3 GB.
    assert size.documented == pytest.approx(60.375e9) and size.exact is None
    assert size.setting == "57579Mi" and 57579 * 2**20 >= size.documented > 57578 * 2**20


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: str(len(case["settings"])))
def test_settings_are_refused_like_in_maxtext(case):
    assert (not list(invalid_combinations(case["settings"]))) == case["accepted"]
    # And as words of a command line.
    words = {name: "null" if item is None else str(item).lower() for name, item in case["settings"].items()}
    assert (not list(invalid_combinations(words))) == case["accepted"]


def test_setting_cases_include_valid_and_invalid_ones():
    accepted = sum(case["accepted"] for case in ACCEPTED)
    assert len(ACCEPTED) == 200 and 40 < accepted < 160


@given(st.floats(0.1, 500), st.floats(1, 1e7), st.floats(0, 1000), st.floats(0.05, 20))
def test_best_interval_loses_least(save, failures, write, factor):
    tier = Tier("local", save, failures, write)
    best = tier.best_seconds
    assert 0 < tier.lost(best) <= tier.lost(best * factor) + 1e-9 <= 1 + 1e-9
    # Young's is the same to first order, where training need not wait for what is written.
    if write <= best:
        assert best == pytest.approx(tier.young_seconds, rel=sqrt(save / failures) + 1e-3)


@pytest.mark.parametrize("tier", [(10, 1000, 10), (100, 1000, 100), (5, 1000, 300), (50, 100, 50)])
@pytest.mark.parametrize("factor", [0.3, 1, 3])
def test_lost_time_matches_random_failures(tier, factor):
    """The time line of each of 200,000 failures, one by one."""
    save, failures, write = tier
    built = Tier("local", *tier)
    interval = built.best_seconds * factor
    after_restoring = np.random.default_rng(0).exponential(failures, 200_000) - write
    # The next save begins when the one before it is complete; each is of use when it is.
    period = max(interval + save, write)
    first = interval + max(write, save)
    saves = np.maximum(0, (after_restoring - first) // period + 1)
    kept = saves.mean() * interval / failures
    assert built.lost(interval) == pytest.approx(1 - kept, abs=0.005)


@given(st.floats(1, 100), st.floats(1e4, 1e6), st.floats(0.5, 60), st.integers(1, 50))
def test_interval_is_rounded_to_the_better_step_multiple(save, failures, step, multiple):
    tier = Tier("persistent", save, failures)
    beyond = next(n for n in range(2, 1 << 30) if n * multiple * step > tier.best_seconds)
    around = [(beyond - 1) * multiple, beyond * multiple]
    assert around[0] * step <= tier.best_seconds or beyond == 2
    chosen = tier.best_steps(step, multiple)
    assert chosen in around
    assert all(tier.lost(chosen * step) <= tier.lost(item * step) for item in around)


def test_kept_checkpoints_follow_the_limit():
    assert count_kept_checkpoints(1000, 100, None) == 10
    assert count_kept_checkpoints(1050, 100, None) == 11
    assert count_kept_checkpoints(1050, 100, 3) == 3


@pytest.mark.parametrize(
    ("declared", "seconds"), [(90, 90), ("90", 90), ("1.5h", 5400), ("30min", 1800), ("7d", 604800)]
)
def test_durations_are_parsed_as_written(declared, seconds):
    assert parse_duration(declared) == seconds


@pytest.mark.parametrize("declared", ["", "x", "-1", "0s", "1y", "nan", "inf"])
def test_invalid_durations_are_refused(declared):
    with pytest.raises(UsageError, match="is not a duration"):
        parse_duration(declared)


def held(tree: Tree, mesh: dict[str, int], process: int, processes: int) -> int:
    """Bytes that the devices of one process hold, element by element."""
    devices = np.arange(np.prod([*mesh.values()])).reshape(*mesh.values())
    own = [np.argwhere(devices == item)[0] for item in np.split(devices.ravel(), processes)[process]]
    total = 0
    for path, array in tree.arrays.items():
        there = np.zeros(array.shape, bool)
        sharding = stored_shardings(tree).get(path)
        for at in own:
            index = dict(zip(mesh, at, strict=True))
            box = [slice(None)] * array.ndim
            for axis, names in enumerate(sharding.spec if sharding else ()):
                count, location = 1, 0
                for name in names:
                    count, location = count * mesh[name], location * mesh[name] + index[name]
                part = array.shape[axis] // count
                box[axis] = slice(location * part, (location + 1) * part)
            there[tuple(box)] = True
        total += int(there.sum()) * array.dtype.itemsize
    return total


@pytest.mark.parametrize(
    ("name", "mesh", "hosts", "slices"),
    [
        ("maxtext_run", {"data": 1, "fsdp": 4}, 2, 1),
        ("maxtext_run", {"data": 1, "fsdp": 4}, 4, 1),
        ("maxtext_run", {"data": 2, "fsdp": 2}, 2, 2),
        ("salvaged_replicator_01", {"data": 2, "fsdp": 4}, 2, 2),
        ("multihost_plain", {"fsdp": 4}, 2, 1),
    ],
)
def test_host_bytes_include_replicated_arrays(name, mesh, hosts, slices):
    location = ORBAX / name
    declared = ",".join(f"{axis}={length}" for axis, length in mesh.items())
    built = ckpttools.plan_training(location, hosts=hosts, slices=slices, mesh=declared)
    tree = ckpttools.open(location)
    assert built.is_exact and [remark.split()[0] for remark in built.remarks] == ["N"]
    assert built.host_bytes == held(tree, mesh, 0, hosts * slices)
    assert built.ramdisk.exact == pytest.approx(2.3 * built.host_bytes)
    assert built.replicated_bytes == max(0, built.host_bytes - -(-built.state_bytes // hosts))


def test_mismatched_meshes_are_refused_or_reported():
    with pytest.raises(UsageError, match="without such axes"):
        ckpttools.plan_training(ORBAX / "maxtext_run", hosts=2, mesh="tensor=2")
    uneven = ckpttools.plan_training(ORBAX / "maxtext_run", hosts=3)
    assert "cannot share evenly" in uneven.remarks[0] and uneven.ramdisk.exact is None


def test_stored_state_is_counted_exactly():
    built = ckpttools.plan_training(TRAINED, hosts=1)
    assert built.is_exact and built.state_bytes == ckpttools.open(TRAINED).nbytes
    assert built.mode == "persistent" and built.settings["checkpoint_period"] == "N" and not built.refusals


@pytest.fixture
def locations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_llama(Path("hf/llama"))
    Path("run").symlink_to(TRAINED)
    Path("maxtext.yml").write_text("base_config: base.yml\nweight_dtype: float32\n")


def test_plan_training_page_is_correct(locations):
    printed = run_page("plan-training.md")
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "plan-training.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    assert "multi_tier_checkpointing_backup_interval_steps=" in printed[1]
    assert "8.03 B parameters, a full state of 96.4 GB" in printed[2]
    assert "enable_emergency_checkpoint=true" in printed[2]
    drawn = ElementTree.parse("lost.svg").getroot()
    assert len([item for item in drawn if item.tag.endswith("polyline")]) == 2


def test_user_settings_are_checked_together_with_the_plan(locations):
    words = ["plan-training", "hf/llama/config.json", "--hosts", 2, "--slices", 2, "--json"]
    report = json.loads(succeed(*words).stdout)
    assert report["refusals"] == [] and report["host_bytes"] == report["state_bytes"] // 2
    refused = ckpt(*words[:-1], "multi_tier_checkpointing_backup_interval_minutes=5")
    assert refused.exit_code == 1 and "not both" in refused.output
    assert "int" in ckpt(*words[:-1], "checkpoint_period=often").output
    again = ckpt(*words[:-1], "--mtbf", "6h", "--plot", "hf/x.jpg")
    assert again.exit_code == 2 and "ends in .svg or .png" in again.output
    # One that the name of a program could be.
    declared = "base_config: base.yml\nmodel_name: llama3.1-8b\nload_parameters_path: gs://b/0/items\n"
    Path("maxtext.yml").write_text(declared)
    both = ckpt("plan-training", "maxtext.yml", "--hosts", 2, "load_full_state_path=gs://b/5/items")
    assert both.exit_code == 1 and "mutually exclusive" in " ".join(both.output.split())


class TestPlot:
    @pytest.fixture
    def words(self, locations):
        return ["plan-training", "hf/llama/config.json", "--hosts", 2, "--slices", 2, "--mtbf", "6h"]

    def test_png_matches_the_svg(self, words):
        pytest.importorskip("resvg_py")
        succeed(*words, "--plot", "lost.png")
        content = Path("lost.png").read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", content[16:24]) == (1440, 800)
        assert ckpt(*words, "--plot", "lost.png").exit_code == 2

    def test_missing_extra_is_named(self, words, monkeypatch):
        monkeypatch.setitem(sys.modules, "resvg_py", None)
        refused = ckpt(*words, "--plot", "lost.png")
        assert refused.exit_code == 2 and "pip install 'ckpttools[plot]'" in refused.output
        assert not Path("lost.png").exists()

    def test_missing_font_does_not_drop_text(self, words, monkeypatch):
        resvg_py = pytest.importorskip("resvg_py")
        draw = partial(resvg_py.svg_to_bytes, skip_system_fonts=True)
        monkeypatch.setattr(resvg_py, "svg_to_bytes", draw)
        refused = ckpt(*words, "--plot", "lost.png")
        assert refused.exit_code == 5 and "no font" in refused.output and not Path("lost.png").exists()


class TestInvalidArguments:
    @pytest.mark.parametrize("wrong", [{"hosts": 0}, {"slices": -1}, {"keep": 0}, {"total_steps": -5}])
    def test_invalid_counts_are_refused(self, locations, wrong):
        with pytest.raises(UsageError, match="cannot be this"):
            ckpttools.plan_training("hf/llama/config.json", **{"hosts": 1, **wrong})

    @pytest.mark.parametrize(
        ("wrong", "declared"),
        [
            ({"mtbf_all": "6h"}, "requires a time between all failures"),
            ({"mtbf": "6h", "mtbf_all": "1h"}, "cannot be more frequent"),
            ({"local_bandwidth": 0}, "`local_bandwidth` cannot be this"),
            ({"local_bandwidth": 2}, 'local_bandwidth="2GB"'),
            ({"persistent_bandwidth": "2kB"}, "a size with its unit"),
            ({"settings": ["base.yml"]}, "not a MaxText setting"),
            ({"mtbf": "6h", "plot": "hf/llama/config.json"}, "not the name of an image"),
        ],
    )
    def test_other_invalid_arguments_are_refused(self, locations, wrong, declared):
        with pytest.raises(UsageError, match=declared):
            ckpttools.plan_training("hf/llama/config.json", **{"hosts": 1, **wrong})


@pytest.mark.parametrize(
    "source", ["trainers/torchtitan/step-10", "trainers/deepspeed"], ids=["torchtitan", "deepspeed"]
)
def test_weights_and_config_are_counted_together(source):
    """What a trainer of PyTorch leaves as well as safetensors."""
    source = FIXTURES / "torch" / source
    built = ckpttools.plan_training(source, hosts=1, with_optimizer=True)
    assert built.is_exact and built.state_bytes == ckpttools.inspect(source, with_optimizer=True).nbytes


@pytest.mark.parametrize("wrong", [{"prefer_rank": 0}, {"step": 3}])
@pytest.mark.parametrize("call", [partial(ckpttools.plan_training, hosts=1), ckpttools.maxtext_config])
def test_weight_options_are_refused_for_configs(locations, call, wrong):
    for source in ("hf/llama/config.json", "hf/llama"):
        with pytest.raises(UsageError, match=r"files of each process|step 3 does not exist"):
            call(source, **wrong)


def test_empty_tree_has_no_plan():
    with pytest.raises(FormatError, match="no parameters"):
        ckpttools.plan_training(Tree({}), hosts=1, mtbf="6h")


def test_numbers_read_as_text_by_yaml_are_refused(locations):
    words = ["--slices", 2, "multi_tier_checkpointing_backup_interval_steps=1e3"]
    refused = ckpt("plan-training", "hf/llama/config.json", "--hosts", 2, *words)
    assert refused.exit_code == 1 and "must be an integer" in " ".join(refused.output.split())


def test_user_limits_determine_required_space(locations):
    how = {"hosts": 2, "total_steps": 1000, "keep": 9}
    unknown = ckpttools.plan_training("hf/llama/config.json", **how)
    assert unknown.run_bytes is None and "unknown without its save interval" in unknown.remarks[-1]
    set_by_hand = ["checkpoint_period=100", "max_num_checkpoints_to_keep=4"]
    built = ckpttools.plan_training("hf/llama/config.json", **how, settings=set_by_hand)
    assert built.run_checkpoints == 4 and built.run_bytes == 4 * built.state_bytes
    timed = ckpttools.plan_training(
        "hf/llama/config.json", **how, settings=set_by_hand, mtbf="6h", step_time=8
    )
    (interval,) = timed.intervals
    assert (interval.steps, interval.seconds) == (100, 800) and interval.lost_fraction == timed.tiers[0].lost(
        800
    )


@pytest.mark.parametrize("mode", ["persistent", "emergency", "multi-tier"])
def test_only_the_standard_manager_deletes(locations, mode):
    """MaxText 0.2.5 tells the managers of the other modes no number to keep."""
    built = ckpttools.plan_training("hf/llama/config.json", hosts=1, mode=mode, keep=3)
    assert ("max_num_checkpoints_to_keep" in built.settings) == (mode == "persistent")
    assert any('ckpttools.prune("RUN", keep_last=3)' in remark for remark in built.remarks) == (
        mode != "persistent"
    )


def test_saves_longer_than_failure_intervals_are_reported(locations):
    how = {"hosts": 1, "mtbf": "1min", "local_save": "2min", "mode": "emergency"}
    built = ckpttools.plan_training("hf/llama/config.json", **how)
    assert "whatever the interval" in built.remarks[-1]
