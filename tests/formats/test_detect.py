"""One detector: all commands agree on what is at a path, and a directory of several is a list."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, run, succeed
from support.hf_models import write_llama
from support.internals import JOURNAL, parse
from support.locations import FIXTURES, HF, ORBAX

import ckpttools
from ckpttools import CheckpointError, FormatError, SeveralCheckpointsError
from ckpttools.copying.selection import select_content
from ckpttools.formats.detect import LocationKind, LocationState, detect
from ckpttools.runs.listing import find_run
from ckpttools.stores.local.store import LocalStore

ITEM = FIXTURES / "golden/llama3.1/maxtext_scanned/0"


def _copy(source: Path) -> Callable[[Path], object]:
    return lambda path: shutil.copytree(source, path, copy_function=os.link)


def _bare(path: Path) -> None:
    """As `Checkpointer.save` writes it: an item with the metadata of a step."""
    shutil.copytree(ITEM / "items", path)
    shutil.copy(ITEM / "_CHECKPOINT_METADATA", path)


def _adapter(path: Path) -> None:
    path.mkdir()
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    shutil.copy(HF / "model.safetensors", path / "adapter_model.safetensors")


def _flax_run(path: Path) -> None:
    path.mkdir()
    for step in (9, 10):
        content = serialization.to_bytes({"params": {"w": np.ones(3, np.float32)}, "step": step})
        (path / f"checkpoint_{step}").write_bytes(content)


def _interrupted(path: Path) -> None:
    shutil.copytree(HF, path.with_name(f"{path.name}.partial"))
    (path.with_name(f"{path.name}.partial") / JOURNAL).touch()


def _notes(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("nothing")


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], LocationKind]] = {
    "orbax run": (_copy(ORBAX / "cm_best_metrics"), LocationKind.RUN),
    "flax run": (_flax_run, LocationKind.RUN),
    "verl run": (_copy(FIXTURES / "torch/trainers/verl"), LocationKind.RUN),
    "deepspeed run": (_copy(FIXTURES / "torch/deepspeed/stage3"), LocationKind.RUN),
    "bare": (_bare, LocationKind.CHECKPOINT),
    "step": (_copy(ITEM), LocationKind.STEP),
    "model": (_copy(HF), LocationKind.MODEL),
    "adapter": (_adapter, LocationKind.ADAPTER),
    "hosts": (_copy(FIXTURES / "hosts" / "replicator-data=2,fsdp=4"), LocationKind.HOSTS),
}
OTHERS: dict[str, Callable[[Path], object]] = {
    "empty": Path.mkdir,
    "notes": _notes,
    "interrupted": _interrupted,
}
NAMES = st.sampled_from(("actor", "critic", "base", "old/first", "old/second", "experiments/x", "z"))


@settings(max_examples=15, deadline=None)
@given(
    chosen=st.dictionaries(NAMES, st.sampled_from((*CHECKPOINTS, *OTHERS)), min_size=2).filter(
        lambda chosen: sum(kind in CHECKPOINTS for kind in chosen.values()) > 1
    )
)
def test_all_commands_agree_on_a_directory_of_several(chosen):
    with TemporaryDirectory() as above:
        top = Path(above) / "top"
        expected = {}
        for given_name, kind in chosen.items():
            # A directory with one bare item alone opens it.
            name = given_name.replace("/", "-") if kind == "bare" else given_name
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            if kind in CHECKPOINTS:
                make, expected[name] = CHECKPOINTS[kind]
                make(top / name)
            else:
                OTHERS[kind](top / name)
                if kind == "interrupted":
                    expected[f"{name}.partial"] = LocationKind.INTERRUPTED
        found = detect(top)
        assert found.kind is LocationKind.COLLECTION and found.format is None
        assert {member.name_below(parse(top)): member.kind for member in found.members} == expected
        listings = (ckpttools.ls(top), ckpttools.summary(top).collection)
        for listing in listings:
            assert {member.name: member.kind for member in listing.members} == expected
            assert all(member.nbytes for member in listing.members)
        for command in (ckpttools.open, find_run, select_content):
            with pytest.raises(SeveralCheckpointsError) as error:
                command(parse(top))
            assert all(str(top / name) in str(error.value) for name in expected if "partial" not in name)
        for name, kind in expected.items():
            _check_member(top / name, kind)


def _check_member(path: Path, kind: LocationKind) -> None:
    """Check that commands treat a single checkpoint or run as what `detect` says."""
    if kind is LocationKind.INTERRUPTED:
        assert detect(path).state is LocationState.INTERRUPTED
        for command in (ckpttools.open, select_content, ckpttools.summary):
            with pytest.raises(FormatError, match="not a checkpoint yet"):
                command(parse(path))
        return
    summary = ckpttools.summary(path)
    assert detect(path).kind is kind and summary.collection is None
    assert (summary.run is not None) == (kind is LocationKind.RUN)
    if kind is LocationKind.RUN:
        listing = ckpttools.ls(path)
        assert len(listing.steps) == detect(path).step_count == len(summary.run.steps)
    elif kind is not LocationKind.STEP:  # `ls` of a step lists its run
        with pytest.raises(CheckpointError):
            ckpttools.ls(path)
    if detect(path).format is not None:
        assert ckpttools.open(path).metadata.format == detect(path).format.name


@pytest.mark.parametrize("words", ("convert to-safetensors", "strip-optimizer", "select --keep *", "copy"))
def test_commands_refuse_a_directory_of_several(tmp_path, words):
    _bare(tmp_path / "in/a")
    shutil.copytree(HF, tmp_path / "in/b")
    command = [*words.split(), tmp_path / "in", tmp_path / "out"]
    output = run(*command, code=3)
    assert f"{tmp_path}/in is not one checkpoint: it has 2 checkpoints" in output
    assert f"{tmp_path}/in/a {tmp_path}/out" in output.partition("name one of them: ckpt")[2]
    assert not (tmp_path / "out").exists()


def test_hint_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("actor", "critic"):
        shutil.copytree(ORBAX / "cm_best_metrics", tmp_path / "rl run" / name)
    output = run("convert", "to-safetensors", "rl run", "out", code=3)
    command = output.partition("name one of them: ")[2].splitlines()[0]
    assert command.startswith("ckpt convert to-safetensors 'rl run/actor' out")
    succeed("convert", "to-safetensors", "rl run/actor", "out")


@pytest.mark.parametrize("words", ((), ("ls",), ("inspect", "tree")))
def test_read_commands_list_the_members(tmp_path, words):
    for name in ("actor", "critic"):
        shutil.copytree(ORBAX / "cm_best_metrics", tmp_path / name)
    output = succeed(*words, tmp_path).output
    assert "actor   run   orbax" in output and "2 runs: " in output and "a step" not in output
    declared = json.loads(ckpt(*words, tmp_path, "--json").stdout)
    members = (declared if words else declared["collection"])["members"]
    assert [(member["name"], member["steps"], member["state"]) for member in members] == [
        ("actor", 2, "complete"),
        ("critic", 2, "complete"),
    ]


def test_ls_accepts_several_paths(tmp_path):
    shutil.copytree(ORBAX / "cm_best_metrics", tmp_path / "one")
    shutil.copytree(ORBAX / "cm_best_metrics", tmp_path / "several/a")
    shutil.copytree(HF, tmp_path / "several/b")
    paths = (tmp_path / "one", tmp_path / "several", HF)
    output = succeed("ls", *paths).output
    texts = ("2 steps, 2 finished", "2 checkpoints and runs", ".     model")
    assert sorted(texts, key=output.index) == [*texts]
    listings = json.loads(ckpt("ls", *paths, "--json").stdout)["listings"]
    assert ["steps" in item for item in listings] == [True, False, False]
    assert [len(item["members"]) for item in listings[1:]] == [2, 1]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("params", "opt_state"), LocationKind.STEP),
        (("items", "metrics"), LocationKind.STEP),
        (("llama", "gemma"), LocationKind.COLLECTION),
        (("llama_7", "gemma_2"), LocationKind.COLLECTION),
        (("step_1", "step_2", "backup_1"), LocationKind.RUN),
        (("ckpt_1", "ckpt_2"), LocationKind.RUN),
    ],
)
def test_file_names_decide_without_metadata(tmp_path, names, kind):
    for name in names:
        _bare(tmp_path / name)
    assert detect(tmp_path).kind is kind


def test_single_paths_have_expected_kinds(tmp_path):
    (tmp_path / "empty").mkdir()
    _notes(tmp_path / "notes")
    write_llama(tmp_path / "model", num_hidden_layers=2)
    succeed("plan", "convert", "to-orbax", tmp_path / "model", tmp_path / "out", "-o", tmp_path / "x.plan")
    shutil.copytree(ITEM, tmp_path / "run/10")
    (tmp_path / "run/.ckpttools-prune").mkdir()
    (tmp_path / "run/.ckpttools-prune/journal.json").touch()
    (tmp_path / "run/11.orbax-checkpoint-tmp/items.orbax-checkpoint-tmp").mkdir(parents=True)
    kinds = {
        "empty": LocationKind.EMPTY,
        "notes": LocationKind.OTHER,
        "notes/notes.txt": LocationKind.OTHER,
        "model/model.safetensors": LocationKind.FILE,
        "x.plan": LocationKind.PLAN,
        "run": LocationKind.RUN,
        "run/10": LocationKind.STEP,
        "run/10/items": LocationKind.ITEM,
        "run/.ckpttools-prune": LocationKind.PRUNE,
        "run/11.orbax-checkpoint-tmp": LocationKind.SAVE,
    }
    assert {name: detect(tmp_path / name).kind for name in kinds} == kinds
    states = {name: detect(tmp_path / name).state for name in ("run", "run/.ckpttools-prune")}
    assert states == {"run": LocationState.COMPLETE, "run/.ckpttools-prune": LocationState.INTERRUPTED}
    assert detect(tmp_path / "run/11.orbax-checkpoint-tmp").state is LocationState.UNFINISHED


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count the calls of the local store."""
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stat", "list", "open", "read", "unfinished"):
            patch.setattr(LocalStore, name, _counting(calls, name, getattr(LocalStore, name)))
        yield calls


def _counting(calls: Counter[str], name: str, call: Callable[..., object]) -> Callable[..., object]:
    def counted(*arguments: object) -> object:
        calls[name] += 1
        return call(*arguments)

    return counted


def test_detection_needs_few_calls(tmp_path):
    """Measured with 200 steps: 1,289 calls before there was one detector, 468 with it."""
    steps = 50
    for step in range(steps):
        shutil.copytree(ITEM, tmp_path / "run" / str(step), copy_function=os.link)
    with _counted() as calls:
        assert detect(tmp_path / "run").step_count == steps
    assert calls.total() <= steps + 20
    with _counted() as calls:
        ckpttools.open(tmp_path / "run")
    assert calls.total() <= 2 * steps + 60
    with _counted() as calls:
        ckpttools.open(HF)
    assert calls.total() <= 60
