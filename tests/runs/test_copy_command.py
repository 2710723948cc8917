"""`ckpt copy`: the same bytes, visible once all are there, only what is finished, gone on with."""

from __future__ import annotations

import errno
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from urllib.parse import unquote

import huggingface_hub.constants
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, ended, run, succeed
from support.gcs_server import Fault
from support.internals import LocalStaging, LockedError, parse
from support.kills import killed_several_times
from support.locations import DOCS, GOLDEN, HF, ORBAX, TRAINED
from support.object_stores import files_in
from support.orbax_items import change_json
from support.web_server import web_server

import ckpttools
from ckpttools import (
    DestinationExistsError,
    FormatError,
    MemoryBudgetError,
    NoSpaceError,
    SourceChangedError,
    StorageError,
    UsageError,
)
from ckpttools.copying import pieces, transfer
from ckpttools.formats.orbax import ocdbt, ocdbt_files
from ckpttools.stores.local.journal import remove_mark

SHARDED = GOLDEN / "llama3.1" / "hf_sharded"
RUN = ORBAX / "cm_default"
MAXTEXT_RUN = ORBAX / "maxtext_run"
UNFINISHED = ORBAX / "unfinished_atomic_rename"
COMMIT = "commit_success.txt"


def contents(where) -> dict[str, bytes]:
    location = parse(where)
    location.store.forget(location.key) if hasattr(location.store, "forget") else None
    return {name: (location / name).read_bytes() for name, _ in location.walk()}


def without_commits(files):
    return {name: content for name, content in files.items() if not name.endswith(COMMIT)}


def in_bucket(cloud, name):
    return f"{cloud.scheme}://{cloud.bucket}/{name}"


@pytest.fixture
def run_of_steps(tmp_path):
    """A run with finished steps, to which others are added."""
    source = tmp_path / "run"
    shutil.copytree(RUN, source)
    return source


