"""Scanning: pieces tile every array, come in order with any number of workers, and fit into the memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Bytes, Chunked, Scratch, Stored, stack

from ckpttools import DTYPES, FormatError, MemoryBudgetError, Region, ShapeError
from ckpttools.core.region import Shape, contiguous_runs
from ckpttools.plan.pieces import PIECE_BYTES, Cut, Item, Tiles, consecutive, fit_pieces, grain
from ckpttools.run.scanning import scan
from ckpttools.testing.strategies import (
    Known,
    UnreadableFile,
    chunk_shapes,
    chunked,
    lazy_arrays,
    noise,
    shapes,
    stored,
)

MIB = 1 << 20
BF16, F32 = DTYPES["bfloat16"], DTYPES["float32"]
CUTS = pytest.mark.parametrize("cut", [consecutive, Tiles()])


def copied(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> list[np.ndarray]:
    return [item.copy() for item in values]


def small(cut: Cut, limit: int) -> Cut:
    """`cut` with pieces of at most `limit` elements."""
    return lambda item, _: cut(item, limit)


class Pinned:
    """A file that claims a size and never ends."""

    path, size, version = "pinned", 1 << 50, ""

    def read_into(self, offset: int, out: memoryview) -> None:
        memoryview(out).cast("B")[:] = bytes(memoryview(out).nbytes)


@CUTS
@given(data=st.data(), known=lazy_arrays(depth=2), limit=st.integers(1, 50), jobs=st.integers(1, 4))
def test_pieces_tile_an_array_and_hold_its_elements(
    cut: Cut, data: st.DataObject, known: Known, limit: int, jobs: int
):
    out = np.zeros(known.array.shape, known.array.dtype.carrier)
    times = np.zeros(known.array.shape, int)
    for seen in scan([(known.array,)], copied, memory=1 << 30, jobs=jobs, cut=small(cut, limit)):
        assert 0 < seen.region.size <= limit
        out[seen.region.slices] = seen.result[0]
        times[seen.region.slices] += 1
    assert (times == 1).all()
    assert out.tobytes() == np.ascontiguousarray(known.truth).tobytes()


@given(known=lazy_arrays(depth=1), limit=st.integers(1, 50))
def test_rows_follow_each_other_in_c_order(known: Known, limit: int):
    end = 0
    for region in consecutive((known.array,), limit):
        ((start, length),) = contiguous_runs(known.array.shape, region)
        assert start == end
        end += length
    assert end == known.array.size


@CUTS
@given(shape=shapes(limit=300), data=st.data())
def test_several_arrays_are_scanned_together(cut: Cut, shape: Shape, data: st.DataObject):
    pair = [data.draw(lazy_arrays(depth=2, shape=shape)) for _ in range(2)]
    item = tuple(entry.array for entry in pair)
    limit = data.draw(st.integers(1, 50))
    for seen in scan([item], copied, memory=1 << 30, jobs=2, cut=small(cut, limit)):
        for got, known in zip(seen.result, pair, strict=True):
            assert got.tobytes() == known.truth[seen.region.slices].tobytes()


@given(sizes=st.lists(st.integers(0, 40), max_size=20), jobs=st.integers(1, 5), limit=st.integers(1, 20))
def test_order_does_not_depend_on_workers(sizes: list[int], jobs: int, limit: int):
    items: list[Item] = [(stored(noise((n,), F32, n), F32),) for n in sizes]

    def slow_in_front(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> int:
        if index == 0:
            time.sleep(0.0005)
        return int(values[0].sum())

    seen = list(scan(items, slow_in_front, memory=1 << 30, jobs=jobs, cut=small(consecutive, limit)))
    expected = [(k, region) for k, item in enumerate(items) for region in consecutive(item, limit)]
    assert [(entry.index, entry.region) for entry in seen] == expected
    assert [entry.result for entry in seen] == [
        int(noise((sizes[k],), F32, sizes[k])[region.slices].sum()) for k, region in expected
    ]


def test_empty_scan_yields_nothing():
    assert list(scan([], copied, memory=1 << 30, jobs=2)) == []
    empty = stored(noise((0, 3), F32), F32)
    assert list(scan([(empty,)], copied, memory=1 << 30, jobs=2)) == []


def test_bytes_are_observed_in_the_calling_thread():
    items: list[Item] = [(stored(noise((n,), F32), F32),) * 2 for n in (5, 700, 3)]
    heard: list[tuple[int, int]] = []
    list(
        scan(
            items,
            copied,
            memory=1 << 30,
            jobs=3,
            cut=small(consecutive, 10),
            observe=lambda nbytes: heard.append((nbytes, threading.get_ident())),
        )
    )
    assert sum(nbytes for nbytes, _ in heard) == 708 * 4 * 2
    assert {thread for _, thread in heard} == {threading.get_ident()}


def test_visit_receives_the_requested_scratch():
    def visit(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> int:
        with scratch.take((MIB,), np.dtype("u1")) as mine:
            return mine.nbytes

    (seen,) = scan([(stored(noise((3,), F32), F32),)], visit, memory=1 << 30, jobs=1, scratch=MIB)
    assert seen.result == MIB


class TestErrors:
    @pytest.mark.parametrize("jobs", [1, 4])
    def test_tasks_run_once_after_their_dependencies(self, jobs: int):
        good, short = stored(noise((9,), F32), F32), Stored((9,), F32, Bytes("short", bytes(20)), 0)
        items: list[Item] = [(good,), (good,), (short,), (short,), (good,)]
        seen, before = [], threading.active_count()
        with pytest.raises(FormatError, match="short ends too early"):
            for item in scan(items, copied, memory=1 << 30, jobs=jobs, cut=small(consecutive, 3)):
                seen.append((item.index, item.region.start))
        assert seen == [(0, (0,)), (0, (3,)), (0, (6,)), (1, (0,)), (1, (3,)), (1, (6,)), (2, (0,))]
        assert threading.active_count() == before

    def test_visit_error_is_raised(self):
        def visit(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> None:
            raise KeyError(index)

        with pytest.raises(KeyError):
            list(scan([(stored(noise((9,), F32), F32),)], visit, memory=1 << 30, jobs=2))

    def test_cut_error_is_raised(self):
        def cut(item: Item, limit: int) -> Iterator[Region]:
            yield Region((0,), (2,))
            raise LookupError("no more")

        seen = []
        with pytest.raises(LookupError, match="no more"):
            for entry in scan([(stored(noise((9,), F32), F32),)], copied, memory=1 << 30, jobs=3, cut=cut):
                seen.append(entry.region)
        assert seen == [Region((0,), (2,))]

    def test_differing_shapes_are_refused(self):
        with pytest.raises(ShapeError, match="differ in shape"):
            scan(
                [(stored(noise((2,), F32), F32), stored(noise((3,), F32), F32))],
                copied,
                memory=1 << 30,
                jobs=1,
            )

    def test_insufficient_memory_error_states_the_need_and_reads_nothing(self):
        item = (Stored((1 << 30,), BF16, UnreadableFile("none", 1 << 31), 0),)
        with pytest.raises(MemoryBudgetError) as caught:
            scan([item], copied, memory=MIB, jobs=8)
        expected = int(str(caught.value.expected).split()[2].removesuffix("MiB,")) * MIB
        assert fit_pieces([item], memory=expected, jobs=8, scratch=0).projected_peak <= expected


def test_stopping_early_stops_the_workers():
    endless, before = Stored((1 << 45,), BF16, Pinned(), 0), threading.active_count()
    for seen in scan([(endless,)], lambda *_: None, memory=1 << 30, jobs=3):
        assert seen.region.start == (0,)
        break
    assert threading.active_count() == before


def test_workers_do_not_run_far_ahead_of_the_consumer():
    endless = Stored((1 << 45,), BF16, Pinned(), 0)
    visits: list[int] = []
    running = scan([(endless,)], lambda index, *_: visits.append(index), memory=1 << 30, jobs=2)
    next(running)
    time.sleep(0.2)
    # Each of the batches, one taken and four for each worker, holds two pieces.
    assert len(visits) <= (1 + 2 * 4) * 2
    running.close()  # type: ignore[attr-defined]


@given(memory=st.integers(1, 1 << 33), jobs=st.integers(1, 64), scratch=st.integers(0, 100 * MIB))
def test_projected_memory_stays_within_limit(memory: int, jobs: int, scratch: int):
    item = (
        Stored((1 << 30,), BF16, UnreadableFile("none"), 0),
        Stored((1 << 30,), F32, UnreadableFile("none"), 0),
    )
    try:
        fit = fit_pieces([item], memory=memory, jobs=jobs, scratch=scratch)
    except MemoryBudgetError:
        assert memory < 110 * MIB + scratch
        return
    assert fit.projected_peak <= memory
    assert 1 <= fit.jobs <= jobs
    assert fit.piece_bytes <= fit.buffer_bytes


class TestTiles:
    @given(shape=shapes(min_rank=1, max_rank=3), data=st.data(), limit=st.integers(1, 60))
    def test_encoded_chunks_that_fit_are_not_cut(self, shape: Shape, data: st.DataObject, limit: int):
        truth = noise(shape, F32)
        chunk = data.draw(chunk_shapes(shape))
        plain = chunked(truth, F32, chunk)
        encoded = Chunked(plain.shape, plain.dtype, plain.chunk, plain.part, part_scratch=0)
        assert grain(encoded) == chunk
        assert grain(plain) == (1,) * len(shape)
        longest = max(range(len(shape)), key=lambda axis: shape[axis] - chunk[axis])
        if all(n == c for k, (n, c) in enumerate(zip(shape, chunk, strict=True)) if k != longest):
            for region in Tiles()((encoded,), max(limit, int(np.prod(chunk)))):
                assert region.start[longest] % chunk[longest] == 0

    def test_stacked_layers_are_scanned_one_by_one(self):
        part = Stored((64, 1 << 20), BF16, UnreadableFile("none"), 0)
        array = stack([part] * 4, 1)
        sizes = {region.shape for region in Tiles()((array,), 64 * MIB)}
        assert len(sizes) == 1
        assert all(shape[1] == 1 and shape[2] == 1 << 20 for shape in sizes)

    def test_pieces_stay_small_without_a_benefit(self):
        array = Stored((1 << 15, 1 << 15), BF16, UnreadableFile("none"), 0)
        assert {region.size * 2 for region in Tiles()((array,), 64 * MIB)} == {PIECE_BYTES}

    def test_encoded_chunk_may_exceed_a_piece(self):
        def part(index: Shape) -> Stored:
            return Stored((1 << 13, 1 << 12), BF16, UnreadableFile("nothing is read"), 0)

        array = _Whole((1 << 13, 1 << 13), BF16, (1 << 13, 1 << 12), part, 0)
        assert {region.shape for region in Tiles()((array,), 32 * MIB)} == {(1 << 13, 1 << 12)}


class _Whole(Chunked):
    """Chunks that are fetched whole, whatever is expected of them."""

    def read_cost(self, region: Region):
        from ckpttools.array.lazy import ReadCost

        cells = np.prod([-(-n // c) for n, c in zip(region.shape, self.chunk, strict=True)])
        return ReadCost(int(cells * np.prod(self.chunk)) * 2, int(cells))


SCAN = """
import json, sys
import numpy as np
from ckpttools.core.dtypes import DTYPES
from ckpttools.array.nodes import Stored, relayout
from ckpttools.plan.pieces import fit_pieces
from ckpttools.core.process_memory import peak_bytes
from ckpttools.run.scanning import scan
from ckpttools.stores.local.file import LocalFile
path, memory, jobs, transposed = sys.argv[1:]
file, dtype = LocalFile.at(path), DTYPES["bfloat16"]
side = 16384
plain = Stored((file.size // 2 // side, side), dtype, file, 0)
array = relayout(plain, [(n,) for n in plain.shape], (1, 0), (1, 1)) if transposed == "yes" else plain
items, limits = [(array,), (plain, plain)], dict(memory=int(memory), jobs=int(jobs), scratch=0)
total = sum(seen.result for seen in scan(items, lambda *a: sum(int(v.max()) for v in a[2]), **limits))
projected = fit_pieces(items, **limits).projected_peak
print(json.dumps({"peak": peak_bytes(), "projected": projected, "total": total}))
"""


@pytest.mark.parametrize("transposed", ["no", "yes"])
@pytest.mark.parametrize(("memory", "jobs"), [(128 * MIB, 2), (160 * MIB, 8), (512 * MIB, 4)])
def test_measured_peak_is_below_the_projection(tmp_path, memory: int, jobs: int, transposed: str):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(320 * MIB)
    command = [sys.executable, "-c", SCAN, str(path), str(memory), str(jobs), transposed]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert result["total"] == 0
    assert result["peak"] <= result["projected"] <= memory
