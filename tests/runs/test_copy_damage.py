"""A copy has the bytes of its source, whatever other processes change before, during and after it."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.internals import parse
from support.object_stores import files_in
from support.web_server import web_server

import ckpttools
from ckpttools import CheckpointError, DestinationExistsError, SourceChangedError, StorageError
from ckpttools.copying import execute, prepared, transfer
from ckpttools.stores import evidence
from ckpttools.stores.base import FileKind, Status
from ckpttools.stores.local.staging import LocalWork
from ckpttools.stores.objects import store as object_store
from ckpttools.stores.objects.staging import ObjectWork
from ckpttools.stores.objects.store import ObjectFile, is_proven_copy

WEIGHTS, CONFIG = "model.safetensors", "config.json"
AT = 600_000
# tmpfs, squashfs, NFS, FUSE, exFAT, overlay
FOREIGN_CTIMES = ("tmpfs", "squashfs", "nfs4", "fuse.sshfs", "exfat", "overlay", "")
SHARED_MEMORY = Path("/dev/shm")


class StopError(Exception):
    """Ends a copy at a chosen moment."""


@pytest.fixture(autouse=True)
def own_records(monkeypatch, tmp_path):
    """Records of this test alone. New files count as old ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(evidence, "_RECENT_NS", 0)


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


def make_model(location):
    location.mkdir()
    values = np.random.default_rng(1).standard_normal(300_000).astype(np.float32)
    save_file({"w": values}, location / WEIGHTS)
    (location / CONFIG).write_text('{"a": 1}')
    return location


