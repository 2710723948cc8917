"""Writers that sleep, answers that are lost, names and objects that are somebody else's: nothing is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from support.command_line import ckpt, run
from support.gcs_server import Fault
from support.internals import parse
from support.locations import GOLDEN, HF
from support.object_stores import azure, environment, files_in, google

from ckpttools import DestinationExistsError
from ckpttools.stores.objects import listing_cache, writing
from ckpttools.stores.objects import lock as locking
from ckpttools.stores.objects.writing import MARK, PART_BYTES, Upload

# A process of its own. Its clock is set forward by a minute once the file that `LATE` names exists.
SLEEPER = """
import os
from ckpttools.__main__ import main
from ckpttools.stores.objects import lock, writing
writing.PART_BYTES = 20_000
now = lock._now
lock._now = lambda: now() + 61 * os.path.exists(os.environ["LATE"])
main()
"""
CONVERT = ("convert", "hf-to-maxtext", HF)


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    """That of what is converted."""
    run(*CONVERT, location := tmp_path_factory.mktemp("whole") / "out")
    return run("hash", location).split()[0]


@pytest.fixture
def in_parts(monkeypatch):
    """Small checkpoints are uploaded in several parts."""
    monkeypatch.setattr(writing, "PART_BYTES", 20_000)


@pytest.fixture
def sleepers(gcs, tmp_path, monkeypatch):
    """Processes whose locks expire while they are stopped."""
    monkeypatch.setattr(locking, "_is_dead", lambda owner: False)
    return Sleepers(gcs, tmp_path / "late")


class Sleepers:
    def __init__(self, gcs, late):
        self.gcs, self.late = gcs, late

    def stopped(self, words, request):
        """Stop a process (SIGSTOP) after a request of it, and let its lock expire."""
        halted = threading.Event()

        def stop():
            if not halted.is_set():
                os.kill(process.pid, signal.SIGSTOP)
                halted.set()

        self.gcs.server.faults = [Fault(request, then=stop)]
        command = [sys.executable, "-c", SLEEPER, *map(str, words)]
        environment = {**os.environ, "LATE": str(self.late)}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        assert halted.wait(60), (process.kill(), process.communicate())
        self.gcs.server.faults = []
        self.late.touch()
        self.gcs.age("runs/out.partial/lock", 61)
        return process


def woken(process):
    os.kill(process.pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


@pytest.mark.parametrize("limit", [1, 5000])
def test_object_with_the_name_of_a_directory_is_refused(cloud, limit, monkeypatch, tmp_path):
    """A file system cannot hold both. Neither is left out silently, however the bucket is listed."""
    monkeypatch.setattr(listing_cache, "_MAX_OBJECTS", limit)
    model = files_in(HF)
    cloud.put({f"{name}/{key}": content for name in ("good", "m") for key, content in model.items()})
    cloud.put({"m/original": b"a file", "m/original/params.json": b"{}", "good/x/a": b"", "good/x": b""})
    base = f"{cloud.scheme}://{cloud.bucket}"
    refused = run("copy", f"{base}/m", tmp_path / "out", code=3)
    assert f"{base}/m/original is both an object and the directory of other objects" in refused
    assert not (tmp_path / "out").exists()
    run("copy", f"{base}/good", tmp_path / "good")
    assert files_in(tmp_path / "good").items() >= model.items()


class TestStoppedWriters:
    """Who wakes up when another has finished does no harm to it."""

    @pytest.mark.parametrize("request_", ["PUT .*partNumber=2", "PUT .*items/commit_success"])
    def test_stopped_writer_does_not_mix_with_another_conversion(
        self, gcs, target, sleepers, in_parts, request_
    ):
        sleeper = sleepers.stopped([*CONVERT, target], request_)
        # Another conversion: what the first goes on with would be mixed into it.
        run(*CONVERT, target, "--no-scan", "--overwrite")
        before = dict(gcs.server.buckets[gcs.bucket])
        code, output = woken(sleeper)
        assert code in (2, 5), output
        assert gcs.server.buckets[gcs.bucket] == before, output
        assert not gcs.server.uploads

    @pytest.mark.parametrize("request_", ["DELETE .*runs/out/0/items", "PUT .*runs/out/0/items/d/"])
    def test_stopped_writer_does_not_damage_a_replacement(self, gcs, target, sleepers, in_parts, request_):
        run(*CONVERT, target)
        words = [*CONVERT, target, "--no-scan", "--overwrite"]
        sleeper = sleepers.stopped(words, request_)
        run(*words)
        digest = run("hash", target).split()[0]
        names = set(gcs.server.buckets[gcs.bucket])
        code, output = woken(sleeper)
        assert code == 5, output
        assert run("hash", target).split()[0] == digest
        assert set(gcs.server.buckets[gcs.bucket]) == names

    def test_interrupted_discard_does_not_damage_a_resumed_run(self, gcs, target, sleepers):
        gcs.server.faults = [Fault("PUT .*/0/commit_success", count=99, status=400, body="<Error/>")]
        assert ckpt(*CONVERT, target).exit_code == 5
        words = [*CONVERT, target, "--no-scan", "--overwrite"]
        sleeper = sleepers.stopped(words, "DELETE .*runs/out/0")
        run(*CONVERT, target)
        digest, before = run("hash", target).split()[0], dict(gcs.server.buckets[gcs.bucket])
        code, output = woken(sleeper)
        assert code == 5, output
        assert run("hash", target).split()[0] == digest and gcs.server.buckets[gcs.bucket] == before


class TestServerResponses:
    """Whatever a server does meanwhile: an error of ours, or the right content; then the same command."""

    @pytest.mark.parametrize("request_", ["PUT ", "POST .*uploadId", "DELETE |GET "])
    @pytest.mark.parametrize(
        "fault",
        [{"status": 503}, {"is_dropped": True}, {"cut": 0}, {"status": 429, "headers": {"Retry-After": "0"}}],
        ids=["503", "dropped", "cut", "429"],
    )
    def test_lost_and_late_requests_are_retried(self, gcs, target, digest, in_parts, fault, request_):
        run(*CONVERT, target, "--no-scan")
        gcs.server.faults = [Fault(request_, count=2, **fault)]
        words = (*CONVERT, target, "--overwrite")
        done = ckpt(*words)
        assert done.exit_code in (0, 5), done.output
        gcs.server.faults = []
        if done.exit_code:
            run(*words)
        assert run("hash", target).split()[0] == digest
        assert not any(key.startswith("runs/out.partial") for key in gcs.server.buckets[gcs.bucket])


PAGES = {
    "xhtml": "<html><body><p>Log in to continue</p></body></html>",
    "html5": "<!DOCTYPE html><html><head><meta charset=utf-8></head><body>Log in<br></body></html>",
    "xml": "<?xml version='1.0'?><rss><channel/></rss>",
    "json": "{}",
    "empty": "",
}


@pytest.mark.parametrize("headers", [{}, {"ETag": '"1"', "Last-Modified": "Fri, 27 Nov 2026 06:00:00 GMT"}])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("scheme", ["gs", "s3", "az"])
def test_login_page_is_not_an_empty_bucket(gcs_server, scheme, page, headers, tmp_path):
    """A captive portal, or a console on another port, answers every request with a page."""
    portal = {
        "gs": lambda: google(gcs_server),
        "az": lambda: azure(gcs_server),
        "s3": lambda: environment(
            AWS_ENDPOINT_URL=gcs_server.url, AWS_ACCESS_KEY_ID="AKIATEST", AWS_SECRET_ACCESS_KEY="secret"
        ),
    }[scheme]
    with portal():
        gcs_server.faults = [Fault(".", 10**6, status=200, body=PAGES[page], headers=headers)]
        there = f"{scheme}://bucket/model"
        for words in (("inspect", "tree", there), (*CONVERT, there), ("copy", there, tmp_path / "out")):
            done = ckpt(*words)
            assert done.exit_code == 5, done.output
            assert re.search("does not offer the (XML )?API of", done.output), done.output
        gcs_server.faults = []


def test_empty_bucket_is_checked_once(gcs, target):
    """It takes one request in each process."""
    gcs.server.log.clear()
    bucket, _ = parse(target).store._at(f"{gcs.bucket}/x")
    for _ in range(3):
        assert bucket.objects_below("nothing") == [] and bucket.names_below("nothing") == {}
    assert [item.method for item in gcs.server.log].count("HEAD") == 1


class TestForeignObjects:
    def test_upload_keeps_object_that_appears_meanwhile(self, gcs, target):
        bucket, key = parse(target).store._at(f"{gcs.bucket}/runs/out/x")
        for size in (1, 2 * PART_BYTES):
            gcs.server.put(gcs.bucket, "runs/out/x", b"mine")
            with pytest.raises(DestinationExistsError, match="written by"), Upload(bucket, key, size, "p"):
                pass
            assert gcs.server.buckets[gcs.bucket]["runs/out/x"].content == b"mine"
            gcs.server.put(gcs.bucket, "runs/out/x", b"ours", {MARK: "p"})
            with Upload(bucket, key, size, "p"):
                pass
            assert len(gcs.server.buckets[gcs.bucket]["runs/out/x"].content) == size

    def test_multipart_upload_keeps_object_that_appears_meanwhile(self, gcs, target):
        bucket, key = parse(target).store._at(f"{gcs.bucket}/runs/out/x")
        with (
            pytest.raises(DestinationExistsError, match="another process"),
            Upload(bucket, key, 0, "p") as upload,
        ):
            upload.write(memoryview(bytes(2 * PART_BYTES)))
            gcs.server.put(gcs.bucket, "runs/out/x", b"mine")
        assert gcs.server.buckets[gcs.bucket]["runs/out/x"].content == b"mine"
        assert not gcs.server.uploads

    def test_source_change_before_publishing_is_recoverable(self, gcs, target, tmp_path):
        """The old one is gone in part, and the new one complete: what is said leads to it."""
        source = tmp_path / "source"
        shutil.copytree(HF, source)
        words = ("convert", "hf-to-maxtext", source, target)
        run(*words)
        gcs.server.faults = [Fault("PUT .*/out/0/items/d", count=99, status=400, body="<Error/>")]
        assert ckpt(*words, "--no-scan", "--overwrite").exit_code == 5
        gcs.server.faults = []
        (source / "model.safetensors").touch()
        done = ckpt(*words, "--no-scan", "--overwrite")
        assert done.exit_code == 2 and "contains a complete checkpoint" in done.output, done.output
        run("copy", f"{target}.partial/content", f"{target}-2")
        assert "equal" in run("verify", f"{target}-2", "--against", HF)

    @pytest.mark.parametrize("name", ["0/items/_METADATA", "notes.txt"], ids=["restored", "beside"])
    def test_objects_added_to_replaced_output_are_kept(self, gcs, target, name):
        """Who finds the old one gone may bring it back, under names that the new one has as well."""
        run(*CONVERT, target)
        words = (*CONVERT, target, "--no-scan", "--overwrite")
        gcs.server.faults = [Fault("PUT .*/out/0/items/d", count=99, status=400, body="<Error/>")]
        assert ckpt(*words).exit_code == 5
        gcs.server.faults = []
        gcs.server.put(gcs.bucket, f"runs/out/{name}", b"mine")
        done = ckpt(*words)
        assert done.exit_code == 2 and "another process" in done.output, done.output
        assert gcs.server.buckets[gcs.bucket][f"runs/out/{name}"].content == b"mine"
        del gcs.server.buckets[gcs.bucket][f"runs/out/{name}"]
        run(*words)
        assert run("hash", target)

    @pytest.mark.parametrize("name", ["0/items/_METADATA", "notes.txt"], ids=["changed", "beside"])
    @pytest.mark.parametrize("moment", ["content/0/items/_METADATA", "content/0/commit_success.txt"])
    def test_objects_written_before_the_replacement_are_kept(self, gcs, target, name, moment, monkeypatch):
        """They appear after the old checkpoint was checked, while the index of the new one is written."""
        run(*CONVERT, target)
        words, take, left = (*CONVERT, target, "--no-scan", "--overwrite"), gcs.server.fault, [moment]
        before = gcs.server.buckets[gcs.bucket].get(f"runs/out/{name}")

        def write_too(request):
            if left and request.startswith("PUT ") and request.endswith(left[0]):
                left.clear()
                gcs.server.put(gcs.bucket, f"runs/out/{name}", b"mine")
            return take(request)

        with monkeypatch.context() as patch:
            patch.setattr(gcs.server, "fault", write_too)
            done = ckpt(*words)
        assert done.exit_code == 2 and "another process" in done.output, done.output
        objects = gcs.server.buckets[gcs.bucket]
        assert objects[f"runs/out/{name}"].content == b"mine"
        assert "runs/out/0/commit_success.txt" in objects
        del objects[f"runs/out/{name}"]
        if before is not None:
            objects[f"runs/out/{name}"] = before
        run(*words)
        assert run("hash", target)

    @pytest.mark.parametrize("moment", ["PUT .*journal/plan", "DELETE .*journal/plan"])
    def test_false_precondition_failure_is_explained(self, gcs, target, moment):
        gcs.server.faults = [Fault(moment, status=412, body="<Error><Code>PreconditionFailed</Code></Error>")]
        done = ckpt(*CONVERT, target)
        assert done.exit_code in (2, 5) and "internal error" not in done.output, done.output
        gcs.server.faults = []
        ckpt(*CONVERT, target)
        assert run("hash", target)

    def test_foreign_objects_in_staging_are_not_published(self, gcs, target):
        run(*CONVERT, target)
        gcs.server.put(gcs.bucket, "runs/out.partial/content/mine", b"mine")
        done = ckpt(*CONVERT, target, "--no-scan", "--overwrite")
        assert done.exit_code == 2 and "no journal" in done.output, done.output
        assert gcs.server.buckets[gcs.bucket]["runs/out.partial/content/mine"].content == b"mine"
        assert run("hash", target)

    @pytest.mark.parametrize(
        "name", ["notes.txt", "content/mine", "lock.txt", "journal.ckpttools", "a/b/c", "parts"]
    )
    @pytest.mark.parametrize("is_new", [True, False])
    def test_convert_refuses_foreign_objects_in_the_staging_directory(self, cloud, name, is_new):
        target, foreign = f"{cloud.scheme}://{cloud.bucket}/runs/out", f"runs/out.partial/{name}"
        if not is_new:
            run(*CONVERT, target)
        cloud.put({foreign: b"mine"})
        words = [*CONVERT, target, *(() if is_new else ("--no-scan", "--overwrite"))]
        done = ckpt(*words)
        assert done.exit_code == 2 and "no journal of ckpttools" in done.output, done.output
        assert f"1 objects, such as {name}" in done.output, done.output
        assert parse(f"{cloud.scheme}://{cloud.bucket}/{foreign}").read_bytes() == b"mine"
        assert ckpt("hash", target).exit_code == (2 if is_new else 0)

    def test_convert_resumes_in_its_own_staging_directory(self, gcs, target):
        """A lock, its probe and a claim of a process that is gone are not foreign."""
        names = ("lock", "lock-1234", "parts/1234")
        owner = b'{"owner": "a", "pid": 7, "host": "gone"}'
        for name in names:
            gcs.server.put(gcs.bucket, f"runs/out.partial/{name}", owner)
            gcs.age(f"runs/out.partial/{name}", 3600)
        run(*CONVERT, target)

    def test_incomplete_output_does_not_replace_the_old(self, gcs, target):
        run(*CONVERT, target)
        words = (*CONVERT, target, "--no-scan", "--overwrite")
        gcs.server.faults = [Fault("DELETE .*runs/out/", count=99, status=400, body="<Error/>")]
        assert ckpt(*words).exit_code == 5
        gcs.server.faults = []
        del gcs.server.buckets[gcs.bucket]["runs/out.partial/content/0/items/_METADATA"]
        done = ckpt(*words)
        assert done.exit_code == 2 and "has changed since" in done.output, done.output

    def test_copies_shared_with_source_resume(self, gcs, target):
        source = gcs.filled(files_in(GOLDEN / "llama3.1" / "maxtext_unscanned"))
        run("stack", source, f"{target}-0")
        run(*CONVERT, target)
        words = ("stack", source, target, "--overwrite")
        gcs.server.faults = [Fault("PUT .*/out/0/commit_success", count=99, status=400, body="<Error/>")]
        assert ckpt(*words).exit_code == 5
        gcs.server.faults = []
        run(*words)
        assert run("hash", target).split()[0] == run("hash", f"{target}-0").split()[0]


class TestSources:
    @pytest.mark.parametrize("where", ["gs", "local"])
    def test_rerun_rereads_changed_source(self, gcs, target, tmp_path, where):
        model = bytearray((HF / "model.safetensors").read_bytes())
        source = f"gs://{gcs.bucket}/changing"
        gcs.server.put(gcs.bucket, "changing/model.safetensors", bytes(model))
        model[-1] ^= 1

        def change():
            gcs.server.put(gcs.bucket, "changing/model.safetensors", bytes(model))

        gcs.server.faults = [Fault("GET .*changing/model", then=change)]
        out = target if where == "gs" else tmp_path / "out"
        done = ckpt("convert", "to-safetensors", source, out)
        assert done.exit_code == 3 and "run the same command again" in done.output, done.output
        run("convert", "to-safetensors", source, out)
        assert "equal" in run("verify", out, "--against", source)


class TestNames:
    @pytest.mark.parametrize("name", ["ü #1", "50%", "a%20b&c+", "~[x]?'\"*"])
    def test_convert_accepts_unusual_names(self, gcs, name):
        location = f"gs://{gcs.bucket}/odd/{name}/out"
        run(*CONVERT, location)
        digest = run("hash", location).split()[0]
        assert f"odd/{name}/out/0/commit_success.txt" in gcs.server.buckets[gcs.bucket]
        run(*CONVERT, location, "--no-scan", "--overwrite")
        # One name for a layer, stacked or not.
        assert run("hash", location).split()[0] == digest

    @pytest.mark.parametrize("name", ["new\nline", "x\x7f"])
    def test_convert_refuses_control_characters_in_names(self, gcs, name):
        done = ckpt(*CONVERT, f"gs://{gcs.bucket}/{name}")
        assert done.exit_code == 2 and "control characters" in done.output, done.output

    def test_overwrite_keeps_objects_with_the_same_prefix(self, gcs, target):
        run(*CONVERT, f"{target}2")
        before = {key: item for key, item in gcs.server.buckets[gcs.bucket].items() if "out2" in key}
        run(*CONVERT, target)
        run(*CONVERT, target, "--no-scan", "--overwrite")
        now = {key: item for key, item in gcs.server.buckets[gcs.bucket].items() if "out2" in key}
        assert now == before
