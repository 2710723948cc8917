"""Where a checkpoint grows: whose it is, who may write, what is put back, and when the old one goes."""

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt
from support.internals import JOURNAL as NAME
from support.internals import (
    PLAN_MARK,
    JobInfo,
    LocalFile,
    LocalStaging,
    LockedError,
    Publishing,
    Started,
    TaskDone,
)
from support.mounts import while_mounted

from ckpttools import (
    CheckpointError,
    DestinationExistsError,
    NoSpaceError,
    StorageError,
    ToMaxText,
    UsageError,
    plan_to_maxtext,
)
from ckpttools.run.finished_tasks import FinishedTask, entries
from ckpttools.stores.local import directory, staging
from ckpttools.stores.local.files import exchange, remove_tree
from ckpttools.stores.local.journal import Journal
from ckpttools.testing.models import LlamaSizes, write_llama

TIMES = re.compile(rb'"[a-z]+_timestamp_nsecs": \d+')
SIZES = LlamaSizes(layers=2, hidden=64, mlp=128, heads=4, kv_heads=2, head_dim=16, vocab=256)


class StopError(Exception):
    """What ends a run at a chosen moment."""


def stop_when(kind):
    def observe(event):
        if isinstance(event, kind):
            raise StopError

    return observe


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of the same shapes and different weights."""
    location = tmp_path_factory.mktemp("models")
    write_llama(location / "a", SIZES)
    weights = bytearray(write_llama(location / "b", SIZES).read_bytes())
    weights[-4096:] = bytes(4096)
    (location / "b" / "model.safetensors").write_bytes(weights)
    return location


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def content(directory):
    """Every file of a directory by its name; times of saving are left out."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    texts = ((path, path.read_bytes()) for path in files)
    return {path.relative_to(directory).as_posix(): TIMES.sub(b"", text) for path, text in texts}


def converted(models, name, tmp_path):
    plan_to_maxtext(models / name).run(tmp_path / f"whole-{name}")
    return content(tmp_path / f"whole-{name}")


def names(directory):
    return sorted(location.name for location in directory.iterdir())


