"""Copying a checkpoint again never mistakes changed content for unchanged content."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt, run
from support.internals import parse
from support.object_stores import files_in

import ckpttools
from ckpttools import DestinationExistsError, SourceChangedError
from ckpttools.stores import evidence

WEIGHTS, CONFIG, OTHER = "model.safetensors", "config.json", "other.safetensors"


class StopError(Exception):
    """Ends a copy at a chosen moment."""


@pytest.fixture(params=["recent", "old"])
def is_old(request, monkeypatch):
    """Whether files are old enough that their ctime is evidence and records count."""
    monkeypatch.setattr(evidence, "_RECENT_NS", 0 if request.param == "old" else 1 << 60)
    return request.param == "old"


@pytest.fixture(autouse=True)
def own_records(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The tests may run on a file system whose ctime is not evidence, such as an overlay.
    monkeypatch.setattr(evidence, "_has_own_ctime", lambda path, descriptor: True)


@pytest.fixture
def model(tmp_path):
    location = tmp_path / "model"
    location.mkdir()
    write(location / WEIGHTS, 1)
    write(location / OTHER, 2)
    (location / CONFIG).write_text('{"a": 1}')
    return location


def write(file, seed, megabytes=2):
    rng = np.random.default_rng(seed)
    save_file({"w" + file.name: rng.standard_normal((megabytes << 18,)).astype(np.float32)}, file)
    time.sleep(0.01)  # longer than a tick of the file system's clock


def keeping_times(act):
    """Return the same change, but restore the file's times afterwards."""

    def changed(file):
        before = file.stat()
        act(file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    return changed


def train(file):
    write(file, 7)


def change_one_bit(file):
    """Change a bit in place, far from the samples."""
    with file.open("r+b") as opened:
        opened.seek(100_003)
        byte = opened.read(1)[0]
        opened.seek(100_003)
        opened.write(bytes([byte ^ 1]))


def replace(file):
    """Replace a file with a changed copy."""
    shutil.copy2(file, file.with_name("new"))
    change_one_bit(file.with_name("new"))
    file.with_name("new").replace(file)


CHANGES = [train, change_one_bit, replace]
CHANGES += [keeping_times(act) for act in CHANGES]
IDS = ["trained", "bit", "replaced", "trained-times", "bit-times", "replaced-times"]


@pytest.mark.parametrize("act", CHANGES, ids=IDS)
class TestChangedContent:
    @pytest.mark.parametrize("name", [WEIGHTS, OTHER])
    def test_copy_replaces_changed_source_only_with_overwrite(self, model, tmp_path, is_old, act, name):
        out = tmp_path / "out"
        ckpttools.copy(model, out)
        before = files_in(out)
        act(model / name)
        for dry in ("--dry-run", "--no-progress"):
            refused = ckpt("copy", model, out, dry)
            assert refused.exit_code == 2 and f"{name} differs in content from" in refused.output
            assert "--overwrite" in refused.output
        assert files_in(out) == before
        assert "copied" in run("copy", model, out, "--overwrite")
        assert files_in(out) == files_in(model) != before

    def test_copy_restores_changed_destination_only_with_overwrite(self, model, tmp_path, is_old, act):
        out = tmp_path / "out"
        ckpttools.copy(model, out)
        act(out / WEIGHTS)
        with pytest.raises(DestinationExistsError, match=f"{WEIGHTS} differs in content"):
            ckpttools.copy(model, out)
        ckpttools.copy(model, out, overwrite=True)
        assert files_in(out) == files_in(model)

    def test_copy_does_not_resume_with_bytes_of_old_source(self, model, tmp_path, is_old, act, monkeypatch):
        monkeypatch.setattr("ckpttools.copying.transfer.PIECE_BYTES", 1 << 20)
        out = tmp_path / "out"

        def observe(done, total):
            if done > 3 << 20:
                raise StopError

        with suppress(StopError):
            ckpttools.copy(model, out, jobs=1, observe=observe)
        act(model / WEIGHTS)
        act(model / OTHER)
        # With other times it is another plan, so it needs `overwrite`.
        ckpttools.copy(model, out, overwrite=True)
        assert files_in(out) == files_in(model)


def test_copy_names_the_changed_step(tmp_path, is_old, model):
    source, out = tmp_path / "run", tmp_path / "out"
    for step in (1, 2):
        ckpttools.convert(model / WEIGHTS, source / "new", format="orbax")
        (source / "new" / "0").rename(source / str(step))
        shutil.rmtree(source / "new")
    ckpttools.copy(source, out)
    data = next((source / "2").rglob("d/data"))
    keeping_times(change_one_bit)(data)
    with pytest.raises(DestinationExistsError, match="d/data differs in content"):
        ckpttools.copy(source, out)
    report = ckpttools.copy(source, out, overwrite=True)
    assert [part.outcome for part in report.parts] == ["there already", "copied"]
    assert files_in(out) == files_in(source)


class TestUnchangedContent:
    def test_copy_skips_unchanged_files(self, model, tmp_path, is_old):
        out = tmp_path / "out"
        ckpttools.copy(model, out)
        (part,) = ckpttools.copy(model, out).parts
        counts = part.files_unchanged, part.files_compared, part.bytes_verified
        assert counts == ((3, 0, 0) if is_old else (0, 3, part.bytes))
        text = run("copy", model, out)
        assert ("3 files unchanged since the last copy" if is_old else "compared byte by byte") in text

    @pytest.mark.parametrize("act", ["touch", "move", "link"])
    def test_copy_compares_content_if_times_differ(self, model, tmp_path, monkeypatch, act):
        monkeypatch.setattr(evidence, "_RECENT_NS", 0)
        out = tmp_path / "out"
        ckpttools.copy(model, out)
        if act == "touch":
            os.utime(model / WEIGHTS)
        elif act == "link":
            os.link(model / WEIGHTS, tmp_path / "another")
        else:
            shutil.copy(model / WEIGHTS, tmp_path / "another")
            (tmp_path / "another").replace(model / WEIGHTS)
        (part,) = ckpttools.copy(model, out).parts
        assert (part.files_unchanged, part.files_compared) == (2, 1)
        # The comparison was recorded.
        (part,) = ckpttools.copy(model, out).parts
        assert (part.files_unchanged, part.files_compared) == (3, 0)

    @pytest.mark.parametrize("damage", ["removed", "garbage", "list", "no directory", "a file", "relative"])
    def test_copy_compares_content_without_a_record(self, model, tmp_path, monkeypatch, damage):
        monkeypatch.setattr(evidence, "_RECENT_NS", 0)
        out = tmp_path / "out"
        if damage == "a file":
            (tmp_path / "cache").touch()
        elif damage == "relative":
            monkeypatch.setenv("XDG_CACHE_HOME", "cache")
        ckpttools.copy(model, out)
        if damage in ("removed", "garbage", "list"):
            (record,) = (tmp_path / "cache" / "ckpttools" / "copies").iterdir()
            record.write_text("[1]" if damage == "list" else "{")
            if damage == "removed":
                record.unlink()
        elif damage == "no directory":
            shutil.rmtree(tmp_path / "cache")
        (part,) = ckpttools.copy(model, out).parts
        assert (part.files_unchanged, part.files_compared) == (0, 3)
        keeping_times(change_one_bit)(model / WEIGHTS)
        with pytest.raises(DestinationExistsError, match="differs in content"):
            ckpttools.copy(model, out)

    def test_verify_compares_all_files(self, model, tmp_path, is_old):
        ckpttools.copy(model, tmp_path / "out")
        (part,) = ckpttools.copy(model, tmp_path / "out", verify=True).parts
        assert (part.files_compared, part.bytes_verified) == (3, part.bytes)

    def test_copy_adds_no_files(self, model, tmp_path, is_old):
        ckpttools.copy(model, tmp_path / "out")
        assert files_in(tmp_path / "out") == files_in(model)


@pytest.mark.parametrize("name", ["model", "renamed"])
def test_copy_compares_another_source_with_the_same_files(model, tmp_path, monkeypatch, name):
    """A record belongs to one source and one copy."""
    monkeypatch.setattr(evidence, "_RECENT_NS", 0)
    ckpttools.copy(model, tmp_path / "out")
    shutil.copytree(model, tmp_path / "second")
    keeping_times(change_one_bit)(tmp_path / "second" / WEIGHTS)
    if name == "model":
        model.rename(tmp_path / "first")
        (tmp_path / "second").rename(model)
        source = model
    else:
        source = tmp_path / "second"
    with pytest.raises(DestinationExistsError, match="differs in content"):
        ckpttools.copy(source, tmp_path / "out")


class TestBuckets:
    def test_copy_to_bucket_compares_content(self, model, gcs, is_old):
        target = f"gs://{gcs.bucket}/model"
        ckpttools.copy(model, target)
        (part,) = ckpttools.copy(model, target).parts
        # The configuration is written last, and compared once.
        assert part.files_unchanged == (2 if is_old else 0)
        (part,) = ckpttools.copy(model, target).parts
        assert part.files_unchanged == (3 if is_old else 0)
        keeping_times(change_one_bit)(model / WEIGHTS)
        with pytest.raises(DestinationExistsError, match="differs in content"):
            ckpttools.copy(model, target)
        ckpttools.copy(model, target, overwrite=True)
        assert (parse(target) / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()

    def test_copy_from_bucket_compares_content(self, model, gcs, tmp_path):
        source, out = f"gs://{gcs.bucket}/model", tmp_path / "out"
        ckpttools.copy(model, source)
        ckpttools.copy(source, out)
        (part,) = ckpttools.copy(source, out).parts
        assert part.files_unchanged == 3
        change_one_bit(model / WEIGHTS)
        ckpttools.copy(model, source, overwrite=True)
        with pytest.raises(DestinationExistsError, match="differs in content"):
            ckpttools.copy(source, out)
        ckpttools.copy(source, out, overwrite=True)
        assert files_in(out) == files_in(model)


@given(
    at=st.integers(0, (1 << 20) + 50),
    keeps=st.booleans(),
    side=st.sampled_from(["source", "copy"]),
    is_old=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_copy_detects_any_changed_byte(tmp_path_factory, at, keeps, side, is_old):
    with pytest.MonkeyPatch.context() as patch:
        if is_old:
            patch.setattr(evidence, "_RECENT_NS", 0)
        location = tmp_path_factory.mktemp("copies")
        (location / "source").mkdir()
        write(location / "source" / WEIGHTS, 1, 1)
        ckpttools.copy(location / "source", location / "copy")

        def change(file):
            data = bytearray(file.read_bytes())
            data[max(200, at) % len(data)] ^= 255
            file.write_bytes(data)

        (keeping_times(change) if keeps else change)(location / side / WEIGHTS)
        with pytest.raises(DestinationExistsError, match="differs in content"):
            ckpttools.copy(location / "source", location / "copy")


def test_copy_reports_source_changed_after_publishing(model, tmp_path, monkeypatch):
    """The copy was killed after it was published and before its journal was deleted."""
    from ckpttools.stores.local.staging import LocalWork

    def stop(self):
        raise StopError

    monkeypatch.setattr(LocalWork, "finalize", stop)
    with suppress(StopError):
        ckpttools.copy(model, tmp_path / "out")
    monkeypatch.undo()
    keeping_times(change_one_bit)(model / WEIGHTS)
    with pytest.raises(SourceChangedError, match="was changed since an earlier run copied it"):
        ckpttools.copy(model, tmp_path / "out")
    ckpttools.copy(model, tmp_path / "out", overwrite=True)
    assert files_in(tmp_path / "out") == files_in(model)
