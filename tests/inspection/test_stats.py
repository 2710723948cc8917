"""Statistics against numpy's, in float64 over whole arrays: every dtype, any cut, NaN and infinity."""

from __future__ import annotations

import json
import subprocess
import sys
from math import isfinite, prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt
from support.golden_data import golden_checkpoint
from support.internals import Bytes, Constant, Scratch, Stored, keystr
from support.internals import Path as TreePath
from support.locations import GOLDEN

import ckpttools
from ckpttools import DTYPES, DType, LazyArray, MemoryBudgetError, Region, Tree
from ckpttools.array.elements import table, widen
from ckpttools.array.scratch import ALIGNMENT
from ckpttools.inspection import moment_statistics
from ckpttools.inspection.distribution import QUANTILES, max_bins
from ckpttools.inspection.layer_rows import layer_rows
from ckpttools.inspection.moment_statistics import Extremes, Moments, extremes, near_zero
from ckpttools.inspection.stats import ArrayStats, Statistics, inspect_stats, statistics_of
from ckpttools.testing.strategies import UnreadableFile, lazy_arrays, noise, shapes, stored

MIB = 1 << 20
BF16, F16, F32, F64 = (DTYPES[name] for name in ("bfloat16", "float16", "float32", "float64"))
LAID_OUT = [dtype for dtype in DTYPES.values() if dtype.not_finite_from is not None]


def numbers(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    """What the elements are, in float64, complex ones their magnitude."""
    with np.errstate(invalid="ignore", over="ignore"):
        typed = carriers.view(dtype.numpy)
        if dtype.kind == "complex":
            return np.hypot(typed.real.astype(np.float64), typed.imag.astype(np.float64))
        return (typed != 0).astype(np.float64) if dtype.kind == "bool" else typed.astype(np.float64)


def extremes_of(x: np.ndarray) -> Extremes:
    """By looking at numbers."""
    return Extremes(x.min(), x.max(), abs(x).min())


class TestExtremes:
    @given(st.data())
    def test_statistics_match_numpy(self, data: st.DataObject):
        dtype = data.draw(st.sampled_from(LAID_OUT))
        patterns = st.integers(0, (1 << dtype.bits) - 1)
        carriers = np.array(data.draw(st.lists(patterns, min_size=1, max_size=9)), dtype.carrier)
        x = numbers(carriers, dtype)
        result = extremes(carriers, dtype)
        if not np.isfinite(x).all():
            assert result is None
        else:
            assert result == extremes_of(x)

    @pytest.mark.parametrize("signs", [(1,), (-1,), (1, -1)])
    def test_extremes_are_found_for_each_sign(self, signs: tuple[int, ...]):
        x = np.array([sign * value for sign in signs for value in (0.5, 3.0, 1e-40)], np.float32)
        result = extremes(x.view(np.uint32), F32)
        assert result == extremes_of(x)

    def test_other_dtype_layouts_use_their_values(self):
        carriers = np.zeros(3, np.uint8)
        others = [d for d in DTYPES.values() if d not in LAID_OUT and d.itemsize == 1]
        assert [extremes(carriers, dtype) for dtype in others] == [None] * len(others)


class TestWidening:
    @pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.itemsize <= 2])
    @pytest.mark.parametrize("only_finite", [True, False])
    def test_every_bit_pattern_widens_to_its_value(self, name: str, only_finite: bool):
        dtype = DTYPES[name]
        carriers = np.arange(1 << dtype.bits, dtype=np.uint32).astype(dtype.carrier)
        with np.errstate(invalid="ignore"):
            truth = numbers(carriers, dtype).astype(np.float32)
        keep = np.isfinite(truth) | (not only_finite)
        for some in (carriers[keep], np.repeat(carriers[keep], 2)[::2]):
            built = np.empty(some.shape, np.float32)
            widen(some, dtype, built)
            assert np.array_equal(built, truth[keep], equal_nan=True)
            assert (np.signbit(built) == np.signbit(truth[keep]))[~np.isnan(built)].all()

    def test_widening_empty_array_succeeds(self):
        widen(np.empty(0, np.uint16), F16, np.empty(0, np.float32))