class TestLocal:
    @pytest.mark.parametrize(
        "source",
        [
            RUN,
            RUN / "5",
            RUN / "5" / "default",
            MAXTEXT_RUN,
            ORBAX / "cm_composite",
            ORBAX / "cm_best_metrics",
            ORBAX / "multihost_plain",
            ORBAX / "pytree_ocdbt0_zarr30",
            ORBAX / "handmade_bare",
            SHARDED,
            HF,
        ],
        ids=lambda path: f"{path.parent.name}/{path.name}",
    )
    def test_copy_writes_identical_files(self, source, tmp_path):
        report = ckpttools.copy(source, tmp_path / "out", verify=True)
        assert files_in(tmp_path / "out") == files_in(source)
        assert sum(part.bytes_verified for part in report.parts) == report.bytes
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_copy_selects_steps(self, tmp_path):
        run("copy", RUN, tmp_path / "a", "--step", "0")
        assert sorted(item.name for item in (tmp_path / "a").iterdir()) == ["0", "metadata"]
        run("copy", RUN, tmp_path / "b", "--latest", "1")
        assert sorted(item.name for item in (tmp_path / "b").iterdir()) == ["5", "metadata"]
        run("copy", RUN, tmp_path / "b", "--step", "0", "--step", "5")
        assert files_in(tmp_path / "b") == files_in(RUN)

    @pytest.mark.parametrize("source", [UNFINISHED, ORBAX / "unfinished_commit_file"])
    def test_unfinished_steps_are_left_out_and_reported(self, source, tmp_path):
        done = ckpt("copy", source, tmp_path / "out")
        assert done.exit_code == 0 and "left out 2" in done.output and "_METADATA" in done.output
        assert [item.name for item in (tmp_path / "out").iterdir()] == ["1"]
        (unfinished,) = [item for item in source.iterdir() if item.name.startswith("2")]
        done = ckpt("copy", unfinished, tmp_path / "step")
        assert done.exit_code == 3 and "not a finished checkpoint" in done.output
        if unfinished.name == "2":
            assert ckpt("copy", source, tmp_path / "two", "--step", "2").exit_code == 3

    def test_damaged_step_is_refused(self, run_of_steps, tmp_path):
        (run_of_steps / "5" / "default" / "manifest.ocdbt").unlink()
        shutil.rmtree(run_of_steps / "5" / "default" / "ocdbt.process_0")
        with pytest.raises(FormatError, match="damaged now"):
            ckpttools.copy(run_of_steps, tmp_path / "out")
        ckpttools.copy(run_of_steps, tmp_path / "out", steps=[0])

    def test_missing_data_file_is_refused(self, run_of_steps, tmp_path):
        data = [path for path in (run_of_steps / "5").rglob("*") if path.parent.name == "d"]
        for path in data:
            path.unlink()
        with pytest.raises(FormatError):
            ckpttools.copy(run_of_steps, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_unreadable_arrays_are_copied_with_a_remark(self, tmp_path):
        source = tmp_path / "item"
        shutil.copytree(ORBAX / "pytree_ocdbt0_zarr30", source)
        change_json(source / "params.dense.bias" / ".zarray", filters=[{"id": "delta"}])
        done = ckpt("copy", source, tmp_path / "out")
        assert done.exit_code == 0 and files_in(tmp_path / "out") == files_in(source)
        assert "was not searched for missing chunks" in " ".join(done.output.split())

    def test_damaged_metadata_is_refused(self, run_of_steps, tmp_path):
        with (run_of_steps / "5" / "default" / "_METADATA").open("ab") as file:
            file.write(b"x")
        with pytest.raises(FormatError):
            ckpttools.copy(run_of_steps, tmp_path / "out")

    def test_missing_chunk_is_refused(self, tmp_path):
        source = tmp_path / "run"
        shutil.copytree(ORBAX / "pytree_ocdbt0_zarr30", source)
        next(path for path in sorted(source.rglob("*")) if re.fullmatch(r"\d+(\.\d+)+", path.name)).unlink()
        with pytest.raises(FormatError, match="chunk"):
            ckpttools.copy(source, tmp_path / "out")

    def test_unknown_files_are_copied(self, run_of_steps, tmp_path):
        more = {
            "5/default/tokenizer.json": b"{}",
            "5/default/odd näme #1%20 [x]": b"1",
            "5/grain/state.bin": b"i",
            "5/empty": b"",
            "notes.txt": b"mine",
            "logs/events": b"e" * 100,
        }
        for name, content in more.items():
            (run_of_steps / name).parent.mkdir(exist_ok=True)
            (run_of_steps / name).write_bytes(content)
        ckpttools.copy(run_of_steps, tmp_path / "out")
        assert files_in(tmp_path / "out") == files_in(run_of_steps)
        assert more.items() <= files_in(tmp_path / "out").items()

    def test_links_to_files_are_followed_and_others_refused(self, tmp_path):
        source = tmp_path / "model"
        shutil.copytree(HF, source)
        (source / "config.json").rename(tmp_path / "elsewhere.json")
        (source / "config.json").symlink_to(tmp_path / "elsewhere.json")
        ckpttools.copy(source, tmp_path / "out")
        assert files_in(tmp_path / "out") == files_in(HF)
        assert not (tmp_path / "out" / "config.json").is_symlink()
        for name, got in (("more", "a link to a directory"), ("none", "a link whose target is not a file")):
            (source / name).symlink_to(tmp_path if name == "more" else tmp_path / "nothing")
            with pytest.raises(FormatError, match=got):
                ckpttools.copy(source, tmp_path / "again")
            (source / name).unlink()
        os.mkfifo(source / "pipe")
        with pytest.raises(FormatError, match="neither a file nor a directory"):
            ckpttools.copy(source, tmp_path / "again")

    def test_references_to_other_checkpoints_are_refused(self, run_of_steps, tmp_path, monkeypatch):
        item = run_of_steps / "5" / "default"
        entry = ocdbt.Extent("../../0/default/d/x", 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(ocdbt_files, "check_path", lambda path, location=None: None)
            index = ocdbt_files.encode([(b"a/.zarray", entry)], "d/index")
        (item / "d" / "index").write_bytes(index.nodes)
        (item / "manifest.ocdbt").write_bytes(index.manifest)
        with pytest.raises(FormatError, match="not the path of a data file") as caught:
            ckpttools.copy(run_of_steps, tmp_path / "out")
        assert entry.file in str(caught.value) and not (tmp_path / "out").exists()

    def test_non_checkpoint_is_refused(self, tmp_path):
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "notes").write_text("n")
        assert ckpt("copy", tmp_path / "x", tmp_path / "y").exit_code == 3
        assert ckpt("copy", tmp_path / "none", tmp_path / "y").exit_code == 2
        assert ckpt("copy", HF / "config.json", tmp_path / "y").exit_code == 3
        assert ckpt("copy", HF / "model.safetensors", tmp_path / "y").exit_code == 2
        assert ckpt("copy", HF, tmp_path / "y", "--step", "1").exit_code == 2
        assert ckpt("copy", RUN, tmp_path / "y", "--step", "7").exit_code == 2
        assert ckpt("copy", RUN, "https://example.com/x").exit_code == 2
        shutil.copytree(RUN, tmp_path / "run")
        assert ckpt("copy", tmp_path / "run", tmp_path / "run" / "in").exit_code == 2
        assert not (tmp_path / "y").exists()

    def test_dry_run_writes_nothing(self, tmp_path):
        output = run("copy", UNFINISHED, tmp_path / "out", "--dry-run")
        assert "1: to be copied" in output and "left out 2" in output and not list(tmp_path.iterdir())

    def test_large_files_are_copied_in_parts(self, tmp_path, monkeypatch):
        monkeypatch.setattr(transfer, "PIECE_BYTES", 2 << 20)
        source = tmp_path / "model"
        shutil.copytree(HF, source)
        (source / "big.bin").write_bytes(random.Random(0).randbytes((9 << 20) + 7))
        report = ckpttools.copy(source, tmp_path / "out", memory="128MiB", jobs=3, verify=True)
        assert files_in(tmp_path / "out") == files_in(source)
        assert report.parts[0].bytes_verified == report.bytes
        with pytest.raises(MemoryBudgetError):
            ckpttools.copy(source, tmp_path / "less", memory="64MiB")


class TestRepeatedCopies:
    def test_copy_adds_only_new_steps(self, run_of_steps, tmp_path):
        out = tmp_path / "out"
        ckpttools.copy(run_of_steps, out, steps=[0])
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
        report = ckpttools.copy(run_of_steps, out)
        assert {part.name: part.outcome for part in report.parts} == {
            "metadata": "there already",
            "0": "there already",
            "5": "copied",
        }
        assert all(path.stat().st_mtime_ns == time for path, time in before.items())
        assert "3 of 3 already existed" in run("copy", run_of_steps, out)

    def test_different_step_is_replaced_only_with_overwrite(self, run_of_steps, tmp_path):
        out = tmp_path / "out"
        ckpttools.copy(run_of_steps, out)
        shutil.rmtree(run_of_steps / "5")
        shutil.copytree(run_of_steps / "0", run_of_steps / "5")
        before = files_in(out)
        with pytest.raises(DestinationExistsError, match="differs from the source"):
            ckpttools.copy(run_of_steps, out)
        assert files_in(out) == before
        ckpttools.copy(run_of_steps, out, overwrite=True)
        assert files_in(out) == files_in(run_of_steps)

    def test_steps_are_added_only_to_runs(self, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("mine")
        with pytest.raises(DestinationExistsError, match="is not a run"):
            ckpttools.copy(RUN, tmp_path / "out")
        (tmp_path / "out" / "thesis.tex").rename(tmp_path / "thesis.tex")
        ckpttools.copy(RUN, tmp_path / "out")

    def test_foreign_file_is_never_replaced(self, tmp_path):
        out = tmp_path / "out"
        ckpttools.copy(RUN, out)
        (out / "5" / "thesis.tex").write_text("mine")
        with pytest.raises(DestinationExistsError, match=r"thesis\.tex"):
            ckpttools.copy(RUN, out, overwrite=True)
        assert (out / "5" / "thesis.tex").read_text() == "mine"

    @pytest.mark.parametrize("source", [RUN / "5", RUN / "5" / "default", HF], ids=["step", "item", "model"])
    def test_run_is_not_replaced_by_a_single_checkpoint(self, tmp_path, source):
        out = tmp_path / "out"
        ckpttools.copy(RUN, out, steps=[0, 5])
        shutil.rmtree(out / "metadata")  # nothing is left that no checkpoint has
        before = files_in(out)
        with pytest.raises(DestinationExistsError, match="is not replaced"):
            ckpttools.copy(source, out, overwrite=True)
        assert files_in(out) == before

    @pytest.mark.parametrize("source", [RUN / "5", RUN / "5" / "default"], ids=["step", "item"])
    def test_model_is_not_replaced_by_another_format(self, tmp_path, source):
        out = tmp_path / "out"
        ckpttools.copy(HF, out)
        with pytest.raises(DestinationExistsError, match="it is a checkpoint of format safetensors"):
            ckpttools.copy(source, out, overwrite=True)
        assert files_in(out) == files_in(HF)

    @pytest.mark.parametrize("unowned", ["notes.txt", "tokenizer.json", "weights/x.bin"])
    @pytest.mark.parametrize("content", [b"", b"xx", bytes(100)])
    def test_copy_error_names_unreadable_file(self, tmp_path, unowned, content):
        ckpttools.copy(HF, tmp_path / "copy")
        (tmp_path / "copy" / "model.safetensors").write_bytes(content)
        (tmp_path / "copy" / unowned).parent.mkdir(exist_ok=True)
        (tmp_path / "copy" / unowned).write_text("mine")
        with pytest.raises(DestinationExistsError, match="is not a readable checkpoint") as refused:
            ckpttools.copy(HF, tmp_path / "copy", overwrite=True)
        assert refused.value.got.startswith(f"{tmp_path / 'copy' / 'model.safetensors'}: ")
        assert (tmp_path / "copy" / unowned).read_text() == "mine"

    def test_copy_error_names_files_of_unknown_directory(self, tmp_path):
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "thesis.tex").write_text("mine")
        with pytest.raises(DestinationExistsError) as refused:
            ckpttools.copy(HF, tmp_path / "copy", overwrite=True)
        assert refused.value.got == "files that the source lacks: thesis.tex"

    def test_nested_model_is_not_overwritten(self, tmp_path):
        out = tmp_path / "out"
        ckpttools.copy(HF, out)
        shutil.copytree(HF, out / "original")
        with pytest.raises(DestinationExistsError, match="with original in it"):
            ckpttools.copy(SHARDED, out, overwrite=True)
        shutil.rmtree(out / "original")
        ckpttools.copy(SHARDED, out, overwrite=True)
        assert files_in(out) == files_in(SHARDED)

    def test_link_to_a_step_is_left_out(self, run_of_steps, tmp_path):
        """It leads to another one after the next save, and the copy would be in its way."""
        (run_of_steps / "latest").symlink_to("5")
        out = tmp_path / "out"
        assert "left out latest" in run("copy", run_of_steps, out)
        assert not (out / "latest").exists()

    def test_copy_detects_changed_bytes_of_equal_size(self, run_of_steps, tmp_path):
        out = tmp_path / "out"
        ckpttools.copy(run_of_steps, out)
        large = max(
            (path for path in (out / "5").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
        )
        content = large.read_bytes()
        large.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(DestinationExistsError):
            ckpttools.copy(run_of_steps, out, verify=True)


class TestBuckets:
    def test_copy_round_trips_through_a_bucket(self, cloud, tmp_path):
        there = in_bucket(cloud, "copied/run")
        report = ckpttools.copy(RUN, there, verify=True)
        assert without_commits(contents(there)) == without_commits(files_in(RUN))
        assert sum(part.bytes_verified for part in report.parts) == report.bytes
        ckpttools.copy(there, tmp_path / "back")
        assert contents(there) == files_in(tmp_path / "back")
        assert "3 of 3 already existed" in run("copy", RUN, there)
        beside = [entry.name for entry in parse(in_bucket(cloud, "copied")).entries()]
        assert beside == ["run"]

    def test_copy_writes_a_model_to_a_bucket(self, cloud):
        there = in_bucket(cloud, "model")
        run("copy", SHARDED, there)
        assert contents(there) == files_in(SHARDED)
        assert run("hash", there).startswith(run("hash", SHARDED))

    def test_copy_within_a_bucket_transfers_no_bytes(self, gcs, target):
        source = gcs.filled(files_in(SHARDED))
        gcs.server.log.clear()
        report = ckpttools.copy(source, target)
        assert contents(target) == files_in(SHARDED)
        large = sum(len(content) for name, content in files_in(SHARDED).items() if "safetensors" in name)
        assert report.parts[0].bytes_by_store > 0.9 * large
        assert ckpttools.copy(source, f"{target}-2", verify=True).parts[0].bytes_verified == report.bytes

    def test_missing_commit_files_are_written(self, gcs, target, run_of_steps):
        for path in run_of_steps.rglob(COMMIT):
            path.unlink()
        done = ckpt("copy", run_of_steps, target)
        assert done.exit_code == 0 and "commit files added" in done.output, done.output
        names = contents(target).keys()
        assert {f"5/{COMMIT}", f"5/default/{COMMIT}", f"0/{COMMIT}"} <= names
        assert "there already" in run("copy", run_of_steps, target)

    def test_step_without_commit_evidence_is_left_out(self, gcs, tmp_path):
        files = {
            f"{step}/{name}": content for name, content in files_in(RUN / "0").items() for step in (0, 1)
        }
        kept = {name for name in files if not (name.startswith("1/") and COMMIT in name)}
        kept = {name for name in kept if "_CHECKPOINT_METADATA" not in name}
        source = gcs.filled({name: files[name] for name in kept})
        report = ckpttools.copy(source, tmp_path / "out")
        assert [part.name for part in report.parts] == [
            "0"
        ] and "whether the save was completed" in report.omitted["1"]

    def test_commit_file_is_written_last(self, gcs, target):
        gcs.server.log.clear()
        ckpttools.copy(RUN / "5", target)
        asked = [unquote(item.path) for item in gcs.server.log if item.method in ("PUT", "POST")]
        puts = [path for path in asked if ".partial" not in path]
        assert puts[-1].endswith(f"out/{COMMIT}") and puts[-2].endswith(f"default/{COMMIT}")
        metadata = next(n for n, path in enumerate(puts) if path.endswith("out/default/_METADATA"))
        assert all("/d/" not in path for path in puts[metadata:])

    def test_large_objects_are_copied_in_parts(self, cloud, tmp_path):
        source = tmp_path / "model"
        shutil.copytree(HF, source)
        (source / "big.bin").write_bytes(random.Random(0).randbytes((17 << 20) + 7))
        there = in_bucket(cloud, "parts")
        ckpttools.copy(source, there, verify=True)
        assert contents(there) == files_in(source)

    def test_names_invalid_for_objects_are_refused(self, target, tmp_path):
        source = tmp_path / "source"
        shutil.copytree(HF, source)
        (source / "a\nb").write_text("x")
        with pytest.raises(UsageError, match="has a name that is not possible in gs://"):
            ckpttools.copy(source, target)
        assert not parse(target).exists() and not parse(f"{target}.partial").exists()

    def test_changed_step_is_replaced_in_a_bucket(self, gcs, target, run_of_steps):
        ckpttools.copy(run_of_steps, target)
        shutil.rmtree(run_of_steps / "5")
        shutil.copytree(run_of_steps / "0", run_of_steps / "5")
        with pytest.raises(DestinationExistsError):
            ckpttools.copy(run_of_steps, target)
        ckpttools.copy(run_of_steps, target, overwrite=True)
        assert without_commits(contents(target)) == without_commits(files_in(run_of_steps))


class TestMemory:
    def test_copy_writes_a_run_to_memory(self):
        ckpttools.copy(RUN, "memory://copied/run", verify=True)
        assert contents("memory://copied/run") == files_in(RUN)
        assert ckpttools.copy(RUN, "memory://copied/run").files == 0


class TestWeb:
    @pytest.fixture
    def server(self, monkeypatch, tmp_path):
        from ckpttools.stores.web import http, hub

        with web_server() as web:
            web.add("llama", SHARDED)
            web.add("hub/org/llama", SHARDED)
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://{web.address}")
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub_cache"))
            monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
            monkeypatch.delenv("HF_TOKEN", raising=False)
            for module in (http, hub):
                monkeypatch.setattr(module, "STORE", type(module.STORE)())
            ckpttools.stores.registry._store.cache_clear()
            yield web
            ckpttools.stores.registry._store.cache_clear()

    def test_copy_reads_from_the_hub_into_a_bucket(self, server, target):
        ckpttools.copy("hf://org/llama", target)
        assert contents(target).items() >= files_in(SHARDED).items()
        assert ckpttools.copy("hf://org/llama", target).files == 0

    def test_copy_reports_server_without_listing(self, server, tmp_path):
        server.listing = None
        report = ckpttools.copy(f"http://{server.address}/llama", tmp_path / "out")
        assert files_in(tmp_path / "out") == files_in(SHARDED)
        assert any("does not list" in remark for remark in report.remarks)

    def test_copy_reports_the_source_commit(self, server, tmp_path):
        assert "@c0ffee" in ckpttools.copy("hf://org/llama", tmp_path / "out").source

    def test_copy_reads_from_a_web_server(self, server, tmp_path):
        ckpttools.copy(f"http://{server.address}/llama", tmp_path / "out")
        assert files_in(tmp_path / "out") == files_in(SHARDED)


class TestInterrupted:
    def _stopped(self, gcs, at, *words):
        with gcs.server.refusing_writes(after=at):
            return ckpt(*words)

    def _complete(self, gcs, prefix):
        names = [
            name.removeprefix(f"{prefix}/")
            for name in gcs.server.buckets[gcs.bucket]
            if name.startswith(prefix)
        ]
        return {
            step: {n for n in names if n.startswith(f"{step}/")}
            for step in ("0", "5")
            if f"{step}/{COMMIT}" in names
        }

    @pytest.mark.parametrize("is_replacing", [False, True])
    def test_copy_resumes_after_any_failing_request(self, gcs, target, is_replacing, run_of_steps):
        words = ["copy", run_of_steps, target, "--jobs", "2"]
        if is_replacing:
            run(*words)
            shutil.rmtree(run_of_steps / "5")
            shutil.copytree(run_of_steps / "0", run_of_steps / "5")
            words = [*words, "--overwrite"]
        rng = random.Random(str(is_replacing))
        message = files_in(run_of_steps)
        expected = {step: {n for n in message if n.startswith(f"{step}/")} for step in ("0", "5")}
        for _ in range(10):
            done = self._stopped(gcs, rng.randrange(90), *words)
            for step, names in self._complete(gcs, "runs/out").items():
                if not is_replacing:
                    assert without_commits(dict.fromkeys(names)) == without_commits(
                        dict.fromkeys(expected[step])
                    )
            if done.exit_code == 0:
                break
            assert done.exit_code == 5, done.output
        run(*words)
        assert without_commits(contents(target)) == without_commits(message)
        assert not any(".partial" in key for key in gcs.server.buckets[gcs.bucket])
        assert not gcs.server.uploads

    def test_copy_to_bucket_resumes_after_sigkill(self, gcs, target, run_of_steps):
        words = ["copy", str(run_of_steps), target, "--jobs", "2"]
        killed_several_times(words, gcs.server)
        run(*words)
        assert without_commits(contents(target)) == without_commits(files_in(run_of_steps))
        assert not any(".partial" in key for key in gcs.server.buckets[gcs.bucket])

    def test_copy_to_disk_resumes_after_sigkill(self, run_of_steps, tmp_path):
        (run_of_steps / "5" / "big.bin").write_bytes(random.Random(0).randbytes(40 << 20))
        words = ["copy", str(run_of_steps), str(tmp_path / "out"), "--jobs", "2"]
        rng = random.Random(2)
        for _ in range(3):
            process = subprocess.Popen([sys.executable, "-m", "ckpttools", *words])
            time.sleep(rng.uniform(0.2, 0.6))
            process.kill()
            process.wait()
            for step in ("0", "5"):
                if (tmp_path / "out" / step).exists():
                    assert files_in(tmp_path / "out" / step).items() >= files_in(run_of_steps / step).items()
        run(*words)
        assert files_in(tmp_path / "out") == files_in(run_of_steps)

    @pytest.mark.parametrize("is_marked", [True, False])
    @pytest.mark.parametrize("overwrite", [True, False])
    def test_copy_is_complete_if_killed_during_cleanup(
        self, run_of_steps, tmp_path, monkeypatch, is_marked, overwrite
    ):
        """The mark goes before the journal; between the two all is there, and nothing says so."""
        out = tmp_path / "out"

        def killed(self, journal):
            if not is_marked:
                remove_mark(self.destination)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(LocalStaging, "finalize", killed)
            patch.setattr(LocalStaging, "_leave", lambda *_: None)
            with pytest.raises(KeyboardInterrupt):
                ckpttools.copy(run_of_steps, out)
        assert list(out.glob("*.partial"))
        ckpttools.copy(run_of_steps, out, overwrite=overwrite)
        assert files_in(out) == files_in(run_of_steps)
        assert not list(out.glob("*.partial"))

    def test_resumed_copy_skips_copied_files(self, tmp_path, monkeypatch):
        source, out = tmp_path / "model", tmp_path / "out"
        shutil.copytree(SHARDED, source)
        (source / "big.bin").write_bytes(random.Random(0).randbytes(9 << 20))
        monkeypatch.setattr(transfer, "PIECE_BYTES", 2 << 20)
        original = transfer._TransferState._copy

        def failing(self, piece, *rest, **more):
            if piece.name == "big.bin" and piece.start >= 6 << 20:
                raise StorageError("the disk is gone")
            original(self, piece, *rest, **more)

        with monkeypatch.context() as patch:
            patch.setattr(transfer._TransferState, "_copy", failing)
            with pytest.raises(StorageError, match="gone"):
                ckpttools.copy(source, out, jobs=1)
        assert not out.exists()
        before = (source / "big.bin").stat()
        (source / "big.bin").write_bytes(random.Random(1).randbytes(9 << 20))
        os.utime(source / "big.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(UsageError, match="beginning of another conversion"):
            ckpttools.copy(source, out)
        (source / "big.bin").write_bytes(random.Random(0).randbytes(9 << 20))
        os.utime(source / "big.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
        report = ckpttools.copy(source, out, verify=True)
        assert files_in(out) == files_in(source)
        assert report.parts[0].bytes_resumed == 6 << 20

    def test_copy_refuses_source_changed_meanwhile(self, tmp_path, monkeypatch):
        source, out = tmp_path / "model", tmp_path / "out"
        shutil.copytree(SHARDED, source)
        original, changes = transfer._TransferState._verify_all, []

        def change(self, pieces):
            if not changes:
                (source / "model-00001-of-00004.safetensors").write_bytes(b"x" * 70_000)
            changes.append(1)
            return original(self, pieces)

        monkeypatch.setattr(transfer._TransferState, "_verify_all", change)
        with pytest.raises(SourceChangedError):
            ckpttools.copy(source, out, verify=True)
        assert not out.exists()
        shutil.rmtree(source)
        shutil.copytree(SHARDED, source)
        ckpttools.copy(source, out, verify=True)
        assert files_in(out) == files_in(SHARDED)

    def test_copy_refuses_objects_changed_meanwhile(self, gcs, target, monkeypatch):
        source = gcs.filled(files_in(SHARDED))
        original = transfer._TransferState._work
        name = next(
            key for key in gcs.server.buckets[gcs.bucket] if key.endswith("00002-of-00004.safetensors")
        )

        def change(self, *work):
            original(self, *work)
            gcs.server.put(gcs.bucket, name, b"x")

        with monkeypatch.context() as patch:
            patch.setattr(transfer._TransferState, "_work", change)
            with pytest.raises(SourceChangedError):
                ckpttools.copy(source, target)
        assert not any(key.startswith("runs/out/") for key in gcs.server.buckets[gcs.bucket])
        ckpttools.copy(SHARDED, target, overwrite=True)
        assert contents(target) == files_in(SHARDED)

    def test_copy_refuses_file_added_meanwhile(self, tmp_path, monkeypatch):
        source, out = tmp_path / "model", tmp_path / "out"
        shutil.copytree(SHARDED, source)
        original = transfer._TransferState._verify_all

        def change(self, pieces):
            (source / "new.json").write_bytes(b"{}")
            return original(self, pieces)

        monkeypatch.setattr(transfer._TransferState, "_verify_all", change)
        with pytest.raises(SourceChangedError, match=r"new\.json is new|changed while"):
            ckpttools.copy(source, out, verify=True)
        assert not out.exists()

    def test_data_corrupted_on_disk_is_detected(self, tmp_path, monkeypatch):
        original = transfer._TransferState._verify_all

        def damage(self, result):
            name = result[0].name
            location = self.work.content / name
            location.write_at(100, b"damage")
            return original(self, result)

        with monkeypatch.context() as patch:
            patch.setattr(transfer._TransferState, "_verify_all", damage)
            with pytest.raises(StorageError, match="differs from what was written"):
                ckpttools.copy(SHARDED, tmp_path / "out", verify=True)
        assert not (tmp_path / "out").exists()
        ckpttools.copy(SHARDED, tmp_path / "out", verify=True)

    def test_copy_resumes_after_full_disk(self, tmp_path, monkeypatch):
        import ckpttools.stores.local.data_files as local

        def full(*arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(local, "write_all_at", full)
            with pytest.raises(NoSpaceError):
                ckpttools.copy(RUN, tmp_path / "out")
        assert not (tmp_path / "out" / "0").exists()
        ckpttools.copy(RUN, tmp_path / "out")
        assert files_in(tmp_path / "out") == files_in(RUN)

    @pytest.mark.parametrize("where", ["local", "gs"])
    def test_only_one_of_several_copies_writes(self, where, target, tmp_path):
        there = target if where == "gs" else tmp_path / "out"

        def copy(_):
            try:
                return ckpttools.copy(SHARDED, there).files > 0
            except (LockedError, DestinationExistsError, UsageError):
                return False

        with ThreadPoolExecutor(3) as pool:
            assert sum(pool.map(copy, range(3))) == 1
        assert contents(there) == files_in(SHARDED)


class TestPage:
    def test_documented_copy_commands_work(self, gcs, tmp_path, monkeypatch):
        gcs.filled({"a": b""})
        monkeypatch.chdir(tmp_path)
        shutil.copytree(RUN, tmp_path / "RUN" / "checkpoints")
        shutil.copytree(SHARDED, tmp_path / "MODEL")
        page = (DOCS / "copy.md").read_text()
        commands = re.findall(r"^\$ ckpt (.*)$", page, re.MULTILINE)
        assert len(commands) == 5
        for command in commands:
            run(*shlex.split(command.replace("my-bucket", gcs.bucket)))
        assert (tmp_path / "llama" / "5").is_dir() and not (tmp_path / "llama" / "0").exists()
        (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        names: dict[str, object] = {"ckpttools": ckpttools}
        exec(block, names)
        assert (tmp_path / "kept" / "checkpoints" / "5").is_dir()


class TestOrbax:
    def test_copied_training_state_has_the_same_digest(self, tmp_path):
        run("copy", TRAINED, tmp_path / "out")
        assert run("hash", tmp_path / "out") == run("hash", TRAINED)


NUMBERS = count()
NAMES = st.text(
    st.characters(blacklist_characters="/\0", blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12
).filter(lambda name: name not in (".", "..") and len(name.encode()) < 60)
TREES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join),
    st.binary(max_size=40) | st.integers(0, 3 << 20).map(lambda n: random.Random(n).randbytes(n)),
    max_size=8,
)


def consistent(tree):
    """Without files that would be in other files."""
    return {
        name: content for name, content in tree.items() if not any(o.startswith(f"{name}/") for o in tree)
    }


@pytest.mark.parametrize("where", ["local", "memory", "gs"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES.map(consistent), piece=st.sampled_from([1 << 20, 64 << 20]))
def test_copy_of_any_files_equals_the_source(where, gcs, tmp_path_factory, monkeypatch, tree, piece):
    tmp_path = tmp_path_factory.mktemp("tree")
    source = tmp_path / "source"
    shutil.copytree(HF, source)
    for name, content in tree.items():
        path = source / name
        if path.parent.is_dir() or not any(parent.is_file() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_bytes(content)
    number = next(NUMBERS)
    there = {
        "local": str(tmp_path / "out"),
        "memory": f"memory://any/{number}",
        "gs": in_bucket(gcs, f"any-{number}"),
    }[where]
    gcs.filled({"a": b""})
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "PIECE_BYTES", piece)
        ckpttools.copy(source, there, jobs=2)
    assert contents(there) == files_in(source)


def test_pieces_cover_files():
    result = pieces.split_files({"a": 5, "b": 0, "c": 4}, 2)
    assert [(item.name, item.start, item.stop) for item in result] == [
        ("a", 0, 2),
        ("a", 2, 4),
        ("a", 4, 5),
        ("c", 0, 2),
        ("c", 2, 4),
        ("b", 0, 0),
    ]
    assert Path(result[0].name).name == "a"


def test_copy_plan_writes_nothing(tmp_path):
    prepared = ckpttools.copy.plan(HF, tmp_path / "out")
    assert prepared.report.bytes and not (tmp_path / "out").exists()
    assert prepared.run().bytes == prepared.report.bytes
    with pytest.raises(TypeError, match="did you mean 'steps'"):
        ckpttools.copy(HF, tmp_path / "other", step=8)


class TestInterruptedCopyReports:
    """Whoever looks at the destination of a copy that was interrupted is told of it, and how it goes on."""

    @pytest.fixture(params=["local", "gs"])
    def left(self, request, gcs, tmp_path):
        """Where a copy of a run was interrupted, in its first step; the command; the run."""
        run = gcs.filled(files_in(MAXTEXT_RUN / "checkpoints"))
        where = parse(f"gs://{gcs.bucket}/left" if request.param == "gs" else str(tmp_path / "left"))
        gcs.server.faults = [Fault("GET .*/0/items/commit_success", count=99, status=400, body="<E/>")]
        assert ckpt("copy", run, where, "--no-progress").exit_code == 5
        gcs.server.faults = []
        return where, f"ckpt copy '{run}' {where} --no-progress", run

    def test_commands_report_interrupted_copy(self, left, tmp_path):
        where, command, _ = left
        for words in (
            ("inspect", "tree", where),
            ("hash", where),
            ("copy", where, tmp_path / "elsewhere"),
            ("copy", HF, where),
            ("convert", "hf-to-maxtext", HF, where),
            ("convert", "hf-to-maxtext", HF, where, "--overwrite"),
            ("doctor", where),
        ):
            result = ckpt(*words)
            declared = " ".join(result.output.split())
            assert result.exit_code in ((0,) if words[0] == "doctor" else (2, 3)), declared
            assert "interrupted" in declared and f"`{command}` again" in declared, declared

    def test_same_command_resumes(self, left):
        where, _, run = left
        assert "4: copied" in ended("copy", run, where).output
        assert (
            "no errors" in succeed("doctor", where).output
            or "configuration OK" in succeed("doctor", where).output
        )


def test_hint_omits_options_that_would_be_refused(tmp_path):
    """A run is never replaced by a step: `--overwrite` is not named where it does not help."""
    run("copy", MAXTEXT_RUN / "checkpoints", tmp_path / "run")
    for options in ((), ("--overwrite",)):
        told = run("copy", TRAINED / "1", tmp_path / "run", *options, code=2)
        assert "is not replaced: it is a run with 2 steps" in told and "with --overwrite" not in told
