"""One conversion by many processes: the same bytes as by one, whoever is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest
from support.command_line import ckpt, run
from support.internals import JobInfo, LockedError, Share, parse, staging_of
from support.locations import GOLDEN, HF, TESTS, TRAINED
from support.object_stores import files_in

from ckpttools.api import publish_plan as publishing
from ckpttools.stores.local.journal import Journal

MAXTEXT = GOLDEN / "llama3.1" / "maxtext_scanned"
SHARDED = GOLDEN / "llama3.1" / "hf_sharded"
STAMPED = re.compile(r"(^|/)_CHECKPOINT_METADATA$")
PIECES = ("--target-data-file-size", "40KB")


def planned(where, *words):
    run_plan = ckpt("plan", *words, "-o", where)
    assert run_plan.exit_code == 0, run_plan.output
    return where


def refused(*words, code=2):
    result = ckpt("run", *words)
    assert result.exit_code == code, result.output
    return result.output


def content(location):
    """The files of a local checkpoint, without the moment at which it was made."""
    return {name: item for name, item in files_in(location).items() if not STAMPED.search(name)}


def processes(plan, count, dying=None):
    """All parts at once, each in a process of its own; one may be killed. How they end."""
    started = []
    for number in range(count):
        words = ["run", str(plan), "--part", f"{number}/{count}", "--no-progress", "--jobs", "1"]
        script = ["support.dying_part_script", "1"] if number == dying else ["ckpttools"]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", *script, *words], cwd=TESTS, stderr=subprocess.PIPE, text=True
            )
        )
    return [(item.wait(timeout=120), item.stderr.read()) for item in started if item.stderr]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one process makes."""
    location = tmp_path_factory.mktemp("whole") / "out"
    run("convert", "hf-to-maxtext", SHARDED, location, *PIECES)
    return location


class TestProcesses:
    def test_four_parts_write_what_one_process_writes(self, tmp_path, whole):
        plan = planned(tmp_path / "plan", "convert", "hf-to-maxtext", SHARDED, tmp_path / "out", *PIECES)
        assert [code for code, _ in processes(plan, 4)] == [0] * 4
        assert not (tmp_path / "out").exists()
        run("run", plan, "--publish")
        assert content(tmp_path / "out") == content(whole)
        assert sorted(item.name for item in tmp_path.iterdir()) == ["out", "plan", "plan.published"]

    def test_three_parts_resume_after_a_fourth_is_killed(self, tmp_path, whole):
        plan = planned(tmp_path / "plan", "convert", "hf-to-maxtext", SHARDED, tmp_path / "out", *PIECES)
        ends = processes(plan, 4, dying=0)
        assert [code for code, _ in ends] == [-9, 0, 0, 0]
        assert "tasks are missing" in refused(plan, "--publish")
        status = run("run", plan, "--status").split("\n")
        assert "stopped" in status[0] and any(line.startswith("0/4      gone, 1 of") for line in status)
        assert any(
            line.startswith("missing  ") and line.endswith("; no process is working on them")
            for line in status
        )
        for number in range(3):
            run("run", plan, "--part", f"{number}/3")
        assert "13 of 13 tasks were done before" in run("run", plan, "--publish")
        assert content(tmp_path / "out") == content(whole)

    def test_parts_in_a_bucket_write_what_one_process_writes(self, gcs, whole):
        there = f"gs://{gcs.bucket}/many/out"
        plan = planned(f"gs://{gcs.bucket}/plan", "convert", "hf-to-maxtext", SHARDED, there, *PIECES)
        ends = processes(plan, 4, dying=2)
        assert [code for code, _ in ends] == [0, 0, -9, 0], ends
        assert "missing" in refused(plan, "--publish")
        for number in range(3):
            run("run", plan, "--part", f"{number}/3")
        run("run", plan, "--publish")
        assert [entry.name for entry in parse(f"gs://{gcs.bucket}/many").entries()] == ["out"]
        result = {name: (parse(there) / name).read_bytes() for name in content(whole)}
        assert result == content(whole)


def test_parts_work_on_every_cloud(cloud, tmp_path, whole):
    there = f"{cloud.scheme}://{cloud.bucket}/some/out"
    plan = planned(tmp_path / "plan", "convert", "hf-to-maxtext", SHARDED, there, *PIECES)
    for number in (1, 0):
        run("run", plan, "--part", f"{number}/2", "--publish")
    assert [entry.name for entry in parse(f"{cloud.scheme}://{cloud.bucket}/some").entries()] == ["out"]
    assert {name: (parse(there) / name).read_bytes() for name in content(whole)} == content(whole)