class TestForeignFiles:
    def test_foreign_partial_directory_is_refused(self, models, out):
        partial = out.with_name("out.partial")
        (partial / "0" / "items").mkdir(parents=True)
        (partial / "0" / "items" / "precious").write_text("x")
        before = content(partial)
        for overwrite in (False, True):
            with pytest.raises(UsageError, match=r"out\.partial exists and has no journal of ckpttools"):
                plan_to_maxtext(models / "a").run(out, overwrite=overwrite)
        assert content(partial) == before and not out.exists()

    def test_linked_partial_directory_is_refused(self, models, out, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        out.with_name("out.partial").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UsageError, match="has no journal of ckpttools"):
            plan_to_maxtext(models / "a").run(out)
        assert names(tmp_path / "elsewhere") == []

    def test_foreign_replaced_directory_is_kept(self, models, out):
        beside = out.with_name("out.replaced")
        beside.mkdir()
        (beside / "precious").write_text("x")
        plan_to_maxtext(models / "b").run(out)
        plan_to_maxtext(models / "a").run(out, overwrite=True)
        assert content(beside) == {"precious": b"x"}

    def test_foreign_files_next_to_the_journal_are_kept(self, models, out):
        with pytest.raises(StopError):
            plan_to_maxtext(models / "a").run(out, observe=stop_when(TaskDone))
        note = out.with_name("out.partial") / "note"
        note.write_text("mine")
        plan_to_maxtext(models / "a").run(out)
        assert note.read_text() == "mine" and (out / "0").is_dir()

    def refused(self, models, out, words):
        """With the flag and without; returns the words."""
        for overwrite in (True, False):
            with pytest.raises(UsageError, match=words) as error:
                plan_to_maxtext(models / "a").run(out, overwrite=overwrite)
            assert error.value.hint and not out.exists()
        return str(error.value)

    @pytest.mark.parametrize("text", [b"my own notes\n", b"\xff\xfe\x00", b"{}", b"[" * 100_000, b"\n\n\n"])
    def test_invalid_journal_is_refused(self, models, out, text):
        partial = out.with_name("out.partial")
        (partial / "removed").mkdir(parents=True)
        (partial / NAME).write_bytes(text)
        self.refused(models, out, r"journal\.ckpttools is not a journal of ckpttools")
        assert content(partial) == {NAME: text} and names(partial) == [NAME, "removed"]

    def test_hard_linked_journal_is_refused(self, models, out, tmp_path):
        partial, precious = out.with_name("out.partial"), tmp_path / "precious"
        partial.mkdir()
        for text in ("", '00000000 ["plan",["', "x"):
            precious.write_text(text)
            os.link(precious, partial / NAME)
            assert "2 names" in self.refused(models, out, "is not a journal of ckpttools")
            assert precious.read_text() == text and names(partial) == [NAME]
            (partial / NAME).unlink()
        os.mkfifo(partial / NAME)
        self.refused(models, out, "is not a journal of ckpttools")

    def test_foreign_removed_directory_is_kept(self, models, out, tmp_path):
        """Beside a journal that says nothing, and beside one of a conversion that replaces nothing."""
        partial = out.with_name("out.partial")
        removed = partial / "removed"
        for begun in (False, True):
            if begun:
                with pytest.raises(StopError):
                    plan_to_maxtext(models / "a").run(out, observe=stop_when(TaskDone))
            else:
                partial.mkdir()
                (partial / NAME).touch()
            (tmp_path / "mine").mkdir(exist_ok=True)
            (tmp_path / "mine" / "f").write_text("data")
            shutil.copytree(tmp_path / "mine", removed)
            self.refused(models, out, "removed was not written by a conversion")
            assert content(removed) == {"f": b"data"}
            shutil.rmtree(removed)
            removed.symlink_to(tmp_path / "mine")
            self.refused(models, out, "removed was not written by a conversion")
            assert removed.is_symlink() and content(tmp_path / "mine") == {"f": b"data"}
            removed.unlink()
            # Ours to the last moment, in which nothing but the mark is left.
            for built in ((), (PLAN_MARK,), (PLAN_MARK, "data")):
                removed.mkdir()
                for name in built:
                    (removed / name).write_text("x")
                if built[1:]:
                    plan_to_maxtext(models / "a").run(out)
                else:
                    with pytest.raises(StopError):
                        plan_to_maxtext(models / "a").run(out, observe=stop_when(TaskDone))
                assert not removed.exists()
            shutil.rmtree(out)

    def test_linked_staging_is_not_followed(self, models, out, tmp_path):
        """To where another conversion grows, marked and all."""
        for location in (out, tmp_path / "other"):
            with pytest.raises(StopError):
                plan_to_maxtext(models / "a").run(location, observe=stop_when(TaskDone))
        other, growing = tmp_path / "other.partial" / "content", out.with_name("out.partial") / "content"
        before = content(other)
        shutil.rmtree(growing)
        growing.symlink_to(other)
        self.refused(models, out, "content was not written by a conversion")
        assert content(other) == before and growing.is_symlink()
        (tmp_path / "link").symlink_to(other)
        remove_tree(tmp_path / "link")
        assert content(other) == before and not (tmp_path / "link").is_symlink()

    def test_mounted_staging_is_kept(self, models, out, tmp_path):
        """Also from the same file system, which has the same device."""
        partial, mine = out.with_name("out.partial"), tmp_path / "mine"
        mine.mkdir()
        (mine / "f").write_text("data")
        with pytest.raises(StopError):
            plan_to_maxtext(models / "a").run(out, observe=stop_when(Publishing))
        locations = [partial / "content" / "a y", partial / "removed" / "y"]
        for location in locations:
            location.mkdir(parents=True)
        before = content(partial)
        command = ("convert", "to-orbax", models / "a", out, "--overwrite")
        cases = [(mine, location, command) for location in locations]
        cases.append((mine, locations[0], ("remove_tree", partial / "content")))
        result = while_mounted(*cases)
        assert [code for code, _ in result] == [2, 2, 5]
        for (_, location, _), (_, text) in zip(cases, result, strict=True):
            assert f"umount {location}" in text and "contains a mount point" in text
        assert content(mine) == {"f": b"data"}
        assert content(partial) == before and not out.exists()


