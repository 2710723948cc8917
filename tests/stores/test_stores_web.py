"""http://, https:// and hf:// as sources: what works on a local directory, whatever the server does to it."""

from __future__ import annotations

import json
import random
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.command_line import ckpt, ended, run, succeed
from support.hf_models import write_llama
from support.internals import Client, Location, parse
from support.locations import DOCS, GOLDEN
from support.stores_on_loopback import PATIENCE, ask_only, cached, forget
from support.web_server import COMMIT, LISTINGS, cut, stall, stating, status, web_server

import ckpttools
from ckpttools import CheckpointError, FormatError, SourceChangedError, StorageError, UsageError
from ckpttools.stores import block_cache
from ckpttools.stores.web import client as attempting
from ckpttools.stores.web import http as plain
from ckpttools.stores.web import hub_cache
from ckpttools.testing.stores import StoreTests

SHARDED = GOLDEN / "llama3.1" / "hf_sharded"
NUMBERS = count()
# What a busy machine takes to answer is not to be taken for a stall elsewhere.
SHORT = replace(PATIENCE, stall=0.3)


@pytest.fixture(scope="module")
def server():
    with web_server() as web:
        web.add("llama", SHARDED)
        web.add("hub/org/llama", SHARDED)
        yield web


@pytest.fixture(autouse=True)
def fresh(server, monkeypatch, tmp_path):
    """Stores that know nothing yet, a server without faults, nobody logged in and an empty cache."""
    files = dict(server.files)
    ask_only(server, monkeypatch, tmp_path)
    yield
    forget(server, files)
    server.listing = LISTINGS["by_python"]


@pytest.fixture
def no_blocks(monkeypatch):
    """Each read of a small file is a request."""
    monkeypatch.setattr(block_cache, "SIZE", 1)


@pytest.fixture
def url(server):
    return f"http://{server.address}/llama"


HUB = "hf://org/llama"
BOTH = pytest.mark.parametrize("where", ["http", "hf"])


def source(where, server):
    return HUB if where == "hf" else f"http://{server.address}/llama"


def placed(file: str, where: str, server, times: int = 1) -> Location:
    """A file of 1,000 different bytes on the server, so many times."""
    content = bytes(range(250)) * 4 * times
    server.files[f"{'hub/org/llama' if where == 'hf' else 'llama'}/{file}"] = content
    return parse(source(where, server)) / file


class TestHttp(StoreTests):
    @pytest.fixture(autouse=True)
    def served(self, server):
        self.server = server

    @contextmanager
    def filled(self, files):
        root = f"made-{next(NUMBERS)}"
        self.server.files |= {f"{root}/{name}": content for name, content in files.items()}
        yield parse(f"http://{self.server.address}/{root}")


class TestHub(StoreTests):
    @pytest.fixture(autouse=True)
    def served(self, server):
        self.server = server

    @contextmanager
    def filled(self, files):
        repo = f"org/made-{next(NUMBERS)}"
        self.server.files |= {f"hub/{repo}/{name}": content for name, content in files.items()}
        yield parse(f"hf://{repo}")


def contents(directory: Path) -> dict[str, bytes]:
    """All files, but for when they were made."""
    result = (path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): re.sub(rb'(?<=nsecs": )\d+', b"0", path.read_bytes())
        for path in result
    }


