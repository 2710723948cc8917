"""`ckpt ls` and `ckpt PATH`: what there is, whatever it is, and what of it is the step's own."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, succeed, with_flags
from support.internals import parse
from support.locations import FIXTURES, HF, ORBAX, TRAINED
from support.object_stores import files_in

import ckpttools
from ckpttools import ChosenItemWarning, FormatError, StorageError
from ckpttools.api import summary as summaries
from ckpttools.core.errors import suppress_step_warnings
from ckpttools.core.text import format_age
from ckpttools.formats.torch.zero import FORMAT
from ckpttools.runs.listing import find_run, list_consistently, list_run, measure_usage


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two finished steps with metrics."""
    return Path(shutil.copytree(ORBAX / "cm_best_metrics", tmp_path / "run"))


def summary(path):
    return with_flags(summaries.summary(path))


def test_run_changed_meanwhile_is_inspected_again(run):
    """As where a job that goes on deletes a step between a look at the run and one at its steps."""
    result = find_run(parse(run))
    assert len(result.steps) == 2
    shutil.rmtree(run / "1")
    assert [item.step for item in list_consistently(result, list_run).steps] == [2]
    with pytest.raises(StorageError):
        list_run(result)
    # What is so in a run at rest stays an error.
    with pytest.raises(StorageError):
        list_consistently(find_run(parse(run)), lambda seen: (seen.path / "1").read_bytes())


def test_ls_shows_metrics_and_the_resumable_step(run):
    listing = ckpttools.ls(run)
    assert [item.step for item in listing.steps] == [1, 2]
    assert [dict(item.metrics or {}) for item in listing.steps] == [{"loss": 1.0}, {"loss": 2.0}]
    assert [(item.name, item.kind) for item in listing.steps[0].items] == [
        ("default", "parameters"),
        ("metrics", "metrics"),
    ]
    assert (listing.latest, listing.resume_item, len(listing.finished)) == (2, "default", 2)
    # Parameters alone: nothing goes on from them.
    assert listing.resume_step is None
    assert "resumes" not in (told := succeed("ls", run).output) and "no optimizer state" in told
    # Which is for MaxText to load only where the arrays are its own.
    assert "load_parameters_path" not in told
    ckpttools.hf_to_maxtext(HF, run.parent / "converted")
    assert "load_parameters_path" in succeed("ls", run.parent / "converted").output
    assert listing.steps[0].nbytes == sum(map(len, files_in(run / "1").values()))


def test_ls_of_a_step_or_item_lists_its_run(run):
    assert ckpttools.ls(run / "1") == ckpttools.ls(run) == ckpttools.ls(run / "1" / "default")


@pytest.mark.parametrize(
    ("name", "latest", "unfinished"),
    [("unfinished_commit_file", 2, {2}), ("unfinished_atomic_rename", 1, {2})],
)
def test_ls_distinguishes_orbax_choice_from_finished_steps(name, latest, unfinished):
    listing = ckpttools.ls(ORBAX / name)
    assert listing.latest == latest
    assert {item.step for item in listing.steps if item.unfinished_reason} == unfinished
    shown = succeed("ls", ORBAX / name).output
    assert ("which Orbax considers finished although it is not" in shown) == (latest in unfinished)


def test_commit_file_marks_finished_steps_in_a_bucket(gcs, run):
    files = files_in(run)
    for lost, latest in (("12", None), ("2", 1), ("", 2)):
        without = {
            name: item
            for name, item in files.items()
            if name not in {f"{n}/commit_success.txt" for n in lost}
        }
        listing = ckpttools.ls(gcs.filled(without))
        assert listing.latest == latest
        assert len(listing.finished) == 2  # by what is in them
        assert all(step.own_bytes == step.nbytes > 0 for step in listing.steps)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12),
)
def test_own_bytes_equal_the_space_freed_by_deletion(tmp_path_factory, names):
    """Against the disk itself: what is there before and after the directory is gone."""
    top = tmp_path_factory.mktemp("usage")
    for number, (directory, content, size) in enumerate(names):
        (top / str(directory)).mkdir(exist_ok=True)
        (top / "0").mkdir(exist_ok=True)
        where = top / str(directory) / str(number)
        if earlier := sorted(top.glob(f"[012]/{content}-*")):
            os.link(earlier[0], where.with_name(f"{content}-{number}"))
        else:
            where.with_name(f"{content}-{number}").write_bytes(b"x" * size)

    def on_disk() -> int:
        result = {item.stat().st_ino: item.stat().st_size for item in top.rglob("*") if item.is_file()}
        return sum(result.values())

    usage, before = measure_usage(parse(str(top / "0"))), on_disk()
    shutil.rmtree(top / "0")
    assert before - on_disk() == usage.own
    assert usage.shared == usage.nbytes - usage.own