class TestOtherModels:
    """Whatever state a run leaves, a conversion of another model does not take it for its own."""

    @pytest.mark.parametrize("moment", [TaskDone, Publishing])
    def test_overwrite_discards_interrupted_conversion(self, models, out, tmp_path, moment):
        with pytest.raises(StopError):
            plan_to_maxtext(models / "a").run(out, observe=stop_when(moment))
        with pytest.raises(UsageError, match="another conversion"):
            plan_to_maxtext(models / "b").run(out)
        plan_to_maxtext(models / "b").run(out, overwrite=True)
        assert content(out) == converted(models, "b", tmp_path)

    def test_conversion_resumes_after_failed_sync(self, models, out, tmp_path, monkeypatch):
        def failing(path):
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(staging, "sync_tree", failing)
            with pytest.raises(StorageError, match="Input/output error"):
                plan_to_maxtext(models / "a").run(out)
        assert not out.exists()
        with pytest.raises(UsageError, match="another conversion"):
            plan_to_maxtext(models / "b").run(out)
        receipt = plan_to_maxtext(models / "a").run(out)
        assert receipt.tasks_resumed == receipt.tasks
        assert content(out) == converted(models, "a", tmp_path)

    def test_different_sidecars_are_a_different_conversion(self, models, out, tmp_path):
        """A copy with a tokenizer has the same arrays, and other companions."""
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in (models / "a").iterdir():
            os.link(file, copy / file.name)
        (copy / "tokenizer.json").write_text("{}")
        with pytest.raises(StopError):
            plan_to_maxtext(models / "a").run(out, observe=stop_when(Publishing))
        with pytest.raises(UsageError, match="another conversion"):
            plan_to_maxtext(copy).run(out)


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