KINDS = {
    "orbax": ("convert", "hf-to-maxtext", SHARDED, "OUT"),
    "zstd": ("convert", "hf-to-maxtext", HF, "OUT", "--compression", "zstd"),
    "files": ("convert", "hf-to-maxtext", HF, "OUT", "--no-ocdbt"),
    "hf": ("convert", "maxtext-to-hf", MAXTEXT, "OUT", "--like", HF, "--max-shard-size", "60KB"),
    "zarr3-zstd": ("convert", "to-zarr3", TRAINED, "OUT", "--compression", "zstd"),
    "cast": ("cast", HF, "OUT", "--dtype", "float16"),
    "select": ("select", TRAINED, "OUT", "--keep", "params"),
    "strip": ("strip-optimizer", TRAINED, "OUT"),
    "unstack": ("unstack", MAXTEXT, "OUT"),
}


OWN = """
from dataclasses import dataclass

from ckpttools.array.nodes import elementwise


@dataclass(frozen=True)
class Same:
    def result(self, dtype):
        return dtype

    def apply(self, source, target, dtype):
        target[...] = source


def mapped(path, array):
    return elementwise(array, Same())
"""


class TestCommands:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_writing_command_can_be_split(self, kind, tmp_path):
        words = [tmp_path / item if item == "OUT" else item for item in KINDS[kind]]
        plan = planned(tmp_path / "plan", *words)
        for number in (2, 0, 1):
            run("run", plan, "--part", f"{number}/3")
        run("run", plan, "--publish")
        (tmp_path / "out").mkdir()
        again = [tmp_path / "alone" if item == "OUT" else item for item in KINDS[kind]]
        run(*again)
        if "zstd" not in kind:
            assert content(tmp_path / "OUT") == content(tmp_path / "alone")
        digests = {run("hash", tmp_path / name).split()[0] for name in ("OUT", "alone")}
        assert len(digests) == 1
        assert not (tmp_path / "OUT.partial").exists()

    def test_user_function_is_planned_again_by_each_part(self, tmp_path):
        (tmp_path / "mine.py").write_text(OWN)
        words = ["remap", MAXTEXT, tmp_path / "out", "--map", f"{tmp_path / 'mine.py'}:mapped"]
        result = ckpt("plan", *words, "-o", tmp_path / "plan")
        assert result.exit_code == 0 and "each part plans again" in result.output, result.output
        code = ("--map", tmp_path / "mine.py:mapped")
        assert "never runs" in refused(tmp_path / "plan", "--part", "0/2")
        for number in range(2):
            run("run", tmp_path / "plan", "--part", f"{number}/2", *code)
        assert "never runs" in refused(tmp_path / "plan", "--publish")
        run("run", tmp_path / "plan", "--publish", *code)
        assert run("hash", tmp_path / "out") == run("hash", MAXTEXT)

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (("copy", HF, "OUT"), "cannot be shared among processes"),
            (("nonsense", HF), "No such command"),
            (("inspect", "tree", HF), "cannot be shared among processes"),
            (("cast", HF, "OUT", "--dtype", "float16", "--manifest", "M"), "requires a single process"),
            (("cast", HF, "OUT", "--dtype", "float16", "--dry-run"), "has no meaning for a plan"),
            (("cast", HF, "memory://a", "--dtype", "float16"), "only one process can write"),
            (("cast", HF, "OUT"), "no dtype is given"),
        ],
    )
    def test_work_that_cannot_be_split_is_refused(self, words, says, tmp_path):
        named = [tmp_path / word if word in ("OUT", "M") else word for word in words]
        result = ckpt("plan", *named, "-o", tmp_path / "plan")
        assert result.exit_code == 2 and says in result.output, result.output
        assert not (tmp_path / "plan").exists() and not (tmp_path / "OUT").exists()


@pytest.fixture(params=["local", "gs"])
def destination(request, tmp_path):
    if request.param == "local":
        return str(tmp_path / "out")
    bucket = request.getfixturevalue("gcs").bucket
    return f"gs://{bucket}/parts/out"


