"""Locks and writers in buckets whose servers honor some or no write conditions."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import s3_server as server_module
from support.command_line import ckpt, run
from support.internals import LockedError, parse
from support.locations import HF
from support.object_stores import amazon
from support.s3_quirks import Quirks

import ckpttools
from ckpttools import DestinationExistsError, StorageError, UsageError
from ckpttools.stores.objects import lock as locking
from ckpttools.stores.objects import writing
from ckpttools.stores.objects.client import IGNORED, QUOTED, UNQUOTED, Conditions
from ckpttools.stores.objects.lock import Lock
from ckpttools.stores.objects.writing import TakenError, probe_conditions, put, read
from ckpttools.stores.publishing import UNPROTECTED

HONORED = {
    "none": Conditions(True, QUOTED),
    "ceph": Conditions(True, UNQUOTED),
    "ignores both": Conditions(False, IGNORED),
    "ignores If-Match": Conditions(True, IGNORED),
    "ignores If-None-Match": Conditions(False, QUOTED),
    "refuses If-Match": Conditions(True, IGNORED),
    "does not know If-Match": Conditions(True, IGNORED),
    "does not know either": Conditions(False, IGNORED),
}
SAFE = [kind for kind, result in HONORED.items() if result.creates]
UNSAFE = [kind for kind, result in HONORED.items() if not result.creates]
# One store of each answer.
TYPICAL = ("none", "ceph", "ignores If-Match", "ignores both")
CONVERT = ("convert", "hf-to-maxtext", HF)


@pytest.fixture(scope="module")
def server():
    built = []

    def before(app):
        built.append(Quirks(app))
        return built[0]

    with server_module.running(before) as url:
        yield built[0], url


@pytest.fixture
def s3(server, monkeypatch):
    """A new bucket on a server without quirks. Requests with status 501 are not retried for long."""
    quirks, url = server
    quirks.kind, quirks.refuse = "none", lambda method, path: 0
    monkeypatch.setattr("ckpttools.stores.objects.client.FIRST_RETRIES", 0)
    monkeypatch.setattr("ckpttools.stores.objects.client.RETRIES", 0)
    monkeypatch.setattr(locking, "SETTLE_SECONDS", 0.1)
    monkeypatch.delenv(UNPROTECTED, raising=False)
    with amazon(url) as result:
        result.quirks = quirks
        yield result


@pytest.fixture
def elsewhere(monkeypatch):
    """Owners of locks that may be on any machine."""
    monkeypatch.setattr(locking, "_is_dead", lambda owner: False)


def bucket_of(s3):
    return parse(f"s3://{s3.bucket}/x").store._at(f"{s3.bucket}/x")[0]


def keys(s3):
    return sorted(name for name, _ in bucket_of(s3).objects_below(""))


def owners(s3, count: int) -> int:
    """Start several threads at once and count those that get a lock, which they hold until all have tried."""
    probe_conditions(bucket_of(s3), "x.partial/lock-")
    start, tried, won = threading.Barrier(count), threading.Semaphore(0), []

    def take(number):
        start.wait()
        try:
            with Lock(bucket_of(s3), "x.partial/lock", "s3://x"):
                won.append(number)
                for _ in range(count - len(won)):
                    assert tried.acquire(timeout=60)
        except LockedError:
            tried.release()

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(take, range(count)))
    return len(won)


class TestProbe:
    @pytest.mark.parametrize("kind", HONORED)
    def test_probe_finds_honored_conditions_and_leaves_no_object(self, s3, kind):
        s3.quirks.kind = kind
        assert probe_conditions(bucket_of(s3), "x.partial/lock-") == HONORED[kind]
        assert keys(s3) == []

    def test_probe_runs_once_with_five_requests(self, s3):
        s3.quirks.log.clear()
        for _ in range(3):
            probe_conditions(bucket_of(s3), "x.partial/lock-")
        assert [method for method, _ in s3.quirks.log] == ["PUT"] * 4 + ["POST"]

    @pytest.mark.parametrize("scheme", ["gs", "az"])
    def test_google_and_azure_honor_all_conditions(self, gcs_server, scheme):
        from support.object_stores import azure, google

        with {"gs": google, "az": azure}[scheme](gcs_server) as result:
            result.filled({"a": b""})
            before = set(gcs_server.buckets[result.bucket])
            bucket = parse(f"{scheme}://{result.bucket}/x").store._at(f"{result.bucket}/x")[0]
            assert probe_conditions(bucket, "x.partial/lock-") == Conditions(True, QUOTED)
            assert set(gcs_server.buckets[result.bucket]) == before

    def test_probe_reports_missing_permission(self, s3):
        s3.quirks.refuse = lambda method, path: 403 if method == "PUT" else 0
        with pytest.raises(StorageError, match="not allowed"):
            probe_conditions(bucket_of(s3), "x.partial/lock-")
        assert not bucket_of(s3).is_probed

    @settings(max_examples=40, deadline=None)
    @given(kind=st.sampled_from(sorted(HONORED)), steps=st.lists(st.sampled_from("cru"), max_size=8))
    def test_conditional_writes_behave_equally_in_all_stores(self, server, kind, steps):
        """A single process sees the same refusals for all servers."""
        quirks, url = server
        # Also for the request that creates the bucket.
        quirks.kind, quirks.refuse = kind, lambda method, path: 0
        with pytest.MonkeyPatch.context() as patch, amazon(url) as result:
            patch.setattr("ckpttools.stores.objects.client.FIRST_RETRIES", 0)
            patch.setattr("ckpttools.stores.objects.client.RETRIES", 0)
            bucket = bucket_of(result)
            probe_conditions(bucket, "lock-")
            expected, stale, current = None, {"e_tag": '"0123"'}, None
            for number, item in enumerate(steps):
                content = b"%d" % number
                condition = {"c": None, "r": current, "u": stale}[item]
                if (item == "c" and expected is None) or (item == "r" and current is not None):
                    stale, current = current or stale, put(bucket, "k", content, instead_of=condition)
                    expected = content
                elif item != "r":
                    with pytest.raises(TakenError):
                        put(bucket, "k", content, instead_of=condition)
                found_now = read(bucket, "k")
                assert (found_now and found_now[0]) == expected


class TestTwoWriters:
    @pytest.mark.parametrize("kind", SAFE)
    def test_only_one_writer_replaces_the_lock(self, s3, kind):
        s3.quirks.kind = kind
        there = f"s3://{s3.bucket}/two"
        run(*CONVERT, there)

        def convert(_):
            try:
                return ckpttools.hf_to_maxtext(HF, there, scan=False, overwrite=True).tasks > 0
            except (LockedError, DestinationExistsError):
                return False

        with ThreadPoolExecutor(3) as pool:
            assert sum(pool.map(convert, range(3))) == 1
        assert "equal" in run("verify", there, "--against", HF)
        assert not [key for key in keys(s3) if ".partial" in key]

    @pytest.mark.parametrize("kind", UNSAFE)
    def test_overwrite_is_refused_without_write_conditions(self, s3, kind, monkeypatch):
        s3.quirks.kind = kind
        there = f"s3://{s3.bucket}/two"
        run(*CONVERT, there)
        before = keys(s3)
        refused = run(*CONVERT, there, "--no-scan", "--overwrite", code=2)
        assert "does not detect a second writer" in refused and "--allow-unprotected" in refused, refused
        assert keys(s3) == before
        with pytest.raises(UsageError, match="second writer") as raised:
            ckpttools.hf_to_maxtext(HF, there, scan=False, overwrite=True)
        assert f"{UNPROTECTED}=1" in raised.value.hint
        run(*CONVERT, there, "--no-scan", "--overwrite", "--allow-unprotected")
        assert "equal" in run("verify", there, "--against", HF)
        # The flag holds for that command alone.
        run(*CONVERT, there, "--overwrite", code=2)
        monkeypatch.setenv(UNPROTECTED, "1")
        ckpttools.hf_to_maxtext(HF, there, overwrite=True)
        assert "equal" in run("verify", there, "--against", HF)

    @pytest.mark.parametrize("kind", UNSAFE)
    def test_parts_are_refused_without_write_conditions(self, s3, kind, tmp_path):
        s3.quirks.kind = kind
        there, plan = f"s3://{s3.bucket}/shared", tmp_path / "x.plan"
        run("plan", "-o", plan, *CONVERT, there)
        assert "several processes" in run("run", plan, "--part", "0/2", code=2)
        for part in ("0/2", "1/2"):
            run("run", plan, "--part", part, "--allow-unprotected")
        run("run", plan, "--publish", "--allow-unprotected")
        assert "equal" in run("verify", there, "--against", HF)

    @pytest.mark.parametrize("kind", UNSAFE)
    def test_only_one_of_simultaneous_writers_gets_lock(self, s3, kind):
        s3.quirks.kind = kind
        assert owners(s3, 4) == 1


class TestLocks:
    @pytest.mark.parametrize("kind", TYPICAL)
    def test_lock_of_dead_process_is_taken_over(self, s3, kind, elsewhere):
        s3.quirks.kind = kind
        there = f"s3://{s3.bucket}/out"
        s3.put({"out.partial/lock": json.dumps({"owner": "a", "pid": 7, "host": "gone"}).encode()})
        told = run(*CONVERT, there, code=2)
        assert "process 7 on gone, last seen" in told, told
        assert f"aws s3 rm s3://{s3.bucket}/out.partial/lock" in told, told
        s3.age("out.partial/lock", 61)
        run(*CONVERT, there)
        assert "equal" in run("verify", there, "--against", HF)
        assert not [key for key in keys(s3) if ".partial" in key]

    @pytest.mark.parametrize("kind", TYPICAL[1:3])
    def test_only_one_process_takes_over_dead_lock(self, s3, kind, elsewhere):
        s3.quirks.kind = kind
        s3.put({"x.partial/lock": json.dumps({"owner": "a", "pid": 7, "host": "gone"}).encode()})
        s3.age("x.partial/lock", 61)
        assert owners(s3, 6) == 1
        assert keys(s3) == []

    @pytest.mark.parametrize("kind", TYPICAL)
    def test_held_lock_is_renewed(self, s3, kind, elsewhere, monkeypatch):
        s3.quirks.kind = kind
        monkeypatch.setattr(locking, "RENEWED_SECONDS", 0.1)
        with Lock(bucket_of(s3), "x.partial/lock", "s3://x") as lock:
            s3.age("x.partial/lock", 61)
            until = time.monotonic() + 60
            while time.time() - bucket_of(s3).head("x.partial/lock").modified / 1e9 > 30:
                assert time.monotonic() < until, "the lock was not renewed"
                time.sleep(0.02)
            lock.check()
            with pytest.raises(LockedError), Lock(bucket_of(s3), "x.partial/lock", "s3://x"):
                pass
        assert keys(s3) == []

    @pytest.mark.parametrize("status", [412, 403])
    def test_failed_renewals_do_not_count(self, s3, status, elsewhere, monkeypatch):
        """Other processes see the lock age, so its owner must stop."""
        now = locking._now
        with Lock(bucket_of(s3), "x.partial/lock", "s3://x") as lock:
            s3.quirks.refuse = lambda method, path: status if method == "PUT" else 0
            with pytest.raises(StorageError):
                lock.renew()
            monkeypatch.setattr(locking, "_now", lambda: now() + 0.8 * locking.EXPIRED_SECONDS)
            with pytest.raises(StorageError, match="no longer locked"):
                lock.check()
            s3.quirks.refuse = lambda method, path: 0

    @pytest.mark.parametrize("kind", [item for item in HONORED if HONORED[item].replaces == IGNORED])
    def test_owner_detects_lost_lock(self, s3, kind, elsewhere):
        s3.quirks.kind = kind
        with Lock(bucket_of(s3), "x.partial/lock", "s3://x") as lock:
            s3.put({"x.partial/lock": json.dumps({"owner": "b", "pid": 8, "host": "other"}).encode()})
            with pytest.raises(StorageError, match="no longer locked"):
                lock.renew()
        assert keys(s3) == ["x.partial/lock"], "it is the other's, and is not deleted"

    def test_read_error_names_the_writer(self, s3):
        there = f"s3://{s3.bucket}/out"
        s3.quirks.refuse = lambda method, path: 403 if "_METADATA" in path and method == "PUT" else 0
        run(*CONVERT, there, code=5)
        s3.quirks.refuse = lambda method, path: 0
        s3.put({"out.partial/lock": json.dumps({"owner": "a", "pid": 7, "host": "gone"}).encode()})
        release = f"aws s3 rm s3://{s3.bucket}/out.partial/lock"
        for words in (("inspect", "tree", there), ("inspect", "tree", f"{there}.partial"), ("doctor", there)):
            told = ckpt(*words).output
            assert "process 7 on gone, last seen" in told or "last renewed" in told, told
            assert release in told, told

    def test_doctor_reports_the_lock(self, s3):
        there = f"s3://{s3.bucket}/out"
        run(*CONVERT, there)
        s3.put({"out.partial/lock": json.dumps({"owner": "a", "pid": 7, "host": "gone"}).encode()})
        for location in (there, f"{there}.partial"):
            report = json.loads(ckpt("doctor", location, "--json").stdout)
            result = [item for item in report["findings"] if item["check"] == "locks"]
            assert len(result) == 1 and "process 7 on gone" in result[0]["what"], report
            assert result[0]["command"] == f"aws s3 rm s3://{s3.bucket}/out.partial/lock"


class TestAborts:
    """A request that fails during error handling does not hide the original error."""

    @pytest.mark.parametrize("status", [403, 400, 500])
    @pytest.mark.parametrize("where", ["part", "completion", "everything"])
    def test_failed_abort_keeps_original_error(self, s3, monkeypatch, status, where):
        monkeypatch.setattr(writing, "PART_BYTES", 20_000)
        monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)

        def refuse(method, path):
            is_upload = "partNumber" in path or (where == "everything" and "uploads" in path)
            is_end = method == "POST" and "uploadId" in path
            is_abort = method == "DELETE" and "uploadId" in path
            is_asked = is_end if where == "completion" else is_upload and method in ("PUT", "POST")
            return status if is_asked or is_abort else 0

        s3.quirks.refuse = refuse
        done = ckpt(*CONVERT, f"s3://{s3.bucket}/out")
        assert done.exit_code == 5, done.output
        assert f"{status}" in done.output and "Traceback" not in done.output
        assert "Debug source" not in done.output and "out/" in done.output, done.output
        s3.quirks.refuse = lambda method, path: 0
        run(*CONVERT, f"s3://{s3.bucket}/out")
