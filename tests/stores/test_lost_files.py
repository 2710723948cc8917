"""Files that are lost, cut or replaced during a write never leave zeros in a published checkpoint."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt, run
from support.internals import JobInfo, Publishing, Started, TaskDone, parse, staging_of
from support.object_stores import files_in

import ckpttools
from ckpttools import CheckpointError, SourceChangedError, StorageError, UsageError
from ckpttools.run.bindings import (
    BindingSink,
    FileBinding,
    drop_voided_records,
    select_sound_records,
    void_run,
)
from ckpttools.stores.checksums import BLOCK_BYTES, MAX_BLOCKS, sample_starts
from ckpttools.stores.local.data_files import LocalDataFiles, WrittenFiles
from ckpttools.stores.local.staging import LocalWork
from ckpttools.stores.objects.staging import ObjectWork
from ckpttools.testing.models import LlamaSizes, write_llama

SHAPE, COUNT = (256, 256), 12
DATA = "content/0/items/d/data"
LLAMA = LlamaSizes(layers=2, hidden=64, mlp=128, heads=4, kv_heads=2, head_dim=16, vocab=256)


class StopError(Exception):
    """Stops a run at a chosen moment."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of nonzero arrays, one array of zeros, and one array that ends with zeros."""
    location = tmp_path_factory.mktemp("source") / "model"
    location.mkdir()
    rng = np.random.default_rng(0)
    arrays = {f"w{i:02}": rng.uniform(1, 2, SHAPE).astype(np.float32) for i in range(COUNT)}
    arrays["z0"], arrays["z1"] = np.zeros(SHAPE, np.float32), arrays["w00"].copy()
    arrays["z1"][3:] = 0
    save_file(arrays, location / "model.safetensors")
    (location / "config.json").write_text("{}")
    return location


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    """A model with more bytes than one request of an upload takes."""
    location = tmp_path_factory.mktemp("source") / "large"
    location.mkdir()
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.uniform(1, 2, (1024, 512)).astype(np.float32) for i in range(5)}
    save_file(arrays, location / "model.safetensors")
    (location / "config.json").write_text("{}")
    return location


def stop_after(count):
    seen = []

    def observe(event):
        seen.extend([event] * isinstance(event, TaskDone))
        if len(seen) >= count:
            raise StopError

    return observe


def content(location):
    """Return the content of all files except the one with the save's timestamp."""
    return {
        name: data for name, data in files_in(location).items() if not name.endswith("_CHECKPOINT_METADATA")
    }


def convert(source, location, **options):
    with suppress(StopError):
        ckpttools.convert(source, location, format="orbax", jobs=1, **options)


def remove(file):
    file.unlink()


def cut(part):
    def act(file):
        os.truncate(file, int(file.stat().st_size * part))

    return act