class TestLock:
    def test_locked_staging_directory_is_refused(self, models, out):
        """Asked to overwrite, too: who is at work there is not thrown out."""
        with pytest.raises(StopError):
            plan_to_maxtext(models / "a").run(out, observe=stop_when(TaskDone))
        partial = out.with_name("out.partial")
        before = content(partial)
        command = [sys.executable, "-c", HOLDER, str(partial / NAME)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
            holder.stdout.readline()
            for name in ("a", "b"):
                with pytest.raises(LockedError, match="another process is writing this checkpoint") as raised:
                    plan_to_maxtext(models / name).run(out, overwrite=True)
                assert f"process {holder.pid} on" in raised.value.got and "ago" in raised.value.got
                assert f"kill {holder.pid}" in raised.value.hint
            assert content(partial) == before
            holder.kill()
        plan_to_maxtext(models / "a").run(out)

    @pytest.mark.parametrize("moment", ["sync_names", "rename", "finalize"])
    def test_publishing_holds_the_lock(self, models, out, tmp_path, monkeypatch, moment):
        tried = []
        real = getattr(LocalStaging, moment)

        def watched(self, *arguments):
            if not tried:
                tried.append(moment)
                with pytest.raises(LockedError):
                    plan_to_maxtext(models / "b").run(out, overwrite=True)
            return real(self, *arguments)

        monkeypatch.setattr(LocalStaging, moment, watched)
        plan_to_maxtext(models / "a").run(out)
        assert tried and content(out) == converted(models, "a", tmp_path)

    def test_journal_removed_before_locking_is_not_found(self, tmp_path, monkeypatch):
        real = fcntl.flock

        def removing(descriptor, how):
            monkeypatch.undo()
            (tmp_path / NAME).unlink()
            real(descriptor, how)

        monkeypatch.setattr(fcntl, "flock", removing)
        with pytest.raises(FileNotFoundError):
            Journal(tmp_path)
        Journal(tmp_path).close()


class TestReplacing:
    """At every instant the old or the new one has the name, or the next command puts it back."""

    @pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
    def swaps(self, request, monkeypatch, tmp_path):
        if not request.param:
            monkeypatch.setattr(directory, "exchange", lambda a, b: False)
        else:
            (tmp_path / "x").mkdir(), (tmp_path / "y").mkdir()
            if not exchange(tmp_path / "x", tmp_path / "y"):
                pytest.skip("this file system has no exchange")
        return request.param

    def test_replacement_resumes_after_a_stop_at_any_call(self, models, out, tmp_path, monkeypatch, swaps):
        old, new = converted(models, "b", tmp_path), converted(models, "a", tmp_path)
        plan = plan_to_maxtext(models / "a")
        stopped = count = 0
        while True:
            count += 6
            plan_to_maxtext(models / "b").run(out, overwrite=True)
            with monkeypatch.context() as patch:
                stop_at_change(patch, count)
                try:
                    plan.run(out, overwrite=True)
                    break
                except StopError:
                    stopped += 1
            result = content(out)
            result.pop(PLAN_MARK, None)
            if out.exists():
                assert result in (old, new)
            if stopped % 2 == 0:
                # Another command puts it back, or leaves what is complete, and refuses.
                with pytest.raises(CheckpointError):
                    plan_to_maxtext(models / "a", ToMaxText(scan=False)).run(out)
                result = content(out)
                result.pop(PLAN_MARK, None)
                assert result in (old, new)
            plan.run(out, overwrite=True)
            assert content(out) == new
            assert not out.with_name("out.partial").exists()
        assert stopped >= 5

    @pytest.mark.parametrize("lost", ["the new one", "its mark", "the mark of what grows"])
    def test_old_checkpoint_is_not_mistaken_for_staging(
        self, models, out, tmp_path, monkeypatch, swaps, lost
    ):
        """Killed when the names were swapped; then somebody takes something away."""
        plan_to_maxtext(models / "a").run(out)
        old = content(out)
        with monkeypatch.context() as patch:
            patch.setattr(LocalStaging, "remove", stop_removing(LocalStaging.remove))
            with pytest.raises(StopError):
                plan_to_maxtext(models / "b").run(out, overwrite=True)
        new = content(out)
        assert new.pop(PLAN_MARK) and new == converted(models, "b", tmp_path)
        if lost == "the new one":
            shutil.rmtree(out)
            plan = plan_to_maxtext(models / "b")
            with pytest.raises(DestinationExistsError):
                plan.run(out)
            assert content(out) == old
            plan.run(out, overwrite=True)
            assert content(out) == new
        elif lost == "its mark":
            (out / PLAN_MARK).unlink()
            plan = plan_to_maxtext(models / "b")
            for overwrite, words in ((False, "exists"), (True, "a conversion wanted to replace")):
                with pytest.raises(UsageError, match=words):
                    plan.run(out, overwrite=overwrite)
            assert content(out) == new
        else:
            shutil.rmtree(out.with_name("out.partial"))
            (out / PLAN_MARK).unlink()
            with pytest.raises(StopError):
                plan_to_maxtext(models / "a").run(tmp_path / "next", observe=stop_when(Publishing))
            growing = tmp_path / "next.partial" / "content"
            (growing / PLAN_MARK).unlink()
            before = content(growing)
            for overwrite in (False, True):
                with pytest.raises(UsageError, match="was not written by a conversion"):
                    plan_to_maxtext(models / "a").run(tmp_path / "next", overwrite=overwrite)
            assert content(growing) == before
            shutil.rmtree(growing)
            plan_to_maxtext(models / "a").run(tmp_path / "next")
            assert content(tmp_path / "next") == old

    def test_damaged_journal_after_swap_is_handled(self, models, out, tmp_path, monkeypatch, swaps):
        plan_to_maxtext(models / "a").run(out)
        with monkeypatch.context() as patch:
            patch.setattr(LocalStaging, "remove", stop_removing(LocalStaging.remove))
            with pytest.raises(StopError):
                plan_to_maxtext(models / "b").run(out, overwrite=True)
        (out.with_name("out.partial") / NAME).write_bytes(b"")
        plan_to_maxtext(models / "b").run(out, overwrite=True)
        assert content(out) == converted(models, "b", tmp_path)
        assert not out.with_name("out.partial").exists()

    def test_new_conversion_keeps_moved_output(self, models, out, tmp_path):
        plan_to_maxtext(models / "b").run(out)
        before = content(out)
        with pytest.raises(StopError):
            plan_to_maxtext(models / "a").run(tmp_path / "other", observe=stop_when(TaskDone))
        (tmp_path / "other.partial").rename(out.with_name("out.partial"))
        out.rename(out.with_name("out.partial") / "replaced")
        out.mkdir()
        (out / "new").touch()
        for overwrite in (False, True):
            with pytest.raises(CheckpointError):
                plan_to_maxtext(models / "a").run(out, overwrite=overwrite)
        assert content(out.with_name("out.partial") / "replaced") == before

    def test_published_checkpoint_is_not_converted_again(self, models, out, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(LocalStaging, "finalize", lambda *_: (_ for _ in ()).throw(StopError))
            with pytest.raises(StopError):
                plan_to_maxtext(models / "a").run(out)
        before = (out / "0" / "items" / "d" / "data").stat()
        receipt = plan_to_maxtext(models / "a").run(out)
        assert receipt.tasks_resumed == receipt.tasks and receipt.bytes_resumed == receipt.bytes_out
        assert (out / "0" / "items" / "d" / "data").stat().st_mtime_ns == before.st_mtime_ns
        assert content(out) == converted(models, "a", tmp_path)
        with pytest.raises(DestinationExistsError):
            plan_to_maxtext(models / "a").run(out)


def stop_removing(remove):
    """Ends the run where what was replaced is to be removed."""

    def stopping(self, location):
        if location.exists() and self.destination.exists():
            raise StopError
        remove(self, location)

    return stopping


def stop_at_change(patch, count):
    """Ends the run at the `count`-th change of names from the first on that publishes."""
    publishing = []

    def watching(name):
        real = getattr(os, name)

        def call(*arguments, **options):
            if publishing:
                publishing.append(name)
                if len(publishing) > count:
                    publishing.clear()
                    raise StopError
            return real(*arguments, **options)

        return call

    begin = LocalStaging.publish

    def published(self, *arguments):
        publishing.append("publish")
        begin(self, *arguments)

    patch.setattr(LocalStaging, "publish", published)
    for name in ("rename", "unlink", "rmdir", "fsync", "open"):
        patch.setattr(os, name, watching(name))


def test_relative_source_path_resumes_conversion(models, out, monkeypatch):
    with pytest.raises(StopError):
        plan_to_maxtext(models / "a").run(out, observe=stop_when(Publishing))
    monkeypatch.chdir(models / "a")
    receipt = plan_to_maxtext(".").run(out)
    assert receipt.tasks_resumed == receipt.tasks


def test_rewriting_changed_output_needs_free_space(models, out, monkeypatch):
    """What an interrupted run published, and somebody changed since, is written once more, beside it."""
    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(LocalStaging, "finalize", lambda *_: (_ for _ in ()).throw(StopError))
        plan_to_maxtext(models / "a").run(out)
    (out / "0/items/d/data").write_text("changed by hand")
    before = content(out)
    usage = shutil.disk_usage(out)
    with monkeypatch.context() as patch, pytest.raises(NoSpaceError, match="too little space"):
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 10))
        plan_to_maxtext(models / "a").run(out, overwrite=True)
    assert content(out) == before
    plan_to_maxtext(models / "a").run(out, overwrite=True)
    assert b"by hand" not in content(out)["0/items/d/data"]