class TestNearZero:
    @given(st.data())
    def test_zeros_and_subnormals_are_counted(self, data: st.DataObject):
        dtype = data.draw(st.sampled_from(LAID_OUT))
        size = data.draw(st.integers(1, 30_000))
        x = np.random.default_rng(0).standard_normal(size).astype(dtype.numpy)
        planted = st.sampled_from([0.0, -0.0, *(dtype.smallest_normal * k for k in (1, -1, 0.5, -0.5))])
        for location, value in data.draw(
            st.dictionaries(st.integers(0, size - 1), planted, max_size=5)
        ).items():
            x[location] = value
        magnitudes = abs(x.astype(np.float64))
        carriers = x.view(dtype.carrier)
        if data.draw(st.booleans(), label="strided"):
            carriers = np.repeat(carriers, 2)[::2]
        before, seen = carriers.copy(), extremes(carriers, dtype)
        assert seen is not None
        zeros, subnormals = near_zero(carriers, dtype, seen, Scratch(2 * carriers.nbytes + 2 * ALIGNMENT))
        assert zeros == (magnitudes == 0).sum()
        assert zeros + subnormals == (magnitudes < dtype.smallest_normal).sum()
        assert np.array_equal(carriers, before)


def one(array: LazyArray, **options: object) -> ArrayStats:
    """The statistics of an array alone."""
    options = {"memory": 1 << 30, "jobs": 2, **options}
    (result,) = inspect_stats(Tree({("a",): array}), **options).arrays  # type: ignore[arg-type]
    return result


def close(got: float | None, expected: float, error: float) -> bool:
    if not isfinite(expected):
        return got is None
    return got is not None and abs(got - expected) <= error


def check(result: Statistics, carriers: np.ndarray, dtype: DType) -> None:
    """Counts and extremes exactly; sums as closely as is promised."""
    x = numbers(carriers, dtype).reshape(-1)
    finite = x[np.isfinite(x)]
    assert (result.elements, result.nan) == (x.size, np.isnan(x).sum())
    assert result.inf == x.size - finite.size - result.nan
    assert result.zeros == (finite == 0).sum()
    assert result.subnormals == ((finite != 0) & (abs(finite) < dtype.smallest_normal)).sum()
    if not finite.size:
        assert (result.min, result.max, result.mean, result.std, result.norm, result.max_abs) == (None,) * 6
        return
    assert result.min is not None and result.max is not None
    if dtype.kind in ("int", "uint") and dtype.bits == 64:
        exact = carriers.view(dtype.numpy)
        assert (result.min, result.max) == (int(exact.min()), int(exact.max()))
    else:
        assert (result.min, result.max) == (finite.min(), finite.max())
    assert result.max_abs == max(abs(result.min), abs(result.max))
    relative = 1e-6 if dtype.bits <= 16 else 1e-12
    with np.errstate(over="ignore", invalid="ignore"):
        near_one = np.ldexp(finite, -np.frexp(abs(finite).max())[1])
        norm, mean, std = (
            np.ldexp(item, np.frexp(abs(finite).max())[1])
            for item in (np.sqrt((near_one * near_one).sum()), near_one.mean(), near_one.std())
        )
        assert close(result.norm, norm, relative * norm)
        # Relative to the largest number, as a sum that cancels has no digits of its own.
        assert close(result.mean, mean, relative * abs(finite).max())
        assert close(result.std, std, relative * abs(finite).max())


@given(known=lazy_arrays(depth=2))
def test_statistics_accept_any_lazy_array(known):
    check(one(known.array).statistics, known.truth, known.array.dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@settings(max_examples=30)
@given(shape=shapes(max_rank=2, limit=200), seed=st.integers(0, 1 << 30))
def test_statistics_accept_noise_of_every_dtype(dtype: DType, shape, seed: int):
    truth = noise(shape, dtype, seed)
    check(one(stored(truth, dtype)).statistics, truth, dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.bits <= 16], ids=str)
def test_statistics_accept_every_bit_pattern(dtype: DType):
    truth = np.arange(1 << min(dtype.bits, 8 * dtype.itemsize)).astype(dtype.carrier)
    if dtype.kind == "bool":
        truth = truth[:2]
    result = one(stored(truth, dtype), histograms=True)
    check(result.statistics, truth, dtype)
    with np.errstate(invalid="ignore"):
        known = table(dtype)[truth].astype(np.float64)
    assert np.array_equal(known, numbers(truth, dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 0.02, 1.0, 3e4])
