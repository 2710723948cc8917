"""What kills leave in a bucket: named by `ckpt doctor`, ended by whoever goes on, not deleted unasked."""

from __future__ import annotations

import json

import pytest
from support.command_line import ckpt, run
from support.gcs_server import Fault
from support.object_stores import amazon, google
from support.places import HF

from ckpttools.core.errors import StorageError
from ckpttools.stores import parse
from ckpttools.stores.abilities import KeepsUploads
from ckpttools.stores.objects.writing import PART_BYTES, Upload


@pytest.fixture(params=["gs", "s3"])
def cloud(request):
    server = request.getfixturevalue("s3_server" if request.param == "s3" else "gcs_server")
    with {"gs": google, "s3": amazon}[request.param](server) as found:
        found.filled({"a": b""})
        yield found
    if request.param == "gs":
        server.uploads.clear()


def abandoned(place, name="d/data"):
    """An upload of which parts are there, as a killed process leaves it."""
    bucket, rest = place.store._at(f"{place.key}/{name}")
    upload = Upload(bucket, rest, 0, "plan")
    for _ in range(3):
        upload.write(memoryview(bytes(PART_BYTES)))
    return upload


def interrupted(gcs, place, request):
    gcs.server.faults = [Fault(request, count=99, status=400, body="<Error/>")]
    assert ckpt("convert", "hf-to-maxtext", HF, place).exit_code == 5
    gcs.server.faults = []


def findings(place, check):
    report = json.loads(ckpt("doctor", place, "--json").stdout)
    return [each for each in report["findings"] if each["check"] == check]


class TestUploads:
    def test_they_are_listed_and_aborted(self, cloud):
        place = parse(f"{cloud.scheme}://{cloud.bucket}/runs/out")
        assert isinstance(place.store, KeepsUploads)
        upload = abandoned(place)
        abandoned(parse(f"{cloud.scheme}://{cloud.bucket}/runs/out2"))
        found = place.store.uploads(place.key)
        assert [each.key for each in found] == [f"{cloud.bucket}/runs/out/d/data"]
        place.store.abort([*found, *found])
        assert not place.store.uploads(place.key)
        assert len(place.store.uploads(f"{cloud.bucket}/runs")) == 1
        with pytest.raises(StorageError, match="ended elsewhere"):
            upload.__exit__(None, None, None)
        assert not place.exists()

    def test_doctor_names_them(self, cloud):
        there = f"{cloud.scheme}://{cloud.bucket}/runs/out"
        run("convert", "hf-to-maxtext", HF, there)
        assert not findings(there, "uploads")
        abandoned(parse(there) / "0")
        (found,) = findings(there, "uploads")
        assert found["level"] == "warning" and found["fix"] == "abort-uploads"
        assert "1 upload in parts" in found["what"] and f"{there}/0/d/data" in found["what"]
        assert "lifecycle" in found["do"]

    def test_the_fix_leaves_those_that_may_be_at_work(self, gcs):
        there = f"gs://{gcs.bucket}/runs/out"
        run("convert", "hf-to-maxtext", HF, there)
        abandoned(parse(there) / "0")
        done = ckpt("doctor", there, "--fix", "abort-uploads")
        assert done.exit_code == 3 and "may still be at work" in done.output
        assert gcs.server.uploads
        for each in gcs.server.uploads.values():
            each.begun -= 7300
        done = ckpt("doctor", there, "--fix", "abort-uploads")
        assert done.exit_code == 0 and "1 upload to" in done.output and "aborted" in done.output
        assert not gcs.server.uploads

    def test_what_cannot_be_looked_at_is_said(self, gcs):
        there = f"gs://{gcs.bucket}/runs/out"
        run("convert", "hf-to-maxtext", HF, there)
        gcs.server.faults = [Fault("GET .*uploads", count=9, status=403)]
        (found,) = findings(there, "uploads")
        assert found["level"] == "info" and "403" in found["what"]
        assert "gcloud storage buckets update" in found["command"]

    def test_the_same_command_ends_them(self, gcs):
        place = parse(f"gs://{gcs.bucket}/runs/out")
        interrupted(gcs, place, "PUT .*/0/commit_success")
        abandoned(place / "0")
        abandoned(place.with_name("out2"))
        run("convert", "hf-to-maxtext", HF, place)
        assert [each.key for each in gcs.server.uploads.values()] == ["runs/out2/d/data"]

    def test_who_may_not_list_them_goes_on_all_the_same(self, gcs):
        place = parse(f"gs://{gcs.bucket}/runs/out")
        interrupted(gcs, place, "PUT .*/0/commit_success")
        gcs.server.faults = [Fault("GET .*uploads", count=9, status=403)]
        run("convert", "hf-to-maxtext", HF, place)

    def test_an_answer_that_is_no_listing_is_none(self, gcs):
        place = parse(f"gs://{gcs.bucket}/runs/out")
        interrupted(gcs, place, "PUT .*/0/commit_success")
        # 200 all the same, as a proxy answers that asks for a login.
        gcs.server.faults = [Fault("GET .*uploads", count=9, status=200, body="<p>log in")]
        run("convert", "hf-to-maxtext", HF, place)


class TestLeftovers:
    def test_a_conversion_that_grows_at_its_place(self, gcs):
        place = parse(f"gs://{gcs.bucket}/runs/out")
        interrupted(gcs, place, "PUT .*/0/commit_success")
        for where in (place, place.parent, place.with_name("out.partial")):
            (found,) = findings(where, "leftovers")
            assert found["place"].startswith(f"{place}")
            assert "again to resume" in found["do"]
        assert "gcloud storage rm -r" in found["do"] and str(place) in found["do"]

    def test_a_conversion_that_has_begun_to_replace_is_the_only_copy(self, gcs):
        place = parse(f"gs://{gcs.bucket}/runs/out")
        run("convert", "hf-to-maxtext", HF, place)
        gcs.server.faults = [Fault("PUT .*/out/0/items/d", count=99, status=400, body="<Error/>")]
        words = ("convert", "hf-to-maxtext", HF, place, "--no-scan", "--overwrite")
        assert ckpt(*words).exit_code == 5
        gcs.server.faults = []
        (found,) = findings(place.with_name("out.partial"), "leftovers")
        assert found["command"] is None and "only copy" in found["do"]
        run(*words)

    @pytest.mark.parametrize("name", ["lock", "content/0/items/d/data", "journal/done-1", "lock-0a"])
    def test_what_no_journal_tells_of(self, gcs, name):
        gcs.server.put(gcs.bucket, f"runs/out.partial/{name}", b"{}")
        for where in (f"gs://{gcs.bucket}/runs", f"gs://{gcs.bucket}/runs/out.partial"):
            (found,) = findings(where, "leftovers")
            assert "no journal" in found["why"] and "rm -r" in found["do"]
        assert f"runs/out.partial/{name}" in gcs.server.buckets[gcs.bucket]

    def test_somebody_s_checkpoint_of_such_a_name_is_one(self, gcs):
        place = f"gs://{gcs.bucket}/runs/out.partial"
        run("convert", "hf-to-maxtext", HF, place)
        assert not findings(place, "leftovers")
        before = dict(gcs.server.buckets[gcs.bucket])
        refused = run("convert", "hf-to-maxtext", HF, f"gs://{gcs.bucket}/runs/out", code=2)
        assert f"{place} holds objects, but no journal of ckpttools" in refused
        assert gcs.server.buckets[gcs.bucket] == before