def cut_and_extend(file):
    size = file.stat().st_size
    os.truncate(file, size // 3)
    os.truncate(file, size)


def clear(file):
    size = file.stat().st_size
    os.truncate(file, 0)
    os.truncate(file, size)


def replace_with_zeros(file):
    size = file.stat().st_size
    file.with_name("other").write_bytes(bytes(size))
    file.with_name("other").replace(file)


def replace_with_copy(file):
    data = bytearray(file.read_bytes())
    # Change everything except the samples.
    for start in range(4096, len(data) - 8192, 4096):
        data[start : start + 1024] = b"x" * 1024
    file.with_name("other").write_bytes(data)
    file.with_name("other").replace(file)


def remove_directory(file):
    shutil.rmtree(file.parent)


DAMAGE = [
    remove,
    cut(0),
    cut(1 / 3),
    cut(0.9),
    lambda file: os.truncate(file, file.stat().st_size - 1),
    cut_and_extend,
    clear,
    replace_with_zeros,
    replace_with_copy,
    remove_directory,
]
NAMES = ["removed", "empty", "third", "most", "byte", "extended", "cleared", "zeros", "copy", "directory"]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    location = tmp_path_factory.mktemp("whole") / "out"
    convert(model, location)
    return content(location)


@pytest.mark.parametrize("damage", DAMAGE, ids=NAMES)
class TestResumedWork:
    """Records of lost data stay void, however often the work is resumed."""

    def test_convert_rewrites_lost_data(self, model, whole, tmp_path, damage):
        out, data = tmp_path / "out", tmp_path / "out.partial" / DATA
        convert(model, out, observe=stop_after(9))
        damage(data)
        convert(model, out, observe=stop_after(2))
        convert(model, out, observe=stop_after(1))
        convert(model, out)
        assert content(out) == whole

    def test_parts_rewrite_lost_data(self, model, whole, tmp_path, damage):
        out, data, plan = tmp_path / "out", tmp_path / "out.partial" / DATA, tmp_path / "plan"
        run("plan", "-o", plan, "convert", "to-orbax", model, out)
        for part in ("0/3", "1/3", "2/3"):
            run("run", plan, "--part", part)
        damage(data)
        # In this order, a part whose own records may all be sound creates the file again.
        run("run", plan, "--part", "0/3")
        refused = ckpt("run", plan, "--publish")
        assert refused.exit_code == 2 and "tasks are missing" in refused.output
        for part in ("1/3", "2/3"):
            run("run", plan, "--part", part)
        run("run", plan, "--publish")
        assert content(out) == whole

    def test_copy_rewrites_lost_data(self, model, tmp_path, damage, monkeypatch):
        monkeypatch.setattr("ckpttools.copying.transfer.PIECE_BYTES", 1 << 20)
        out = tmp_path / "out"
        data = tmp_path / "out.partial" / "content" / "model.safetensors"

        def stop_at(nbytes):
            def observe(done, total):
                if done > nbytes:
                    raise StopError

            return observe

        for nbytes in (2 << 20, 1 << 20):
            with suppress(StopError):
                ckpttools.copy(model, out, jobs=1, observe=stop_at(nbytes))
            if data.exists():
                damage(data)
        ckpttools.copy(model, out, verify=True)
        assert content(out) == content(model)


def test_plan_status_ignores_voided_records(model, tmp_path):
    out, plan = tmp_path / "out", tmp_path / "plan"
    run("plan", "-o", plan, "convert", "to-orbax", model, out)
    run("run", plan, "--part", "0/1")
    (tmp_path / "out.partial" / DATA).unlink()
    assert ckpt("run", plan, "--publish").exit_code == 2
    assert ckpttools.plan_status(plan).tasks_done == 0


def test_convert_resumes_undamaged_work(model, whole, tmp_path):
    convert(model, tmp_path / "out", observe=stop_after(9))
    receipt = ckpttools.convert(model, tmp_path / "out", format="orbax")
    assert receipt.tasks_resumed >= 8 and content(tmp_path / "out") == whole


def test_convert_resumes_work_moved_to_another_disk(model, whole, tmp_path):
    """The directory and all files have other identities, so the samples decide."""
    convert(model, tmp_path / "out", observe=stop_after(9))
    shutil.copytree(tmp_path / "out.partial", tmp_path / "copied")
    (tmp_path / "out.partial").rename(tmp_path / "kept")
    (tmp_path / "copied").rename(tmp_path / "out.partial")
    receipt = ckpttools.convert(model, tmp_path / "out", format="orbax")
    assert receipt.tasks_resumed >= 8 and content(tmp_path / "out") == whole


zeros_or_data = st.binary(min_size=1, max_size=80) | st.integers(1, 80).map(bytes)


@given(pieces=st.lists(zeros_or_data, min_size=1, max_size=5), order=st.randoms(), at=st.integers(0, 400))
@settings(deadline=None)
def test_bindings_detect_any_truncation(tmp_path_factory, pieces, order, at):
    """After a cut and an extension, the record is void or the bytes are unchanged."""
    location = tmp_path_factory.mktemp("work")
    size = sum(map(len, pieces))
    writes = [(sum(map(len, pieces[:number])), data) for number, data in enumerate(pieces)]
    order.shuffle(writes)
    files = LocalDataFiles(location, {"f": size}, {})
    sink = BindingSink(files)
    for offset, data in writes:
        sink.write("f", offset, memoryview(data), 1)
    bindings = sink.bindings
    files.close()
    assert [FileBinding.from_text(binding).to_text() for binding in bindings] == list(bindings)
    before = (location / "f").read_bytes()
    os.truncate(location / "f", min(at, size))
    os.truncate(location / "f", size)
    entered = []
    work = _Entered(parse(location), [[0, "", list(bindings), "run"]], entered.extend)
    records, has_voided = select_sound_records(work)
    if at >= size:
        assert not has_voided and len(records) == 1
    elif (location / "f").read_bytes() != before:
        assert has_voided and not records
    # A hole in place of zeros may be reported or not.
    if has_voided:
        assert not records
        assert drop_voided_records([*work.records, *entered]) == []


@dataclass
class _Entered:
    content: object
    records: object
    record: object


def test_void_record_keeps_later_records(tmp_path):
    records = [[0, "", [], "a"], [1, "", [], "a"], [0, "", [], "b"], [2, "", [], "c"], [-1, [["a", 0]]]]
    assert drop_voided_records(records) == [records[1], records[2], records[3]]
    assert drop_voided_records([*records, void_run("c")]) == [records[1], records[2]]


def test_records_without_bindings_are_ignored(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 10)
    records = [[0, [], {}], [1, "digest"], [2, "", ["broken"], "a"]]
    work = _Entered(parse(tmp_path), records, lambda item: None)
    assert select_sound_records(work)[0] == []


# -- while a command writes


def rename_directory(file):
    file.parents[3].rename(file.parents[3].with_name("moved"))


def replace_directory(file):
    top = file.parents[3]
    shutil.copytree(top, top.with_name("copied"))
    top.rename(top.with_name("moved"))
    top.with_name("copied").rename(top)


def replace_with_link(file):
    file.rename(file.with_name("other"))
    file.symlink_to("elsewhere")


ACTS = [remove, cut(0.5), replace_with_zeros, replace_with_copy, rename_directory, replace_directory]
ACTS += [remove_directory, replace_with_link, lambda file: shutil.rmtree(file.parents[3])]
ACT_NAMES = ["removed", "cut", "zeros", "copy", "moved", "staging-copied", "directory", "link", "all"]


@pytest.mark.parametrize("act", ACTS, ids=ACT_NAMES)
@pytest.mark.parametrize("moment", [TaskDone, Publishing])
class TestDamageDuringWrite:
    """The command fails, and an old checkpoint keeps its name."""

    @pytest.mark.parametrize("is_replacing", [False, True], ids=["new", "overwrite"])
    def test_convert_fails_and_keeps_the_old_checkpoint(self, model, tmp_path, act, moment, is_replacing):
        out = tmp_path / "out"
        old = {}
        if is_replacing:
            convert(model, out)
            old = content(out)
        done = []

        def observe(event):
            if isinstance(event, moment) and not done and (tmp_path / "out.partial" / DATA).exists():
                done.append(event)
                act(tmp_path / "out.partial" / DATA)

        with pytest.raises(StorageError) as error:
            ckpttools.convert(model, out, format="orbax", overwrite=is_replacing, observe=observe, jobs=1)
        assert done and error.value.exit_code == 5
        assert content(out) == old if is_replacing else not out.exists()


def test_convert_detects_truncation_hidden_by_a_later_write(model, tmp_path):
    """The file is truncated before the last task, which would extend it again."""
    seen = []

    def observe(event):
        seen.extend([event] * isinstance(event, TaskDone))
        if isinstance(event, TaskDone) and len(seen) == COUNT + 1:
            os.truncate(tmp_path / "out.partial" / DATA, 0)

    with pytest.raises(StorageError, match="was removed, replaced or cut"):
        ckpttools.convert(model, tmp_path / "out", format="orbax", observe=observe, jobs=1)
    assert not (tmp_path / "out").exists()


def test_convert_stops_if_a_link_in_the_path_changes(model, tmp_path):
    for name in ("s1", "s2"):
        (tmp_path / name).mkdir()
    link = tmp_path / "current"
    link.symlink_to("s1")

    def observe(event):
        if isinstance(event, TaskDone) and link.readlink().name == "s1":
            link.unlink()
            link.symlink_to("s2")

    with pytest.raises(StorageError, match="was removed, moved or replaced while it was written"):
        ckpttools.convert(
            model, link / "out", format="safetensors", max_shard_size="1MB", observe=observe, jobs=1
        )
    assert list((tmp_path / "s2").iterdir()) == []
    assert not (tmp_path / "s1" / "out").exists()


def assert_overwrite_keeps_old(model, out, monkeypatch, owner, method, lose):
    """Overwriting fails and keeps the old checkpoint while `lose` replaces a method, and then succeeds."""
    convert(model, out)
    old = content(out)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, lose)
        with pytest.raises(StorageError, match="was removed, replaced or cut while it was written"):
            ckpttools.convert(model, out, format="orbax", overwrite=True)
    assert content(out) == old
    ckpttools.convert(model, out, format="orbax", overwrite=True)
    assert content(out) == old and not out.with_name("out.partial").exists()


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "d/data"])
def test_convert_checks_files_before_publishing(model, tmp_path, monkeypatch, name):
    """A file is lost after it was written and before the checkpoint is published."""
    publish = LocalWork.publish_checked

    def lose(self, check):
        (tmp_path / "out.partial" / "content/0/items" / name).unlink()
        publish(self, check)

    assert_overwrite_keeps_old(model, tmp_path / "out", monkeypatch, LocalWork, "publish_checked", lose)


