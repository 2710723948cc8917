"""Writing to buckets: the same content as in a directory, visible once it is complete, nothing lost."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import unquote

import numpy as np
import pytest
from support.command_line import ckpt, run
from support.gcs_server import Fault
from support.internals import JobInfo, LockedError, parse
from support.kills import killed_several_times
from support.locations import GOLDEN, HF, TRAINED
from support.object_stores import files_in

import ckpttools
from ckpttools import DestinationExistsError, StorageError
from ckpttools.stores.objects import lock as locking

MAXTEXT = GOLDEN / "llama3.1" / "maxtext_scanned"
SHARDED = GOLDEN / "llama3.1" / "hf_sharded"
STAMPED = re.compile(r"(^|/)_CHECKPOINT_METADATA$")
WRITERS = {
    "orbax": ("hf-to-maxtext", HF),
    "unscanned": ("hf-to-maxtext", HF, "--no-scan"),
    "zstd": ("hf-to-maxtext", HF, "--compression", "zstd"),
    "no-ocdbt": ("hf-to-maxtext", HF, "--no-ocdbt"),
    "hf": ("maxtext-to-hf", MAXTEXT, "--like", HF, "--max-shard-size", "60KB"),
    "zarr3": ("to-zarr3", MAXTEXT),
    "zarr3-zstd": ("to-zarr3", TRAINED, "--compression", "zstd"),
    "safetensors": ("to-safetensors", TRAINED),
}


# What stores differ in is how files are put, whole or in parts: one writer of each kind goes to all of them.
_TO_ALL = ("orbax", "hf", "zarr3")
_PAIRS = [
    (cloud, writer)
    for cloud in ("gs", "s3", "az")
    for writer in WRITERS
    if cloud == "gs" or writer in _TO_ALL
]


class TestConversions:
    @pytest.mark.parametrize(("cloud", "writer"), _PAIRS, indirect=["cloud"])
    def test_store_output_equals_local_output(self, cloud, tmp_path, writer):
        kind, source, *options = WRITERS[writer]
        there = f"{cloud.scheme}://{cloud.bucket}/new/{writer}"
        run("convert", kind, source, there, *options)
        run("convert", kind, source, tmp_path / "out", *options)
        digest = run("hash", tmp_path / "out").split()[0]
        assert run("hash", there).split()[0] == digest
        small = {name for name in files_in(tmp_path / "out") if not re.search(r"d/|\.safetensors$", name)}
        for name in small - {name for name in small if STAMPED.search(name)}:
            location = parse(there) / name
            if "/c/" not in f"/{name}":
                assert location.exists(), name
        assert ckpt("doctor", there).exit_code == 0
        beside = [entry.name for entry in parse(f"{cloud.scheme}://{cloud.bucket}/new").entries()]
        assert beside == [writer], "nothing is left beside it"

    @pytest.mark.parametrize("words", [("strip-optimizer",), ("unstack",), ("select", "--keep", "params")])
    def test_other_commands_write_to_stores(self, cloud, tmp_path, words):
        source, there = cloud.filled(files_in(TRAINED)), f"{cloud.scheme}://{cloud.bucket}/other"
        command, *options = words
        run(command, source, there, *options)
        run(command, TRAINED, tmp_path / "out", *options)
        assert run("hash", there).split()[0] == run("hash", tmp_path / "out").split()[0]

    def test_same_bucket_copies_are_server_side(self, gcs, target):
        source = gcs.filled(files_in(TRAINED))
        gcs.server.log.clear()
        run("stack", gcs.filled(files_in(GOLDEN / "llama3.1" / "maxtext_unscanned")), target)
        assert any(item.method == "PUT" and "linked-" in unquote(item.path) for item in gcs.server.log)
        assert run("hash", target)
        assert source.exists()

    def test_manifest_is_written_to_a_store(self, gcs, target):
        manifest = f"gs://{gcs.bucket}/manifest.json"
        run("convert", "hf-to-maxtext", HF, target, "--manifest", manifest)
        assert "equal" in run("verify", target, "--manifest", manifest)

    def test_object_parts_follow_store_limits(self, gcs, target, monkeypatch):
        from ckpttools.stores.costs import Streams
        from ckpttools.stores.objects import gs

        monkeypatch.setattr(type(gs.STORE), "streams", Streams(1 << 20, 50_000, 8))
        run("convert", "hf-to-maxtext", HF, target)
        data = [result.size for name, result in parse(target).walk() if "/d/data" in name]
        assert len(data) > 3 and max(data) < 150_000

    def test_chunk_is_uploaded_before_the_next_is_encoded(self, gcs, target):
        staging = parse(target).store.staging(parse(target).key, False, lambda: None)
        with staging.opened(JobInfo("plan")) as work:
            with closing(work.data_files({}, {}).write_passes(0)) as sinks:
                sink = next(sinks)
                sink.write_whole("c/0", b"whole")
                sink.write("c/1", 0, memoryview(b"half"), 0, 8)
                names = gcs.server.buckets[gcs.bucket]
                assert "runs/out/c/0" in names and "runs/out/c/1" not in names
                sink.write("c/1", 4, memoryview(b"half"), 0, 8)
                assert "runs/out/c/1" in names
                assert list(sinks) == []
            assert (work.content / "c" / "1").read_bytes() == b"halfhalf"


class TestDestinations:
    def test_existing_destination_is_kept_without_overwrite(self, gcs, target):
        run("convert", "hf-to-maxtext", HF, target)
        before = dict(gcs.server.buckets[gcs.bucket])
        done = ckpt("convert", "hf-to-maxtext", SHARDED, target)
        assert done.exit_code == 2 and "exists" in done.output and "--overwrite" in done.output
        assert gcs.server.buckets[gcs.bucket] == before

    def test_replaced_checkpoint_stays_until_the_new_is_complete(self, gcs, target):
        run("convert", "hf-to-maxtext", HF, target)
        old, seen = dict(gcs.server.buckets[gcs.bucket]), []

        def look():
            there = gcs.server.buckets[gcs.bucket]
            seen.append(all(there.get(name) == result for name, result in old.items()))

        gcs.server.faults.append(Fault("(POST|PUT) .*content/0/items/d/data", count=99, then=look))
        run("convert", "hf-to-maxtext", HF, target, "--no-scan", "--overwrite")
        assert seen and all(seen)
        assert "unstacked" in ckpt("inspect", "tree", target).output
        assert [entry.name for entry in parse(f"gs://{gcs.bucket}/runs").entries()] == ["out"]

    @pytest.mark.parametrize("name", ["notes.txt", "0/items/mine"])
    def test_foreign_objects_are_not_replaced(self, gcs, target, name):
        run("convert", "hf-to-maxtext", HF, target)
        gcs.server.put(gcs.bucket, f"runs/out/{name}", b"mine")
        done = ckpt("convert", "hf-to-maxtext", HF, target, "--overwrite")
        assert done.exit_code == 2, done.output
        assert gcs.server.buckets[gcs.bucket][f"runs/out/{name}"].content == b"mine"

    def test_bucket_and_object_are_refused_as_destinations(self, gcs, target):
        gcs.server.put(gcs.bucket, "runs/out", b"mine")
        assert ckpt("convert", "hf-to-maxtext", HF, target).exit_code == 2
        done = ckpt("convert", "hf-to-maxtext", HF, f"gs://{gcs.bucket}")
        assert done.exit_code == 2 and "a complete bucket" in done.output
        done = ckpt("convert", "hf-to-maxtext", HF, "gs://no-such-bucket/x")
        assert done.exit_code == 2 and "does not exist" in done.output

    def test_destination_overlapping_source_is_refused(self, gcs):
        source = gcs.filled(files_in(TRAINED))
        for there in (source, source / "out", source.parent):
            assert ckpt("strip-optimizer", source, there, "--overwrite").exit_code == 2

    def test_missing_write_permission_is_named(self, gcs, target):
        body = "<Error><Code>AccessDenied</Code><Message>Access denied.</Message></Error>"
        gcs.server.faults.append(Fault("(PUT|POST) ", count=99, status=403, body=body))
        done = ckpt("convert", "hf-to-maxtext", HF, target)
        assert done.exit_code == 5 and "storage.objects.create" in done.output


class TestInterrupted:
    """Any request may be the last: the same command goes on, and what it makes is the same."""

    @pytest.mark.parametrize("writer", ["orbax", "zstd", "hf", "zarr3"])
    @pytest.mark.parametrize("is_replacing", [False, True])
    def test_convert_resumes_after_any_failing_request(self, gcs, target, writer, is_replacing):
        kind, source, *options = WRITERS[writer]
        location = parse(target)
        if is_replacing:
            run("convert", kind, source, target, *options, "--jobs", "1")
            options = [*options, "--overwrite"]
        expected = run("convert", kind, source, f"{target}-0", *options, "--jobs", "2") and None
        expected = run("hash", f"{target}-0").split()[0]
        count = len([item for item in gcs.server.log if item.method in ("PUT", "POST", "DELETE")])
        rng = random.Random(f"{writer} {is_replacing}")
        for _ in range(12):
            at = rng.randrange(count)
            done = self._stopped(gcs, at, kind, source, target, *options, "--jobs", "2")
            if done.exit_code == 0 or "exists" in done.output:
                assert run("hash", target).split()[0] == expected
                break
            assert done.exit_code == 5, done.output
            if any(name.endswith("out/commit_success.txt") for name, _ in self._walk(location)):
                assert run("hash", target).split()[0] == expected
        if done.exit_code:
            run("convert", kind, source, target, *options, "--jobs", "2")
        assert run("hash", target).split()[0] == expected
        names = {name for name, _ in location.walk()}
        assert names == {name for name, _ in parse(f"{target}-0").walk()}
        assert not any(key.startswith("runs/out.partial") for key in gcs.server.buckets[gcs.bucket])
        assert not gcs.server.uploads

    def _stopped(self, gcs, at, *words):
        with gcs.server.refusing_writes(after=at):
            return ckpt("convert", *words)

    def _walk(self, location):
        return location.walk() if location.exists() else ()

    def test_convert_refuses_output_of_another_conversion(self, gcs, target):
        self._stopped(gcs, 8, "hf-to-maxtext", HF, target)
        done = ckpt("convert", "hf-to-maxtext", HF, target, "--no-scan")
        assert done.exit_code == 2 and "beginning of another conversion" in done.output, done.output
        run("convert", "hf-to-maxtext", HF, target, "--no-scan", "--overwrite")
        run("convert", "hf-to-maxtext", HF, f"{target}-0", "--no-scan")
        assert run("hash", target).split()[0] == run("hash", f"{target}-0").split()[0]
        assert {name for name, _ in parse(target).walk()} == {name for name, _ in parse(f"{target}-0").walk()}

    def test_partial_checkpoint_is_reported_as_interrupted(self, gcs, target):
        self._stopped(gcs, 8, "hf-to-maxtext", HF, target)
        done = ckpt("inspect", "tree", target)
        assert done.exit_code != 0 and "interrupted" in done.output, done.output

    def test_convert_resumes_after_sigkill(self, gcs, target, tmp_path):
        words = ["convert", "hf-to-maxtext", str(HF), target, "--jobs", "2"]
        killed_several_times(words, gcs.server)
        # Uploads in parts that nobody has ended stay: the cloud deletes them, or `doctor` names them.
        done = ckpt(*words)
        assert done.exit_code == 0 or "exists" in done.output, "it was complete before"
        run("convert", "hf-to-maxtext", HF, f"{target}-0")
        assert run("hash", target).split()[0] == run("hash", f"{target}-0").split()[0]
        assert not any(key.startswith("runs/out.partial") for key in gcs.server.buckets[gcs.bucket])


class TestTwoWriters:
    def test_only_one_of_several_conversions_writes(self, cloud):
        there = f"{cloud.scheme}://{cloud.bucket}/two"

        def convert(_):
            try:
                return ckpttools.hf_to_maxtext(HF, there).tasks > 0
            except (LockedError, DestinationExistsError):
                return False

        with ThreadPoolExecutor(3) as pool:
            assert sum(pool.map(convert, range(3))) == 1
        assert run("hash", there)

    def test_expired_lock_is_lost(self, gcs, target, monkeypatch):
        monkeypatch.setattr(locking, "RENEWED_SECONDS", 600)
        now = locking._now
        staging = parse(target).store.staging(parse(target).key, False, lambda: None)
        with staging.opened(JobInfo("plan")) as first:
            gcs.age("runs/out.partial/lock", 61)
            monkeypatch.setattr(locking, "_now", lambda: now() + 61)
            with staging.opened(JobInfo("plan")) as second:
                second.record([[0, [], {}]])
                with pytest.raises(StorageError, match="is no longer locked by this process"):
                    first.record([[1, [], {}]])
                with pytest.raises(StorageError):
                    first.publish()
                # Neither the first refusal nor a second try takes it from its new owner.
                with pytest.raises(StorageError):
                    first.publish()
                second.lock.renew()
            assert not parse(target).exists()

    def test_lock_is_renewed_without_threads(self, cloud, monkeypatch):
        """As in a process that is ending, with Python 3.12 and later."""
        began = threading.Thread.start

        def start(thread):
            if threading.current_thread().name.startswith("saving"):
                raise RuntimeError("can't create new thread at interpreter shutdown")
            began(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        monkeypatch.setattr(locking, "RENEWED_SECONDS", 0)
        arrays = {f"w{number}": np.full((64, 64), number, np.float32) for number in range(8)}
        there = f"{cloud.scheme}://{cloud.bucket}/ending"
        ckpttools.save_async(arrays, there, "zarr3", compression="zstd").wait(60)
        monkeypatch.undo()
        assert all(np.array_equal(ckpttools.open(there)[name].read(), arrays[name]) for name in arrays)
        assert not parse(f"{there}.partial").exists()

    def test_lock_of_ended_local_process_is_taken_over(self, gcs, target):
        staging = parse(target).store.staging(parse(target).key, False, lambda: None)
        key = "runs/out.partial/lock"
        script = (
            "from ckpttools.stores.objects.lock import _process; print(__import__('json').dumps(_process()))"
        )
        gone = subprocess.check_output([sys.executable, "-c", script])
        gcs.server.put(gcs.bucket, key, gone)
        with staging.opened(JobInfo("plan")):
            pass
        gcs.server.put(gcs.bucket, key, json.dumps({**json.loads(gone), "host": "elsewhere"}).encode())
        with pytest.raises(LockedError, match="another process") as caught, staging.opened(JobInfo("plan")):
            pass
        assert "on elsewhere, last seen" in caught.value.got

    def test_lock_of_zombie_process_is_taken_over(self, gcs, target):
        """A process that was killed in a container may be listed as long as that runs."""
        script = (
            "from ckpttools.stores.objects.lock import _process\n"
            "print(__import__('json').dumps(_process()), flush=True)\n"
            "input()"
        )
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as process:
            gone = process.stdout.readline()
            gcs.server.put(gcs.bucket, "runs/out.partial/lock", gone)
            staging = parse(target).store.staging(parse(target).key, False, lambda: None)
            with pytest.raises(LockedError), staging.opened(JobInfo("plan")):
                pass
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with staging.opened(JobInfo("plan")):
                pass

    def test_convert_survives_lost_lock_response(self, gcs, target):
        gcs.server.faults.append(Fault("PUT .*lock", count=1, cut=0))
        run("convert", "hf-to-maxtext", HF, target)
        assert run("hash", target)


def test_active_write_is_not_reported_as_interrupted(gcs, target):
    staging = parse(target).store.staging(parse(target).key, False, lambda: None)
    with staging.opened(JobInfo("plan", command="ckpt convert x y")) as work:
        done = ckpt("inspect", "tree", target)
        assert "is being written by process" in done.output and "wait" in done.output, done.output
        work.record([[0, [], {}]])
        told = " ".join(ckpt("doctor", f"{target}.partial").output.split())
        assert "is writing it" in told and "rm -r" not in told, told


def test_interrupted_conversion_names_the_resume_command(gcs, target):
    staging = parse(target).store.staging(parse(target).key, False, lambda: None)
    with staging.opened(JobInfo("plan", command="ckpt convert x y")) as work:
        work.record([[0, [], {}]])
    assert "run `ckpt convert x y` again" in ckpt("inspect", "tree", target).output
    assert "run `ckpt convert x y` again" in ckpt("doctor", f"{target}.partial").output


def test_step_without_commit_file_opens_with_a_warning(gcs):
    files = files_in(TRAINED)
    location = gcs.filled(
        {name: content for name, content in files.items() if name != "1/commit_success.txt"}
    )
    done = ckpt("inspect", "tree", location)
    assert done.exit_code == 0 and "which Orbax does not list on gs://" in done.stderr
    assert "does not list" not in ckpt("inspect", "tree", gcs.filled(files)).stderr
    assert "does not list" not in ckpt("inspect", "tree", TRAINED).stderr


def test_objects_added_after_listing_are_kept(cloud):
    """What was listed a moment ago is not what is there when a destination is replaced."""
    there = f"{cloud.scheme}://{cloud.bucket}/run"
    run("convert", "hf-to-maxtext", HF, there)
    ckpttools.inspect(there)
    step = {f"run/7/items/{name}": content for name, content in files_in(TRAINED).items()}
    cloud.put(step)
    told = run("convert", "hf-to-maxtext", SHARDED, there, "--overwrite", code=2)
    assert "is not replaced" in told
    kept = {name: (parse(there) / name.removeprefix("run/")).read_bytes() for name in step}
    assert kept == step