def test_plan_file_inside_the_output_is_refused(tmp_path):
    for location in ("out/plan", "out", "out.partial/plan"):
        result = ckpt("plan", "cast", HF, tmp_path / "out", "--dtype", "float16", "-o", tmp_path / location)
        assert result.exit_code == 2 and "outside the output checkpoint" in result.output, result.output
    kept = tmp_path / "notes"
    kept.write_text("mine")
    result = ckpt("plan", "cast", HF, tmp_path / "out", "--dtype", "float16", "-o", kept)
    assert result.exit_code == 2 and kept.read_text() == "mine"


def check_claim_is_named(output, destination):
    """Check that a message names the owner of a claim, its age, and the command that releases it."""
    assert re.search(r"part x/y: process \d+ on \S+, last seen \d+ (second|minute)s? ago", output), output
    remove = f"gcloud storage rm {destination}.partial/parts/"
    release = f"kill {os.getpid()}" if "://" not in destination else remove
    assert release in output, output


class TestConcurrentParts:
    @pytest.fixture
    def plan(self, destination, tmp_path):
        return planned(tmp_path / "plan", "convert", "hf-to-maxtext", SHARDED, destination, *PIECES)

    def joined(self, plan, destination, first, stop):
        from ckpttools.plan.plan_file import read_plan

        purpose = JobInfo(read_plan(parse(plan)).header.plan)
        return staging_of(parse(destination)).joined(purpose, 0, Share("x/y", first, stop))

    def test_working_parts_exclude_other_commands(self, plan, destination, tmp_path):
        alone = ("convert", "hf-to-maxtext", SHARDED, destination, *PIECES, "--no-progress")
        run("run", plan, "--part", "0/4")
        with self.joined(plan, destination, 0, 2):
            for words in (alone, (*alone, "--overwrite"), (*alone, "--no-scan", "--overwrite")):
                result = ckpt(*words)
                assert result.exit_code == 2, result.output
                check_claim_is_named(result.output, destination)
                assert f"ckpt run {plan} --status" in result.output.replace("\n", " "), result.output
            check_claim_is_named(refused(plan, "--publish"), destination)
            assert "at work" in run("run", plan, "--status")
            other = planned(tmp_path / "other", *alone[:-1], "--no-scan", "--overwrite")
            for number in range(1, 4):
                run("run", plan, "--part", f"{number}/4")
        assert "has no output of this plan" in refused(other, "--publish")
        run("run", plan, "--publish")

    def test_same_part_is_not_run_twice_at_once(self, plan, destination, monkeypatch):
        from ckpttools.stores.objects import lock, shared_staging

        monkeypatch.setattr(lock, "RENEWED_SECONDS", 0.05)
        monkeypatch.setattr(shared_staging, "_POLL_SECONDS", 0.2)
        with self.joined(plan, destination, 0, 2):
            output = refused(plan, "--part", "0/1")
            assert "another process is doing tasks of part 0/1" in output
            check_claim_is_named(output, destination)
        run("run", plan, "--part", "0/1")
        assert "13 tasks" in run("run", plan, "--part", "0/1")

    def test_single_run_resumes_from_parts(self, plan, destination):
        run("run", plan, "--part", "1/2")
        output = run("convert", "hf-to-maxtext", SHARDED, destination, *PIECES)
        assert re.search(r"\d+ of 13 tasks were done before", output), output

    def test_parts_of_another_plan_are_refused(self, plan, destination, tmp_path):
        words = ("convert", "hf-to-maxtext", SHARDED, destination, "--no-scan")
        other = planned(tmp_path / "other", *words)
        run("run", plan, "--part", "0/2")
        assert "contains the beginning of another conversion" in refused(other, "--part", "0/2")
        taking = planned(tmp_path / "taking", *words, "--overwrite")
        run("run", taking, "--part", "0/1")
        assert "contains the beginning of another conversion" in refused(plan, "--part", "1/2")
        assert "has no output of this plan" in refused(plan, "--publish")
        run("run", taking, "--publish")
        assert "exists" in refused(plan, "--part", "1/2")
        run("run", taking, "--part", "1/2")

    def test_last_part_publishes(self, plan, destination):
        output = run("run", plan, "--part", "0/2", "--publish")
        assert "not published" in output and not parse(destination).is_file()
        assert "13 arrays" in run("run", plan, "--part", "1/2", "--publish")
        assert (parse(destination) / "0" / "items" / "manifest.ocdbt").exists()

    def test_replaced_output_stays_until_publication(self, destination, tmp_path, whole):
        words = ("convert", "hf-to-maxtext", SHARDED, destination, *PIECES)
        run(*words)
        before = (parse(destination) / "0" / "items" / "_METADATA").read_bytes()
        plan = planned(tmp_path / "plan", *words, "--overwrite")
        run("run", plan, "--part", "1/2")
        assert (parse(destination) / "0" / "items" / "_METADATA").read_bytes() == before
        run("run", plan, "--part", "0/2")
        run("run", plan, "--publish")
        assert run("hash", destination).split()[0] == run("hash", whole).split()[0]