@pytest.mark.parametrize("swaps", [True, False], ids=["exchange", "two renames"])
def test_overwrite_restores_old_checkpoint_if_files_are_lost(model, tmp_path, monkeypatch, swaps):
    """The new checkpoint is checked under its name before the old one is deleted."""
    if not swaps:
        monkeypatch.setattr("ckpttools.stores.local.directory.exchange", lambda a, b: False)
    check = WrittenFiles.check

    def lose(self, names=None, directory=None):
        if directory is not None:
            (directory / "0/items/d/data").unlink()
        check(self, names, directory)

    assert_overwrite_keeps_old(model, tmp_path / "out", monkeypatch, WrittenFiles, "check", lose)


def test_failed_check_restores_old_directory(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()

    def fail():
        raise StorageError("not what was written")

    with staging_of(parse(tmp_path / "out"), overwrite=True).opened(JobInfo("plan")) as work:
        (work.content / "new").write_bytes(b"x")
        with pytest.raises(StorageError, match="not what was written"):
            work.publish_checked(fail)
        assert [item.name for item in (tmp_path / "out").iterdir()] == ["old"]


LAYOUTS = {
    "shards": {"format": "safetensors", "max_shard_size": "1MB"},
    "chunk files": {"format": "orbax", "ocdbt": False},
    "compressed": {"format": "orbax", "compression": "zstd"},
    "compressed files": {"format": "orbax", "ocdbt": False, "compression": "zstd"},
    "zarr": {"format": "zarr3"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayouts:
    """The same for many files and for growing files."""

    def files(self, tmp_path):
        """Return the large files of an unfinished checkpoint, newest first."""
        files = (tmp_path / "out.partial" / "content").rglob("*")
        data = [file for file in files if file.is_file() and file.stat().st_size > 4096]
        return sorted(data, key=lambda file: -file.stat().st_mtime_ns)

    @pytest.mark.parametrize("act", [remove, cut(0.5), replace_with_zeros], ids=["removed", "cut", "zeros"])
    @pytest.mark.parametrize("which", [0, -1], ids=["last", "first"])
    def test_convert_rewrites_lost_files(self, model, tmp_path, layout, act, which):
        convert_as(model, tmp_path / "whole", layout)
        convert_as(model, tmp_path / "out", layout, observe=stop_after(9))
        act(self.files(tmp_path)[which])
        convert_as(model, tmp_path / "out", layout, observe=stop_after(2))
        convert_as(model, tmp_path / "out", layout)
        ckpttools.verify(tmp_path / "whole", tmp_path / "out")
        assert ckpttools.hash(tmp_path / "out").digest == ckpttools.hash(tmp_path / "whole").digest

    @pytest.mark.parametrize("act", [remove, cut(0.5), replace_with_zeros], ids=["removed", "cut", "zeros"])
    @pytest.mark.parametrize("which", [0, -1], ids=["last", "first"])
    def test_convert_fails_if_data_is_lost_before_publishing(self, model, tmp_path, layout, act, which):
        done = []

        def observe(event):
            if isinstance(event, Publishing) and not done:
                act(self.files(tmp_path)[which])
                done.append(event)

        with pytest.raises(StorageError, match="was removed, replaced or cut"):
            convert_as(model, tmp_path / "out", layout, observe=observe)
        assert done and not (tmp_path / "out").exists()


def convert_as(source, location, layout, **options):
    with suppress(StopError):
        ckpttools.convert(source, location, jobs=1, **LAYOUTS[layout], **options)


@pytest.mark.parametrize("is_replacing", [False, True], ids=["new", "overwrite"])
def test_convert_detects_deleted_object(model, cloud, is_replacing):
    """The checkpoint is not published, and the same command rewrites the lost object."""
    location = parse(f"{cloud.scheme}://{cloud.bucket}/out")
    if is_replacing:
        ckpttools.convert(model, location, format="orbax")
    digest = ckpttools.hash(model).digest
    done = []

    def observe(event):
        if isinstance(event, Publishing) and not done:
            top = parse(f"{location}.partial/content") if is_replacing else location
            name = next(name for name, status in top.walk() if status.size > 100_000)
            top.store.remove((top / name).key)
            done.append(name)

    with pytest.raises(StorageError, match="was removed or replaced while the checkpoint was written"):
        ckpttools.convert(model, location, format="orbax", overwrite=is_replacing, observe=observe)
    if is_replacing:
        assert ckpttools.hash(location).digest == digest
    ckpttools.convert(model, location, format="orbax", overwrite=is_replacing)
    assert ckpttools.hash(location).digest == digest


def grow(file, tmp_path):
    os.truncate(file, file.stat().st_size + 4096)


def link_elsewhere(file, tmp_path):
    (tmp_path / "victim").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(tmp_path / "victim")


def link_directory_elsewhere(file, tmp_path):
    shutil.copytree(file.parent, tmp_path / "victims")
    shutil.rmtree(file.parent)
    file.parent.symlink_to(tmp_path / "victims")


def add_foreign_file(file, tmp_path):
    file.with_name("generation_config.json").write_text("{}")


def punch_hole(file, start, length):
    """Deallocate a range of a file, and keep its size and its modification time."""
    before = file.stat()
    command = ["fallocate", "--punch-hole", "--offset", str(start), "--length", str(length), str(file)]
    try:
        is_done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        is_done = False
    with file.open("rb") as opened:
        if not is_done or opened.seek(start, os.SEEK_HOLE) != start:
            pytest.skip("the file system has no holes")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("format", ["safetensors", "zarr3", "orbax"])
def test_convert_rewrites_holes(model, tmp_path, monkeypatch, format):
    """No sample is in the hole."""
    out = tmp_path / "out"
    file = TestForeignContent().interrupted(model, out, format, monkeypatch)
    punch_hole(file, 65536, 16384)
    receipt = ckpttools.convert(model, out, format=format)
    assert receipt.tasks_resumed > 0
    ckpttools.convert(model, tmp_path / "expected", format=format)
    assert content(out) == content(tmp_path / "expected")


class TestForeignContent:
    """Files that another process changed or added between two runs."""

    FORMATS = ("safetensors", "zarr3", "orbax")

    def interrupted(self, model, out, format, monkeypatch):
        def stop(*arguments):
            raise StopError

        with monkeypatch.context() as patch, suppress(StopError):
            patch.setattr(LocalWork, "publish_checked", stop)
            ckpttools.convert(model, out, format=format)
        files = (out.with_name(out.name + ".partial") / "content").rglob("*")
        return max((file for file in files if file.is_file()), key=lambda file: file.stat().st_size)

    @pytest.mark.parametrize("format", FORMATS)
    def test_convert_truncates_files_that_have_grown(self, model, tmp_path, monkeypatch, format):
        grow(self.interrupted(model, tmp_path / "out", format, monkeypatch), tmp_path)
        ckpttools.convert(model, tmp_path / "out", format=format)
        ckpttools.convert(model, tmp_path / "expected", format=format)
        assert content(tmp_path / "out") == content(tmp_path / "expected")

    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize(
        ("act", "words"),
        [
            (link_elsewhere, "is a symbolic link"),
            (link_directory_elsewhere, "is a symbolic link"),
            (add_foreign_file, "is not a file of the checkpoint"),
        ],
    )
    def test_convert_refuses_foreign_files(self, model, tmp_path, monkeypatch, format, act, words):
        out = tmp_path / "out"
        file = self.interrupted(model, out, format, monkeypatch)
        if act is link_directory_elsewhere and file.parent.name == "content":
            pytest.skip("the format has no directories")
        act(file, tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("victim*/*") if path.is_file()}
        with pytest.raises(UsageError, match=words):
            ckpttools.convert(model, out, format=format)
        assert before == {path: path.read_bytes() for path in before}
        assert not out.exists()

    def test_convert_detects_file_that_grows_before_publishing(self, model, tmp_path):
        def observe(event):
            if isinstance(event, Publishing):
                grow(tmp_path / "out.partial" / DATA, tmp_path)

        with pytest.raises(StorageError, match="was removed, replaced or cut while it was written"):
            ckpttools.convert(model, tmp_path / "out", format="orbax", observe=observe)

    def test_temporarily_redirected_link_is_not_read(self, model, tmp_path):
        """The link leads to the planned file before and after the run."""
        shutil.copytree(model, tmp_path / "blobs")
        (tmp_path / "other").write_bytes(
            bytes(1 << 20) + (model / "model.safetensors").read_bytes()[1 << 20 :]
        )
        (tmp_path / "model").mkdir()
        for file in (tmp_path / "blobs").iterdir():
            (tmp_path / "model" / file.name).symlink_to(file)
        file = parse(tmp_path / "model" / "model.safetensors").open()
        link = tmp_path / "model" / "model.safetensors"
        link.unlink()
        link.symlink_to(tmp_path / "other")
        with pytest.raises(SourceChangedError, match="another file has the name"):
            file.read(0, 16)


@pytest.mark.parametrize(
    ("is_replacing", "size"), [(False, "1MB"), (True, "20MB")], ids=["one-request-new", "multipart-overwrite"]
)
def test_convert_detects_replaced_object_on_resume(large_model, cloud, monkeypatch, is_replacing, size):
    """An object of the same size that the plan has not written is never published."""
    model = large_model
    location = parse(f"{cloud.scheme}://{cloud.bucket}/out")
    options = {"format": "orbax", "target_data_file_size": size, "overwrite": is_replacing}
    if is_replacing:
        ckpttools.convert(model, location, format="orbax")

    def stop(*arguments):
        raise StopError

    with monkeypatch.context() as patch, suppress(StopError):
        patch.setattr(ObjectWork, "publish", stop)
        ckpttools.convert(model, location, **options)
    top = parse(f"{location}.partial/content") if is_replacing else location
    name, status = max(top.walk(), key=lambda item: item[1].size)
    (top / name).put(b"x" * status.size)
    with pytest.raises(CheckpointError, match="was written by another process in the meantime"):
        ckpttools.convert(model, location, **options)
    top.store.remove((top / name).key)
    receipt = ckpttools.convert(model, location, **options)
    assert receipt.tasks_resumed > 0 or size == "20MB"
    assert ckpttools.hash(location).digest == ckpttools.hash(model).digest


def test_convert_detects_object_replaced_before_publishing(model, cloud):
    location = parse(f"{cloud.scheme}://{cloud.bucket}/out")
    done = []

    def observe(event):
        if isinstance(event, Publishing) and not done:
            name, status = max(location.walk(), key=lambda item: item[1].size)
            (location / name).put(b"x" * status.size)
            done.append(name)

    with pytest.raises(StorageError, match="was removed or replaced while the checkpoint was written"):
        ckpttools.convert(model, location, format="orbax", observe=observe)


class TestChangedSource:
    """The size, the times and all sampled bytes of the source stay the same."""

    @pytest.fixture
    def source(self, model, tmp_path):
        shutil.copytree(model, tmp_path / "source")
        return tmp_path / "source"

    def change(self, source):
        file = source / "model.safetensors"
        before = file.stat()
        data = bytearray(file.read_bytes())
        for number in range(COUNT):
            # The middle of each array, where no sample is taken.
            data[(number << 18) + 90_001] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    def test_convert_discards_data_of_old_source(self, source, tmp_path):
        convert(source, tmp_path / "out", observe=stop_after(9))
        self.change(source)
        convert(source, tmp_path / "out")
        assert ckpttools.hash(tmp_path / "out").digest == ckpttools.hash(source).digest

    def test_convert_to_bucket_discards_data_of_old_source(self, source, cloud):
        location = parse(f"{cloud.scheme}://{cloud.bucket}/out")
        options = {"format": "orbax", "target_data_file_size": "1MB", "jobs": 1}
        with suppress(StopError):
            ckpttools.convert(source, location, observe=stop_after(9), **options)
        self.change(source)
        ckpttools.convert(source, location, **options)
        assert ckpttools.hash(location).digest == ckpttools.hash(source).digest

    def test_convert_resumes_if_source_is_unchanged(self, source, tmp_path):
        convert(source, tmp_path / "out", observe=stop_after(9))
        assert ckpttools.convert(source, tmp_path / "out", format="orbax").tasks_resumed >= 8

    @pytest.mark.parametrize("is_renamed", [False, True], ids=["in-place", "renamed"])
    @pytest.mark.parametrize("is_killed_at", ["publish_checked", "finalize"])
    def test_reference_uses_one_state_of_the_source(self, tmp_path, monkeypatch, is_renamed, is_killed_at):
        source, out = tmp_path / "hf", tmp_path / "out"
        write_llama(source, LLAMA)
        self.interrupt(
            monkeypatch, is_killed_at, lambda: ckpttools.hf_to_maxtext(source, out, reference=True)
        )
        self.change_tail(source, is_renamed)
        if is_killed_at == "finalize":
            with pytest.raises(SourceChangedError, match="may have changed since an interrupted run"):
                ckpttools.hf_to_maxtext(source, out, reference=True)
        ckpttools.hf_to_maxtext(source, out, reference=True, overwrite=is_killed_at == "finalize")
        ckpttools.hf_to_maxtext(source, tmp_path / "expected")
        assert ckpttools.hash(out).digest == ckpttools.hash(tmp_path / "expected").digest
        assert not (tmp_path / "out.partial").exists()

    def test_reference_resumes_if_source_is_unchanged(self, tmp_path, monkeypatch):
        source, out = tmp_path / "hf", tmp_path / "out"
        write_llama(source, LLAMA)
        self.interrupt(
            monkeypatch, "publish_checked", lambda: ckpttools.hf_to_maxtext(source, out, reference=True)
        )
        assert ckpttools.hf_to_maxtext(source, out, reference=True).tasks_resumed > 0

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_published_checkpoint_of_older_source_is_not_complete(
        self, source, tmp_path, monkeypatch, overwrite
    ):
        out = tmp_path / "out"
        self.interrupt(monkeypatch, "finalize", lambda: convert(source, out))
        self.change(source)
        if not overwrite:
            with pytest.raises(SourceChangedError, match="may have changed since an interrupted run"):
                convert(source, out)
            return
        convert(source, out, overwrite=True)
        assert ckpttools.hash(out).digest == ckpttools.hash(source).digest

    def test_overwrite_replaces_published_checkpoint_if_source_has_new_time(
        self, source, tmp_path, monkeypatch
    ):
        out = tmp_path / "out"
        self.interrupt(monkeypatch, "finalize", lambda: convert(source, out))
        self.change(source)
        os.utime(source / "model.safetensors")
        convert(source, out, overwrite=True)
        assert ckpttools.hash(out).digest == ckpttools.hash(source).digest

    @pytest.mark.parametrize("act", ["change", "chmod", "link", "change and link"])
    def test_convert_repeats_tasks_if_status_time_changes(self, source, tmp_path, act):
        """Also in place of a copy with `cp -p`, which keeps the inode, the size and the time."""
        started, done = [], []

        def observe(event):
            started.extend([event] * isinstance(event, Started))
            done.extend([event] * isinstance(event, TaskDone))
            if len(done) == 4 and isinstance(event, TaskDone):
                if "change" in act:
                    self.change(source)
                if "chmod" in act:
                    (source / "model.safetensors").chmod(0o640)
                if "link" in act:
                    os.link(source / "model.safetensors", tmp_path / "link")

        convert(source, tmp_path / "out", observe=observe)
        assert len(started) == 2
        assert ckpttools.hash(tmp_path / "out").digest == ckpttools.hash(source).digest

    def test_convert_stops_if_the_source_keeps_changing(self, source, tmp_path):
        def observe(event):
            if isinstance(event, TaskDone):
                (source / "model.safetensors").chmod(0o640)

        with pytest.raises(SourceChangedError, match=r"model\.safetensors was changed while it was read"):
            convert(source, tmp_path / "out", observe=observe)
        assert not (tmp_path / "out").exists()

    def interrupt(self, monkeypatch, method, act):
        """Run `act`, and stop before a method of the work as a kill does."""

        def stop(*arguments):
            raise StopError

        with monkeypatch.context() as patch:
            patch.setattr(LocalWork, method, stop)
            with suppress(StopError):
                act()

    def change_tail(self, source, is_renamed):
        """Change one bit of each array where no sample is taken."""
        file = source / "model.safetensors"
        before, data = file.stat(), bytearray(file.read_bytes())
        starts = sample_starts(len(data), MAX_BLOCKS)
        for at in range(len(data) // 3, len(data) - 1, 20_000):
            if not any(start <= at < start + BLOCK_BYTES for start in starts):
                data[at // 2 * 2] ^= 1
        if is_renamed:
            file.with_name("other").write_bytes(data)
            file.with_name("other").replace(file)
        else:
            file.write_bytes(data)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
