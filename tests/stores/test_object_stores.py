"""Object stores: what is asked of them, and how often; what is pinned; what a user hears of their errors."""

from __future__ import annotations

import json
import re
import shlex
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from random import randbytes

import pytest
from support.command_line import ckpt, run, succeed
from support.gcs_server import Fault
from support.internals import parse
from support.locations import DOCS, GOLDEN, HF, ORBAX, TRAINED
from support.measured import within
from support.object_stores import amazon, azure, environment, files_in
from support.safetensors_files import packed

import ckpttools
from ckpttools import FormatError, SourceChangedError, StorageError
from ckpttools.stores import FileKind, block_cache, reads
from ckpttools.stores.concurrency import Pace, requested_concurrency
from ckpttools.stores.objects import az, client, gs, listing_cache, s3
from ckpttools.testing.stores import StoreTests

SHARDED = GOLDEN / "llama3.1" / "hf_sharded"
MAXTEXT = GOLDEN / "llama3.1" / "maxtext_scanned"
ZARR = ORBAX / "llama3.1_scanned_zarr2_noocdbt"


@pytest.fixture
def s3_cloud(s3_server):
    with amazon(s3_server) as cloud:
        yield cloud


@pytest.fixture(params=["gcs", "s3_cloud"])
def cloud(request):
    return request.getfixturevalue(request.param)


class TestGoogle(StoreTests):
    @pytest.fixture(autouse=True)
    def cloud(self, gcs):
        self.gcs = gcs

    @contextmanager
    def filled(self, files):
        yield self.gcs.filled(files)


class TestAmazon(StoreTests):
    @pytest.fixture(autouse=True)
    def cloud(self, s3_cloud):
        self.s3 = s3_cloud

    @contextmanager
    def filled(self, files):
        yield self.s3.filled(files)


class TestAzure(StoreTests):
    @pytest.fixture(autouse=True)
    def cloud(self, gcs_server):
        with azure(gcs_server) as self.azure:
            yield

    @contextmanager
    def filled(self, files):
        yield self.azure.filled(files)

    def test_permission_error_is_explained(self):
        location, words = (
            self.azure.filled({"a": b""}),
            "Public access is not permitted on this storage account.",
        )
        body = f"<Error><Message>{words}</Message></Error>"
        self.azure.server.faults.append(Fault("comp=list", status=409, body=body))
        with pytest.raises(StorageError, match="not allowed") as caught:
            location.entries()
        assert caught.value.got == f"409 Conflict: {words}; asked as anonymous (AZURE_SKIP_SIGNATURE is set)"