class TestConcurrentStarts:
    """Parts that begin at the same moment: one prepares the destination, the others wait for it."""

    def begun(self, destination, overwrite=False, plan="b"):
        return staging_of(parse(destination), overwrite).joined(JobInfo(plan), 0, Share("1/2", 1, 2))

    def test_part_waits_while_another_prepares(self, destination, monkeypatch):
        """A large partial directory of another conversion takes its time to be deleted."""
        from ckpttools.stores.local import shared_staging as local
        from ckpttools.stores.objects import shared_staging as objects

        monkeypatch.setattr(local, "_PREPARED_SECONDS", 1.0)
        monkeypatch.setattr(objects, "_PREPARED_SECONDS", 1.0)
        with staging_of(parse(destination)).opened(JobInfo("a")) as work:
            work.record([[0]])
        slow, is_slow = threading.Event(), threading.Event()
        built = local.LocalStaging if "://" not in destination else objects.ObjectStaging
        name = "remove" if built is local.LocalStaging else "_discard"
        removed = getattr(built, name)

        def removing(*given):
            is_slow.set()
            assert slow.wait(20)
            return removed(*given)

        monkeypatch.setattr(built, name, removing)
        first = staging_of(parse(destination), True).joined(JobInfo("b"), 0, Share("0/2", 0, 1))
        with ThreadPoolExecutor(2) as pool:
            preparing = pool.submit(ended, first)
            assert is_slow.wait(20)
            waiting = pool.submit(ended, self.begun(destination, overwrite=True))
            sleep(1.7)
            assert not waiting.done()
            slow.set()
            assert (preparing.result(30), waiting.result(30)) == ("", "")

    def test_journal_exists_before_the_lock_is_released(self, gcs, monkeypatch):
        from ckpttools.stores.objects.journal import ObjectJournal

        destination = f"gs://{gcs.bucket}/moment/out"
        seen, go_on = threading.Event(), threading.Event()
        begin = ObjectJournal.begin

        def slowly(*given):
            built = begin(*given)
            seen.set()
            assert go_on.wait(20)
            return built

        monkeypatch.setattr(ObjectJournal, "begin", slowly)
        first = staging_of(parse(destination)).joined(JobInfo("b"), 0, Share("0/2", 0, 1))
        with ThreadPoolExecutor(2) as pool:
            preparing = pool.submit(ended, first)
            assert seen.wait(20)
            waiting = pool.submit(ended, self.begun(destination))
            sleep(0.5)
            assert not waiting.done()
            go_on.set()
            assert (preparing.result(30), waiting.result(30)) == ("", "")

    def test_expired_part_cannot_record_work(self, gcs, monkeypatch):
        from ckpttools import StorageError
        from ckpttools.stores.objects import lock

        destination = f"gs://{gcs.bucket}/stalled/out"
        now = lock._now
        with pytest.raises(StorageError, match="no longer locked"), self.begun(destination) as work:
            monkeypatch.setattr(lock, "_now", lambda: now() + lock.EXPIRED_SECONDS + 1)
            with pytest.raises(StorageError, match="no longer locked"):
                work.claim.lock.renew()
            monkeypatch.setattr(lock, "_now", now)
            work.record([[1]])


def ended(joined):
    """How doing nothing of a share ended."""
    try:
        with joined:
            return ""
    except LockedError as error:
        return str(error)