@pytest.mark.parametrize("center", [0.0, 1.0, 100.0])
def test_statistics_match_for_model_weights(dtype: DType, scale: float, center: float):
    drawn = np.random.default_rng(0).standard_normal(70_001) * scale + center * scale
    with np.errstate(over="ignore"):
        truth = drawn.astype(dtype.numpy).view(dtype.carrier)
    result = one(stored(truth, dtype)).statistics
    check(result, truth, dtype)
    if result.inf == 0:
        relative = 1e-6 if dtype.bits <= 16 else 1e-12
        assert result.std == pytest.approx(numbers(truth, dtype).std(), rel=relative)
        assert result.mean == pytest.approx(numbers(truth, dtype).mean(), abs=relative * result.std)


@pytest.mark.parametrize("scale", [1e-30, 1e-21, 1e19, 1e30])
def test_squares_beyond_float32_are_summed_exactly(scale: float):
    truth = (np.random.default_rng(0).standard_normal(5000) * scale).astype(BF16.numpy).view(BF16.carrier)
    result = one(stored(truth, BF16)).statistics
    exact = numbers(truth, BF16)
    assert result.norm == pytest.approx(np.sqrt((exact**2).sum()), rel=1e-9)
    assert result.std == pytest.approx(exact.std(), rel=1e-9)


def test_large_mean_loses_no_precision():
    truth = 1e8 + np.random.default_rng(0).standard_normal(100_000)
    result = one(stored(truth.view(F64.carrier), F64)).statistics
    assert result.std == pytest.approx(truth.std(), rel=1e-9)


def test_float64_overflow_is_reported():
    truth = np.array([1.7e308, 1.7e308, 1.7e308, -1.7e308])
    result = one(stored(truth.view(F64.carrier), F64)).statistics
    assert (result.min, result.max, result.norm) == (-1.7e308, 1.7e308, None)