def test_shared_bytes_are_not_counted_as_own(tmp_path):
    run = Path(shutil.copytree(TRAINED, tmp_path / "run"))
    (step,) = ckpttools.ls(run).steps
    assert (step.own_bytes, step.shared_bytes, step.kind) == (step.nbytes, 0, "stacked-training")
    ckpttools.strip_optimizer(run, tmp_path / "params")
    (now,) = ckpttools.ls(run).steps
    assert now.shared_bytes > 0
    assert now.nbytes == step.nbytes
    assert " of it in files with names outside of their step" in succeed("ls", run).output


def test_ls_names_items_being_deleted(run):
    record = {"operation_id": "0" * 32, "checkpointable_name": "metrics", "destination": None}
    (run / "1" / "_CHECKPOINT_DELETION").write_text(json.dumps(record))
    assert ckpttools.ls(run).steps[0].item_being_deleted == "metrics"
    assert "item metrics of 1" in succeed("ls", run).output
    (run / "1" / "_CHECKPOINT_DELETION").write_text("{}")
    with pytest.raises(FormatError, match="not a record of a deletion"):
        ckpttools.ls(run)


def test_ls_prints_the_report_as_json(run):
    declared = json.loads(succeed("ls", run, "--json").output)
    assert [item["step"] for item in declared["steps"]] == [1, 2]
    assert (declared["latest"], declared["resume_step"]) == (2, None)


def test_training_state_resumes_but_host_part_does_not():
    assert ckpttools.ls(TRAINED).resume_step == ckpttools.ls(TRAINED).latest is not None
    assert "resumes" in succeed("ls", TRAINED).output
    # What conversions write has an empty opt_state, as MaxText's own tool has.
    assert ckpttools.ls(ORBAX / "maxtext_converted").resume_step is None
    part = ckpttools.ls(ORBAX / "emergency" / "local_host2")
    assert part.resume_step is None and "ckpttools.assemble" in part.blocked_by


def test_metrics_saved_as_text_become_numbers(run):
    (run / "1" / "metrics" / "metrics").write_text('{"loss": "0.5", "note": "restarted"}')
    assert ckpttools.ls(run).steps[0].metrics == {"loss": 0.5}