class TestCommands:
    def test_long_header_needs_two_requests(self, server, monkeypatch):
        monkeypatch.setattr(plain, "HEAD", 1024)
        assert "39 arrays" in succeed("inspect", "tree", source("http", server)).stdout
        assert len(server.asked("00001-of-00004")) == 2

    @pytest.mark.parametrize("fault", [status(405), cut(100)])
    def test_failed_header_read_is_retried(self, server, fault):
        server.fault("GET .*00001-of-00004", fault)
        assert "39 arrays" in succeed("inspect", "tree", source("http", server)).stdout
        assert len(server.asked("00001-of-00004")) <= 3

    @BOTH
    def test_web_request_count_is_reported(self, server, where):
        server.fault("GET .*00002", status(503))
        server.fault("GET .*00003", cut(1000))
        done = succeed("inspect", "tree", source(where, server))
        declared = re.fullmatch(rf"(\d+) requests to {where}://, (\d+) kB read", done.stderr.splitlines()[-1])
        # One may be tried on a connection that the server has closed.
        assert 0 <= int(declared[1]) - len(server.log) <= 2, "attempts and redirects, too"
        assert int(declared[2]) <= round(server.nbytes / 1000)

    @BOTH
    def test_web_source_converts_like_a_local_directory(self, server, tmp_path, where):
        run("convert", "hf-to-maxtext", SHARDED, tmp_path / "local")
        run("convert", "hf-to-maxtext", source(where, server), tmp_path / "far")
        # That a model of the hub is named with its commit is all that differs.
        named = b', "ckpttools_source": "hf://org/llama@%s"' % COMMIT.encode()
        far = contents(tmp_path / "far").items()
        assert any(named in item for _, item in far) == (where != "http")
        assert {name: item.replace(named, b"") for name, item in far} == contents(tmp_path / "local")
        assert len(server.asked("GET .*model.safetensors.index.json")) == 1
        assert len(server.asked("GET .*/config.json")) == 1
        # By ranges from where they lie: a header, then what the tasks read.
        assert server.nbytes < 3 * sum(path.stat().st_size for path in SHARDED.iterdir())
        # What was made is read from there as well, also where nothing is above the step.
        server.add("made" if where == "http" else "hub/org/made", tmp_path / "far" / "0")
        built = source(where, server).replace("llama", "made")
        assert succeed("hash", built).stdout == succeed("hash", tmp_path / "local").stdout

    @BOTH
    def test_read_commands_accept_web_sources(self, server, tmp_path, where):
        far = source(where, server)
        assert "parameters" in run_plainly("inspect", "tree", far)
        assert json.loads(run_plainly("inspect", "tree", far, "--json"))["path"] == far
        for words in (("stats",), ("chunks",), ("report", "-o", tmp_path / "page.html")):
            run_plainly("inspect", words[0], far, *words[1:])
        assert run("hash", far).split()[0] == run("hash", SHARDED).split()[0]
        ended("diff", far, SHARDED)
        run("convert", "hf-to-maxtext", SHARDED, tmp_path / "out")
        run("verify", tmp_path / "out", "--against", far)
        assert "model-00001-of-00004" not in run_plainly("doctor", far)

    def test_open_accepts_file_index_or_directory(self, server, url):
        assert len(ckpttools.open(url).arrays) == len(
            ckpttools.open(f"{url}/model.safetensors.index.json").arrays
        )
        assert 0 < len(ckpttools.open(f"{url}/model-00001-of-00004.safetensors").arrays) < 39
        assert 0 < len(ckpttools.open(f"{HUB}/model-00001-of-00004.safetensors").arrays) < 39

    def test_orbax_item_is_read_from_the_web(self, server):
        item = GOLDEN / "llama3.1" / "maxtext_scanned"
        server.add("run", item)
        server.add("hub/org/run", item)
        expected = run("hash", item).split()[0]
        assert run("hash", f"http://{server.address}/run").split()[0] == expected
        assert run("hash", "hf://org/run").split()[0] == expected

    @BOTH
    def test_web_destination_is_refused_before_reading(self, server, tmp_path, where):
        far = source(where, server)
        checkpoints = (
            ("convert", "hf-to-maxtext", SHARDED, f"{far}/new"),
            ("convert", "hf-to-maxtext", far, f"{far}/new"),
        )
        for words in (
            *(checkpoints if where == "http" else ()),
            ("hash", far, "--manifest", f"{far}/manifest.json"),
            ("inspect", "report", far, "-o", f"{far}/page.html"),
            ("convert", "hf-to-maxtext", SHARDED, tmp_path / "out", "--manifest", f"{far}/manifest.json"),
        ):
            done = ckpt(*words)
            assert done.exit_code == 2
            assert (
                "cannot be written" in done.output or "is read-only" in done.output
            ) and "write to a local" in done.output
        assert server.log == [] and not (tmp_path / "out").exists()

    def test_hub_name_gets_a_hint(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert "named hf://org/llama" in ckpt("hash", "org/llama").output


def run_plainly(*words):
    return succeed(*words).output


class TestRequests:
    @BOTH
    def test_small_arrays_share_requests(self, server, tmp_path, where):
        """Many threads want the same blocks; each comes once, and more at a time from end to end."""
        (model := tmp_path / "model").mkdir()
        values = np.arange(4096, dtype="float32")
        save_file({f"layers.{n}.w": values + n for n in range(350)}, model / "model.safetensors")
        (model / "config.json").write_text("{}")
        server.add("llama" if where == "http" else "hub/org/llama", model)
        server.delay = 0.01
        run("convert", "to-zarr3", source(where, server), tmp_path / "far", "--jobs", "16")
        nbytes = (model / "model.safetensors").stat().st_size
        assert len(server.asked("GET")) < 40 and server.nbytes < 1.2 * nbytes
        assert run("hash", tmp_path / "far").split()[0] == run("hash", model).split()[0]

    @BOTH
    def test_shard_needs_one_request_and_one_redirect(self, server, tmp_path, where):
        write_llama(tmp_path / "model", shards=12)
        server.add("llama" if where == "http" else "hub/org/llama", tmp_path / "model")
        server.files = {path: data for path, data in server.files.items() if "-of-00004" not in path}
        run_plainly("inspect", "tree", source(where, server))
        assert len(server.asked("safetensors( |$)")) == (12 if where == "http" else 24)
        assert len(server.asked("GET .*(json|/llama/$)( |$)")) == (3 if where == "http" else 2)
        assert len(server.log) < 24 + 12

    def test_headers_are_requested_concurrently(self, server, tmp_path):
        write_llama(tmp_path / "model", shards=12)
        server.add("hub/org/llama", tmp_path / "model")
        server.files = {path: data for path, data in server.files.items() if "-of-00004" not in path}
        server.delay = 0.05
        ckpttools.inspect(HUB)
        assert server.most_at_once >= 8

    def test_only_the_header_of_a_large_file_is_read(self, server, tmp_path):
        write_llama(tmp_path / "model", vocab_size=40_000)
        server.add("hub/org/large", tmp_path / "model")
        server.nbytes = 0
        ckpttools.inspect("hf://org/large")
        assert server.nbytes < 300_000 < len(server.files["hub/org/large/model.safetensors"])


def cut_from(start: int):
    """Refuses ranges from a byte on."""

    def act(handler):
        match = re.match(r"bytes=(\d+)", handler.headers.get("Range", ""))
        return (403, {}, b"") if match and int(match[1]) > start else None

    return act


def begun_again():
    """As another process begins, which knows nothing."""
    plain.STORE._looked.clear()
    plain.STORE._directories.clear()


class TestFaultsOfBlocks:
    """Short reads share blocks, so that what goes wrong with one request concerns many of them."""

    CONTENT = random.Random(1).randbytes(5 * block_cache.SIZE + 4321)

    def reads(self, file):
        """Many short reads, across the ends of blocks too, by many threads at once."""
        chosen = random.Random(2)
        starts = [chosen.randrange(len(self.CONTENT) - 900) for _ in range(200)]
        starts += [n * block_cache.SIZE - 450 for n in range(1, 6)]
        with ThreadPoolExecutor(8) as pool:
            return [(at, pool.submit(file.read, at, 900)) for at in starts]

    def opened(self, server, where):
        location = placed("data.safetensors", where, server)
        server.files[f"{'hub/org/llama' if where == 'hf' else 'llama'}/data.safetensors"] = self.CONTENT
        file = location.open()
        file.store.client = Client(SHORT)
        return file

    @BOTH
    @pytest.mark.parametrize(
        "act",
        [status(503), cut(1000), cut(0), stall(0.5), stall(0.5, 1000)],
        ids=["503", "cut", "cut at once", "stalls", "stalls in between"],
    )
    def test_concurrent_reads_wait_for_transient_failures(self, server, where, act):
        file = self.opened(server, where)
        server.fault("GET .*data.safetensors", act, 2)
        assert all(done.result() == self.CONTENT[at : at + 900] for at, done in self.reads(file))
        assert all(fault.times == 0 for fault in server.faults)

    @BOTH
    def test_permanent_failure_ends_concurrent_reads(self, server, where):
        file = self.opened(server, where)
        server.fault("GET .*data.safetensors", cut(0), 10_000)
        assert all(isinstance(done.exception(), StorageError) for _, done in self.reads(file))
        server.faults.clear()
        assert file.read(3, 900) == self.CONTENT[3:903], "and nobody waits for it for ever"

    def test_file_changed_between_reads_is_never_mixed(self, server):
        file = self.opened(server, "http")
        assert file.read(0, 900) == self.CONTENT[:900]
        server.files["llama/data.safetensors"] = self.CONTENT[::-1]
        done = [(at, item.exception(), item) for at, item in self.reads(file)]
        assert any(isinstance(error, SourceChangedError) for _, error, _ in done)
        assert all(
            isinstance(error, SourceChangedError) or item.result() == self.CONTENT[at : at + 900]
            for at, error, item in done
        )
        with pytest.raises(SourceChangedError):
            file.check_unchanged()


@pytest.mark.usefixtures("no_blocks")
class TestFaults:
    @BOTH
    @pytest.mark.parametrize(
        ("act", "times"),
        [
            (status(503), 3),
            (status(500), 1),
            (status(429, Retry_After="0"), 3),
            (cut(10), 3),
            (cut(0), 3),
            (stall(0.5), 1),
            (stall(0.5, 10), 1),
            (stating(Content_Length="2000"), 1),
        ],
        ids=["503", "500", "429", "cut", "cut at once", "stalls", "stalls in between", "too long"],
    )
    def test_transient_failures_are_retried(self, server, where, act, times):
        file = placed("data.bin", where, server).open()
        file.store.client = Client(SHORT)
        server.fault("GET .*data.bin", act, times)
        assert file.read(7, 900) == (bytes(range(250)) * 4)[7:907]
        assert all(fault.times == 0 for fault in server.faults)

    @BOTH
    def test_broken_body_is_resumed_at_its_last_byte(self, server, where):
        file = placed("data.bin", where, server).open()
        server.fault("GET .*data.bin", cut(300))
        file.read(0, 999)  # its beginning, with the rest of the file
        assert [line.rpartition("=")[2] for line in server.asked("bytes=")] == ["0-999", "300-999"]

    @BOTH
    @pytest.mark.parametrize("act", [status(503), cut(5), stall(0.5)], ids=["503", "cut", "stalls"])
    def test_permanent_failures_are_raised(self, server, where, act):
        file = placed("data.bin", where, server).open()
        file.store.client = Client(SHORT)
        server.fault("GET .*data.bin", act, 10_000)
        with pytest.raises(StorageError, match=r"cannot read .*data.bin") as caught:
            file.read(1, 900)
        assert "tried 4 times" in caught.value.got and caught.value.hint

    def test_long_retry_after_fails(self, server):
        location = placed("data.bin", "http", server)
        server.fault("HEAD", status(429, Retry_After="7200"), 9)
        with pytest.raises(StorageError) as caught:
            location.stat()
        assert "7,200 s" in caught.value.got

    def test_total_retries_are_limited(self, server, monkeypatch):
        location = placed("data.bin", "http", server)
        patience = attempting.Patience(attempts=1000, first_wait=0, failures=20)
        location.store.client = Client(patience)
        server.fault("HEAD", status(503), 10_000)
        with pytest.raises(StorageError) as caught:
            location.stat()
        assert len(server.log) == 21 and "21 requests failed" in caught.value.got

    @BOTH
    def test_missing_range_support_is_reported(self, server, where):
        server.ranges = False
        small, large = placed("config.json", where, server), placed("model.bin", where, server, 3000)
        assert len(small.read_bytes()) == 1000
        with pytest.raises(StorageError, match="cannot be read by ranges") as caught:
            large.open().read(0, 100)
        assert "range requests" in caught.value.expected and caught.value.hint

    @pytest.mark.parametrize("etags", [True, False])
    def test_file_changed_between_reads_is_refused(self, server, etags):
        server.etags = etags
        location = placed("data.bin", "http", server)
        file = location.open()
        assert file.read(1, 10)
        server.files["llama/data.bin"] = b"x" * (1000 if etags else 1001)
        with pytest.raises(SourceChangedError, match="was changed"):
            file.read(11, 10)
        with pytest.raises(SourceChangedError, match="was changed"):
            file.check_unchanged()
        assert location.open().read(11, 10) == b"x" * 10, "who begins again gets the new one"

    def test_etag_detects_ignored_conditions(self, server):
        file = placed("data.bin", "http", server).open()
        server.fault("GET .*data.bin", stating(ETag='"another"'))
        with pytest.raises(SourceChangedError, match="was changed"):
            file.read(1, 900)

    @pytest.mark.parametrize("etag", ["", "weak", "shorter"])
    def test_later_response_needs_the_same_validator(self, server, etag):
        """Another server behind the address can send another state without a validator."""
        file = placed("data.bin", "http", server).open()
        assert file.read(1, 10)
        others = {"": "", "weak": f"W/{file.version}", "shorter": file.version[:-2] + '"'}
        server.fault("GET .*data.bin", stating(ETag=others[etag]))
        with pytest.raises(SourceChangedError, match="was changed"):
            file.read(500, 10)

    def test_later_response_needs_the_same_time_without_etags(self, server):
        server.etags = False
        file = placed("data.bin", "http", server).open()
        assert file.read(1, 10)
        server.fault("GET .*data.bin", stating(Last_Modified=""))
        with pytest.raises(SourceChangedError, match="was changed"):
            file.read(500, 10)

    def test_file_changed_within_a_read_is_refused(self, server):
        file = placed("data.bin", "http", server).open()

        def changed(handler):
            server.files["llama/data.bin"] = b"x" * 1000

        server.fault("GET .*data.bin", cut(300))
        server.fault("GET .*data.bin", changed)
        with pytest.raises(SourceChangedError):
            file.read(1, 990)

    def test_conversion_of_changed_source_is_refused(self, server, url, tmp_path):
        planned = ckpttools.hf_to_maxtext.plan(url, tmp_path / "out")
        server.files["llama/model-00001-of-00004.safetensors"] = bytes(120_304)
        with pytest.raises(SourceChangedError):
            planned.run()
        assert not (tmp_path / "out").exists()

    @BOTH
    @pytest.mark.parametrize(
        ("act", "told"),
        [
            (stating(Content_Range="bytes 5-904/1000"), "another range than requested"),
            (stating(Content_Range="bytes 1-900/5000"), "reports different lengths"),
            (stating(Content_Range="lines 1-900"), "another range than requested"),
            (stating(Content_Encoding="gzip"), "another range than requested"),
        ],
        ids=["offset", "length", "unit", "compressed"],
    )
    def test_wrong_response_headers_are_detected(self, server, where, act, told):
        file = placed("data.bin", where, server).open()
        server.fault("GET .*data.bin", act, 9)
        with pytest.raises(StorageError, match=told):
            file.read(1, 900)

    @pytest.mark.parametrize("code", [403, 503])
    def test_unreachable_shard_is_not_reported_as_missing(self, server, url, code):
        server.fault("(HEAD|GET) .*model-00002", status(code), 99)
        done = ckpt("inspect", "tree", url)
        assert done.exit_code == 5 and "missing" not in done.output

    def test_unreachable_weights_are_not_replaced_by_others(self, server, url):
        server.files["llama/model.safetensors"] = server.files["llama/model-00001-of-00004.safetensors"]
        server.fault("(HEAD|GET) .*/model.safetensors( |$)", status(503), 99)
        assert "status 503" in run("hash", url, code=5)

    def test_unversioned_source_is_not_resumed(self, server, url, tmp_path):
        server.versions = False
        server.fault("GET .*00003-of", cut_from(60_000), 999)
        words = "convert", "hf-to-maxtext", url, tmp_path / "out", "--jobs", "1"
        run(*words, code=5)
        assert (tmp_path / "out.partial").exists()
        server.faults = []
        for path, content in list(server.files.items()):
            if path.startswith("llama/") and path.endswith(".safetensors"):
                start = 8 + int.from_bytes(content[:8], "little")
                server.files[path] = content[:start] + bytes(len(content) - start)
        begun_again()
        assert "it cannot be resumed: delete" in run(*words, code=2)
        run(*words, "--overwrite")
        run("verify", tmp_path / "out", "--against", url)

    def test_file_deleted_while_open_is_reported(self, server):
        file = placed("data.bin", "http", server).open()
        del server.files["llama/data.bin"]
        with pytest.raises(FormatError, match="does not exist anymore"):
            file.read(1, 900)

    def test_unreachable_host_is_reported_quickly(self):
        for address, got in (
            ("http://127.0.0.1:9/x", "connection refused"),
            ("http://no.host.invalid/x", "the host does not exist"),
        ):
            with pytest.raises(StorageError, match=f"cannot read {address}") as caught:
                parse(address).stat()
            assert caught.value.got == f"{got}, tried 2 times"

    def test_circular_redirects_fail(self, server, url):
        server.fault("HEAD", status(302, Location="/llama/x"), 99)
        with pytest.raises(StorageError) as caught:
            parse(f"{url}/x").stat()
        assert "redirects" in caught.value.got


class TestHttpDirectories:
    @pytest.mark.parametrize("listing", LISTINGS)
    def test_directory_listing_pages_are_parsed(self, server, url, listing):
        server.listing = LISTINGS[listing]
        server.files["llama/a b/c d.txt"] = server.files["llama/50% off#1.txt"] = b"x"
        entries = {entry.name: entry.is_dir for entry in parse(url).entries()}
        assert entries == {path.name: False for path in SHARDED.iterdir()} | {
            "a b": True,
            "50%25 off%231.txt": False,
        }
        assert all(location.is_dir() or len(location.read_bytes()) for location in parse(url).iterdir())

    @pytest.mark.parametrize("kind", ["html", "json"])
    def test_invalid_listing_names_are_skipped(self, server, url, kind):
        if kind == "html":
            links = "%2e%2e/", "%2e/", "..%2f..%2fx", "a%2fb", "%00", "http://[x", "good"
            page = "<title>Index of /</title>" + "".join(f'<a href="{link}">x</a>' for link in links)
        else:
            page = json.dumps(
                [{"name": name} for name in ("..", ".", "a/b", "../x", "\ud800", "", "/", "good")]
            )
        server.fault("GET /odd/$", lambda handler: (200, {"Content-Type": "text/html"}, page.encode()), 9)
        assert [entry.name for entry in parse(f"http://{server.address}/odd").entries()] == ["good"]

    def test_common_model_names_are_tried_without_a_listing(self, server, url):
        server.listing = None
        names = {entry.name for entry in parse(url).entries()}
        assert names == {path.name for path in SHARDED.iterdir()}
        assert run("hash", url).split()[0] == run("hash", SHARDED).split()[0]

    def test_missing_listing_error_names_files_to_use(self, server, url):
        server.listing, server.files = None, {}
        assert not parse(url).exists()
        server.fault("(HEAD|GET) /closed$", status(301, Location="/closed/"), 9)
        server.fault("/closed/$", status(403), 99)
        with pytest.raises(StorageError, match="cannot list") as caught:
            parse(f"http://{server.address}/closed").entries()
        assert "model.safetensors" in caught.value.hint

    def test_login_page_is_not_a_model(self, server):
        page = 200, {"Content-Type": "text/html"}, b"<title>Log in"
        server.fault("/closed", status(302, Location="/login/"), 999)
        server.fault("/login", lambda handler: page, 999)
        with pytest.raises(StorageError, match="cannot list"):
            parse(f"http://{server.address}/closed").entries()

    @pytest.mark.parametrize("name", ["run", "run/", "run/100/items", "model.safetensors", "config.json"])
    @pytest.mark.parametrize("code", [200, 206])
    def test_web_page_in_place_of_a_file_is_an_access_error(self, server, tmp_path, name, code):
        """As of a login service or a portal, which answer every request with a page."""
        page = b"<title>Welcome"
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Range": "bytes 0-0/14"}
        server.fault(".", lambda handler: (code, headers, page), 10**6)
        location = f"http://{server.address}/{name}"
        for words in (("ls",), ("inspect", "tree"), ("doctor",), ("hash",)):
            result = ckpt(*words, location)
            assert result.exit_code == 5, result.output
            assert "web page (text/html" in result.output or "no directory listing" in result.output
        for words in (("convert", "to-safetensors"), ("copy",)):
            assert ckpt(*words, location, tmp_path / "out", "--no-progress").exit_code == 5

    def test_directory_with_an_index_page_and_a_model_is_opened(self, server, url):
        server.listing = None
        page = 200, {"Content-Type": "text/html"}, b"<title>My model"
        server.fault("(GET|HEAD) /llama/?$", lambda handler: page, 99)
        assert run("hash", url).split()[0] == run("hash", SHARDED).split()[0]

    def test_html_file_can_be_read(self, server):
        server.files["page.html"] = b"<title>Welcome"
        server.fault("/page.html", stating(Content_Type="text/html"), 9)
        assert parse(f"http://{server.address}/page.html").is_file()

    def test_stat_reads_one_byte_without_head_support(self, server):
        location = placed("data.bin", "http", server)
        server.fault("HEAD", status(405), 9)
        assert location.stat().size == 1000

    def test_denied_read_is_reported(self, server, url):
        server.fault("llama/x.safetensors", status(403), 9)
        with pytest.raises(StorageError, match="is denied") as caught:
            parse(f"{url}/x.safetensors").stat()
        assert "without a login" in caught.value.got and "netrc" in caught.value.hint

    @pytest.mark.parametrize(
        ("code", "file", "words"),
        [
            (401, "x.safetensors", "check the name and the password of the login me"),
            (401, "config.json", "check the name and the password of the login me"),
            (403, "x.safetensors", "ask the owner of 127.0.0.1 to let the login me read it"),
            (403, "config.json", "ask the owner of 127.0.0.1 to let the login me read it"),
            (407, "x.safetensors", "HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT"),
        ],
    )
    @pytest.mark.parametrize("method", ["HEAD", "GET"])
    def test_rejected_login_is_not_suggested_again(self, server, url, tmp_path, code, file, words, method):
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret")
        server.files[f"llama/{file}"] = b"x" * 9
        location = parse(f"{url}/{file}")
        opened = location.open() if method == "GET" else None
        server.fault(f"llama/{file}", status(code), 99)
        with pytest.raises(StorageError) as caught:
            opened.read(0, 9) if opened else location.stat()
        assert words in caught.value.hint and "netrc" not in caught.value.hint, caught.value
        assert f"status {code}" in caught.value.got and "secret" not in str(caught.value)
        assert code == 407 or "with the stored login me" in caught.value.got

    def test_netrc_login_is_sent_only_to_its_host(self, server, url, tmp_path):
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password word")
        sent = []
        server.files["llama/x.safetensors"] = b"x"
        server.fault("x.safetensors", lambda handler: sent.append(handler.headers.get("Authorization")), 9)
        port = server.address.partition(":")[2]
        server.fault("y.safetensors", status(302, Location=f"http://localhost:{port}/llama/x.safetensors"), 9)
        for file in ("x", "y"):
            parse(f"{url}/{file}.safetensors").stat()
        assert sent == ["Basic bWU6d29yZA==", None]

    def test_default_netrc_login_is_never_sent(self, server, url, tmp_path):
        (tmp_path / "netrc").write_text("default login me password word")
        sent = []
        server.fault("HEAD", lambda handler: sent.append(handler.headers.get("Authorization")))
        placed("data.bin", "http", server).stat()
        assert sent == [None]

    def test_netrc_login_accepts_any_characters(self, server, url, tmp_path):
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password ж", encoding="utf-8")
        sent = []
        server.fault("HEAD", lambda handler: sent.append(handler.headers.get("Authorization")))
        placed("data.bin", "http", server).stat()
        assert sent == ["Basic bWU60LY="]

    @pytest.mark.parametrize(
        "content", [b"machine 127.0.0.1 login me password two words", b"machine x login y password \xff"]
    )
    def test_invalid_netrc_content_is_not_shown(self, server, url, tmp_path, content):
        (tmp_path / "netrc").write_bytes(content)
        with pytest.raises(StorageError, match="cannot read the logins") as caught:
            parse(url).stat()
        assert "words" not in str(caught.value)

    @pytest.mark.parametrize(
        ("proxy", "got"), [("socks5://x:1", "socks5"), ("http://me:word@[x", "malformed address")]
    )
    def test_unusable_proxy_is_reported(self, monkeypatch, proxy, got):
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(StorageError, match="proxy") as caught:
            parse("http://models.invalid/x").stat()
        assert got in caught.value.got and "word" not in str(caught.value)

    def test_proxy_accepts_login_and_missing_scheme(self, server, monkeypatch):
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        sent = []
        server.fault("HEAD", lambda handler: sent.append(handler.headers.get("Proxy-Authorization")), 9)
        for proxy in (f"http://me:w%40rd@{server.address}", server.address):
            monkeypatch.setenv("http_proxy", proxy)
            parse(f"http://models.invalid/llama/{len(sent)}.safetensors").exists()
        assert sent == ["Basic bWU6d0ByZA==", None]

    @pytest.mark.parametrize("target", ["http://[x", "http://me:word@[x/y"])
    def test_malformed_addresses_are_reported(self, server, url, target):
        server.fault("HEAD", status(302, Location=target))
        for address in (f"{url}/x.safetensors", "http://[x/y"):
            with pytest.raises(StorageError, match="cannot read") as caught:
                parse(address).stat()
            assert "malformed address" in caught.value.got and "word" not in str(caught.value)

    def test_invalid_header_numbers_are_reported(self, server, url):
        server.fault("HEAD", stating(Content_Length="9" * 5000), 9)
        file = placed("data.bin", "http", server).open()
        assert file.size == 1000, "asked for by a range instead"
        server.fault("GET", stating(Content_Range=f"bytes 1-900/{'9' * 5000}"), 9)
        with pytest.raises(StorageError, match="another range"):
            file.read(1, 900)

    @pytest.mark.parametrize(
        ("address", "told"),
        [
            ("https://huggingface.co/org/name", "hf://org/name"),
            ("https://huggingface.co/org/name/tree/main", "hf://org/name"),
            ("https://host/x.safetensors?signature=abc", "without a query"),
            ("https://me:word@host/x", "netrc"),
        ],
    )
    def test_misused_addresses_are_refused_with_a_hint(self, address, told):
        with pytest.raises(UsageError) as caught:
            parse(address).stat()
        assert told in str(caught.value) and not re.search("abc|word@", str(caught.value))
        assert not re.search("abc|word@", ckpt("convert", "hf-to-maxtext", SHARDED, address).output)


class TestRepositories:
    def test_revision_is_pinned_to_its_commit(self, server):
        for revision in ("main", COMMIT, "refs/pr/1", "refs%2Fpr%2F1"):
            location = parse(f"hf://org/llama@{revision}/config.json")
            assert location.is_file()
            assert str(location.resolve()) == f"hf://org/llama@{COMMIT}/config.json"
        assert len(server.asked("/revision/")) == 2

    @pytest.mark.usefixtures("no_blocks")
    def test_expired_signed_url_is_renewed(self, server):
        file = placed("data.safetensors", "hf", server).open()
        for start in (1, 2, 3):
            file.read(start, 900)
        assert server.signed == 1
        server.expired = 1
        assert file.read(1, 900) == (bytes(range(250)) * 4)[1:901]
        assert server.signed == 2 and len(server.asked("GET /signed")) == 5

    def test_hub_content_hash_detects_changes(self, server):
        file = placed("data.safetensors", "hf", server).open()
        server.files["hub/org/llama/data.safetensors"] = b"x" * 1000
        with pytest.raises(SourceChangedError):
            file.read(1, 900)

    def test_hub_token_is_sent_only_to_the_hub(self, server, monkeypatch):
        server.gated = {"org/llama"}
        monkeypatch.setenv("HF_TOKEN", server.secret)
        assert placed("data.safetensors", "hf", server).open().read(0, 1000)

    @pytest.mark.parametrize(
        ("address", "token", "told"),
        [
            ("hf://org/llama/config.json", None, ["is gated", "hf auth login", "accept the terms at", "401"]),
            ("hf://org/llama/config.json", "other", ["is gated", "accept the terms at", "403"]),
            (
                "hf://org/nothing",
                None,
                ["model org/nothing does not exist, or it is private", "hf auth login"],
            ),
            ("hf://org/llama@v9", None, ["has no revision v9", "commits/main"]),
            ("hf://org/llama/no.json", None, ["does not exist", f"tree/{COMMIT}"]),
            ("hf://gpt2", None, ["does not name a model", "hf://org/name"]),
            ("hf://datasets/org/name", None, ["does not name a model"]),
            ("hf://org/na--me", None, ["does not name a model"]),
            ("hf://org/na?me", None, ["does not name a model"]),
            ("hf://org/..", None, ["does not name a model"]),
        ],
    )
    def test_unreadable_hub_model_is_explained(self, server, monkeypatch, address, token, told):
        server.gated = {"org/llama"}
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(CheckpointError) as caught:
            parse(address).open().read(0, 100)
        assert all(item in str(caught.value) for item in told), caught.value
        assert token != "other" or "hf auth login" not in str(caught.value)
        done = ckpt("inspect", "tree", address.removesuffix("/config.json"))
        assert done.exit_code in (2, 5), done.output
        assert all(item in done.output for item in told[:1] if "nothing" not in item)

    @pytest.mark.parametrize(
        "message",
        [
            "Invalid credentials in Authorization header",
            "Invalid username or password.",
            "The token has expired",
            "Expired token",
        ],
    )
    @pytest.mark.parametrize(
        "asked", ["api/models/org/llama/revision", "api/models/org/llama/tree", "resolve"]
    )
    def test_rejected_token_is_not_reported_as_missing_model(self, server, monkeypatch, message, asked):
        monkeypatch.setenv("HF_TOKEN", "hf_old")
        server.fault(asked, status(401, X_Error_Message=message), 99)
        with pytest.raises(StorageError, match="does not accept the token") as caught:
            parse("hf://org/llama/config.json").open().read(0, 9)
        assert message in caught.value.got and "401" in caught.value.got
        assert "/settings/tokens" in caught.value.hint and "hf_old" not in str(caught.value)

    @pytest.mark.parametrize(
        ("token", "headers"),
        [
            ("", {"X_Error_Message": "Invalid username or password."}),
            ("hf_old", {"X_Error_Code": "RepoNotFound", "X_Error_Message": "Repository not found"}),
            ("hf_old", {}),
        ],
    )
    def test_anonymous_401_response_reports_a_missing_model(self, server, monkeypatch, token, headers):
        monkeypatch.setenv("HF_TOKEN", token)
        server.fault("api/models", status(401, **headers), 99)
        with pytest.raises(StorageError, match="model org/llama does not exist, or it is private"):
            parse("hf://org/llama/config.json").open()

    def test_cached_hub_files_are_read(self, server, tmp_path):
        cached(tmp_path / "hub_cache", SHARDED, "config.json", "model-00001-of-00004.safetensors")
        assert run("hash", HUB).split()[0] == run("hash", SHARDED).split()[0]
        assert not server.asked("config.json") and not server.asked("00001-of") and server.asked("00002-of")
        file = parse(HUB) / "config.json"
        assert isinstance(opened := file.open(), hub_cache.CachedFile) and parse(opened.path) == file

    def test_truncated_cached_copy_is_not_used(self, server, tmp_path):
        folder = cached(tmp_path / "hub_cache", SHARDED, "config.json")
        (folder / "config.json").resolve().write_bytes(b"{")
        assert (parse(HUB) / "config.json").read_bytes() == (SHARDED / "config.json").read_bytes()

    def test_different_cached_copy_of_equal_size_is_not_used(self, server, tmp_path):
        folder = cached(tmp_path / "hub_cache", SHARDED, "config.json")
        copy = (folder / "config.json").resolve()
        other = copy.rename(copy.with_name("0" * 40))
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(f"../../blobs/{other.name}")
        other.write_bytes(b"{" + b" " * (other.stat().st_size - 2) + b"}")
        assert (parse(HUB) / "config.json").read_bytes() == (SHARDED / "config.json").read_bytes()

    def test_dangling_cache_links_do_not_exist_offline(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        folder = cached(tmp_path / "hub_cache", SHARDED, *(path.name for path in SHARDED.iterdir()))
        (folder / "model-00001-of-00004.safetensors").resolve().unlink()
        done = ckpt("inspect", "tree", HUB)
        assert done.exit_code == 3 and "is missing" in done.output

    @pytest.mark.parametrize("link", ["/api/models/org/llama/tree/more", "http://[x"])
    def test_unexpected_hub_entries_are_skipped_or_reported(self, server, link):
        more = json.dumps([{"type": "file", "path": path, "size": 1} for path in ("good", "\ud800", "../x")])
        server.fault("org/llama/tree/more", lambda handler: (200, {}, more.encode()))
        server.fault("org/llama/tree/c0", stating(Link=f'<{link}>; rel="next"'))
        if link.startswith("/"):
            assert {"good"} == {entry.name for entry in parse(HUB).entries()} - set(
                server.names("hub/org/llama")
            )
        else:
            with pytest.raises(StorageError, match="cannot read"):
                parse(HUB).entries()

    def test_offline_reads_use_only_the_cache(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(StorageError, match="not in the cache") as caught:
            parse("hf://org/other").exists()
        assert "HF_HUB_OFFLINE" in caught.value.got
        cached(tmp_path / "hub_cache", SHARDED, *(path.name for path in SHARDED.iterdir()))
        assert run("hash", HUB).split()[0] == run("hash", SHARDED).split()[0]
        assert server.log == []


def test_documented_web_commands_work(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server.add("hub/meta-llama/Llama-3.1-8B", SHARDED)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    lines = re.findall(r"^\$ ckpt (.*)$", (DOCS / "stores-web.md").read_text(), re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        run_plainly(*shlex.split(line.replace("https://models.example.org", f"http://{server.address}")))
