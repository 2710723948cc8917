"""Reads over a network: how many at once, in which parts, and what becomes of one that is late."""

from __future__ import annotations

import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import ckpt, succeed
from support.gcs_server import Fault
from support.internals import Client, parse
from support.locations import GOLDEN, HF
from support.object_stores import files_in, google
from support.web_server import status, web_server

import ckpttools
from ckpttools import Region, StorageError
from ckpttools.plan.task import Prices, prices
from ckpttools.stores import block_cache, concurrency, reads
from ckpttools.stores.concurrency import Pace, use_concurrency
from ckpttools.stores.objects import gs
from ckpttools.stores.reads import ReadPool
from ckpttools.stores.web import client as attempting
from ckpttools.stores.web import http as plain
from ckpttools.testing.models import write_model

SHARDED = GOLDEN / "llama3.1" / "hf_sharded"


@pytest.fixture
def gcs(gcs_server, monkeypatch):
    with google(gcs_server) as cloud:
        monkeypatch.setattr(gs.STORE, "_reads", ReadPool())
        yield cloud


def content(nbytes: int) -> bytes:
    return bytes(number * 31 % 251 for number in range(nbytes))


class TestParts:
    @given(nbytes=st.integers(0, 5000), part=st.integers(1, 2000), start=st.integers(0, 100))
    def test_read_combines_parts(self, nbytes, part, start):
        source, out = content(nbytes + start), bytearray(nbytes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reads, "PART", max(part, nbytes // 50, 1))
            READS.read_into(start, memoryview(out), lambda at, length: source[at : at + length])
        assert out == source[start:]

    def test_failed_part_fails_the_read_and_stops_writes(self, monkeypatch):
        monkeypatch.setattr(reads, "PART", 10)
        slow = threading.Event()

        def fetch(at, length):
            if at == 10:
                raise StorageError("no")
            if at == 20:
                slow.wait(10)
            return b"x" * length

        out = bytearray(30)
        with pytest.raises(StorageError, match="no"):
            READS.read_into(0, memoryview(out), fetch)
        kept = bytes(out)
        slow.set()
        time.sleep(0.05)
        assert bytes(out) == kept and kept[10:] == bytes(20)


READS = ReadPool()


class TestLateResponses:
    """What takes much longer than others is asked for again; whatever comes later is written nowhere."""

    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch):
        monkeypatch.setattr(reads, "_LATE_SECONDS", 0.1)

    def test_late_response_is_discarded(self):
        mine, slow, number = ReadPool(), threading.Event(), count()

        def fetch(at, length):
            if next(number) == 30:
                slow.wait(10)
                return b"late"
            return b"good"

        for _ in range(30):
            mine.read_into(0, memoryview(bytearray(4)), fetch)
        out = bytearray(4)
        mine.read_into(0, memoryview(out), fetch)
        assert out == b"good"
        out[:] = b"next"
        slow.set()
        time.sleep(0.05)
        assert out == b"next"

    def test_failed_attempt_does_not_fail_the_other(self):
        mine, slow, number = ReadPool(), threading.Event(), count()

        def fetch(at, length):
            mine_is = next(number)
            if mine_is == 30:
                slow.wait(10)
            if mine_is == 31:
                slow.set()
                raise StorageError("no")
            return b"good"

        for _ in range(31):
            out = bytearray(4)
            mine.read_into(0, memoryview(out), fetch)
        assert out == b"good"

    def test_repeated_requests_are_limited(self):
        mine, asked = ReadPool(), count()

        def fetch(at, length):
            next(asked)
            time.sleep(0.4 if at else 0)
            return bytes(length)

        for _ in range(40):
            mine.read_into(0, memoryview(bytearray(4)), fetch)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: mine.read_into(1, memoryview(bytearray(4)), fetch), range(16)))
        assert next(asked) <= 40 + 16 + reads._AGAIN_AT_ONCE

    @pytest.mark.parametrize(
        "stalled", [{0}, {0, 1}, {0, 1, 2}, {3}, {5, 8}, {1, 4, 7, 10, 12}, set(range(8, 13))]
    )
    def test_stalled_reads_of_short_transfers_are_repeated(self, monkeypatch, stalled):
        monkeypatch.setattr(reads, "PART", 4)
        monkeypatch.setattr(reads, "_UNKNOWN_SECONDS", 0.3)
        mine, number, end = ReadPool(), count(), threading.Event()
        whole = content(13 * 4)

        def fetch(at, length):
            if next(number) in stalled:
                end.wait(20)
            return whole[at : at + length]

        out, began = bytearray(len(whole)), time.monotonic()
        try:
            mine.read_into(0, memoryview(out), fetch)
            assert out == whole and time.monotonic() - began < 5
        finally:
            end.set()

    def test_stalled_read_is_repeated_at_most_twice(self, monkeypatch):
        monkeypatch.setattr(reads, "_UNKNOWN_SECONDS", 0.1)
        mine, number, end = ReadPool(), count(), threading.Event()

        def fetch(at, length):
            if next(number) == reads._ATTEMPTS - 1:
                # In time for further attempts.
                threading.Timer(0.5, end.set).start()
            end.wait(20)
            return b"good"

        out = bytearray(4)
        mine.read_into(0, memoryview(out), fetch)
        assert out == b"good" and next(number) == reads._ATTEMPTS

    def test_reads_stay_fast_with_one_stall_in_twenty(self, gcs, monkeypatch):
        monkeypatch.setattr(reads, "PART", 1 << 16)
        monkeypatch.setattr(block_cache, "SIZE", 1)
        whole = content(1 << 20) * 4
        file = (gcs.filled({"x.bin": whole}) / "x.bin").open()
        assert file.read(0, 1 << 21) == whole[: 1 << 21]
        began = time.monotonic()
        for at in range(2):
            gcs.server.faults.append(Fault("x.bin", stall=5))
            assert file.read(at << 20, 1 << 20) == whole[at << 20 :][: 1 << 20]
        assert time.monotonic() - began < 4
        assert len(gcs.server.log) <= 32 + 2 * 16 + 4

    def test_read_threads_are_daemons(self, gcs):
        assert all(item.daemon for item in threading.enumerate() if "_work" in item.name)


