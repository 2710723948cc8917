"""Running a plan: the result does not depend on interruptions, and nothing half-written gets the name."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.internals import JOURNAL, LocalStaging, Publishing, Started, TaskDone

from ckpttools import (
    DestinationExistsError,
    NoSpaceError,
    Receipt,
    Resources,
    SourceChangedError,
    StorageError,
    ToMaxText,
    UsageError,
    plan_to_maxtext,
)
from ckpttools.plan import plan as planning
from ckpttools.run import threads
from ckpttools.stores.local.data_files import LocalDataFiles
from ckpttools.testing.models import LlamaSizes, write_llama

SIZES = LlamaSizes(layers=3, hidden=128, mlp=384, heads=4, kv_heads=2, head_dim=32, vocab=1000)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    write_llama(directory, SIZES)
    return directory


@pytest.fixture
def small_tasks(monkeypatch):
    """Cuts the tiny model into many tasks."""
    monkeypatch.setattr(planning, "LARGEST_TASK", 1 << 15)
    monkeypatch.setattr(planning, "_SMALLEST_TASK", 1 << 10)


def data_digest(checkpoint: Path) -> str:
    items = checkpoint / "0" / "items"
    files = [items / "d" / "data", items / "d" / "index", items / "manifest.ocdbt", items / "_METADATA"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class InterruptionError(Exception):
    pass


def interrupt_after(count):
    seen = []

    def observe(event):
        if isinstance(event, TaskDone):
            seen.append(event)
            if len(seen) == count:
                raise InterruptionError

    return observe


def test_events_record_the_complete_run(model, tmp_path, small_tasks):
    events = []
    conversion = plan_to_maxtext(model)
    receipt = conversion.run(tmp_path / "out", observe=events.append)
    assert isinstance(events[0], Started)
    assert isinstance(events[-2], Publishing)
    assert events[-1] is receipt
    done = [event for event in events if isinstance(event, TaskDone)]
    assert len(done) == receipt.tasks == len(conversion.plan.tasks)
    assert sum(event.bytes_out for event in done) == receipt.bytes_out == conversion.plan.bytes_out
    assert isinstance(receipt, Receipt)
    assert receipt.tasks_resumed == 0


def test_any_order_of_tasks_gives_the_same_files(model, tmp_path, small_tasks, monkeypatch):
    plan_to_maxtext(model, resources=Resources(jobs=1)).run(tmp_path / "a")
    monkeypatch.setattr(planning, "LARGEST_TASK", 1 << 13)
    plan_to_maxtext(model, resources=Resources(jobs=4)).run(tmp_path / "b")
    assert data_digest(tmp_path / "a") == data_digest(tmp_path / "b")


def test_second_run_resumes_the_first(model, tmp_path, small_tasks, monkeypatch):
    monkeypatch.setattr(threads, "_SYNC_SECONDS", 0.001)
    whole = plan_to_maxtext(model)
    whole.run(tmp_path / "whole")
    with pytest.raises(InterruptionError):
        plan_to_maxtext(model).run(tmp_path / "out", observe=interrupt_after(40))
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / JOURNAL).exists()
    receipt = plan_to_maxtext(model).run(tmp_path / "out")
    assert 40 <= receipt.tasks_resumed < receipt.tasks
    assert not (tmp_path / "out.partial").exists()
    assert not list((tmp_path / "out").rglob(JOURNAL))
    assert data_digest(tmp_path / "out") == data_digest(tmp_path / "whole")


SLOW_RUN = """
import sys, time
from ckpttools.api.hf_to_maxtext import plan_to_maxtext
from ckpttools.plan import plan
from ckpttools.run import threads
from ckpttools.run.events import TaskDone
plan.LARGEST_TASK, plan._SMALLEST_TASK, threads._SYNC_SECONDS = 1 << 14, 1 << 10, 0.01
def observe(event):
    if isinstance(event, TaskDone):
        time.sleep(0.02)