def damage(file, at=AT, keep_times=False):
    """Change some bytes in place."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        data = opened.read(64)
        opened.seek(at)
        opened.write(bytes(byte ^ 1 for byte in data))
    if keep_times:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@contextmanager
def mapped(file):
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as pages:
        yield pages


def stop_before_publishing(monkeypatch, source, out):
    def stop(self, check):
        raise StopError

    with monkeypatch.context() as patch, suppress(StopError):
        patch.setattr(LocalWork, "publish_checked", stop)
        ckpttools.copy(source, out)
    return out.with_name(f"{out.name}.partial") / "content"


class TestEvidence:
    def test_web_server_tags_are_not_evidence(self, model, tmp_path):
        with web_server() as web:
            web.add("model", model)
            source = f"http://{web.address}/model"
            ckpttools.copy(source, tmp_path / "out")
            (part,) = ckpttools.copy(source, tmp_path / "out").parts
        assert (part.files_unchanged, part.files_compared) == (0, 2)

    @settings(max_examples=50)
    @given(scheme=st.sampled_from(("http", "https", "s3", "gs", "az", "hf")), version=st.text(max_size=12))
    def test_only_content_or_generation_is_evidence(self, scheme, version):
        location = parse(f"{scheme}://a/b/c")
        for item in (version, f"W/{version}", f'W/"{version}"', f'"{version}"'):
            stamp = evidence.get_stamp(location, Status(FileKind.FILE, 3, item))
            is_strong = item != "" and not item.startswith(("W/", "changed "))
            assert stamp.is_evidence == (is_strong and not scheme.startswith("http"))

    @pytest.mark.parametrize("kind", ["ext4", "btrfs", *FOREIGN_CTIMES])
    def test_ctime_counts_on_known_file_systems(self, model, monkeypatch, kind):
        monkeypatch.setattr(evidence, "file_system_type", lambda path, device: kind)
        status = parse(model / WEIGHTS).stat()
        assert evidence.get_stamp(parse(model / WEIGHTS), status).is_evidence == (kind not in FOREIGN_CTIMES)

    def test_read_only_file_system_has_no_evidence(self, model, monkeypatch):
        class ReadOnly:
            f_flag = os.ST_RDONLY

        monkeypatch.setattr(os, "fstatvfs", lambda descriptor: ReadOnly)
        assert evidence.get_stamp(parse(model / WEIGHTS), parse(model / WEIGHTS).stat()).evidence == ""

    @pytest.mark.parametrize("directory", ["disk", "memory"])
    def test_copy_detects_writes_to_a_page_that_was_dirty(self, tmp_path, directory):
        if directory == "memory" and not SHARED_MEMORY.is_dir():
            pytest.skip("no tmpfs")
        parent = SHARED_MEMORY if directory == "memory" else tmp_path
        with tempfile.TemporaryDirectory(dir=parent) as location:
            source, out = make_model(Path(location, "model")), tmp_path / "out"
            with mapped(source / WEIGHTS) as pages:
                pages[AT] ^= 1
                ckpttools.copy(source, out)
                pages[AT] ^= 255
                with pytest.raises(DestinationExistsError, match="differs in content"):
                    ckpttools.copy(source, out)


class TestChangedDestination:
    @pytest.mark.parametrize("keep_times", [False, True])
    @pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
    @pytest.mark.parametrize("moment", ["publish_checked", "finalize"])
    def test_copy_fails_if_its_copy_is_damaged(self, model, tmp_path, monkeypatch, moment, name, keep_times):
        original, out = getattr(LocalWork, moment), tmp_path / "out"

        def act(self, *arguments):
            at = 3 if name == CONFIG else AT
            damage(Path(self.content.key if moment == "publish_checked" else out, name), at, keep_times)
            return original(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(LocalWork, moment, act)
            with pytest.raises(StorageError, match="differs from what was written"):
                ckpttools.copy(model, out)
        with suppress(CheckpointError):
            ckpttools.copy(model, out)
            assert files_in(out) == files_in(model)

    def test_copy_does_not_record_objects_that_changed(self, model, cloud, monkeypatch):
        original, target = ObjectWork.finalize, f"{cloud.scheme}://{cloud.bucket}/out"

        def act(self):
            original(self)
            data = bytearray((model / WEIGHTS).read_bytes())
            data[AT] ^= 1
            cloud.put({f"out/{WEIGHTS}": bytes(data)})

        with monkeypatch.context() as patch:
            patch.setattr(ObjectWork, "finalize", act)
            with suppress(StorageError):
                ckpttools.copy(model, target)
        with pytest.raises(DestinationExistsError, match="differs in content"):
            ckpttools.copy(model, target)


class TestLinks:
    @pytest.mark.parametrize("verify", [False, True])
    @pytest.mark.parametrize("kind", ["absolute", "relative", "chain", "one", "hard"])
    def test_links_out_of_the_destination_are_not_a_copy(self, model, tmp_path, kind, verify):
        out = tmp_path / "out"
        shutil.copytree(model, out)
        for name in (WEIGHTS,) if kind == "one" else (WEIGHTS, CONFIG):
            target = model / name
            if kind == "chain":
                (tmp_path / name).symlink_to(target)
                target = tmp_path / name
            (out / name).unlink()
            if kind == "hard":
                os.link(target, out / name)
                continue
            (out / name).symlink_to(f"../model/{name}" if kind == "relative" else target)
        with pytest.raises(DestinationExistsError) as refused:
            ckpttools.copy(model, out, verify=verify)
        assert f"is a link to {model}" in str(refused.value)
        expected = files_in(model)
        ckpttools.copy(model, out, verify=verify, overwrite=True)
        assert files_in(model) == expected
        shutil.rmtree(model)
        assert files_in(out) == expected

    def test_links_inside_the_destination_are_a_copy(self, model, tmp_path):
        shutil.copy(model / CONFIG, model / "second.json")
        shutil.copytree(model, tmp_path / "out")
        (tmp_path / "out" / "second.json").unlink()
        (tmp_path / "out" / "second.json").symlink_to(CONFIG)
        (part,) = ckpttools.copy(model, tmp_path / "out").parts
        assert part.outcome == "there already"


class TestChangedSource:
    @pytest.mark.parametrize("verify", [False, True])
    @pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
    def test_copy_refuses_a_rewrite_with_the_same_time(self, model, tmp_path, monkeypatch, name, verify):
        """As by `cp -p` from an archive in which all files have one time."""
        original = execute.check_source

        def act(*arguments, **options):
            damage(model / name, 3 if name == CONFIG else AT, keep_times=True)
            original(*arguments, **options)

        monkeypatch.setattr(execute, "check_source", act)
        with pytest.raises(SourceChangedError, match="was changed while it was copied"):
            ckpttools.copy(model, tmp_path / "out", verify=verify)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("change", ["link", "mode"])
    def test_copy_accepts_changes_that_keep_the_content(self, model, tmp_path, monkeypatch, change):
        original = execute.check_source

        def act(*arguments, **options):
            if change == "link":
                os.link(model / WEIGHTS, tmp_path / "another")
            else:
                (model / WEIGHTS).chmod(0o600)
            original(*arguments, **options)

        monkeypatch.setattr(execute, "check_source", act)
        ckpttools.copy(model, tmp_path / "out")
        assert files_in(tmp_path / "out") == files_in(model)

    def test_verify_rereads_files_without_evidence(self, model, tmp_path, monkeypatch):
        if not SHARED_MEMORY.is_dir():
            pytest.skip("no tmpfs")
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as location:
            source = make_model(Path(location, "model"))
            original = transfer._TransferState._verify_all
            with mapped(source / WEIGHTS) as pages:
                pages[AT] ^= 1

                def act(self, pieces):
                    pages[AT] ^= 255
                    return original(self, pieces)

                monkeypatch.setattr(transfer._TransferState, "_verify_all", act)
                with pytest.raises(SourceChangedError):
                    ckpttools.copy(source, tmp_path / "out", verify=True)

    def test_files_of_a_run_are_replaced_after_its_steps(self, model, tmp_path, monkeypatch):
        source, out = tmp_path / "run", tmp_path / "out"
        ckpttools.convert(model / WEIGHTS, source, format="orbax")
        (source / "params.json").write_text("1")
        (source / "metadata").mkdir()
        (source / "metadata" / "a.json").write_text("1")
        ckpttools.copy(source, out)
        before = files_in(out)
        for name in ("params.json", "metadata/a.json"):
            (source / name).write_text("2")
        damage(next((source / "0").rglob("d/data")))

        def fail(*arguments, **options):
            raise StopError

        with monkeypatch.context() as patch:
            patch.setattr(prepared, "copy_part", fail)
            with pytest.raises(StopError):
                ckpttools.copy(source, out, overwrite=True)
        assert files_in(out) == before
        ckpttools.copy(source, out, overwrite=True)
        assert files_in(out) == files_in(source)


class TestResumedCopies:
    @pytest.mark.parametrize("verify", [False, True])
    @pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors.index.json", "a/b"])
    def test_copy_does_not_publish_a_file_of_another_process(
        self, model, tmp_path, monkeypatch, name, verify
    ):
        out = tmp_path / "out"
        extra = stop_before_publishing(monkeypatch, model, out) / name
        extra.parent.mkdir(exist_ok=True)
        extra.write_text("{}")
        with pytest.raises(StorageError, match="was not written by this command"):
            ckpttools.copy(model, out, verify=verify)
        assert not out.exists() and extra.exists()
        extra.unlink()
        ckpttools.copy(model, out, verify=verify)
        assert files_in(out) == files_in(model)

    @pytest.mark.parametrize("at", [0, 4096, 1 << 19, 1_100_000])
    @pytest.mark.parametrize("keep_times", [False, True])
    def test_resumed_copy_rewrites_lost_data(self, model, tmp_path, monkeypatch, at, keep_times):
        monkeypatch.setattr(transfer, "PIECE_BYTES", 1 << 18)
        file = stop_before_publishing(monkeypatch, model, tmp_path / "out") / WEIGHTS
        before = file.stat()
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes(8192))
        if keep_times:
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        (part,) = ckpttools.copy(model, tmp_path / "out").parts
        assert files_in(tmp_path / "out") == files_in(model)
        assert 0 < part.bytes_resumed <= before.st_size - (1 << 17)


class TestBuckets:
    @pytest.mark.parametrize("restored", [False, True])
    @pytest.mark.parametrize("verify", [False, True])
    def test_copy_has_the_opened_version(self, model, cloud, monkeypatch, verify, restored):
        base = f"{cloud.scheme}://{cloud.bucket}"
        ckpttools.copy(model, f"{base}/model")
        content = (model / WEIGHTS).read_bytes()
        original = object_store.copy

        def act(bucket, old, new):
            if old.endswith(WEIGHTS):
                cloud.put({old: content[::-1]})
            original(bucket, old, new)
            if old.endswith(WEIGHTS) and restored:
                cloud.put({old: content})

        monkeypatch.setattr(object_store, "copy", act)
        try:
            ckpttools.copy(f"{base}/model", f"{base}/out", verify=verify)
        except SourceChangedError:
            return
        # Only S3 gives old content its old ETag again.
        assert restored and cloud.scheme == "s3"
        assert (parse(f"{base}/out") / WEIGHTS).read_bytes() == content

    @pytest.mark.parametrize(
        ("tag", "result", "built", "age", "proven"),
        [
            ("0x8D", "0x8D", "0x8E", 0, True),  # Azure: unique to each write
            ("0x8D", "0x8F", "0x8E", 99, False),
            ("a" * 32, "a" * 32, "b" * 32, 1, False),
            ("a" * 32, "a" * 32, "b" * 32, 9, True),  # encrypted: the source is older than the copy
            (f"{'a' * 32}-2", f"{'a' * 32}-2", "b" * 32, 9, True),  # uploaded in parts
            (f"{'a' * 32}-2", f"{'a' * 32}-2", "b" * 32, 4, False),
            ("changed now", "changed now", "changed later", 1, False),
        ],
    )
    def test_only_proven_copies_are_skipped(self, tag, result, built, age, proven):
        source = ObjectFile(parse("s3://a").store, "a/b", Status(FileKind.FILE, 5, tag))
        now = Status(FileKind.FILE, 5, result, modified=10**9)
        copy = Status(FileKind.FILE, 5, built, modified=10**9 * (1 + age))
        assert is_proven_copy(source, now, copy, 3.0) == proven
        assert not is_proven_copy(source, now, copy._replace(size=4), 3.0)
        assert not is_proven_copy(source, now, None, 3.0)
