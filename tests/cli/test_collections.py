"""No command takes one of several checkpoints in a directory silently; three commands list them all."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from support.command_line import ckpt, succeed
from support.locations import GOLDEN, ORBAX, TRAINED

import ckpttools
from ckpttools.core.errors import SeveralCheckpointsError

# D is a directory of two models, M one of them, and O the output.
LINES = (
    "adapter extract D M O --rank 2",
    "adapter extract M D O --rank 2",
    "adapter merge D M O",
    "adapter merge M D O",
    "adapter to-maxtext D O --base M",
    "adapter to-peft D O --base M",
    "average D M O",
    "average M D O",
    "cast D O --dtype float32",
    "cat D lm_head.weight",
    "convert D O",
    "convert hf-to-maxtext D O",
    "convert maxtext-to-hf D O",
    "convert to-orbax D O",
    "convert to-safetensors D O",
    "convert to-zarr3 D O",
    "convert to-zarr3 D --into O",
    "copy D O",
    "diff D M",
    "diff M D",
    "hash D",
    "inspect chunks D",
    "inspect report D -o O",
    "inspect stats D",
    "maxtext-config D",
    "plan convert to-orbax D O -o O.plan",
    "plan-training D --hosts 2",
    "prune D --keep-last 1",
    "quantize D O",
    "reshard D O --mesh fsdp=2",
    "select D O --keep '*'",
    "shrink D O --layers 2",
    "stack D O",
    "stitch D M O",
    "strip-optimizer D O",
    "unstack D O",
    "verify D --against M",
    "verify M --against D",
)
CALLS = {
    "load": lambda path: ckpttools.load(path),
    "open": lambda path: ckpttools.open(path),
    "inspect": lambda path: ckpttools.inspect(path),
    "convert": lambda path: ckpttools.convert(path, path.with_name("out"), format="zarr3"),
    "stats": lambda path: ckpttools.stats(path),
    "strip_optimizer": lambda path: ckpttools.strip_optimizer(path, path.with_name("out")),
}


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    """A directory of two models."""
    location = tmp_path_factory.mktemp("several") / "models"
    for name in ("first", "second"):
        shutil.copytree(GOLDEN / "qwen3" / "hf", location / name)
    return location


@pytest.mark.parametrize("line", LINES)
def test_command_refuses_several_checkpoints(line, several, tmp_path):
    paths = {"D": several, "M": several / "first", "O": tmp_path / "out"}
    done = ckpt(*(paths.get(word, word) for word in shlex.split(line)))
    assert done.exit_code == 3, done.output
    assert "is not one checkpoint: it has 2 checkpoints" in done.stderr
    assert f"{several}/first" in done.stderr.partition("hint")[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CALLS)
def test_call_refuses_several_checkpoints(name, several):
    with pytest.raises(SeveralCheckpointsError, match="it has 2 checkpoints"):
        CALLS[name](several)
    assert not several.with_name("out").exists()


@pytest.mark.parametrize("words", [[], ["ls"], ["inspect", "tree"], ["info"]], ids=" ".join)
def test_listing_has_all_of_them(words, several):
    done = succeed(*words, several)
    assert [line.split()[:3] for line in done.stdout.splitlines()[2:4]] == [
        ["first", "model", "safetensors"],
        ["second", "model", "safetensors"],
    ]
    assert "a step" not in done.stdout


def test_empty_directory_does_not_hide_other_listings(tmp_path):
    (tmp_path / "empty").mkdir()
    done = ckpt("ls", tmp_path / "empty", GOLDEN / "llama3.1" / "hf")
    assert done.exit_code == 0 and "no checkpoint or run" in done.stdout and "safetensors" in done.stdout
    assert ckpt("ls", tmp_path / "empty", tmp_path / "empty").exit_code == 3


def test_subdirectories_of_reinforcement_learning_are_runs(tmp_path):
    for name in ("actor", "critic"):
        shutil.copytree(TRAINED, tmp_path / name)
    listing = json.loads(succeed("ls", tmp_path, "--json").stdout)
    assert [(item["name"], item["kind"], item["steps"]) for item in listing["members"]] == [
        ("actor", "run", 1),
        ("critic", "run", 1),
    ]


@pytest.mark.parametrize("damage", ["none", "lost_item", "lost_metadata", "in_progress"])
def test_run_has_one_state_in_its_own_listing_and_in_that_of_its_parent(damage, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(ORBAX / "maxtext_run" / "checkpoints" / "4", run / "4")
    latest = run / "4"
    items = latest / "items"
    if damage == "lost_item":
        shutil.rmtree(items)
    elif damage == "lost_metadata":
        (items / "_METADATA").unlink()
    elif damage == "in_progress":
        latest.rename(latest.with_name(f"{latest.name}.orbax-checkpoint-tmp"))
    (step,) = json.loads(succeed("ls", run, "--json").stdout)["steps"]
    expected = "complete"
    if step["unfinished_reason"] is not None:
        expected = "damaged" if step["is_damaged"] else "unfinished"
    shutil.copytree(GOLDEN / "qwen3" / "hf", tmp_path / "model")
    members = json.loads(succeed("ls", tmp_path, "--json").stdout)["members"]
    (state,) = [item["state"] for item in members if item["name"].startswith("run")]
    assert state == expected