def test_columns_hidden_in_narrow_terminals_are_named(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    shown = succeed("ls", run).output
    assert "loss=2" in shown and "no room for items, saved: --json has all" in shown
    monkeypatch.setenv("COLUMNS", "200")
    assert "no room" not in succeed("ls", run).output


def test_empty_directory_is_reported(tmp_path):
    for words in (("ls",), ("doctor",), ("prune", "--keep-last", "1"), ("average", "--last", "2", "DST")):
        refused = ckpt(words[0], tmp_path, *words[1:])
        assert refused.exit_code == 3 and "is an empty directory" in refused.output, words


def test_reverse_conversion_needs_no_model_with_carried_config(tmp_path):
    ckpttools.hf_to_maxtext(HF, tmp_path / "maxtext")
    for path in (tmp_path / "maxtext", tmp_path / "maxtext" / "0" / "items"):
        next = summary(path).next
        assert f"ckpt convert maxtext-to-hf {path} DST" in next and f"ckpt maxtext-config {path}" in next
    assert f"ckpt maxtext-config {TRAINED} --like HF_DIR" in summary(TRAINED).next
    torch = FIXTURES / "torch" / "trainers" / "deepspeed"
    assert f"ckpt convert to-safetensors {torch} DST" in summary(torch).next


def test_non_run_is_refused(tmp_path):
    with pytest.raises(FormatError, match="the parts that 4 hosts of a job saved") as caught:
        ckpttools.ls(FIXTURES / "hosts" / "replicator-data=2,fsdp=4")
    assert "ckpttools.list_saves" in str(caught.value)
    with pytest.raises(FormatError, match="not a run with steps"):
        ckpttools.ls(HF)
    with pytest.raises(StorageError, match="does not exist"):
        ckpttools.ls(tmp_path / "nothing")


class TestPathArgument:
    @pytest.mark.parametrize(
        ("path", "declared"),
        [
            (ORBAX / "cm_best_metrics", "a run of 2 steps"),
            (ORBAX / "maxtext_converted" / "0", "a step, orbax"),
            (ORBAX / "v1_checkpointables", "a step with 3 trees"),
            (FIXTURES / "hosts" / "replicator-data=2,fsdp=4", "the parts that 4 hosts of a job saved"),
            (ORBAX / "emergency" / "local_host2", "the part of each step that one host"),
            (HF, "a model of llama, safetensors"),
            (HF / "model.safetensors", "a file of llama, safetensors"),
        ],
    )
    def test_path_alone_is_identified(self, path, declared):
        shown = succeed(path).output
        assert declared in shown
        assert f"ckpt inspect tree {path}" in shown

    def test_truncated_run_is_not_mistaken_for_a_host_part(self, tmp_path):
        run = tmp_path / "run"
        ckpttools.hf_to_maxtext(HF, run)
        data = run / "0/items/d/data"
        os.truncate(data, data.stat().st_size // 2)
        shown = succeed(run).output
        assert "a run of one step, incomplete: chunks are missing" in shown and "assemble" not in shown
        assert f"next  ckpt doctor {run}" in shown and ckpt("doctor", run).exit_code == 1

    @pytest.mark.parametrize("name", ["run", "copy", "convert", "inspect", "diff"])
    def test_command_wins_over_directory_of_the_same_name(self, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        Path(name).mkdir()
        assert "Usage: ckpt" in ckpt(name).output
        Path(name).rmdir()
        shutil.copytree(ORBAX / "cm_best_metrics", name)
        for path in (f"./{name}", name):
            assert f"{name}: a run of 2 steps" in succeed(path).output
        assert f"Usage: ckpt {name}" in ckpt(name, "--help").output

    def test_help_explains_directories_named_like_commands(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(ORBAX / "cm_best_metrics", "run")
        assert "Usage: ckpt run" in ckpt("run", "--help").output and "./NAME" in succeed("--help").output

    def test_adapter_path_is_identified(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
        shutil.copy(HF / "model.safetensors", tmp_path / "adapter_model.safetensors")
        assert "a LoRA adapter of org/base" in succeed(tmp_path).output

    def test_plans_and_parent_directories_are_identified(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(HF, "models/llama")
        shutil.copytree(ORBAX / "cm_best_metrics", "models/runs/one")
        shutil.copytree(FIXTURES / "hosts" / "replicator-data=2,fsdp=4", "models/runs/job")
        succeed("plan", "synth", "models/llama", "noise", "-o", "noise.plan")
        told = succeed("noise.plan").output
        assert "a plan of ckpttools.synth" in told and "ckpt run noise.plan --status" in told
        (tmp_path / "models/empty").mkdir()
        assert summary(tmp_path).next == tuple(
            f"ckpt {tmp_path / 'models' / name}" for name in ("llama", "runs/job", "runs/one")
        )
        for command in (*summary("noise.plan").next[:1], *summary(".").next):
            succeed(*command.removeprefix("ckpt ").split())
        assert ckpt("models/empty").exit_code == 3
        told = summary(".")
        assert told.what == "a directory with 3 checkpoints and runs"
        kinds = {member.name: member.kind for member in told.collection.members}
        assert kinds == {"models/llama": "model", "models/runs/job": "hosts", "models/runs/one": "run"}

    def test_advised_commands_can_be_run(self, tmp_path):
        for path in (ORBAX / "cm_best_metrics", ORBAX / "v1_checkpointables", HF):
            for command in summary(path).next:
                if "DST" not in command and "--keep-last" not in command:
                    succeed(*command.removeprefix("ckpt ").split())

    def test_commands_win_over_paths_and_words_are_not_paths(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "formats").mkdir()
        assert "safetensors" in succeed("formats").output
        assert "No such command 'lss'" in ckpt("lss").output
        assert "No path has this name" in ckpt("out").output
        assert ckpt("./lss").exit_code == 2


class TestSeveralItems:
    @pytest.fixture
    def step(self, tmp_path) -> Path:
        step = Path(shutil.copytree(ORBAX / "v1_checkpointables", tmp_path / "7"))
        (step / "state").rename(step / "model_params")
        (step / "opt").rename(step / "optimizer_state")
        shutil.rmtree(step / "data")
        declared = json.loads((step / "_CHECKPOINT_METADATA").read_text())
        handler = declared["item_handlers"]["state"]
        declared["item_handlers"] = {"model_params": handler, "optimizer_state": handler}
        (step / "_CHECKPOINT_METADATA").write_text(json.dumps(declared))
        return step

    def test_item_with_parameters_is_opened_with_a_warning(self, step):
        with pytest.warns(ChosenItemWarning, match=r"model_params of .* is opened; open optimizer_state"):
            tree = ckpttools.open(step)
        assert tree.metadata.item == "model_params"
        assert [item.name for item in summary(step).items] == ["model_params", "optimizer_state"]

    def test_suppressed_warnings_stay_in_one_thread(self, step):
        inside, done = Event(), Event()

        def look() -> None:
            with suppress_step_warnings():
                inside.set()
                done.wait(60)
                ckpttools.open(step)

        with ThreadPoolExecutor(1) as pool:
            silent = pool.submit(look)
            assert inside.wait(60)
            with pytest.warns(ChosenItemWarning):
                ckpttools.open(step)
            done.set()
            silent.result()

    def test_ambiguous_parameter_items_must_be_chosen(self, step):
        shutil.copytree(step / "model_params", step / "ema")
        with pytest.raises(FormatError, match="several items"):
            ckpttools.open(step)


@pytest.mark.parametrize(
    ("seconds", "declared"), [(0.9, "0 seconds"), (1, "1 second"), (119, "119 seconds"), (7300, "2 hours")]
)
def test_format_age_prints_readable_ages(seconds, declared):
    assert format_age(seconds) == declared


# ---- runs of trainers of PyTorch


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    """One step of an actor."""
    return Path(shutil.copytree(FIXTURES / "torch/trainers/verl", tmp_path / "verl"))


def test_ls_lists_verl_steps(verl):
    (verl / "latest_checkpointed_iteration.txt").write_text("10")
    step = verl / "global_step_10"
    listing = ckpttools.ls(verl)
    assert listing == ckpttools.ls(step) == ckpttools.ls(step / "actor")
    (only,) = listing.steps
    assert (only.step, only.name, only.unfinished_reason) == (10, step.name, None)
    assert [(item.name, item.kind) for item in only.items] == [("actor", "parameters")]
    assert only.nbytes == sum(map(len, files_in(step).values()))
    assert (listing.latest, listing.resume_step) == (10, 10)
    shown = " ".join(succeed("ls", verl).output.split())
    assert "resumes step 10, by latest_checkpointed_iteration.txt" in shown
    (verl / "latest_checkpointed_iteration.txt").unlink()
    assert ckpttools.ls(verl).latest is None and "resumes" not in succeed("ls", verl).output


def test_ls_lists_unreadable_trainer_steps(verl):
    """In the order of their numbers; what has no checkpoint is told, too."""
    shutil.copytree(verl / "global_step_10", verl / "global_step_9")
    (verl / "global_step_9/actor/model_world_size_2_rank_1.pt").unlink()
    (verl / "global_step_11").mkdir()
    (verl / "latest_checkpointed_iteration.txt").write_text("9")
    listing = ckpttools.ls(verl)
    assert [item.step for item in listing.steps] == [9, 10, 11]
    assert [item.step for item in listing.finished] == [10]
    shown = " ".join(succeed("ls", verl).output.split())
    assert "global_step_9: actor: 2 processes saved, and of their files that of rank 1 is missing" in shown
    assert "global_step_11: it has no readable checkpoint" in shown
    assert "latest step 9, by latest_checkpointed_iteration.txt, which cannot be read" in shown
    (verl / "latest_checkpointed_iteration.txt").write_text("12")
    assert ckpttools.ls(verl).blocked_by == "which does not exist here"
    (verl / "latest_checkpointed_iteration.txt").write_text("the best")
    shown = " ".join(succeed("ls", verl).output.split())
    assert "latest none of these, by latest_checkpointed_iteration.txt" in shown


def test_large_latest_file_is_read_partially(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / "torch/deepspeed/stage3", run)
    with (run / "latest").open("ab") as file:
        file.truncate(1 << 30)
    listing = ckpttools.ls(run)
    assert (listing.tracker, listing.latest, [item.step for item in listing.steps]) == ("latest", None, [3])
    assert parse(run) == FORMAT.checkpoint_location(parse(run))


@pytest.mark.parametrize(
    ("name", "steps", "resumes"),
    [("torch/trainers/torchtitan", {10: "training"}, None), ("torch/deepspeed/stage3", {3: "training"}, 3)],
)
def test_ls_lists_steps_of_other_trainers(name, steps, resumes):
    listing = ckpttools.ls(FIXTURES / name)
    assert {item.step: item.kind for item in listing.steps} == steps and listing.resume_step == resumes


def test_file_is_not_a_run():
    with pytest.raises(FormatError, match="not a run with steps"):
        ckpttools.ls(FIXTURES / "torch/full.pt")


@pytest.mark.parametrize(("name", "members"), [("torch/trainers", 6), ("torch/trainers/fsdp", 1)])
def test_directories_of_trainers_are_listed(name, members):
    assert len(ckpttools.ls(FIXTURES / name).members) == members