class TestPublishedPlans:
    """What a scheduler starts again after all was done."""

    @pytest.fixture(params=[(), ("--overwrite",)], ids=["new", "overwrite"])
    def plan(self, request, destination, tmp_path):
        words = ("convert", "hf-to-maxtext", SHARDED, destination, *PIECES, *request.param)
        return planned(tmp_path / "plan", *words)

    def test_parts_do_nothing_after_publishing(self, plan, destination):
        run("run", plan, "--part", "0/1", "--publish")
        before = files_of(parse(destination))
        for words in (("--part", "0/2"), ("--part", "1/2", "--publish"), ("--parts", "1", "--part", "0/1")):
            assert "nothing to do" in run("run", plan, *words)
        assert "nothing is left to do" in run("run", plan, "--publish")
        assert "nothing is left to do" in run("run", plan, "--publish", "--wait")
        assert "nothing is left to do" in run("run", plan, "--status")
        assert json.loads(ckpt("run", plan, "--status", "--json").stdout)["state"] == "complete"
        assert json.loads(ckpt("run", plan, "--part", "0/2", "--json").stdout)["is_published"]
        assert not parse(f"{destination}.partial").exists()
        assert files_of(parse(destination)) == before

    def test_waiting_part_does_nothing_after_publishing(self, plan, destination):
        from ckpttools.api import run_part as parts
        from ckpttools.plan.parts import Part
        from ckpttools.plan.plan_file import read_plan

        run("run", plan, "--part", "0/1")
        file = read_plan(parse(plan))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts, "execute_part", published_first(plan, parts.execute_part))
            receipt = parts.run_part(file, Part(0, 2))
        assert receipt.is_published
        assert not parse(f"{destination}.partial").exists()

    # Processes of their own; in this one the four kinds meet above.
    @pytest.mark.parametrize(
        ("destination", "plan"), [("local", ()), ("gs", ("--overwrite",))], ids=["local", "gs"], indirect=True
    )
    def test_concurrent_publications_both_succeed(self, plan, destination):
        run("run", plan, "--part", "0/1")
        words = [sys.executable, "-m", "ckpttools", "run", str(plan), "--publish", "--no-progress"]
        both = [subprocess.Popen(words, cwd=TESTS, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        declared = [item.communicate(timeout=100)[1] for item in both]
        assert [item.returncode for item in both] == [0, 0], declared
        assert parse(destination).exists() and not parse(f"{destination}.partial").exists()

    def test_publisher_finishes_interrupted_cleanup(self, tmp_path):
        out, how = tmp_path / "out", ("--publish", "--no-progress")
        plan = planned(tmp_path / "plan", "convert", "hf-to-maxtext", SHARDED, out, *PIECES)
        run("run", plan, "--part", "0/1")

        def replanned(*arguments):
            """Meanwhile another publishes, and is stopped before its journal is gone."""
            built = real(*arguments)
            with pytest.MonkeyPatch.context() as other:
                other.setattr(publishing, "replan_file", real)
                other.setattr(Journal, "move", failing)
                assert ckpt("run", plan, *how).exit_code == 5
            return built

        def failing(journal, *arguments):
            raise OSError(5, "stopped")

        real = publishing.replan_file
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(publishing, "replan_file", replanned)
            assert "13 arrays" in run("run", plan, *how)
        assert not (tmp_path / "out.partial").exists()
        for words in (["--status"], how, [*how, "--wait"]):
            assert "nothing is left to do" in run("run", plan, *words)

    def test_unwritable_plan_directory_is_reported(self, tmp_path):
        out = tmp_path / "out"
        plan = planned(tmp_path / "plan", "convert", "hf-to-maxtext", SHARDED, out, *PIECES)
        (tmp_path / "plan.published").mkdir()
        output = " ".join(run("run", plan, "--part", "0/1", "--publish").split())
        assert "parts run again will be refused" in output and "13 arrays" in output
        assert "exists" in refused(plan, "--part", "0/1")

    def test_moved_plan_does_nothing_after_publishing(self, plan, destination, tmp_path):
        run("run", plan, "--part", "0/1", "--publish")
        before = files_of(parse(destination))
        moved = tmp_path / "elsewhere" / "plan"
        moved.parent.mkdir()
        shutil.move(plan, moved)
        for words in (("--part", "0/2"), ("--part", "1/2", "--publish")):
            declared = " ".join(refused(moved, *words).split())
            assert (
                "exists, and did not exist when the plan was made" in declared
                and "plan.published" in declared
            )
        assert "has no output of this plan" in refused(moved, "--publish")
        assert "no unfinished output of this plan" in run("run", moved, "--status")
        assert not parse(f"{destination}.partial").exists() and files_of(parse(destination)) == before
        shutil.move(tmp_path / "plan.published", moved.parent)
        assert "nothing to do" in run("run", moved, "--part", "0/2")

    def test_plan_replaces_only_its_planned_output(self, destination, tmp_path):
        words = ("convert", "hf-to-maxtext", SHARDED, destination, *PIECES)
        run(*words)
        plan = planned(tmp_path / "plan", *words, "--overwrite")
        run("run", plan, "--part", "0/2")
        assert not json.loads(ckpt("run", plan, "--status", "--json").stdout)["other_content"]
        run("run", plan, "--part", "1/2", "--publish")
        before = files_of(parse(destination))
        assert "nothing to do" in run("run", plan, "--part", "0/2")
        (tmp_path / "plan.published").unlink()
        assert "had other content when the plan was made" in " ".join(refused(plan, "--part", "0/2").split())
        assert not parse(f"{destination}.partial").exists() and files_of(parse(destination)) == before
        run("run", planned(plan, *words, "--overwrite"), "--part", "0/1", "--publish")

    def test_changed_sources_are_detected(self, tmp_path):
        out = tmp_path / "out"
        plan = planned(tmp_path / "plan", "convert", "hf-to-maxtext", SHARDED, out, *PIECES)
        run("run", plan, "--part", "0/1", "--publish")
        shutil.rmtree(out)
        assert "not begun" in run("run", plan, "--status")
        assert "13 tasks" in run("run", plan, "--part", "0/1")
        run("run", plan, "--publish")
        shutil.rmtree(out)
        run("convert", "hf-to-maxtext", SHARDED, out)
        assert "exists" in refused(plan, "--part", "0/1")
        again = planned(plan, "convert", "hf-to-maxtext", SHARDED, out, *PIECES, "--overwrite")
        assert "13 tasks" in run("run", again, "--part", "0/1", "--publish")


def files_of(location):
    return {name: (result.size, result.version) for name, result in location.walk()}


def published_first(plan, execute):
    """`execute`, before which another process publishes the plan."""

    def executed(*given, **named):
        run("run", plan, "--publish")
        return execute(*given, **named)

    return executed


class TestSources:
    @pytest.fixture
    def model(self, tmp_path):
        return Path(shutil.copytree(SHARDED, tmp_path / "disk" / "model"))

    @pytest.fixture
    def plan(self, model, tmp_path):
        return planned(tmp_path / "plan", "convert", "hf-to-maxtext", model, tmp_path / "disk" / "out")

    def test_changed_source_stops_parts_and_publishing(self, plan, model, tmp_path):
        run("run", plan, "--part", "0/2")
        shard = max(model.glob("*.safetensors"))
        data, time = bytearray(shard.read_bytes()), shard.stat().st_mtime_ns
        data[-1] ^= 1
        shard.write_bytes(data)
        os.utime(shard, ns=(time + 1, time + 1))
        assert "is not the file that was planned" in refused(plan, "--part", "1/2", code=3)
        assert "\n1/2 " not in run("run", plan, "--status")
        data[-1] ^= 1
        shard.write_bytes(data)
        os.utime(shard, ns=(time, time))
        run("run", plan, "--part", "1/2")
        os.utime(shard, ns=(time + 1, time + 1))
        assert "is not the file that was planned" in refused(plan, "--publish", code=3)
        os.utime(shard, ns=(time, time))
        run("run", plan, "--publish")

    def test_changed_source_of_equal_size_and_time_is_detected(self, plan, model):
        """As of archives, in which all files have one time; a link or other permissions are no change."""
        run("run", plan, "--part", "0/2")
        for shard in model.glob("*.safetensors"):
            os.link(shard, shard.with_suffix(".bak"))
            shard.chmod(0o600)
        run("run", plan, "--part", "1/2")
        shard = max(model.glob("*.safetensors"))
        time, half = shard.stat().st_mtime_ns, shard.stat().st_size // 2
        shard.write_bytes(shard.read_bytes()[:half] + bytes(shard.stat().st_size - half))
        os.utime(shard, ns=(time, time))
        for words in (("--part", "0/1"), ("--publish",)):
            assert "other bytes" in refused(plan, *words, code=3)

    def test_existing_plan_is_not_replaced(self, plan, model, tmp_path):
        words = ("convert", "hf-to-maxtext", model)
        planned(plan, *words, tmp_path / "disk" / "out")
        before = plan.read_bytes()
        other = ckpt("plan", *words, tmp_path / "disk" / "other", "-o", plan)
        assert other.exit_code == 2 and "is another plan" in other.output, other.output
        assert plan.read_bytes() == before

    def test_root_option_relocates_paths(self, plan, model, tmp_path, whole):
        moved = tmp_path / "elsewhere"
        shutil.move(model.parent, moved)
        for item in moved.rglob("*.safetensors"):
            os.utime(item)  # a copy need not have the time of change
        root = ("--root", f"{tmp_path / 'disk'}={moved}")
        assert "cannot inspect" in refused(plan, "--part", "0/2", code=3)
        for number in range(2):
            run("run", plan, "--part", f"{number}/2", *root)
        run("run", plan, "--publish", *root)
        run("convert", "hf-to-maxtext", moved / "model", moved / "alone")
        assert content(moved / "out") == content(moved / "alone")

    def test_relative_paths_refer_to_the_planning_directory(self, model, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path / "disk")
        planned(tmp_path / "plan", "cast", "model", "out", "--dtype", "float16")
        monkeypatch.chdir("/")
        for number in range(2):
            run("run", tmp_path / "plan", "--part", f"{number}/2")
        run("run", tmp_path / "plan", "--publish")
        assert list((tmp_path / "disk" / "out").glob("*.safetensors"))
        assert Path.cwd() == Path("/")

    def test_planning_directory_may_be_missing(self, model, tmp_path, monkeypatch):
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        words = (
            "convert",
            "maxtext-to-hf",
            os.path.relpath(MAXTEXT),
            "../out",
            f"--like={os.path.relpath(HF)}",
        )
        planned(tmp_path / "plan", *words)
        monkeypatch.chdir("/")
        (tmp_path / "work").rmdir()
        run("run", tmp_path / "plan", "--part", "0/1")
        run("run", tmp_path / "plan", "--publish")
        assert list((tmp_path / "out").glob("*.safetensors"))
        assert not (tmp_path / "work").exists()

    def test_root_option_refuses_another_store(self, plan, gcs, tmp_path):
        root = ("--root", f"{tmp_path / 'disk' / 'out'}=gs://{gcs.bucket}/out")
        for words in (("--part", "0/1"), ("--publish",), ("--status",)):
            assert "the plan was made for file://" in refused(plan, *words, *root)

    def test_relocated_source_of_equal_size_is_refused(self, plan, model, tmp_path):
        moved = tmp_path / "elsewhere"
        shutil.move(model.parent, moved)
        shard = min(moved.rglob("*.safetensors"))
        data = shard.read_bytes()
        shard.write_bytes(data[:-5000] + bytes(5000))
        root = ("--root", f"{tmp_path / 'disk'}={moved}")
        output = refused(plan, "--part", "0/1", *root, code=3)
        assert "is not the file that was planned" in output

    def test_damaged_plan_is_refused(self, plan):
        data = plan.read_bytes()
        for damaged in (data[:-70], data[:200], data.replace(b"model-00002", b"model-00003"), b"", b"{}\n"):
            plan.write_bytes(damaged)
            assert "plan" in refused(plan, "--part", "0/1", code=3)

    def test_plan_decodes_only_known_classes(self, plan):
        from ckpttools.plan.array_lines import decode_dataclass

        for name in ("os:system", "ckpttools.mapping.values:np", "ckpttools.core.dtypes:DType"):
            with pytest.raises((ValueError, AttributeError)):
                decode_dataclass([name, {}], ("ckpttools.mapping.",))

    def test_plan_of_another_version_is_refused(self, plan, monkeypatch):
        from ckpttools.api import plans

        monkeypatch.setattr(plans, "__version__", "9.9")
        for words in (("--part", "0/2"), ("--publish",)):
            assert "another version of ckpttools" in refused(plan, *words)

    def test_torn_journal_line_is_ignored(self, plan, model, tmp_path):
        run("run", plan, "--part", "0/1")
        (journal,) = (tmp_path / "disk" / "out.partial" / "parts").iterdir()
        lines = journal.read_bytes().split(b"\n")
        journal.write_bytes(b"\n".join(lines[:4]) + lines[4][:-3])
        status = json.loads(run("run", plan, "--status", "--json"))
        assert status["tasks_done"] < status["tasks"] and status["state"] == "stopped"
        run("run", plan, "--part", "2/3")
        run("run", plan, "--part", "0/1")
        run("run", plan, "--publish")