class TestJournal:
    def entries(self, count):
        return [
            FinishedTask(number, {(number,): name_range(number)}, {"overflowed": number})
            for number in range(count)
        ]

    def records(self, count):
        return [entry.to_record("run") for entry in self.entries(count)]

    def test_journal_returns_recorded_entries(self, tmp_path):
        journal = Journal(tmp_path)
        journal.begin(JobInfo("plan"))
        journal.record(self.records(3))
        journal.close()
        again = Journal(tmp_path)
        assert (again.plan, list(entries(again.records))) == ("plan", self.entries(3))

    def test_last_complete_inventory_is_published(self, tmp_path):
        journal = Journal(tmp_path)
        journal.begin(JobInfo("plan", "/src", "ckpt cast a b", "/"))
        journal.note_publishing(["5 1 a", "7 2 b c"])
        journal.note_publishing(["5 3 a"])
        journal.close()
        again = Journal(tmp_path)
        again.close()
        assert again.purpose == JobInfo("plan", "/src", "ckpt cast a b", "/")
        assert (again.publishing, again.inventory) == (True, ["5 3 a"])
        data = (tmp_path / NAME).read_bytes()
        (tmp_path / NAME).write_bytes(data.replace(b"5 3 a", b"6 3 a"))
        damaged = Journal(tmp_path)
        assert (damaged.publishing, damaged.inventory) == (True, None)

    def test_journal_of_another_process_is_not_removed(self, tmp_path):
        """Somebody has deleted the directory, and another process has begun anew."""
        journal = Journal(tmp_path)
        (tmp_path / NAME).unlink()
        assert not journal.remove()
        other = Journal(tmp_path)
        other.begin(JobInfo("other"))
        assert not journal.remove()
        assert (tmp_path / NAME).read_bytes()
        assert other.remove() and names(tmp_path) == []

    @pytest.mark.parametrize("damage", range(0, 400, 7))
    def test_damaged_journal_lines_are_ignored(self, tmp_path, damage):
        journal = Journal(tmp_path)
        journal.begin(JobInfo("plan"))
        journal.record(self.records(5))
        journal.close()
        data = bytearray((tmp_path / NAME).read_bytes())
        data[damage % len(data)] ^= 0x15
        (tmp_path / NAME).write_bytes(data)
        again = Journal(tmp_path)
        assert again.plan in ("plan", None)
        assert all(entry in self.entries(5) for entry in entries(again.records))
        again.record(self.records(6)[5:])
        again.close()
        assert again.plan is None or self.entries(6)[5] in entries(Journal(tmp_path).records)

    @settings(max_examples=25)
    @given(st.data())
    def test_torn_first_journal_line_is_recognized(self, tmp_path_factory, data):
        """It ends anywhere, and any block of it may be zeros: the journal is empty then, or what it was."""
        location = tmp_path_factory.mktemp("torn")
        purpose = JobInfo("plan", "/src", "ckpt convert " + "x" * data.draw(st.sampled_from((0, 9000))), "/ü")
        journal = Journal(location)
        journal.begin(purpose)
        journal.close()
        written = (location / NAME).read_bytes()
        line = bytearray(written[: data.draw(st.integers(0, len(written)))])
        for block in data.draw(st.sets(st.integers(0, len(line) // 512))):
            line[512 * block : 512 * (block + 1)] = bytes(len(line[512 * block : 512 * (block + 1)]))
        (location / NAME).write_bytes(line)
        again = Journal(location)
        again.close()
        assert again.purpose == (purpose if line == written else None)

    @pytest.mark.parametrize("junk", [b"", b"deadb", b'deadbeef ["plan",["9', bytes(4096), bytes(50) + b"x"])
    def test_torn_journal_is_refused_or_overwritten(self, models, out, junk):
        with pytest.raises(StopError):
            plan_to_maxtext(models / "a").run(out, observe=stop_when(TaskDone))
        (out.with_name("out.partial") / NAME).write_bytes(junk)
        with pytest.raises(UsageError, match=r"the journal in .* is damaged"):
            plan_to_maxtext(models / "a").run(out)
        plan_to_maxtext(models / "a").run(out, overwrite=True)
        assert (out / "0" / "items" / "_METADATA").is_file()

    def test_missing_bytes_are_rewritten(self, models, out, tmp_path):
        with pytest.raises(StopError):
            plan_to_maxtext(models / "a").run(out, observe=stop_when(Publishing))
        (data,) = out.with_name("out.partial").glob("content/0/items/d/data")
        data.unlink()
        receipt = plan_to_maxtext(models / "a").run(out)
        assert receipt.tasks_resumed == 0
        assert content(out) == converted(models, "a", tmp_path)


def name_range(number):
    from ckpttools.formats.placement import Range

    return Range(f"d/data-{number:05d}", 7 * number, 5)


class TestChangedSource:
    """Nothing is published that was read of two states, and nothing of it is gone on with."""

    @pytest.mark.parametrize("how", ["in place", "another file", "the header, at the same time"])
    def test_source_changed_while_reading_is_refused(self, out, tmp_path, how):
        write_llama(tmp_path / "hf", SIZES)
        path = tmp_path / "hf" / "model.safetensors"

        def changing(event):
            if isinstance(event, Publishing):
                before = path.stat()
                if how == "another file":
                    path.with_name("new").write_bytes(path.read_bytes())
                    path.with_name("new").rename(path)
                else:
                    with path.open("r+b") as file:
                        file.seek(9 if "header" in how else before.st_size - 4)
                        file.write(b"\x01\x02\x03\x04")
                if how != "in place":
                    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

        with pytest.raises(
            CheckpointError, match=r"model\.safetensors was changed while it was read"
        ) as error:
            plan_to_maxtext(tmp_path / "hf").run(out, observe=changing)
        told = {"in place": "", "another file": "another file has the name: "}.get(
            how, "its header was rewritten: "
        )
        when = r"\d+ bytes, changed at 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*Z"
        assert re.fullmatch(told + when, error.value.got)
        assert error.value.got != error.value.expected
        assert re.search(when, error.value.expected)
        assert names(tmp_path) == ["hf"]
        write_llama(tmp_path / "hf", SIZES)
        plan_to_maxtext(tmp_path / "hf").run(out)

    def test_source_changed_before_resuming_is_refused(self, out, tmp_path):
        """Another model of the same size and time, as of archives in which all files have one time."""
        path = write_llama(tmp_path / "hf", SIZES)
        os.utime(path, ns=(0, 0))
        with pytest.raises(StopError):
            plan_to_maxtext(tmp_path / "hf").run(out, observe=stop_when(TaskDone))
        half = path.stat().st_size // 2
        path.write_bytes(path.read_bytes()[:half] + bytes(path.stat().st_size - half))
        os.utime(path, ns=(0, 0))
        with pytest.raises(UsageError, match="the beginning of another conversion"):
            plan_to_maxtext(tmp_path / "hf").run(out)

    def test_unavailable_source_keeps_finished_tasks(self, tmp_path, out):
        """As with a disk that is not mounted for a moment: what was done stays done."""
        source, away = tmp_path / "hf", tmp_path / "away"
        write_llama(source, SIZES)

        def unmounting(event):
            if isinstance(event, Publishing):
                source.rename(away)

        plan = plan_to_maxtext(source)
        with pytest.raises(CheckpointError, match="No such file"):
            plan.run(out, observe=unmounting)
        away.rename(source)
        kept = []
        plan_to_maxtext(source).run(out, observe=lambda e: kept.append(e) if isinstance(e, Started) else None)
        assert kept[0].tasks_done == len(kept[0].plan.tasks) > 0

    def test_new_hard_link_of_source_is_accepted(self, models, out, tmp_path):
        def linking(event):
            if isinstance(event, Publishing):
                os.link(models / "a" / "model.safetensors", tmp_path / "link")
                (tmp_path / "link").unlink()

        plan_to_maxtext(models / "a").run(out, observe=linking)

    @pytest.mark.parametrize("command", [("hash",), ("inspect", "stats"), ("verify", "--against"), ("diff",)])
    def test_stats_refuses_source_changed_while_reading(self, tmp_path, monkeypatch, command):
        """Nothing final is said of what was read of two states."""
        path = write_llama(tmp_path / "hf", SIZES)
        real = LocalFile.read_into

        def changing(self, offset, data):
            real(self, offset, data)
            if offset > 100_000:
                os.utime(path, ns=(0, 0))

        monkeypatch.setattr(LocalFile, "read_into", changing)
        both = [tmp_path / "hf"] * (2 if command[0] in ("verify", "diff") else 1)
        words = [*command[:1], both[0], *command[1:], both[1]] if len(both) == 2 else [*command, *both]
        result = ckpt(*words)
        assert (result.exit_code, "was changed while it was read" in result.stderr) == (3, True), (
            result.output
        )


def test_undeletable_files_are_named_with_full_path(tmp_path, monkeypatch):
    deep = tmp_path / "tree" / "a" / "b"
    deep.mkdir(parents=True)
    for name in ("one", "mark"):
        (tmp_path / "tree" / name).touch()
    (deep / "y").touch()
    real = os.unlink

    def failing(path, **options):
        if os.fspath(path).endswith("y"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        with pytest.raises(PermissionError) as error:
            remove_tree(tmp_path / "tree", last="mark")
    assert error.value.filename == str(deep / "y")
    assert (tmp_path / "tree" / "mark").exists()
    remove_tree(tmp_path / "tree", last="mark")
    assert names(tmp_path) == []


# Kills the process at the call with this number that changes a name after the manifest was written.
KILLED_LATE = """
import os, sys
left = int(sys.argv.pop(1))
manifest = sys.argv[sys.argv.index("--manifest") + 1]
def hook(event, arguments):
    global left
    if event in ("os.rename", "os.rmdir", "os.remove") and os.path.exists(manifest):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
sys.addaudithook(hook)
from ckpttools.cli.main import main
main()
"""


@pytest.mark.parametrize("number", range(3))
def test_same_command_finishes_after_a_late_kill(models, out, tmp_path, number):
    expected = converted(models, "a", tmp_path)
    manifest = tmp_path / "out.json"
    words = ["convert", "hf-to-maxtext", models / "a", out, "--manifest", manifest, "--no-progress"]
    words = [str(word) for word in words]
    killed = subprocess.run([sys.executable, "-c", KILLED_LATE, str(number), *words], capture_output=True)
    assert killed.returncode == -9
    text = manifest.read_bytes()
    other = ckpt(*words[:2], str(models / "b"), *words[3:])
    assert other.exit_code == 2 and "Error" in other.output and manifest.read_bytes() == text
    assert ckpt(*words).exit_code == 0
    assert content(out) == expected and manifest.read_bytes() == text
    assert not out.with_name("out.partial").exists()


def test_file_changed_after_a_late_kill_is_not_reported_as_complete(models, out, tmp_path):
    words = ["convert", "hf-to-maxtext", models / "a", out, "--manifest", tmp_path / "m", "--no-progress"]
    words = [str(word) for word in words]
    subprocess.run([sys.executable, "-c", KILLED_LATE, "1", *words], capture_output=True)
    changed = out / "0/_CHECKPOINT_METADATA"
    changed.write_bytes(changed.read_bytes() + b" ")
    again = ckpt(*words)
    assert again.exit_code == 2 and "exists" in again.output
    again = ckpt(*words, "--overwrite")
    assert again.exit_code == 0, again.output
    assert content(out) == converted(models, "a", tmp_path)


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to nothing", "fifo"])
def test_staging_name_that_is_not_a_directory_is_refused(models, out, tmp_path, kind):
    partial = out.with_name("out.partial")
    if kind == "file":
        partial.write_text("mine")
    elif kind == "fifo":
        os.mkfifo(partial)
    else:
        partial.symlink_to(models / "a/config.json" if kind == "link to a file" else tmp_path / "nothing")
    before = _identity(partial)
    for words in (("convert", "hf-to-maxtext"), ("convert", "to-safetensors"), ("copy",)):
        result = ckpt(*words, str(models / "a"), str(out), "--no-progress")
        assert result.exit_code == 2, result.output
        assert f"{partial} is not a directory" in result.output and "hint" in result.output
    assert _identity(partial) == before and not out.exists()


def _identity(path):
    """Return what a change would alter. Following a link alters only its time of access."""
    found = path.lstat()
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