class TestCommands:
    """Whatever reads a checkpoint reads it from a bucket, with the same result as from a directory."""

    def test_convert_from_store_writes_the_same_bytes(self, cloud, tmp_path):
        for source, name in ((HF, "local"), (cloud.filled(files_in(HF)), "remote")):
            run("convert", "hf-to-maxtext", source, tmp_path / name)
        local, remote = files_in(tmp_path / "local"), files_in(tmp_path / "remote")
        assert local.keys() == remote.keys()
        differing = {name for name in local if local[name] != remote[name]}
        assert differing <= {"0/_CHECKPOINT_METADATA", "0/items/_CHECKPOINT_METADATA"}, "which have the time"

    def test_convert_from_store_to_hf_verifies_as_equal(self, cloud, tmp_path):
        source = cloud.filled({**files_in(MAXTEXT)})
        run("convert", "maxtext-to-hf", source, tmp_path / "out", "--like", HF)
        assert "equal" in run("verify", tmp_path / "out", "--against", HF)

    @pytest.mark.parametrize(
        ("source", "commands"),
        [
            (SHARDED, ("inspect tree", "inspect stats", "hash", "doctor")),
            (TRAINED, ("inspect tree", "inspect chunks", "hash", "doctor")),
            (ZARR, ("inspect chunks", "hash")),
        ],
        ids=["safetensors", "ocdbt", "zarr"],
    )
    def test_store_output_matches_local_output(self, gcs, source, commands):
        location = gcs.filled(files_in(source))
        for words in map(str.split, commands):
            local, remote = (ckpt(*words, item, "--json") for item in (source, location))
            assert remote.exit_code == local.exit_code
            declared = json.loads(remote.stdout.replace(str(location), str(source)))
            assert ("traffic" in declared) == (words == ["inspect", "tree"]), "which is looking alone"
            assert {**declared, "traffic": {}} == {**json.loads(local.stdout), "traffic": {}}

    def test_diff_and_verify_accept_two_buckets(self, cloud):
        model, run_ = cloud.filled(files_in(SHARDED)), cloud.filled(files_in(MAXTEXT))
        assert "39 arrays equal" in run("diff", model, run_)
        assert "equal" in run("verify", run_, "--against", model)

    def test_remaining_commands_read_from_a_store(self, cloud, tmp_path):
        location, manifest = cloud.filled(files_in(TRAINED)), tmp_path / "manifest.json"
        run("hash", location, "--manifest", manifest)
        succeed("verify", location, "--manifest", manifest)
        run("inspect", "report", location, "-o", tmp_path / "page.html")
        run("select", location, tmp_path / "some", "--keep", "params")
        succeed("inspect", "tree", f"{location}/1/items")

    def test_documented_store_commands_work(self, gcs, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        gcs.server.buckets.pop("my-bucket", None)
        for name, source in (("models/llama", HF), ("runs/llama/checkpoints", MAXTEXT)):
            for key, content in files_in(source).items():
                gcs.server.put("my-bucket", f"{name}/{key}", content)
        page = (DOCS / "stores.md").read_text().splitlines()
        lines = [line for line in page if "$ ckpt" in line and "gs://" in line]
        assert len(lines) >= 9
        for line in lines:
            succeed(*shlex.split(line)[2:])


class TestRequests:
    """How often a store is asked: a listing for what is there, one request for each file's metadata."""

    def asked(self, gcs, *words):
        gcs.server.log.clear()
        succeed(*words)
        return gcs.server.log

    def test_sharded_model_needs_one_request_per_shard(self, gcs):
        location = gcs.filled(files_in(SHARDED))
        asked = self.asked(gcs, "inspect", "tree", location)
        assert len(asked) == 1 + 1 + 1 + 4 + 1, "listing, journal, index, shards, configuration"
        assert sum("list-type" in item.path for item in asked) == 1

    def test_index_of_several_blocks_is_read_once(self, gcs, monkeypatch):
        monkeypatch.setattr(block_cache, "SIZE", 1 << 10)
        location = gcs.filled(files_in(SHARDED))
        asked = self.asked(gcs, "inspect", "tree", location)
        assert sum("index" in item.path for item in asked) == 1

    @pytest.mark.parametrize(
        "words", ["inspect tree", "inspect chunks", "inspect stats", "hash", "doctor", "diff {0}"]
    )
    def test_request_count_is_reported(self, gcs, words):
        location = gcs.filled(files_in(SHARDED))
        gcs.server.log.clear()
        done = ckpt(*(item.format(SHARDED) for item in words.split()), location)
        assert re.fullmatch(
            rf"{len(gcs.server.log)} requests to gs://, \d+ kB read", done.stderr.splitlines()[-1]
        )
        assert "request" not in ckpt(*words.format(SHARDED).split(), SHARDED).stderr

    def test_traffic_is_in_reports(self, gcs, tmp_path):
        location = gcs.filled(files_in(HF))
        gcs.server.log.clear()
        traffic = ckpttools.inspect(str(location)).traffic
        assert traffic["gs://"].requests == len(gcs.server.log)
        assert traffic["gs://"].nbytes > 1000
        receipt = json.loads(succeed("convert", "hf-to-maxtext", location, tmp_path / "out", "--json").stdout)
        assert receipt["traffic"]["gs://"]["requests"] > 0

    def test_pages_of_listings_are_counted(self, gcs):
        location = gcs.filled({f"{number}.bin": b"" for number in range(2500)})
        gcs.server.log.clear()
        before = gs.STORE.traffic
        assert len(location.entries()) == 2500
        assert (gs.STORE.traffic - before).requests == len(gcs.server.log)

    def test_shard_with_long_header_needs_two_requests(self, gcs, monkeypatch):
        monkeypatch.setattr(block_cache, "SIZE", 2 << 10)
        location = gcs.filled(files_in(SHARDED))
        asked = self.asked(gcs, "inspect", "tree", location)
        for number in range(1, 5):
            assert sum(f"0000{number}%2Dof" in item.path for item in asked) <= 2

    def test_step_needs_one_request_per_file(self, gcs):
        location = gcs.filled(files_in(TRAINED))
        asked = self.asked(gcs, "inspect", "tree", location)
        names = [item.path.rpartition("%2F")[2] for item in asked]
        assert len(asked) == len(set(names)) == 7

    def test_inspecting_an_item_needs_at_most_nine_requests(self, gcs):
        location = gcs.filled(files_in(TRAINED))
        assert len(self.asked(gcs, "inspect", "tree", f"{location}/1/items")) <= 9

    def test_change_check_needs_one_listing(self, gcs):
        location = gcs.filled(files_in(SHARDED))
        succeed("inspect", "tree", location)
        asked = self.asked(gcs, "hash", location)
        assert [item.method for item in asked if "safetensors" not in item.path] == ["HEAD", "GET"]

    def test_shards_are_opened_at_the_same_time(self, gcs):
        location = gcs.filled(files_in(SHARDED))
        gcs.server.latency = 0.1
        succeed("inspect", "tree", location)
        assert gcs.server.most_at_once >= 4

    def test_large_listings_are_split_by_directory(self, gcs, monkeypatch):
        monkeypatch.setattr(listing_cache, "_MAX_OBJECTS", 10)
        location = gcs.filled(files_in(ZARR))
        gcs.server.page = 7
        assert succeed("hash", location).stdout == succeed("hash", ZARR).stdout
        assert len(list(location.walk())) == len(files_in(ZARR))


class TestListings:
    def test_directory_marker_is_not_a_file(self, gcs):
        location = gcs.filled({"": b"", "d/": b"", "d/file": b"1", "empty": b""})
        assert {name for name, _ in location.walk()} == {"d/file", "empty"}
        assert {entry.name: entry.kind for entry in location.entries()} == {
            "d": FileKind.DIRECTORY,
            "empty": FileKind.FILE,
        }

    def test_listings_are_cached_briefly(self, gcs, monkeypatch):
        location = gcs.filled({"a": b"1"})
        assert (location / "a").is_file() and location.is_dir()
        gcs.put({(location / "b").key.partition("/")[2]: b"2"})
        assert not (location / "b").exists()
        monkeypatch.setattr(listing_cache, "_VALID_SECONDS", 0.0)
        monkeypatch.setattr(listing_cache, "_VALID_FACTOR", 0)
        other = gcs.filled({"a": b"1"})
        assert other.is_dir()
        gcs.put({(other / "b").key.partition("/")[2]: b"2"})
        assert (other / "b").exists()

    def test_named_objects_are_readable_without_listing(self, gcs):
        location = gcs.filled({"d/a.json": b"1", "d/b.json": b"2", "d/c.json": b"3"})
        gcs.server.faults.append(Fault("list-type", count=99, status=403))
        assert [(location / "d" / f"{name}.json").read_bytes() for name in "abc"] == [b"1", b"2", b"3"]

    def test_bucket_is_a_top_level_directory(self, gcs):
        location = gcs.filled({"a": b"1"})
        bucket = parse(f"gs://{gcs.bucket}")
        assert bucket.is_dir() and location in [item / "some where" for item in bucket.iterdir()]
        with pytest.raises(StorageError, match="cannot list gs://"):
            parse("gs://").entries()

    @pytest.mark.parametrize("name", ["../x", "a\x01b"])
    def test_invalid_key_is_reported_missing(self, gcs, name):
        location = gcs.filled({"a": b"1"})
        assert not (location / name).exists()

    def test_keys_accept_any_characters(self, cloud):
        names = ["z~%é*.bin", "a b&<c>.json", "ключ", "x?y#z"]
        location = cloud.filled({name: name.encode() for name in names})
        assert sorted((location / name).read_bytes().decode() for name, _ in location.walk()) == sorted(names)


class TestPinnedVersions:
    """One object, one version: whatever was read of it, and whenever."""

    def changed(self, gcs, location, content):
        gcs.put({location.key.partition("/")[2]: content})

    def test_object_changed_between_reads_is_refused(self, cloud):
        file = cloud.filled({"x.bin": bytes(1 << 20)}) / "x.bin"
        opened = file.open()
        assert opened.read(0, 1 << 19) == bytes(1 << 19)
        self.changed(cloud, file, bytes([1]) * (1 << 20))
        with pytest.raises(SourceChangedError, match="changed while it was read"):
            opened.read(1 << 19, 1 << 19)
        with pytest.raises(SourceChangedError):
            opened.check_unchanged()
        assert file.open().read(0, 1) == b"\1"

    def test_object_changed_during_a_response_is_refused(self, gcs):
        file = gcs.filled({"x.bin": bytes(1 << 20)}) / "x.bin"
        opened = file.open()
        change = Fault("x.bin", cut=1000, then=lambda: self.changed(gcs, file, bytes([1]) * (1 << 20)))
        gcs.server.faults.append(change)
        with pytest.raises(SourceChangedError):
            opened.read(0, 1 << 20)

    def test_object_changed_after_reading_is_detected(self, cloud):
        file = cloud.filled({"x.bin": b"1234"}) / "x.bin"
        opened = file.open()
        assert opened.read(0, 4) == b"1234"
        opened.check_unchanged()
        self.changed(cloud, file, b"5678")
        with pytest.raises(SourceChangedError):
            opened.check_unchanged()

    def test_removed_object_is_reported(self, gcs):
        file = gcs.filled({"x.bin": bytes(1 << 20)}) / "x.bin"
        opened = file.open()
        gcs.server.buckets[gcs.bucket].clear()
        with pytest.raises(FormatError, match="was removed"):
            opened.read(0, 1 << 20)

    def test_etag_detects_changes_without_conditional_reads(self, gcs):
        file = gcs.filled({"x.bin": bytes(1 << 20)}) / "x.bin"
        opened = file.open()
        self.changed(gcs, file, bytes([1]) * (1 << 20))
        gcs.server.heeds_conditions = False
        with pytest.raises(SourceChangedError):
            opened.read(0, 1 << 20)

    def test_long_read_is_split_into_parts(self, gcs, monkeypatch):
        monkeypatch.setattr(reads, "PART", 1 << 18)
        content = bytes(range(256)) * (1 << 13)
        with (gcs.filled({"x.bin": content}) / "x.bin").open() as opened:
            gcs.server.log.clear()
            assert opened.read(100, (1 << 21) - 200) == content[100:-100]
            assert len(gcs.server.log) == 8

    def test_conversion_of_a_changing_source_is_discarded(self, gcs, tmp_path):
        location = gcs.filled(files_in(HF))
        weights = location / "model.safetensors"
        content = weights.read_bytes()
        # The last read of the conversion is not the first of this file.
        gcs.server.faults.append(Fault("config", then=lambda: self.changed(gcs, weights, content)))
        done = ckpt("convert", "hf-to-maxtext", location, tmp_path / "out")
        assert done.exit_code == 3 and "was changed while it was read" in done.output
        assert not (tmp_path / "out").exists()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(client, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(client, "RETRIES", 2)
    monkeypatch.setattr(client, "FIRST_RETRIES", 2)


class TestFaults:
    """What goes wrong now and then is tried again; what goes wrong for good is explained."""

    @pytest.mark.parametrize("kind", ["list-type", "HEAD", "GET .*x.bin"], ids=["list", "head", "get"])
    @pytest.mark.parametrize(
        "fault",
        [
            {"status": 503, "count": 2},
            {"status": 429, "count": 2, "headers": {"Retry-After": "1"}},
            {"stall": 0.5},
        ],
        ids=["503", "429", "stall"],
    )
    def test_transient_errors_are_retried(self, gcs, impatient, kind, fault):
        location = gcs.filled({"x.bin": b"1234"})
        gcs.server.faults.append(Fault(kind, **fault))
        assert (location / "x.bin").read_bytes() == b"1234"
        assert [entry.name for entry in location.entries()] == ["x.bin"]

    @pytest.mark.parametrize("kind", ["list-type", "GET .*x.bin"])
    def test_truncated_response_is_resumed(self, gcs, kind):
        content = bytes(range(256)) * 4096
        location = gcs.filled({"x.bin": content})
        gcs.server.faults.append(Fault(kind, cut=100))
        assert location.is_dir()
        assert (location / "x.bin").read_bytes() == content
        if kind != "list-type":
            assert gcs.server.log[-1].range == f"bytes=100-{len(content) - 1}"

    @pytest.mark.parametrize("cut", [0, 1, 40, 400])
    @pytest.mark.parametrize("count", [1, 5, 10])
    def test_truncated_listing_is_repeated_like_other_requests(self, gcs, monkeypatch, cut, count):
        monkeypatch.setattr(client, "_PAUSE_SECONDS", 0.001)
        location = gcs.filled({f"d/{number:03}": b"1" for number in range(20)})
        assert parse(f"gs://{gcs.bucket}").is_dir(), "the bucket has answered before"
        gcs.server.faults.append(Fault("list-type", count=count, cut=cut))
        assert len(list(location.walk())) == 20

    def test_truncated_listing_continues_after_last_page(self, gcs, monkeypatch):
        monkeypatch.setattr(client, "_PAUSE_SECONDS", 0.001)
        names = [f"d/{number:03}" for number in range(40)]
        location = gcs.filled(dict.fromkeys(names, b"1"))
        gcs.server.page = 4
        monkeypatch.setattr(client, "_NAMES_PER_PAGE", 4)
        gcs.server.faults.append(Fault("continuation-token", count=9, cut=10))
        assert sorted(name for name, _ in location.walk()) == names
        paths = [item.path for item in gcs.server.log if "list-type" in item.path]
        started = [path for path in paths if "token" not in path]
        assert ["start-after" in path for path in started] == [False, *[True] * 9]

    def test_unsorted_listing_restarts(self):
        pages = client._Pages("d")
        result = {"size": 1, "e_tag": "1", "last_modified": datetime.now(UTC)}
        pages.add([{"path": f"d/{name}", **result} for name in "bca"])
        assert pages.next_start() is None and pages.result == []
        for names in ("abc", "bcd"):
            assert pages.next_start() == (None if names == "abc" else "d/c")
            pages.add([{"path": f"d/{name}", **result} for name in names])
        assert [name for name, _ in pages.result] == list("abcd"), "a server that ignores the start"

    def test_truncated_listing_error_names_number_of_tries(self, gcs, impatient, monkeypatch):
        monkeypatch.setattr(client, "_PAUSE_SECONDS", 0.001)
        location = gcs.filled({"x.bin": b"1234"})
        gcs.server.faults.append(Fault("list-type", count=999, cut=10))
        with pytest.raises(StorageError, match="cannot list gs://") as caught:
            location.entries()
        assert caught.value.got == "a truncated response, tried 3 times"
        assert "again" in caught.value.hint

    @pytest.mark.parametrize("kind", ["list-type", "GET .*x.bin"])
    def test_retries_are_limited(self, gcs, impatient, kind):
        location = gcs.filled({"x.bin": b"1234"})
        body = "<Error><Code>SlowDown</Code><Message>Please slow down.</Message></Error>"
        gcs.server.faults.append(Fault(kind, count=999, status=503, body=body))
        with pytest.raises(StorageError, match=r"cannot (list|read) gs://") as caught:
            location.entries()
            (location / "x.bin").read_bytes()
        assert caught.value.got == "503 Service Unavailable, SlowDown: Please slow down., tried 3 times"
        assert "make the same call again later" in caught.value.hint

    @pytest.mark.parametrize("match", ["GET .*00002-of-00004", "GET .*index.json"])
    def test_unreachable_store_is_not_reported_as_damaged(self, gcs, impatient, match):
        location = gcs.filled(files_in(SHARDED))
        gcs.server.faults.append(Fault(match, count=99, status=503))
        done = ckpt("doctor", location)
        assert done.exit_code == 5 and "run the same command again later" in done.output
        assert "chmod" not in done.output and "fetch" not in done.output

    def test_endless_stall_fails(self, gcs, impatient):
        location = gcs.filled({"x.bin": b"1234"})
        gcs.server.faults.append(Fault("GET .*x.bin", count=99, stall=1))
        with pytest.raises(StorageError) as caught:
            (location / "x.bin").read_bytes()
        assert caught.value.exit_code == 5

    @pytest.mark.parametrize(("code", "known"), [("", ""), ("<Code>AccessDenied</Code>", ", AccessDenied")])
    @pytest.mark.parametrize(("kind", "permission"), [("list-type", "list"), ("GET .*x.bin", "get")])
    def test_listing_error_names_missing_permission(self, gcs, code, known, kind, permission):
        location = gcs.filled({"x.bin": b"1234"})
        body = f"<Error>{code}<Message>You may not.</Message></Error>"
        gcs.server.faults.append(Fault(kind, count=99, status=403, body=body))
        with pytest.raises(StorageError, match="not allowed") as caught:
            location.entries()
            (location / "x.bin").read_bytes()
        identity = "asked as anonymous (STORAGE_EMULATOR_HOST is set)"
        assert caught.value.got == f"403 Forbidden{known}: You may not.; {identity}"
        assert f"storage.objects.{permission}" in caught.value.expected
        assert "gcloud auth" in caught.value.hint

    def test_missing_bucket_error_names_the_bucket(self, cloud):
        for name in ("x", "x.safetensors", ""):
            done = ckpt("inspect", "tree", f"{cloud.scheme}://no-such-bucket/{name}")
            assert done.exit_code == 2
            assert "bucket 'no-such-bucket' does not exist" in done.output

    def test_missing_object_error_names_the_object(self, cloud):
        location = cloud.filled({"a": b""})
        done = ckpt("inspect", "tree", location / "nope")
        assert done.exit_code == 2 and f"{location / 'nope'} does not exist" in done.output

    def test_connection_failure_is_reported_quickly(self, impatient):
        with environment(STORAGE_EMULATOR_HOST="127.0.0.1:1"):
            done = ckpt("inspect", "tree", "gs://bucket/x")
        assert done.exit_code == 5
        assert "no connection to http://127.0.0.1:1" in done.output
        assert "Connection refused" in done.output and "HTTPS_PROXY" in done.output

    def test_errors_do_not_show_client_text(self, gcs, impatient):
        gcs.filled({"a": b""})
        for status in (301, 400, 404, 409, 418, 451, 500, 507):
            gcs.server.faults[:] = [Fault(count=99, status=status, body="<html>")]
            done = ckpt("inspect", "tree", f"gs://{gcs.bucket}/{status}")
            assert done.exit_code == 5, done.output
            assert str(status) in done.output and "Debug source" not in done.output


class TestAccess:
    """Who asks, by the environment, and where."""

    def test_missing_obstore_error_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "obstore", None)
        with environment():
            for scheme in ("gs", "s3", "az"):
                done = ckpt("inspect", "tree", f"{scheme}://bucket/x")
                assert done.exit_code == 2
                assert "pip install 'ckpttools[cloud]'" in done.output

    @pytest.mark.parametrize("variable", ["STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"])
    def test_emulator_variable_selects_the_emulator(self, gcs_server, variable):
        gcs_server.put("emulated", "a", b"1")
        with environment(**{variable: gcs_server.url}):
            assert parse("gs://emulated/a").read_bytes() == b"1"

    def test_google_credentials_files_are_found(self, tmp_path, monkeypatch):
        monkeypatch.setattr(gs, "metadata_headers", lambda *_: None)
        with environment(CLOUDSDK_CONFIG=str(tmp_path)):
            assert "no credentials were found" in gs.STORE.access("b").identity
            usual = tmp_path / "application_default_credentials.json"
            usual.write_text('{"type": "authorized_user"}')
            assert gs.STORE.access("b").identity == f"authorized_user of {usual}"
            assert gs.STORE.access("b").config == {"application_credentials": str(usual)}
        named = tmp_path / "key.json"
        with environment(GOOGLE_APPLICATION_CREDENTIALS=str(named)):
            with pytest.raises(StorageError, match="cannot be read"):
                gs.STORE.access("b")
            named.write_text('{"type": "service_account", "client_email": "me@project"}')
            assert gs.STORE.access("b").identity == f"me@project of {named}"
            named.write_text('{"type": "external_account"}')
            with pytest.raises(StorageError, match="google-auth"):
                gs.STORE.access("b")

    def test_google_machine_is_recognized_by_metadata_header(self, tmp_path, monkeypatch):
        with environment(CLOUDSDK_CONFIG=str(tmp_path)):
            for headers, identity in (
                ({"Metadata-Flavor": "Google"}, "service account of this machine"),
                ({"Server": "EC2ws"}, "anonymous"),
            ):
                monkeypatch.setattr(gs, "metadata_headers", lambda *_, result=headers: result)
                assert identity in gs.STORE.access("b").identity

    def test_amazon_profiles_are_used(self, tmp_path):
        (tmp_path / "credentials").write_text(
            "[work]\naws_access_key_id = AKIAPROFILE12345\naws_secret_access_key = x\n"
        )
        (tmp_path / "config").write_text("[profile work]\nregion = eu-north-1\n")
        files = {
            "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
            "AWS_CONFIG_FILE": str(tmp_path / "config"),
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        with environment(**files, AWS_PROFILE="work"):
            access = s3.STORE.access("b")
            assert access.identity == "AKIA…2345 of shared-credentials-file, profile work"
            assert access.config["region"] == "eu-north-1"
        with environment(**files):
            access = s3.STORE.access("b")
            assert access.config["skip_signature"] and "no credentials were found" in access.identity
        with environment(**files, AWS_PROFILE="other"), pytest.raises(StorageError, match="cannot be read"):
            s3.STORE.access("b")
        with environment(AWS_ACCESS_KEY_ID="AKIAENVIRONMENT1", AWS_SECRET_ACCESS_KEY="x"):
            assert s3.STORE.access("b").identity == "AKIA…ENT1 of AWS_ACCESS_KEY_ID"

    def test_missing_azure_account_is_reported(self, monkeypatch):
        monkeypatch.setattr(az, "metadata_headers", lambda *_: None)
        monkeypatch.setenv("PATH", "")
        with environment():
            done = ckpt("inspect", "tree", "az://container/x")
            assert done.exit_code == 5 and "export AZURE_STORAGE_ACCOUNT_NAME=NAME" in done.output
        with environment(AZURE_STORAGE_ACCOUNT="mine"):
            assert az.STORE.access("c").config["account_name"] == "mine"
            assert "no credentials were found" in az.STORE.access("c").identity
        with environment(AZURE_STORAGE_ACCOUNT="mine", AZURE_STORAGE_SAS_TOKEN="x"):
            assert az.STORE.access("c").identity == "the identity in AZURE_STORAGE_SAS_TOKEN"

    def test_missing_metadata_server_returns_none(self, monkeypatch):
        monkeypatch.setattr(client, "_ADDRESS", "127.0.0.1")
        assert client.metadata_headers("/", {}) is None


@pytest.mark.parametrize("words", ["hash", "inspect stats", "convert to-safetensors"])
def test_peak_memory_stays_within_the_limit(gcs, tmp_path, words):
    """Answers under way and blocks that are kept count, too."""
    tensors = {f"w{number}": ("F32", [1 << 22], randbytes(1 << 24)) for number in range(6)}
    local = tmp_path / "model.safetensors"
    local.write_bytes(packed(tensors))
    source = gcs.filled({"model.safetensors": local.read_bytes()})
    to = [tmp_path / "out"] if words.startswith("convert") else []
    refused = within(*words.split(), source, *to, mib=100)
    assert refused.code == 4, refused.declared
    assert refused.peak <= 100 << 20
    assert refused.hint >= within(*words.split(), local, *to, mib=70).hint + (gs.STORE.costs.memory >> 20)
    ended = within(*words.split(), source, *to, mib=refused.hint)
    assert ended.code == 0, ended.declared
    assert ended.peak <= refused.hint << 20


@pytest.mark.parametrize("key", ["logs//x", "logs/../x"])
def test_undecodable_object_name_blocks_nothing_else(gcs, key):
    location = gcs.filled({**files_in(SHARDED), key: b"x"})
    assert run("hash", location).split()[0] == run("hash", SHARDED).split()[0]
    with pytest.raises(StorageError) as caught:
        (location / "logs").entries()
    assert "rename that object" in caught.value.hint


@pytest.mark.parametrize("endpoint", ["localhost:9000", "not a url", "http://[x"])
def test_invalid_endpoint_is_reported(endpoint):
    keys = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "secret"}
    with (
        environment(AWS_ENDPOINT_URL=endpoint, **keys),
        pytest.raises(StorageError, match="endpoint") as caught,
    ):
        parse("s3://bucket/x").stat()
    assert "AWS_ENDPOINT_URL" in caught.value.hint


def test_endpoint_credentials_are_not_shown():
    keys = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "secret"}
    with (
        environment(AWS_ENDPOINT_URL="http://me:word@127.0.0.1:9", **keys),
        pytest.raises(StorageError) as caught,
    ):
        parse("s3://bucket/x").stat()
    assert "word" not in str(caught.value) and "127.0.0.1:9" in str(caught.value)


