"""Plans in files, from Python: written, done in parts, looked at and published; the same as by `ckpt`."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.command_line import ckpt, run, succeed
from support.internals import JobInfo, Share, parse, staging_of
from support.locations import GOLDEN, HF
from support.object_stores import files_in

import ckpttools
from ckpttools import CheckpointError, FormatError, SourceChangedError, UsageError
from ckpttools.api import publish_plan as publishing
from ckpttools.plan.plan_file import read_plan
from ckpttools.run.finished_tasks import UnfinishedError

SHARDED = GOLDEN / "llama3.1" / "hf_sharded"


def digest(location):
    return ckpttools.hash(location).digest


@pytest.fixture
def written(tmp_path):
    """A plan of four parts or more, made by a call."""
    prepared = ckpttools.hf_to_maxtext.plan(SHARDED, tmp_path / "out", dtype="float16")
    return ckpttools.write_plan(prepared, tmp_path / "plan")


class TestPlansFromPythonAndShell:
    def test_command_line_runs_plans_written_by_python(self, written, tmp_path):
        assert written.has_call and written.has_tasks
        for number in range(3):
            run("run", written.file, "--part", f"{number}/3")
        assert "13 arrays" in run("run", written.file, "--publish")
        ckpttools.hf_to_maxtext(SHARDED, tmp_path / "alone", dtype="float16")
        assert digest(tmp_path / "out") == digest(tmp_path / "alone")

    def test_python_runs_plans_written_by_the_command_line(self, tmp_path):
        words = ("maxtext-to-hf", GOLDEN / "llama3.1" / "maxtext_scanned", tmp_path / "out", "--like", HF)
        assert ckpt("plan", "convert", *words, "-o", tmp_path / "plan").exit_code == 0
        plan = tmp_path / "plan"
        assert ckpttools.plan_status(plan).state == "not begun"
        receipts = [ckpttools.run_part(plan, f"{number}/2", memory="512MiB") for number in range(2)]
        assert [receipt.tasks_resumed for receipt in receipts] == [0, 0]
        status = ckpttools.plan_status(plan)
        assert status.state == "done" and status.tasks_done == status.tasks == sum(r.tasks for r in receipts)
        assert ckpttools.publish_plan(plan).destination == parse(tmp_path / "out")
        assert ckpttools.publish_plan(plan).state == "complete"
        assert ckpttools.run_part(plan, "0/1").is_published
        run("convert", *words[:2], tmp_path / "alone", *words[3:])
        assert files_in(tmp_path / "out") == files_in(tmp_path / "alone")

    def test_part_is_detected_from_the_environment(self, written, monkeypatch):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
        assert ckpttools.run_part(written.file, parts=3).part == "1/3"

    def test_plan_reports_have_short_reprs(self, written, tmp_path):
        out = tmp_path / "out"
        assert repr(written).startswith(f"<PlanWritten {tmp_path / 'plan'} of {out}: 13 tasks, ")
        assert repr(ckpttools.run_part(written.file, "0/2")).startswith(f"<PartReceipt 0/2 of {out}: ")
        status = ckpttools.plan_status(written.file)
        assert repr(status).startswith(f"<PlanStatus of {out}: stopped, ") and "1 done" in repr(status)
        assert (status.num_parts, status.not_started) == (2, (1,))
        ckpttools.run_part(written.file, "1/2")
        ckpttools.publish_plan(written.file)
        assert repr(ckpttools.publish_plan(written.file)).startswith(f"<Published {out}: complete since ")
        assert "already published" in repr(ckpttools.run_part(written.file, "1/2"))


class TestLocations:
    def test_plan_with_relative_paths_can_be_moved(self, tmp_path, monkeypatch):
        shutil.copytree(SHARDED, tmp_path / "made" / "model")
        (tmp_path / "made" / "rules.toml").write_text('[[rules]]\nfrom = "model.{...}"\nto = "base.{...}"\n')
        monkeypatch.chdir(tmp_path / "made")
        prepared = ckpttools.remap.plan("model", "../out", map="rules.toml")
        ckpttools.write_plan(prepared, "llama.plan")
        (tmp_path / "moved").mkdir()
        monkeypatch.chdir(tmp_path / "moved")
        shutil.move(tmp_path / "made" / "llama.plan", "llama.plan")
        run("run", "llama.plan", "--part", "0/1")
        run("run", "llama.plan", "--publish")
        assert sorted(item.name for item in (tmp_path / "moved").iterdir()) == [
            "llama.plan",
            "llama.plan.published",
        ]
        assert sorted(item.name for item in (tmp_path / "made").iterdir()) == ["model", "rules.toml"]
        assert "nothing to do" in run("run", tmp_path / "moved" / "llama.plan", "--part", "0/2")

    def test_roots_relocate_paths(self, tmp_path, monkeypatch):
        shutil.copytree(SHARDED, tmp_path / "disk" / "model")
        prepared = ckpttools.cast.plan(
            tmp_path / "disk" / "model", tmp_path / "disk" / "out", dtype="float16"
        )
        plan = ckpttools.write_plan(prepared, tmp_path / "plan").file
        shutil.move(tmp_path / "disk", tmp_path / "mnt")
        with pytest.raises(CheckpointError, match=r'root="OLD=NEW"'):
            ckpttools.run_part(plan, "0/1")
        result = ckpt("run", plan, "--part", "0/1")
        assert "give --root OLD=NEW" in " ".join(result.output.split()), result.output
        monkeypatch.chdir(tmp_path)
        root = {str(tmp_path / "disk"): "mnt"}
        ckpttools.run_part(plan, "0/1", root=root)
        ckpttools.publish_plan(plan, root=root)
        assert list((tmp_path / "mnt" / "out").glob("*.safetensors"))

    def test_roots_relocate_family_files(self, tmp_path, monkeypatch):
        disk, moved, here = tmp_path / "disk", tmp_path / "mnt", tmp_path / "here"
        shutil.copytree(HF, disk / "model")
        here.mkdir()
        monkeypatch.chdir(here)
        (disk / "mine.toml").write_text(succeed("families", "show", "llama", "--toml").output)
        words = ("shrink", disk / "model", disk / "out", "--layers", "2", "--family", "../disk/mine.toml")
        run("plan", *words, "-o", "../plan")
        monkeypatch.chdir(tmp_path)
        here.rmdir()
        shutil.move(disk, moved)
        for part in (["--part", "0/1"], ["--publish"]):
            run("run", "plan", *part, "--root", f"{disk}={moved}")
        assert json.loads((moved / "out/config.json").read_text())["num_hidden_layers"] == 2


class TestPlansOfTrees:
    def test_prepared_tree_publishes_its_plan(self, tmp_path):
        def prepared():
            tree = ckpttools.open(SHARDED).pipe(ckpttools.CastTo("float16"))
            return ckpttools.save.plan(tree, tmp_path / "out", "safetensors")

        written = ckpttools.write_plan(prepared(), tmp_path / "plan")
        assert written.has_tasks and not written.has_call
        run("run", written.file, "--part", "0/1")
        result = ckpt("run", written.file, "--publish")
        assert result.exit_code == 2 and "cannot be written as text" in result.output
        with pytest.raises(SourceChangedError, match="make the plan again"):
            other = ckpttools.save.plan(ckpttools.open(SHARDED), tmp_path / "out", "safetensors")
            ckpttools.publish_plan(written.file, prepared=other)
        ckpttools.publish_plan(written.file, prepared=prepared())
        ckpttools.cast(SHARDED, tmp_path / "alone", dtype="float16")
        assert digest(tmp_path / "out") == digest(tmp_path / "alone")

    @pytest.mark.parametrize(
        "prepared",
        [
            lambda out: ckpttools.save.plan({"a": np.ones((64, 1024), np.float32)}, out),
            lambda out: ckpttools.hf_to_maxtext.plan(HF, out, manifest=out.parent / "m"),
            lambda out: ckpttools.hf_to_maxtext.plan(HF, "memory://plans/out"),
        ],
    )
    def test_plan_file_refuses_single_process_work(self, prepared, tmp_path):
        with pytest.raises(UsageError):
            ckpttools.write_plan(prepared(tmp_path / "out"), tmp_path / "plan")
        assert not (tmp_path / "plan").exists()

    def test_plan_of_another_call_is_refused(self, written):
        file = read_plan(written.file)
        for name in ("open", "write_plan", "nothing", "copy"):
            call = {"name": name, "arguments": {"source": str(SHARDED), "destination": "x"}}
            object.__setattr__(file.header, "call", call)
            with pytest.raises((FormatError, UsageError)):
                publishing.replan_file(file, publishing.Relocation())


class TestPublishing:
    def test_publish_waits_for_parts_that_replace_output(self, tmp_path, monkeypatch):
        monkeypatch.setattr(publishing, "_WAIT_SECONDS", 0.05)
        out = tmp_path / "out"
        ckpttools.hf_to_maxtext(SHARDED, out)
        prepared = ckpttools.hf_to_maxtext.plan(SHARDED, out, dtype="float16", overwrite=True)
        plan = ckpttools.write_plan(prepared, tmp_path / "plan").file
        assert ckpttools.plan_status(plan).state == "not begun"
        seen, waited = [], threading.Event()

        def waiting(status):
            seen.append(status.state)
            waited.set()

        with ThreadPoolExecutor(1) as pool:
            publishes = pool.submit(ckpttools.publish_plan, plan, wait=True, waiting=waiting)
            assert waited.wait(30) and digest(out) == digest(SHARDED.parent / "maxtext_scanned")
            ckpttools.run_part(plan, "1/2")
            ckpttools.run_part(plan, "0/2")
            assert publishes.result(60).arrays == 13
        assert seen[0] == "not begun" and ckpttools.plan_status(plan).state == "complete"
        again = json.loads(ckpt("run", plan, "--publish", "--wait", "--json").stdout)
        assert again["state"] == "complete"

    def test_publish_does_not_wait_for_published_output(self, tmp_path, monkeypatch):
        monkeypatch.setattr(publishing, "_WAIT_SECONDS", 0.0)
        out = tmp_path / "out"
        prepared = ckpttools.hf_to_maxtext.plan(SHARDED, out, overwrite=True)
        plan = ckpttools.write_plan(prepared, tmp_path / "plan").file
        (tmp_path / "plan.published").mkdir()

        def waiting(status):
            ckpttools.run_part(plan, "0/2")
            if status.state == "stopped":
                ckpttools.run_part(plan, "1/2")
                ckpttools.publish_plan(plan)

        with pytest.raises(UsageError, match="has no output of this plan"):
            ckpttools.publish_plan(plan, wait=True, waiting=waiting)
        assert digest(out) == digest(SHARDED.parent / "maxtext_scanned")


class TestHints:
    """What to do next is what `ckpt run` can do."""

    def test_replacing_output_needs_a_new_plan(self, written, tmp_path):
        ckpttools.cast(SHARDED, tmp_path / "out", dtype="float16")
        result = ckpt("run", written.file, "--part", "0/1")
        declared = " ".join(result.output.split())
        assert result.exit_code == 2 and "a plan made with --overwrite" in declared, declared
        with pytest.raises(CheckpointError, match="a plan made with overwrite=True"):
            ckpttools.run_part(written.file, "0/1")

    def test_hints_name_calls_in_python_and_commands_in_shell(self, written):
        ckpttools.run_part(written.file, "0/2")
        with pytest.raises(UnfinishedError) as raised:
            ckpttools.publish_plan(written.file)
        assert "--" not in str(raised.value) and "ckpt run" not in str(raised.value)
        assert f'ckpttools.run_part("{written.file}", "0/1")' in str(raised.value)
        declared = " ".join(ckpt("run", written.file, "--publish").output.split())
        assert f"`ckpt run {written.file} --part 0/1` does the remaining tasks" in declared

    def test_publish_refuses_while_parts_are_working(self, written):
        header = read_plan(written.file).header
        ckpttools.run_part(written.file, "1/2")
        share = Share("0/2", 0, 2)
        with staging_of(parse(header.destination)).joined(JobInfo(header.plan), 0, share):
            for _ in range(2):
                result = ckpt("run", written.file, "--publish")
                declared = " ".join(result.output.split())
                assert result.exit_code == 2 and "publish with --wait" in declared, declared
                with pytest.raises(CheckpointError, match="publish with wait=True"):
                    ckpttools.publish_plan(written.file)
