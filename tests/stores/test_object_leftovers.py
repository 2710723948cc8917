"""What kills leave in a bucket: named by `ckpt doctor`, ended by whoever goes on, not deleted unasked."""

from __future__ import annotations

import json

import pytest
from support.command_line import ckpt, run
from support.gcs_server import Fault
from support.internals import parse
from support.locations import HF
from support.object_stores import amazon, google

from ckpttools import StorageError
from ckpttools.stores.abilities import SupportsUploads
from ckpttools.stores.objects.writing import PART_BYTES, Upload


@pytest.fixture(params=["gs", "s3"])
def cloud(request):
    server = request.getfixturevalue("s3_server" if request.param == "s3" else "gcs_server")
    with {"gs": google, "s3": amazon}[request.param](server) as result:
        result.filled({"a": b""})
        yield result
    if request.param == "gs":
        server.uploads.clear()


def abandoned(location, name="d/data"):
    """An upload of which parts are there, as a killed process leaves it."""
    bucket, rest = location.store._at(f"{location.key}/{name}")
    upload = Upload(bucket, rest, 0, "plan")
    for _ in range(3):
        upload.write(memoryview(bytes(PART_BYTES)))
    return upload


def interrupted(gcs, location, request):
    gcs.server.faults = [Fault(request, count=99, status=400, body="<Error/>")]
    assert ckpt("convert", "hf-to-maxtext", HF, location).exit_code == 5
    gcs.server.faults = []


def findings(location, check):
    report = json.loads(ckpt("doctor", location, "--json").stdout)
    return [item for item in report["findings"] if item["check"] == check]


class TestUploads:
    def test_unfinished_uploads_are_listed_and_aborted(self, cloud):
        location = parse(f"{cloud.scheme}://{cloud.bucket}/runs/out")
        assert isinstance(location.store, SupportsUploads)
        upload = abandoned(location)
        abandoned(parse(f"{cloud.scheme}://{cloud.bucket}/runs/out2"))
        result = location.store.uploads(location.key)
        assert [item.key for item in result] == [f"{cloud.bucket}/runs/out/d/data"]
        location.store.abort([*result, *result])
        assert not location.store.uploads(location.key)
        assert len(location.store.uploads(f"{cloud.bucket}/runs")) == 1
        with pytest.raises(StorageError, match="ended by another process"):
            upload.__exit__(None, None, None)
        assert not location.exists()

    def test_doctor_lists_unfinished_uploads(self, cloud):
        there = f"{cloud.scheme}://{cloud.bucket}/runs/out"
        run("convert", "hf-to-maxtext", HF, there)
        assert not findings(there, "uploads")
        abandoned(parse(there) / "0")
        (result,) = findings(there, "uploads")
        assert result["level"] == "warning" and result["fix"] == "abort-uploads"
        assert "1 incomplete upload," in result["what"] and f"{there}/0/d/data" in result["what"]
        assert "lifecycle" in result["hint"]

    def test_fix_keeps_recent_uploads(self, gcs):
        there = f"gs://{gcs.bucket}/runs/out"
        run("convert", "hf-to-maxtext", HF, there)
        abandoned(parse(there) / "0")
        done = ckpt("doctor", there, "--fix", "abort-uploads")
        assert done.exit_code == 3 and "may still be running" in done.output
        assert gcs.server.uploads
        for upload in gcs.server.uploads.values():
            upload.begun -= 7300
        done = ckpt("doctor", there, "--fix", "abort-uploads")
        assert done.exit_code == 0 and "1 upload to" in done.output and "aborted" in done.output
        assert not gcs.server.uploads

    def test_failed_upload_listing_is_reported(self, gcs):
        there = f"gs://{gcs.bucket}/runs/out"
        run("convert", "hf-to-maxtext", HF, there)
        gcs.server.faults = [Fault("GET .*uploads", count=9, status=403)]
        (result,) = findings(there, "uploads")
        assert result["level"] == "info" and "403" in result["what"]
        assert "gcloud storage buckets update" in result["command"]

    def test_rerun_aborts_unfinished_uploads(self, gcs):
        location = parse(f"gs://{gcs.bucket}/runs/out")
        interrupted(gcs, location, "PUT .*/0/commit_success")
        abandoned(location / "0")
        abandoned(location.with_name("out2"))
        run("convert", "hf-to-maxtext", HF, location)
        assert [upload.key for upload in gcs.server.uploads.values()] == ["runs/out2/d/data"]

    def test_forbidden_listing_does_not_stop_the_command(self, gcs):
        location = parse(f"gs://{gcs.bucket}/runs/out")
        interrupted(gcs, location, "PUT .*/0/commit_success")
        gcs.server.faults = [Fault("GET .*uploads", count=9, status=403)]
        run("convert", "hf-to-maxtext", HF, location)

    def test_invalid_upload_listing_is_ignored(self, gcs):
        location = parse(f"gs://{gcs.bucket}/runs/out")
        interrupted(gcs, location, "PUT .*/0/commit_success")
        # 200 all the same, as a proxy answers that asks for a login.
        gcs.server.faults = [Fault("GET .*uploads", count=9, status=200, body="<p>log in")]
        run("convert", "hf-to-maxtext", HF, location)


class TestLeftovers:
    def test_doctor_reports_interrupted_conversion_in_place(self, gcs):
        location = parse(f"gs://{gcs.bucket}/runs/out")
        interrupted(gcs, location, "PUT .*/0/commit_success")
        for where in (location, location.parent, location.with_name("out.partial")):
            (result,) = findings(where, "leftovers")
            assert result["location"].startswith(f"{location}")
            assert "again to resume" in result["hint"]
        assert "gcloud storage rm -r" in result["hint"] and str(location) in result["hint"]

    def test_doctor_keeps_interrupted_replacement(self, gcs):
        location = parse(f"gs://{gcs.bucket}/runs/out")
        run("convert", "hf-to-maxtext", HF, location)
        gcs.server.faults = [Fault("PUT .*/out/0/items/d", count=99, status=400, body="<Error/>")]
        words = ("convert", "hf-to-maxtext", HF, location, "--no-scan", "--overwrite")
        assert ckpt(*words).exit_code == 5
        gcs.server.faults = []
        (result,) = findings(location.with_name("out.partial"), "leftovers")
        assert result["command"] is None and "only copy" in result["hint"]
        run(*words)

    @pytest.mark.parametrize("name", ["lock", "content/0/items/d/data", "journal/done-1", "lock-0a"])
    def test_unknown_staging_objects_are_kept(self, gcs, name):
        gcs.server.put(gcs.bucket, f"runs/out.partial/{name}", b"{}")
        for where in (f"gs://{gcs.bucket}/runs", f"gs://{gcs.bucket}/runs/out.partial"):
            (result,) = findings(where, "leftovers")
            assert "without a journal" in result["consequence"] and "rm -r" in result["hint"]
        assert f"runs/out.partial/{name}" in gcs.server.buckets[gcs.bucket]

    def test_checkpoint_named_like_staging_is_not_a_leftover(self, gcs):
        location = f"gs://{gcs.bucket}/runs/out.partial"
        run("convert", "hf-to-maxtext", HF, location)
        assert not findings(location, "leftovers")
        before = dict(gcs.server.buckets[gcs.bucket])
        refused = run("convert", "hf-to-maxtext", HF, f"gs://{gcs.bucket}/runs/out", code=2)
        assert f"{location} contains objects, but no journal of ckpttools" in refused
        assert gcs.server.buckets[gcs.bucket] == before