class TestConcurrencyControl:
    @pytest.fixture(autouse=True)
    def short(self, monkeypatch):
        monkeypatch.setattr(reads, "PART", 1 << 14)
        monkeypatch.setattr(block_cache, "SIZE", 1)
        monkeypatch.setattr(concurrency, "_REST", 1)
        monkeypatch.setattr(concurrency, "_SECONDS", 0.2)

    def reads_until(self, gcs, is_reached):
        """Whether the reads that may be under way come to be as many; a busy machine misleads for a while."""
        mine = gs.STORE._reads.pace = Pace(1 << 20)
        file = (gcs.filled({"x.bin": bytes(1 << 20)}) / "x.bin").open()
        end = time.monotonic() + 30
        while not is_reached(mine.limit) and time.monotonic() < end:
            file.read(0, 1 << 20)
        return is_reached(mine.limit)

    def test_high_latency_increases_concurrency(self, gcs):
        gcs.server.latency = 0.15
        assert self.reads_until(gcs, lambda limit: limit >= 1.5 * concurrency.DEFAULT_CONCURRENCY)
        assert gcs.server.most_at_once <= 1.5 * concurrency.DEFAULT_CONCURRENCY

    def test_saturated_link_reduces_concurrency(self, gcs):
        gcs.server.down.bandwidth = 1e6
        assert self.reads_until(gcs, lambda limit: limit <= concurrency.DEFAULT_CONCURRENCY // 2)

    def test_throttling_reduces_concurrency(self, monkeypatch):
        with web_server() as web:
            monkeypatch.setattr(plain, "STORE", plain.HttpStore())
            plain.STORE.client = Client(attempting.Patience(first_wait=0.001))
            ckpttools.stores.registry._store.cache_clear()
            web.files["x.bin"] = bytes(1 << 20)
            web.fault("GET .*x.bin", status(503), times=2)
            file = parse(f"http://{web.address}/x.bin").open()
            file.read(0, 1 << 20)
            assert plain.STORE.client.reads.pace.limit == concurrency.DEFAULT_CONCURRENCY // 4
        ckpttools.stores.registry._store.cache_clear()

    def test_concurrent_bytes_are_bounded(self):
        mine, now, limit = Pace(100), [], []

        def read(nbytes):
            with mine.read(nbytes):
                now.append(nbytes)
                limit.append(sum(now))
                time.sleep(0.002)
                now.remove(nbytes)

        with ThreadPoolExecutor(40) as pool:
            list(pool.map(read, [100, 30, 7, 100] * 40))
        assert max(limit) <= mine.nbytes == 100 * concurrency.DEFAULT_CONCURRENCY


class TestReadCosts:
    """What is read of a store behind a network is read once; local plans are what they always were."""

    LAYER: ClassVar = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }

    @pytest.fixture
    def model(self, tmp_path):
        """Matrices that are larger than tasks, as holes."""
        write_model(tmp_path / "model", self.LAYER, sparse=True)
        return tmp_path / "model"

    def served(self, gcs, directory):
        for path in directory.iterdir():
            with path.open("rb") as file:
                hole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            gcs.server.put(gcs.bucket, f"model/{path.name}", hole)
        return f"gs://{gcs.bucket}/model"

    @pytest.mark.parametrize("memory", ["1GiB", "300MiB"])
    def test_transposed_matrices_are_read_once(self, gcs, model, memory):
        plan = ckpttools.hf_to_maxtext.plan(self.served(gcs, model), "out", memory=memory).plan
        fetched = sum(plan.tree.arrays[task.path].read_cost(task.region).nbytes for task in plan.tasks)
        assert fetched <= 1.25 * plan.bytes_in

    def test_ordered_writes_read_transposed_matrices_once(self, gcs, model):
        source = self.served(gcs, model)
        plan = ckpttools.hf_to_maxtext.plan(source, f"gs://{gcs.bucket}/out", memory="1GiB").plan
        kernels = [task for task in plan.tasks if "wi_0" in task.path]
        fetched = sum(plan.tree.arrays[task.path].read_cost(task.region).nbytes for task in kernels)
        assert kernels and fetched <= 1.1 * sum(task.bytes_in for task in kernels)

    def test_untransposed_arrays_get_small_tasks(self, gcs, model):
        source = self.served(gcs, model)
        plan = ckpttools.hf_to_maxtext.plan(source, f"gs://{gcs.bucket}/out", memory="1GiB").plan
        sizes = {
            name: {task.bytes_out for task in plan.tasks if name in task.path}
            for name in ("wi_0", "embedding")
        }
        assert max(sizes["embedding"]) < 64 << 20 < max(sizes["wi_0"])

    def test_local_reads_are_priced_as_disk_reads(self, gcs, model):
        near = ckpttools.open(model).arrays
        far = ckpttools.open(self.served(gcs, model)).arrays
        assert {prices(array) for array in near.values()} == {Prices(1, 4 << 10)}
        assert {prices(array) for array in far.values()} == {Prices(32, 32 * (2 << 20))}

    def test_read_gaps_are_not_fetched_beyond_request_cost(self, gcs, model):
        array = ckpttools.open(self.served(gcs, model)).arrays["lm_head.weight",]
        for start, stop in (((0, 0), (32000, 1)), ((0, 100), (50, 200)), ((5, 0), (7, 4000))):
            region = Region(start, stop)
            reads = region.shape[0]
            cost = array.read_cost(region)
            assert cost.nbytes + cost.reads * (2 << 20) <= region.size * 2 + (reads + 1) * (2 << 20)

    def test_convert_reads_a_model_once(self, gcs, tmp_path):
        location = gcs.filled(files_in(SHARDED))
        receipt = ckpttools.hf_to_maxtext(str(location), tmp_path / "out")
        assert receipt.traffic["gs://"].nbytes <= 1.1 * sum(map(len, files_in(SHARDED).values()))


class TestRequests:
    @pytest.mark.parametrize("number", [1, 3])
    def test_requests_option_limits_concurrency(self, gcs, number, monkeypatch):
        monkeypatch.setattr(reads, "PART", 1 << 12)
        gcs.server.latency = 0.005
        location = gcs.filled(files_in(SHARDED))
        succeed("hash", location, "--requests", number)
        assert gcs.server.most_at_once == number

    def test_more_requests_reserve_more_memory(self):
        with use_concurrency(64):
            assert gs.STORE.costs.memory >= 64 * reads.PART
            assert gs.STORE.costs.requests == 64
        with use_concurrency(1):
            assert gs.STORE.costs.memory < 64 << 20

    def test_commands_and_calls_accept_requests(self, gcs, tmp_path):
        location = gcs.filled(files_in(HF))
        gcs.server.latency = 0.005
        succeed("convert", "hf-to-maxtext", location, tmp_path / "out", "--requests", 2)
        ckpttools.stats(str(location), requests=2)
        assert gcs.server.most_at_once <= 2
        assert concurrency.requested_concurrency() is None

    def test_requests_option_refuses_zero(self):
        done = ckpt("hash", "gs://bucket/x", "--requests", 0)
        assert done.exit_code == 2 and "--requests" in done.output