plan_to_maxtext(sys.argv[1]).run(sys.argv[2], observe=observe)
"""


def tasks_in(journal):
    """How many tasks are entered as done."""
    return journal.read_bytes().count(b'["task"') if journal.exists() else 0


def test_run_resumes_after_sigkill(model, tmp_path, small_tasks, monkeypatch):
    monkeypatch.setattr(planning, "LARGEST_TASK", 1 << 14)
    plan_to_maxtext(model).run(tmp_path / "whole")
    out = tmp_path / "out"
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SLOW_RUN, str(model), str(out)])
        journal = tmp_path / "out.partial" / JOURNAL
        before = tasks_in(journal)
        deadline = time.monotonic() + 30
        while tasks_in(journal) <= before:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not out.exists()
    receipt = plan_to_maxtext(model).run(out)
    assert receipt.tasks_resumed > 0
    assert data_digest(out) == data_digest(tmp_path / "whole")


def test_torn_last_journal_line_is_ignored(model, tmp_path, small_tasks, monkeypatch):
    monkeypatch.setattr(threads, "_SYNC_SECONDS", 0.001)
    with pytest.raises(InterruptionError):
        plan_to_maxtext(model).run(tmp_path / "out", observe=interrupt_after(40))
    journal = tmp_path / "out.partial" / JOURNAL
    lines = journal.read_text()
    journal.write_text(lines + "1")
    sound = {json.loads(line.split(" ", 1)[1])[1][0] for line in lines.splitlines()[1:]}
    receipt = plan_to_maxtext(model).run(tmp_path / "out")
    assert receipt.tasks_resumed == len(sound)


def test_existing_destination_is_not_changed(model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(DestinationExistsError, match="is not a readable checkpoint\\n    precious"):
            plan_to_maxtext(model).run(out, overwrite=overwrite)
        assert [location.name for location in tmp_path.iterdir()] == ["out"]
        assert [location.name for location in out.iterdir()] == ["precious"]


def test_existing_checkpoint_is_replaced_only_on_request(model, tmp_path):
    out = tmp_path / "out"
    plan_to_maxtext(model, ToMaxText(scan=False)).run(out)
    before = data_digest(out)
    with pytest.raises(DestinationExistsError, match="overwrite=True"):
        plan_to_maxtext(model).run(out)
    assert data_digest(out) == before
    plan_to_maxtext(model).run(out, overwrite=True)
    plan_to_maxtext(model).run(tmp_path / "whole")
    assert data_digest(out) == data_digest(tmp_path / "whole") != before
    assert sorted(location.name for location in tmp_path.iterdir()) == ["out", "whole"]
    assert sorted(location.name for location in out.iterdir()) == ["0"]


def test_empty_directory_may_be_the_destination(model, tmp_path):
    (tmp_path / "out").mkdir()
    plan_to_maxtext(model).run(tmp_path / "out")
    assert (tmp_path / "out" / "0" / "items" / "manifest.ocdbt").exists()


def test_unfinished_run_of_another_conversion_is_kept(model, tmp_path, small_tasks):
    with pytest.raises(InterruptionError):
        plan_to_maxtext(model).run(tmp_path / "out", observe=interrupt_after(5))
    other = plan_to_maxtext(model, ToMaxText(scan=False))
    with pytest.raises(UsageError, match="another conversion"):
        other.run(tmp_path / "out")
    other.run(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "0" / "items" / "_METADATA").exists()


def test_changed_source_starts_another_conversion(tmp_path, small_tasks):
    write_llama(tmp_path / "hf", SIZES)
    with pytest.raises(InterruptionError):
        plan_to_maxtext(tmp_path / "hf").run(tmp_path / "out", observe=interrupt_after(5))
    path = tmp_path / "hf" / "model.safetensors"
    os.utime(path, ns=(0, 0))
    with pytest.raises(UsageError, match="another conversion"):
        plan_to_maxtext(tmp_path / "hf").run(tmp_path / "out")


def test_data_read_from_changed_source_is_discarded(tmp_path, small_tasks, monkeypatch):
    """A source that is another for a while, in which the process is killed, and what it was afterwards."""
    monkeypatch.setattr(threads, "_SYNC_SECONDS", 0.001)
    file = write_llama(tmp_path / "hf", SIZES)
    truth, at = file.read_bytes(), file.stat()
    plan_to_maxtext(tmp_path / "hf").run(tmp_path / "whole")
    seen = []

    def change(event):
        if isinstance(event, TaskDone):
            seen.append(event)
            if len(seen) == 20:
                with file.open("r+b") as opened:
                    opened.seek(len(truth) // 2)
                    opened.write(bytes(len(truth) // 2))

    # As if it were killed: nothing is tidied up.
    monkeypatch.setattr(LocalStaging, "discard", lambda staging, journal: None)
    with pytest.raises(SourceChangedError):
        plan_to_maxtext(tmp_path / "hf", resources=Resources(jobs=1)).run(tmp_path / "out", observe=change)
    assert len(seen) < 100, "it stops at once"
    file.write_bytes(truth)
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    plan_to_maxtext(tmp_path / "hf", resources=Resources(jobs=1)).run(tmp_path / "out")
    assert data_digest(tmp_path / "out") == data_digest(tmp_path / "whole")


def test_concurrent_writes_of_one_checkpoint_are_refused(model, tmp_path, small_tasks):
    inner = []

    def observe(event):
        if isinstance(event, Started):
            with pytest.raises(UsageError, match="another process"):
                plan_to_maxtext(model).run(tmp_path / "out")
            inner.append(event)

    plan_to_maxtext(model).run(tmp_path / "out", observe=observe)
    assert inner


def test_full_disk_is_refused_before_writing(tmp_path, monkeypatch):
    # Not a quarter of a million tasks.
    monkeypatch.setattr(planning, "LARGEST_TASK", 1 << 34)
    # 14 TiB as a hole; no disk that runs this test has so much room, and ext4 holds files up to 16 TiB.
    huge = LlamaSizes(layers=1, hidden=1 << 14, mlp=1 << 14, heads=4, kv_heads=2, head_dim=64, vocab=7 << 26)
    write_llama(tmp_path / "hf", huge, sparse=True)
    conversion = plan_to_maxtext(tmp_path / "hf", resources=Resources(memory=1 << 36))
    with pytest.raises(NoSpaceError, match="too little space"):
        conversion.run(tmp_path / "out")
    assert [location.name for location in tmp_path.iterdir()] == ["hf"]


def test_filling_disk_is_reported_and_resumable(model, tmp_path, small_tasks, monkeypatch):
    write = os.pwrite
    calls = []

    def full(descriptor, data, offset):
        calls.append(offset)
        if len(calls) > 20:
            raise OSError(28, "No space left on device")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpaceError, match="the disk is full"):
        plan_to_maxtext(model).run(tmp_path / "out")
    monkeypatch.setattr(os, "pwrite", write)
    assert not (tmp_path / "out").exists()
    plan_to_maxtext(model).run(tmp_path / "out")
    plan_to_maxtext(model).run(tmp_path / "whole")
    assert data_digest(tmp_path / "out") == data_digest(tmp_path / "whole")


def test_unwritable_location_is_a_storage_error(model, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot create"):
        plan_to_maxtext(model).run(tmp_path / "file" / "out")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses to be written")
def test_read_only_file_system_is_a_storage_error(model):
    with pytest.raises(StorageError, match="cannot create"):
        plan_to_maxtext(model).run("/proc/self/ckpttools-out")


def test_shrinking_source_is_named(tmp_path, small_tasks):
    path = write_llama(tmp_path / "hf", SIZES)
    conversion = plan_to_maxtext(tmp_path / "hf")
    os.truncate(path, path.stat().st_size - 100)
    from ckpttools import FormatError

    with pytest.raises(FormatError, match="ends too early"):
        conversion.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("limit", [None, 512 << 10], ids=["whole", "truncated"])
def test_unaligned_and_partial_writes_are_correct(tmp_path, monkeypatch, limit):
    """Also where the system writes less than it was given, as near the end of a quota."""
    import numpy as np

    from ckpttools.array.scratch import Scratch

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: write(descriptor, data[:limit], at))
    size = 5 << 20
    rng = np.random.default_rng(0)
    truth = np.zeros(size, np.uint8)
    files = LocalDataFiles(tmp_path, {"a/data": size}, {})
    with Scratch(4 << 20).take((4 << 20,), np.dtype("u1")) as block:
        for offset, start, length in [(0, 0, 2 << 20), (4096 * 600, 1, 1 << 20), (3_500_001, 0, 1_500_000)]:
            piece = block[start : start + length]
            piece[:] = rng.integers(0, 256, length, np.uint8)
            files.write("a/data", offset, piece.data, piece.ctypes.data)
            truth[offset : offset + length] = piece
    files.sync()
    files.close()
    assert (tmp_path / "a" / "data").read_bytes() == truth.tobytes()


def test_appended_data_is_never_overwritten(tmp_path):
    """Its tasks ended in any order."""
    files = LocalDataFiles(tmp_path, {}, {})
    for stop in (150, 10, 100):
        files.extend("data-00000", stop)
    assert files.append("data", 1000, b"more") == ("data-00000", 150)
    files.close()


def test_chunk_file_contains_exactly_its_chunk(tmp_path):
    """Also where a run that was interrupted left a longer one."""
    files = LocalDataFiles(tmp_path, {}, {})
    for data in (b"longer", b"short"):
        files.write_whole("c/0", data)
    assert (tmp_path / "c" / "0").read_bytes() == b"short"
    files.close()