@pytest.mark.parametrize("words", [("inspect", "tree"), ("doctor",), ("resolve",)])
def test_request_concurrency_is_configurable(gcs, monkeypatch, words):
    location = gcs.filled({f"x/checkpoints/{name}": item for name, item in files_in(TRAINED).items()})
    path = location / "x" / "checkpoints"
    declared = [f"base_output_directory={location}", "run_name=x"] if words == ("resolve",) else [path]
    seen = set()
    monkeypatch.setattr(
        Pace,
        "limit",
        property(lambda pace: seen.add(requested_concurrency()) or requested_concurrency() or 16),
    )
    assert ckpt(*words, *declared, "--requests", 3).exit_code == 0
    assert seen <= {3} and requested_concurrency() is None


def test_emulator_error_does_not_suggest_login(gcs):
    location = gcs.filled({"x.bin": b"1234"})
    gcs.server.faults.append(Fault("list-type", count=99, status=403, body="<Error/>"))
    with pytest.raises(StorageError) as caught:
        location.entries()
    assert caught.value.hint.startswith(f"requests to {gcs.server.url} have no credentials; to use Google")
    assert "unset STORAGE_EMULATOR_HOST" in caught.value.hint
    gcs.server.faults.clear()
    with pytest.raises(StorageError, match="does not exist") as caught:
        parse("gs://nobody-has-it/x").entries()
    assert "gcloud" not in caught.value.hint and "STORAGE_EMULATOR_HOST" in caught.value.hint