@given(
    values=st.lists(st.sampled_from([1.0, -0.0, 1e308, -1.7e308, np.inf, np.nan]), min_size=2, max_size=24),
    apart=st.booleans(),
)
def test_complex_magnitude_overflow_is_not_reported_as_inf(values: list[float], apart: bool):
    """Like 1.7e308 + 1.7e308j: no infinity was found, and no magnitude can be told."""
    dtype = DTYPES["complex128"]
    truth = np.array(values[: len(values) // 2 * 2]).view(dtype.carrier)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpttools.inspection.moment_statistics._ROOM", 24 if apart else 1 << 22)
        result = one(stored(truth, dtype), histograms=True)
    magnitudes, bad = numbers(truth, dtype), ~np.isfinite(truth)
    large, held = np.isinf(magnitudes) & ~bad, magnitudes[np.isfinite(magnitudes)]
    seen = result.statistics
    assert seen.nan + seen.inf == bad.sum()
    assert seen.nan == np.isnan(magnitudes).sum()
    assert result.first_bad == ((bad.argmax(),) if bad.any() else None)
    assert seen.min == (held.min() if held.size else None)
    assert seen.max == seen.max_abs == (held.max() if held.size and not large.any() else None)
    assert (result.distribution is None) == (seen.max is None)
    if large.any():
        assert (seen.mean, seen.std, seen.norm) == (None,) * 3


def test_large_integers_keep_their_last_digit():
    truth = np.array([2**63 - 1, -(2**63), 5], np.int64)
    result = one(stored(truth.view("u8"), DTYPES["int64"])).statistics
    assert (result.min, result.max, result.max_abs) == (-(2**63), 2**63 - 1, 2**63)


def test_empty_array_has_empty_statistics():
    result = one(stored(noise((0, 3), F32), F32), histograms=True, per_layer=True)
    assert result.statistics == Statistics(0, None, None, None, None, None, None, 0, 0, 0, 0)
    assert (result.first_bad, result.distribution, dict(result.layers)) == (None, None, {})


@given(parts=st.lists(st.lists(st.floats(-1e6, 1e6), max_size=30), min_size=1, max_size=6))
def test_moments_of_parts_are_additive(parts: list[list[float]]):
    built = [found_in(np.array(part)) for part in parts]
    total, whole = sum(built, Moments()), found_in(np.array([x for part in parts for x in part]))
    assert (total.elements, total.min, total.max, total.zeros) == (
        whole.elements,
        whole.min,
        whole.max,
        whole.zeros,
    )
    assert total.mean == pytest.approx(whole.mean, abs=1e-9, rel=1e-9)
    assert total.spread == pytest.approx(whole.spread, abs=1e-6, rel=1e-9)


def found_in(values: np.ndarray) -> Moments:
    if not values.size:
        return Moments()
    whole = Region.whole(values.shape)
    carriers = values.astype(np.float64).view(F64.carrier)
    return moment_statistics.moments(carriers, whole, whole, F64, Scratch(moment_statistics.SCRATCH_BYTES))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3000)),
    planted=st.sets(st.sampled_from([0.0, 1e-40, np.nan, np.inf, 100.0])),
    apart=st.booleans(),
)
def test_blocks_with_non_finite_values_are_handled(dtype: DType, shape, planted: set[float], apart: bool):
    """Contiguous or not, of any size, in several blocks: layers of a stacked array, each by itself."""
    truth = np.random.default_rng(1).standard_normal(shape).astype(dtype.numpy)
    truth.reshape(-1)[: len(planted)] = list(planted)[: truth.size]
    carriers, region = truth.view(dtype.carrier), Region.whole(shape)
    parts = list(region.pieces(1, 1)) if apart else [region]
    scratch = Scratch(moment_statistics.SCRATCH_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpttools.inspection.moment_statistics._ROOM", 1 << 12)
        result = [moment_statistics.moments(carriers.copy(), region, part, dtype, scratch) for part in parts]
    check(statistics_of(sum(result, Moments())), carriers, dtype)
    bad = np.argwhere(~np.isfinite(truth.astype(np.float64)))
    assert sum(result, Moments()).first == (tuple(bad[0]) if len(bad) else None)


@given(shape=shapes(min_rank=1, max_rank=3, limit=200), data=st.data())
def test_first_non_finite_element_is_located(shape, data: st.DataObject):
    truth = np.ones(shape, np.float32)
    bad = data.draw(st.lists(st.integers(0, prod(shape) - 1), max_size=3))
    truth.reshape(-1)[bad] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    result = one(stored(truth.view(F32.carrier), F32))
    assert result.first_bad == (np.unravel_index(min(bad), shape) if bad else None)
    assert result.statistics.nan + result.statistics.inf == len(set(bad))


@pytest.mark.parametrize("factor", [1e-30, 2.0**55, 2.0**57, 2.0**60, 1e30])
def test_large_squares_are_summed_in_float64(factor: float):
    truth = (np.random.default_rng(3).standard_normal(300_001) * factor + factor / 3).astype(np.float32)
    bits = (truth.view(np.uint32) >> 16).astype(np.uint16)
    check(one(stored(bits, BF16)).statistics, bits, BF16)


class TestPieces:
    """The same numbers, however arrays are cut and by however many."""

    @pytest.fixture
    def large(self) -> Stored:
        truth = (np.random.default_rng(1).standard_normal(3_000_003) * 0.02).astype(BF16.numpy)
        truth[1_234_567] = np.nan
        return stored(truth.view(BF16.carrier), BF16)

    def test_worker_count_does_not_change_statistics(self, large: Stored):
        result = [one(large, jobs=jobs, histograms=True) for jobs in (1, 2, 5)]
        assert result[0] == result[1] == result[2]

    def test_block_size_does_not_change_statistics(self, large: Stored, monkeypatch: pytest.MonkeyPatch):
        whole = one(large)
        monkeypatch.setattr("ckpttools.inspection.moment_statistics._ROOM", 1 << 14)
        cut = one(large)
        assert whole.first_bad == cut.first_bad == (1_234_567,)
        for name in ("elements", "min", "max", "zeros", "nan", "inf"):
            assert getattr(whole.statistics, name) == getattr(cut.statistics, name)
        assert whole.statistics.std == pytest.approx(cut.statistics.std, rel=1e-8)


class TestDistribution:
    def test_largest_arrays_get_a_distribution(self):
        arrays = {
            (name,): stored(noise((size,), F32), F32) for name, size in zip("abcd", (3, 9, 1, 8), strict=True)
        }
        result = inspect_stats(
            Tree(arrays), memory=1 << 30, jobs=1, histograms=True, most_histograms=2
        ).arrays
        assert [item.path for item in result if item.distribution] == ["b", "d"]

    def test_statistics_memory_is_reserved(self):
        arrays = {(str(index),): stored(noise((300,), F32), F32) for index in range(2000)}
        options = {"memory": 170 << 20, "jobs": 1}
        inspect_stats(Tree(arrays), **options)
        with pytest.raises(MemoryBudgetError):
            inspect_stats(Tree(arrays), **options, histograms=True)

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
    @settings(max_examples=30)
    @given(seed=st.integers(0, 1 << 30), size=st.integers(1, 300))
    def test_bins_and_quantiles_match_numpy(self, dtype: DType, seed: int, size: int):
        truth = noise((size,), dtype, seed)
        x = numbers(truth, dtype)
        finite = np.sort(x[np.isfinite(x)])
        result = one(stored(truth, dtype), histograms=True).distribution
        if not finite.size:
            assert result is None
            return
        assert result is not None
        assert result.zeros + sum(item.negative + item.positive for item in result.bins) == finite.size
        assert len(result.bins) <= max_bins(dtype)
        least = 0.0 if result.is_exact else 2.0**-133
        for item in result.bins:
            low, high = 2.0**item.exponent, 2.0 ** (item.exponent + 1) if item.exponent < 1023 else np.inf
            if low >= least:
                assert item.positive == ((finite >= low) & (finite < high)).sum()
                assert item.negative == ((finite <= -low) & (finite > -high)).sum()
        for share, value in result.quantiles.items():
            expected = finite[int(np.ceil(share * finite.size)) - 1]
            error = 0.0 if result.is_exact else max(abs(expected) / 16, 1e-38)
            assert abs(value - expected) <= error

    @pytest.mark.parametrize(
        ("name", "least"),
        [
            ("float32", -133),
            ("float64", -1026),
            ("int32", -1026),
            ("bfloat16", -133),
            ("float16", -24),
            ("int8", 0),
        ],
    )
    def test_subnormal_values_count_as_zeros_in_wide_dtypes(self, name: str, least: int):
        """Nothing but zeros of dtypes of up to 16 bits; of wider ones also what is hardly more."""
        dtype = DTYPES[name]
        values = np.array([0, 1, 1]).astype(dtype.numpy)
        if dtype.is_float and dtype.bits > 16:
            values[1:] = 2.0**least, 2.0 ** (least - 1)
        result = one(stored(values.view(dtype.carrier), dtype), histograms=True)
        assert result.distribution is not None
        assert result.distribution.min_exponent == least
        assert result.distribution.zeros == (2 if dtype.is_float and dtype.bits > 16 else 1)
        assert result.statistics.zeros == 1

    def test_float32_quantiles_have_seven_bits(self):
        truth = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
        result = one(stored(truth.view(F32.carrier), F32), histograms=True).distribution
        assert result is not None and not result.is_exact
        assert tuple(result.quantiles) == QUANTILES
        for share, value in result.quantiles.items():
            expected = np.sort(truth)[int(np.ceil(share * truth.size)) - 1]
            assert value == pytest.approx(expected, rel=2**-8)


class TestLayers:
    def test_stacked_layers_have_separate_rows(self):
        tree = ckpttools.open(golden_checkpoint(scan=True))
        report = inspect_stats(tree, memory=1 << 30, jobs=2, per_layer=True)
        stacked = [array for array in report.arrays if array.layers]
        assert len(stacked) == 9
        for item in stacked:
            whole = tree.arrays[tuple(item.path.split("/"))].read()
            assert sorted(item.layers) == [0, 1, 2, 3]
            for layer, result in item.layers.items():
                check(result, np.ascontiguousarray(whole[:, layer]).view(BF16.carrier), BF16)

    def test_scanned_and_unscanned_statistics_agree(self):
        scanned, single = (
            inspect_stats(ckpttools.open(golden_checkpoint(scan)), memory=1 << 30, jobs=2, per_layer=True)
            for scan in (True, False)
        )
        rows = layer_rows(ckpttools.open(golden_checkpoint(scan=False)))
        apart = {keystr(path): row for path, row in rows.items()}
        by_layer = {
            (apart[array.path].name, apart[array.path].numbers[0]): array.statistics
            for array in single.arrays
            if array.path in apart
        }
        stacked = {(array.path, layer): s for array in scanned.arrays for layer, s in array.layers.items()}
        assert by_layer.keys() == stacked.keys()
        for key, result in stacked.items():
            assert result.norm == pytest.approx(by_layer[key].norm, rel=1e-7)
            assert (result.min, result.max) == (by_layer[key].min, by_layer[key].max)

    @pytest.mark.parametrize(
        ("path", "name", "numbers"),
        [
            ("model.layers.12.mlp.up_proj.weight", "model.layers.*.mlp.up_proj.weight", (12,)),
            ("transformer.h.3.ln_1.weight", "transformer.h.*.ln_1.weight", (3,)),
            ("encoder/block_2/kernel", "encoder/block_*/kernel", (2,)),
            ("model/layers/7", "model/layers/*", (7,)),
        ],
    )
    def test_numbers_in_names_become_layers(self, path: str, name: str, numbers: tuple[int, ...]):
        key: TreePath = tuple(path.split("/"))
        row = layer_rows(Tree({key: Constant((2,), F32, bytes(4))}))[key]
        assert (row.name, row.axes, row.numbers) == (name, (), numbers)

    @pytest.mark.parametrize("path", ["opt_state/0/mu", "layer_norm.weight", "conv1.weight", "players.3x"])
    def test_other_numbers_in_names_are_not_layers(self, path: str):
        assert not layer_rows(Tree({tuple(path.split("/")): Constant((2,), F32, bytes(4))}))


STATS = """
import json, sys
from ckpttools.formats.registry import open_tree
from ckpttools.inspection.stats import inspect_stats
from ckpttools.core.process_memory import peak_bytes
from pathlib import Path
report = inspect_stats(open_tree(Path(sys.argv[1])), memory=int(sys.argv[2]), jobs=2, histograms=True)
print(json.dumps({"peak": peak_bytes(), "zeros": sum(each.statistics.zeros for each in report.arrays)}))
"""


@pytest.mark.parametrize("memory", [160 * MIB, 256 * MIB])
def test_peak_memory_stays_within_the_limit(tmp_path: Path, memory: int):
    path, count = sparse(tmp_path), 300 * MIB // 2
    command = [sys.executable, "-c", STATS, str(path), str(memory)]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert result["zeros"] == count
    assert result["peak"] <= memory


def sparse(directory: Path) -> Path:
    """A safetensors file of 300 MiB of zeros that takes no room."""
    header = {"w": {"dtype": "BF16", "shape": [300, MIB // 2], "data_offsets": [0, 300 * MIB]}}
    text = json.dumps(header).encode()
    path = directory / "zeros.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 300 * MIB)
    return path


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    values = np.ones((4, 6), np.float32)
    values[2, 3] = np.nan
    values[3, 0] = -np.inf
    path = tmp_path / "spoilt.safetensors"
    save_file({"good": np.arange(5, dtype=np.float32), "model.bad": values}, path)
    return path


class TestCommand:
    HF = GOLDEN / "llama3.1" / "hf"

    def test_stats_prints_json(self):
        result = ckpt("inspect", "stats", self.HF, "--json", "--filter", "*layernorm*", "--histogram")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert report["num_arrays"] == 8
        first = report["arrays"][0]
        assert first["path"] == "model.layers.0.input_layernorm.weight"
        assert first["statistics"]["elements"] == 64
        assert set(first["distribution"]["quantiles"]) == {str(share) for share in QUANTILES}

    @pytest.mark.parametrize("columns", [80, 200])
    def test_tables_fit_the_terminal(self, columns: int):
        result = ckpt("inspect", "stats", golden_checkpoint(scan=True), "--per-layer", COLUMNS=str(columns))
        assert result.exit_code == 0, result.output
        assert max(map(len, result.stdout.splitlines()[1:])) <= columns
        assert "layer 3" in result.stdout

    def test_sort_orders_arrays_by_norm(self):
        result = ckpt("inspect", "stats", self.HF, "--json", "--sort", "norm")
        norms = [load["statistics"]["norm"] for load in json.loads(result.stdout)["arrays"]]
        assert norms == sorted(norms, reverse=True)

    def test_histogram_fits_the_terminal(self):
        result = ckpt("inspect", "stats", self.HF, "--filter", "lm_head*", "--histogram", COLUMNS="80")
        assert "2^-5" in result.stdout
        assert "median" in result.stdout
        assert max(map(len, result.stdout.splitlines()[1:])) <= 80

    @pytest.mark.parametrize(
        ("values", "lines"),
        [
            ([0, 1e-42, 1e-42, 1], {"zero": "25.00%", "0 < |x| < 2^-133": "50.00%"}),
            ([1e-42, 1e-42], {"0 < |x| < 2^-133": "100.00%"}),
            ([0, 1], {"zero": "50.00%"}),
        ],
    )
    def test_histogram_counts_zeros_separately(
        self, tmp_path: Path, values: list[float], lines: dict[str, str]
    ):
        save_file({"a": np.array(values, np.float32)}, tmp_path / "a.safetensors")
        shown = ckpt("inspect", "stats", tmp_path / "a.safetensors", "--histogram", COLUMNS="80").stdout
        result = {line[2:24].strip(): line[24:33].strip() for line in shown.splitlines() if "%  █" in line}
        assert {label: share for label, share in result.items() if "≤" not in label} == lines

    @pytest.mark.parametrize("option", ["--histogram", "--per-layer"])
    def test_nan_option_refuses_other_output_options(self, option: str):
        """As JSON all of it is there."""
        result = ckpt("inspect", "stats", self.HF, "--nan", option)
        assert result.exit_code == 2
        assert option in result.stderr
        assert ckpt("inspect", "stats", self.HF, "--nan", option, "--json").exit_code == 0

    def test_nan_option_locates_nan(self, spoilt: Path):
        result = ckpt("inspect", "stats", spoilt, "--nan")
        assert result.exit_code == 1
        assert "model.bad[2, 3]" in result.stdout
        assert "1 NaN" in result.stdout and "1 infinite" in result.stdout
        assert "good" not in result.stdout

    def test_nan_option_prints_json(self, spoilt: Path):
        result = ckpt("inspect", "stats", spoilt, "--nan", "--json")
        assert result.exit_code == 1
        report = json.loads(result.stdout)
        assert (report["nan"], report["inf"]) == (1, 1)
        assert [item["first_bad"] for item in report["arrays"]] == [None, [2, 3]]

    def test_nan_option_reports_absence(self):
        result = ckpt("inspect", "stats", self.HF, "--nan")
        assert result.exit_code == 0
        assert result.stdout == "No NaN or infinity in 39 arrays, 362 kB.\n"

    def test_unmatched_filter_is_refused(self):
        result = ckpt("inspect", "stats", self.HF, "--filter", "nothing*", "--nan")
        assert result.exit_code == 2
        assert "no array has a path that matches" in result.stderr

    def test_non_checkpoint_has_no_statistics(self, tmp_path: Path):
        assert ckpt("inspect", "stats", tmp_path).exit_code == 3
        assert ckpt("inspect", "stats", tmp_path / "none").exit_code == 2

    def test_too_little_memory_is_refused(self):
        result = ckpt("inspect", "stats", self.HF, "--memory", "1MiB")
        assert result.exit_code == 4
        assert "try --memory" in result.stderr

    def test_truncated_file_is_reported(self, tmp_path: Path):
        path = sparse(tmp_path)
        tree = ckpttools.open(path)
        with path.open("r+b") as file:
            file.truncate(300 * MIB)
        from ckpttools import FormatError

        with pytest.raises(FormatError, match="ends too early"):
            inspect_stats(tree, memory=1 << 30, jobs=2)


def test_layer_rows_are_read_lazily():
    small = Stored((100,), BF16, Bytes("b", bytes(200)), 0)
    tree = Tree({("a",): Stored((1 << 20,), BF16, UnreadableFile("a", 1 << 21), 0), ("b",): small})
    assert layer_rows(tree) == {}
    assert len(inspect_stats(tree, "b", memory=1 << 30, jobs=1).arrays) == 1


def test_progress_counts_bytes():
    tree = Tree({("a",): Stored((100,), BF16, Bytes("a", bytes(200)), 0)})
    heard: list[int] = []
    inspect_stats(tree, memory=1 << 30, jobs=1, observe=heard.append)
    assert sum(heard) == 200
