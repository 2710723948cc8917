"""Numbers against numbers: every measure against numpy, equal in every format, bad input told."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ended
from support.golden_data import golden_checkpoint
from support.internals import (
    OrbaxWriter,
    Pairing,
    SafetensorsWriter,
    Stored,
    Tolerances,
    ZarrWriter,
    Zstd,
    diff,
    take,
)
from support.large_pairs import differing_models, said_within
from support.locations import GOLDEN, HF
from support.stored_trees import write

import ckpttools
from ckpttools import DTYPES, LazyArray, MemoryBudgetError, Tree
from ckpttools.compare.diff import ArrayDiff
from ckpttools.compare.measure import MAX_STEPS, Deviation, as_doubles, deviation
from ckpttools.testing.strategies import (
    UnreadableFile,
    chunk_shapes,
    chunked,
    dtypes,
    lazy_arrays,
    noise,
    shapes,
    stored,
)

ckpt = partial(ended, "diff")

PLENTY = {"memory": 512 << 20, "jobs": 2}
FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_float]
SMALL_FLOATS = [dtype for dtype in FLOATS if dtype.bits <= 16]
WHOLE = [dtype for dtype in DTYPES.values() if dtype.kind in ("int", "uint")]


def of_pair(a: LazyArray, b: LazyArray, tolerances: Tolerances | None = None) -> ArrayDiff:
    (result,) = diff(Pairing({"a": a}, {"a": b}), tolerances or Tolerances(), **PLENTY)
    return result


def values_of(dtype, count: int) -> np.ndarray:
    """All elements of a small dtype: bits that it lacks are zero."""
    return np.arange(count, dtype=np.uint64).astype(dtype.carrier)


class TestUlps:
    @pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
    def test_ulp_distance_counts_representable_values(self, dtype):
        """Counted off: the place in the sorted list of all numbers that the dtype has."""
        everything = values_of(dtype, 1 << dtype.bits)
        truth = as_doubles(everything, dtype)
        ranks = {number: rank for rank, number in enumerate(np.unique(truth[~np.isnan(truth)]))}
        random = np.random.default_rng(0)
        for a, b in random.choice(everything, (300, 2)):
            x, y = as_doubles(np.array([a, b]), dtype)
            if not np.isnan(x) and not np.isnan(y):
                result = deviation(np.array([a]), np.array([b]), (dtype, dtype))
                steps = abs(ranks[x] - ranks[y])
                assert result.max_ulp == (steps if steps <= MAX_STEPS else None), (x, y)

    @given(
        start=st.floats(-(2.0**90), 2.0**90, width=32),
        steps=st.integers(0, 40),
        wide=st.booleans(),
        up=st.booleans(),
    )
    def test_ulp_distance_matches_nextafter(self, start: float, steps: int, wide: bool, up: bool):
        dtype = DTYPES["float64" if wide else "float32"]
        kind = dtype.numpy.type
        end = kind(start)
        for _ in range(steps):
            end = np.nextafter(end, kind(np.inf if up else -np.inf))
        result = deviation(
            np.array([start], kind).view(dtype.carrier),
            np.array([end], kind).view(dtype.carrier),
            (dtype, dtype),
        )
        # -0 lies nowhere: nextafter goes from the smallest number to 0, and on from there.
        assert result.max_ulp == steps

    @given(dtype=st.sampled_from(WHOLE), data=st.data())
    def test_integer_deviation_is_the_difference(self, dtype, data: st.DataObject):
        limits = np.iinfo(dtype.numpy) if dtype.bits >= 8 and dtype.name not in ("int4", "int2") else None
        low, high = (limits.min, limits.max) if limits else (-2, 1)
        a, b = (data.draw(st.integers(int(low), int(high))) for _ in range(2))
        arrays = [np.array([item]).astype(dtype.numpy).view(dtype.carrier) for item in (a, b)]
        result = deviation(*arrays, (dtype, dtype))
        assert result.max_ulp == (0 if a == b else None)
        assert result.max_abs == pytest.approx(abs(a - b))
        assert result.num_differing == (a != b)

    def test_mixed_dtypes_are_compared_in_the_coarser_dtype(self):
        a = np.array([1.0, 1.0 + 2**-9], np.float32).view(np.uint32)
        b = np.array([0x3F80, 0x3F82], np.uint16)
        result = deviation(a, b, (DTYPES["float32"], DTYPES["bfloat16"]))
        assert (result.num_differing, result.max_ulp) == (1, 2)

    def test_integers_and_floats_have_no_ulp_distance(self):
        result = deviation(
            np.array([3], np.uint32), np.array([0x4080], np.uint16), (DTYPES["int32"], DTYPES["bfloat16"])
        )
        assert (result.num_differing, result.max_ulp, result.max_abs) == (1, None, 1.0)


class TestMeasures:
    @given(data=st.data(), shape=shapes(limit=300), pair=st.tuples(dtypes(packed=True), dtypes(packed=True)))
    def test_deviations_match_numpy(self, data: st.DataObject, shape, pair):
        pair = data.draw(st.sampled_from([pair, (pair[0], pair[0])]))
        seeds = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
        truth = [noise(shape, dtype, seed) for dtype, seed in zip(pair, seeds, strict=True)]
        if pair[0] == pair[1]:
            keep = np.random.default_rng(seeds[0]).random(shape) < 0.7
            truth[1] = np.where(keep, truth[0], truth[1])
        arrays = [
            item if dtype.packed or not shape else chunked(values, dtype, data.draw(chunk_shapes(shape)))
            for values, dtype in zip(truth, pair, strict=True)
            for item in [stored(values, dtype)]
        ]
        result = of_pair(*arrays)
        x, y = (as_doubles(item.reshape(-1), dtype) for item, dtype in zip(truth, pair, strict=True))
        if {item.kind for item in pair} <= {"int", "uint"}:
            x, y = (
                item.reshape(-1).view(d.numpy).astype(object) for item, d in zip(truth, pair, strict=True)
            )
            unequal = np.array(x != y, bool)
            nan = np.zeros((2, x.size), bool)
        else:
            nan = np.isnan(x), np.isnan(y)
            with np.errstate(invalid="ignore"):
                unequal = (x != y) & ~(nan[0] & nan[1])
        assert result.deviation is not None
        assert result.deviation.elements == x.size
        assert result.deviation.num_differing == result.deviation.num_exceeding == np.count_nonzero(unequal)
        assert result.deviation.nan == np.count_nonzero(nan[0] != nan[1])
        compared = unequal & ~(nan[0] | nan[1])
        with np.errstate(all="ignore"):
            gap = np.abs(x - y)[compared].astype(float)
            rel = gap / np.maximum(np.abs(x), np.abs(y))[compared].astype(float)
        rel[~np.isfinite(gap)] = np.inf
        assert result.deviation.max_abs == pytest.approx(gap.max(initial=0), rel=1e-12)
        assert result.deviation.max_rel == pytest.approx(rel.max(initial=0), rel=1e-12)
        first = None if not unequal.any() else np.unravel_index(int(unequal.argmax()), shape)
        assert result.deviation.first == first
        same = pair[0] == pair[1]
        alike = "bits" if result.deviation.other_bits else "equal"
        assert result.outcome == ("differs" if unequal.any() else alike if same else "dtype")

    @given(
        atol=st.sampled_from([0.0, 1e-3, 0.1]),
        rtol=st.sampled_from([0.0, 1e-3, 0.5]),
        ulp=st.sampled_from([0, 1, 300]),
        seed=st.integers(0, 99),
    )
    def test_tolerances_select_differing_elements(self, atol: float, rtol: float, ulp: int, seed: int):
        random = np.random.default_rng(seed)
        a = random.standard_normal(200).astype(np.float32)
        b = (a + random.standard_normal(200) * 10.0 ** random.integers(-9, 1, 200)).astype(np.float32)
        b[:3] = np.inf, np.nan, a[2]
        result = of_pair(
            *(stored(item.view(np.uint32), DTYPES["float32"]) for item in (a, b)), Tolerances(atol, rtol, ulp)
        )
        wide = a.astype(float), b.astype(float)
        with np.errstate(invalid="ignore"):
            near = np.abs(wide[0] - wide[1]) <= atol + rtol * np.maximum(*map(np.abs, wide))
        bits = [
            np.where(e < 0, -(e.view(np.int32).astype(int) & 0x7FFFFFFF), e.view(np.int32)) for e in (a, b)
        ]
        steps = np.abs(bits[0].astype(int) - bits[1].astype(int)) <= ulp if ulp else np.zeros(200, bool)
        beyond = (a != b) & ~(near & np.isfinite(b)) & ~(steps & ~np.isnan(b))
        assert result.deviation is not None
        assert result.deviation.num_exceeding == np.count_nonzero(beyond)
        assert result.deviation.first == (int(beyond.argmax()),)
        assert result.outcome == "differs"

    def test_arrays_within_tolerance_are_equal(self):
        a, b = (
            stored(np.array(v, np.float32).view(np.uint32), DTYPES["float32"]) for v in ([1, 2], [1, 2.1])
        )
        assert of_pair(a, b, Tolerances(rtol=0.1)).outcome == "within"
        assert of_pair(a, b, Tolerances(atol=0.2)).outcome == "within"
        assert of_pair(a, b, Tolerances(ulp=1)).outcome == "differs"
        assert of_pair(a, b, Tolerances(rtol=0.1)).is_equal

    def test_nan_and_zero_bits_are_counted_separately(self):
        quiet, other, zero, minus = 0x7FC00000, 0x7FC00001, 0, 0x80000000
        a, b = ([quiet, quiet, zero, zero], [quiet, other, zero, minus])
        sides = [stored(np.array(v, np.uint32), DTYPES["float32"]) for v in (a, b)]
        assert of_pair(*sides, Tolerances(atol=1e-45)).outcome == "within"
        result = of_pair(*sides)
        assert result.outcome == "bits"
        assert result.deviation is not None
        assert (result.deviation.num_differing, result.deviation.other_bits) == (0, 2)

    def test_infinities_differ_unless_equal(self):
        a, b = (
            stored(np.array(v, np.float32).view(np.uint32), DTYPES["float32"])
            for v in ([np.inf, np.inf, 1], [np.inf, -np.inf, np.inf])
        )
        result = of_pair(a, b, Tolerances(rtol=1, atol=1e9)).deviation
        assert result is not None
        assert (result.num_differing, result.num_exceeding) == (2, 2)
        assert result.max_abs == result.max_rel == np.inf

    def test_infinite_complex_numbers_differ(self):
        """inf - inf is NaN in one part, and still the numbers are apart."""
        a, b = (np.array([complex(np.inf, part), 1]) for part in (1, 2))
        result = deviation(a, b, (DTYPES["complex128"],) * 2)
        assert (result.num_differing, result.max_abs, result.max_rel) == (1, np.inf, np.inf)

    @pytest.mark.parametrize(
        ("number", "name"), [(1e30, "float8_e4m3fn"), (1e30, "float16"), (np.inf, "float16")]
    )
    def test_out_of_range_value_is_not_close_to_the_limit(self, number: float, name: str):
        a, coarse = np.array([number], np.float32).view(np.uint32), DTYPES[name]
        limit = np.array([float(ml_dtypes.finfo(coarse.numpy).max)]).astype(coarse.numpy).view(coarse.carrier)
        result = deviation(a, limit, (DTYPES["float32"], coarse), Tolerances(ulp=1))
        assert (result.num_differing, result.num_exceeding) == (1, 1)

    @given(parts=st.lists(st.integers(0, 40), min_size=1, max_size=5), seed=st.integers(0, 99))
    def test_deviations_of_parts_are_additive(self, parts: list[int], seed: int):
        dtype = DTYPES["float16"]
        a, b = (noise((sum(parts),), dtype, seed + k) for k in range(2))
        total, start = Deviation(), 0
        for length in parts:
            part = deviation(a[start : start + length], b[start : start + length], (dtype, dtype))
            if part.first is not None:
                shifted = (part.first[0] + start,)
                part = Deviation(*(getattr(part, f) for f in _FIELDS if f != "first"), first=shifted)
            total, start = total + part, start + length
        assert total == deviation(a, b, (dtype, dtype))

    @given(known=lazy_arrays(depth=3))
    def test_any_array_equals_its_materialized_values(self, known):
        truth = stored(np.array(known.truth, order="C"), known.array.dtype)
        assert of_pair(known.array, truth).outcome == "equal"

    @given(st.data())
    def test_differing_layers_of_a_stack_are_named(self, data: st.DataObject):
        dtype = DTYPES["bfloat16"]
        truth = np.random.default_rng(0).integers(0x3F00, 0x4100, (5, 4, 7)).astype(np.uint16)
        damaged = truth.copy()
        layer = data.draw(st.integers(0, 3))
        damaged[2:, layer, 3:] += 1
        whole = chunked(damaged, dtype, data.draw(chunk_shapes((5, 4, 7))))
        mine = {f"layers_{k}": take(whole, 1, k) for k in range(4)}
        theirs = {f"layers_{k}": stored(truth[:, k].copy(), dtype) for k in range(4)}
        for a, b in ((mine, theirs), (theirs, mine)):
            result = {item.name: item for item in diff(Pairing(a, b), **PLENTY)}
            assert [name for name, item in result.items() if not item.is_equal] == [f"layers_{layer}"]
            part = result[f"layers_{layer}"].deviation
            assert part is not None
            assert (part.elements, part.num_differing, part.max_ulp, part.first) == (35, 12, 1, (2, 3))

    def test_one_sided_and_reshaped_arrays_are_reported(self):
        array, other = (stored(noise(shape, DTYPES["int8"]), DTYPES["int8"]) for shape in ((4,), (2, 2)))
        result = diff(Pairing({"a": array, "b": array}, {"b": other, "c": other}), **PLENTY)
        assert [(item.name, item.outcome) for item in result] == [
            ("a", "only in A"),
            ("b", "shape"),
            ("c", "only in B"),
        ]

    def test_equal_values_of_another_dtype_differ_in_dtype(self):
        values = np.array([1.5, -2, 0.25], np.float32)
        a = stored(values.view(np.uint32), DTYPES["float32"])
        b = stored((values.view(np.uint32) >> 16).astype(np.uint16), DTYPES["bfloat16"])
        assert of_pair(a, b).outcome == "dtype"
        (result,) = diff(Pairing({"a": a}, {"a": b}), ignore_dtypes=True, **PLENTY)
        assert result.outcome == "equal"

    def test_layers_of_two_dtypes_are_compared_separately(self):
        f32 = stored(np.ones((2, 3), np.float32).view(np.uint32), DTYPES["float32"])
        whole = chunked(np.full((2, 2, 3), 0x3F80, np.uint16), DTYPES["bfloat16"], (2, 2, 3))
        a = {f"l{k}": take(whole, 1, k) for k in range(2)}
        result = diff(Pairing(a, {"l0": f32, "l1": take(whole, 1, 1)}), **PLENTY)
        assert [item.outcome for item in result] == ["dtype", "equal"]

    def test_diff_reads_only_common_arrays(self):
        refusing = Stored((1 << 20,), DTYPES["int8"], UnreadableFile("a", 1 << 20), 0)
        short = stored(noise((2,), DTYPES["int8"]), DTYPES["int8"])
        result = diff(Pairing({"a": refusing, "b": refusing}, {"b": short, "c": refusing}), **PLENTY)
        assert {item.outcome for item in result} == {"only in A", "shape", "only in B"}

    def test_diff_refuses_too_little_memory(self):
        array = stored(noise((4,), DTYPES["int8"]), DTYPES["int8"])
        with pytest.raises(MemoryBudgetError):
            diff(Pairing({"a": array}, {"a": array}), memory=1 << 20, jobs=1)


_FIELDS = Deviation.__dataclass_fields__


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden model with some numbers changed, an array missing and one too many."""
    from safetensors.numpy import load_file

    directory = tmp_path_factory.mktemp("changed")
    tensors = load_file(HF / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1.01)
    for layer in range(4):
        array = tensors[f"model.layers.{layer}.mlp.up_proj.weight"].copy()
        array[5, 7] += 1
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = array
    output = "model.layers.3.self_attn.o_proj.weight"
    tensors[output] = np.zeros_like(tensors[output])
    del tensors["model.layers.2.mlp.down_proj.weight"]
    tensors["model.extra"] = np.ones(3, np.float32)
    tensors["model.layers.1.input_layernorm.weight"] = tensors[
        "model.layers.1.input_layernorm.weight"
    ].astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    shutil.copy(HF / "config.json", directory)
    return directory


class TestCommand:
    def test_checkpoints_are_equal_in_every_format_and_layout(self, tmp_path: Path):
        tree = ckpttools.open(golden_checkpoint(scan=True))
        writers = {
            "zarr2": OrbaxWriter(zarr3=False, ocdbt=False),
            "zarr3": OrbaxWriter(ocdbt=False, compression=Zstd(1)),
            "ocdbt": OrbaxWriter(),
            "safetensors": SafetensorsWriter(),
            "plain": ZarrWriter(),
        }
        for name, writer in writers.items():
            write(tree, writer, tmp_path / name)
            assert "Equal: 39 arrays equal" in ckpt(HF, tmp_path / name).output
        assert "Equal" in ckpt(golden_checkpoint(scan=False), golden_checkpoint(scan=True)).output
        assert "Equal: 39" in ckpt(golden_checkpoint(scan=False), GOLDEN / "llama3.1" / "hf_sharded").output
        assert "Equal: 40" in ckpt(tmp_path / "zarr2", tmp_path / "plain").output  # And the step.

    def test_differences_are_folded_and_summarized(self, changed: Path):
        output = ckpt(changed, HF, code=1, COLUMNS="100").output
        assert "model.layers.{0..3}.mlp.up_proj.weight" in output
        assert "4 of 32,768 elements, the first at [5, 7] in layers 0" in output
        assert "model.layers.2.mlp.down_proj.weight\n  only in B  bfloat16[64,128]" in output
        assert "model.extra\n  only in A  float32[3]" in output
        assert "float32[64] in A, bfloat16[64] in B" in output and "the same numbers" in output
        assert (
            "Different: 6 arrays with different values, 1 array of a different dtype, 1 array only in A"
            in output
        )

    @pytest.mark.parametrize("columns", [80, 200])
    def test_output_fits_the_terminal(self, changed: Path, columns: int):
        output = ckpt(changed, golden_checkpoint(scan=True), code=1, COLUMNS=str(columns)).output
        lines = [line for line in output.splitlines() if "/" not in line]
        assert max(map(len, lines)) <= columns

    def test_diff_prints_the_report_as_json(self, changed: Path):
        report = json.loads(ckpt(changed, HF, "--json", code=1).output)
        assert report["equal"] is False
        assert report["outcomes"] == {"differs": 6, "equal": 31, "dtype": 1, "only in A": 1, "only in B": 1}
        by_name = {item["name"]: item for item in report["arrays"]}
        assert len(by_name) == 9
        result = by_name["model.layers.0.mlp.up_proj.weight"]
        assert result["deviation"]["first"] == [5, 7]
        assert result["a"] == result["b"] == {"dtype": "bfloat16", "shape": [128, 64]}
        everything = json.loads(ckpt(changed, HF, "--json", "--all", code=1).output)
        assert len(everything["arrays"]) == 40

    def test_infinite_measures_are_valid_json(self, tmp_path: Path):
        for name, value in (("a", np.inf), ("b", 1.0)):
            save_file({"w": np.full(20, value, np.float32)}, tmp_path / f"{name}.safetensors")
        text = ckpt(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json", code=1).output
        assert json.loads(text, parse_constant=pytest.fail)["arrays"][0]["deviation"]["max_abs"] == "inf"

    def test_options_set_tolerances_and_ignore_dtypes(self, changed: Path):
        only = ("--filter", "*norm*")
        assert "1 array with different values" in ckpt(changed, HF, *only, code=1).output
        output = ckpt(changed, HF, *only, "--rtol", "0.05", "--ignore-dtype").output
        assert "within the tolerances" in output
        ckpt(changed, HF, *only, "--ulp", "10", "--ignore-dtype")

    def test_filter_selects_arrays(self, changed: Path):
        assert "Equal: 4 arrays equal" in ckpt(changed, HF, "--filter", "*q_proj*").output
        assert "no array is selected" in ckpt(changed, HF, "--filter", "nothing", code=2).output

    def test_explanations_can_be_disabled(self, changed: Path):
        assert "because" not in ckpt(changed, HF, "--no-explain", code=1).output
        assert "because" in ckpt(changed, HF, code=1).output

    def test_invalid_input_is_refused(self, tmp_path: Path):
        assert "does not exist" in ckpt(HF, tmp_path / "nothing", code=2).output
        (tmp_path / "text").write_text("no checkpoint")
        ckpt(HF, tmp_path / "text", code=3)
        short = shutil.copytree(HF, tmp_path / "short")
        file = short / "model.safetensors"
        short.chmod(0o755)
        file.chmod(0o644)
        file.write_bytes(file.read_bytes()[:-100])
        ckpt(HF, short, code=3)
        assert "unknown family" in ckpt(HF, golden_checkpoint(True), "--family", "lama", code=2).output
        ckpt(HF, HF, "--atol", "-1", code=2)
        ckpt(HF, HF, "--atol", "nan", code=2)
        ckpt(HF, HF, "--rtol", "nan", code=2)
        ckpt(HF, code=2)
        assert "try --memory" in ckpt(HF, HF, "--memory", "1MiB", code=4).output

    @pytest.mark.parametrize(
        ("option", "value", "code"), [("--family", "nonsense", 2), ("--like", "/nowhere", 2)]
    )
    def test_model_options_are_validated(self, option: str, value: str, code: int):
        """Also where names are equal anyway."""
        assert value in ckpt(HF, HF, option, value, code=code).stderr

    def test_rope_layout_is_refused_without_mapping(self):
        assert "--rope-layout requires a conversion" in ckpt(HF, HF, "--rope-layout", "halves", code=2).stderr

    def test_state_alone_is_compared(self, tmp_path: Path):
        for name, number in (("a", 1), ("b", 1), ("c", 2)):
            save_file({"step": np.array(number, np.int32)}, tmp_path / f"{name}.safetensors")
        ckpt(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        ckpt(tmp_path / "a.safetensors", tmp_path / "c.safetensors", code=1)

    def test_hostile_names_are_escaped(self, tmp_path: Path):
        for name, value in (("a", 1), ("b", 2)):
            save_file({"w\x1b[31m": np.full(9, value, np.int8)}, tmp_path / f"{name}.safetensors")
        output = ckpt(tmp_path / "a.safetensors", tmp_path / "b.safetensors", code=1).output
        assert "\x1b[31mw" not in output and "w\\x1b[31m" in output


DIFF = """
import sys
from ckpttools.compare.align import align
import ckpttools
from ckpttools.compare.diff import diff
from ckpttools.compare.explain import explain
from ckpttools.core.process_memory import peak_bytes
both = align(*(ckpttools.open(path) for path in sys.argv[2:]))
limits = {"memory": int(sys.argv[1]), "jobs": 2}
found = explain(diff(both, **limits), both, **limits)
print(sum(not each.is_equal for each in found), peak_bytes())
"""


@pytest.mark.parametrize("memory", [160 << 20, 512 << 20])
def test_peak_memory_is_bounded_for_many_differences(tmp_path: Path, memory: int):
    result, peak = said_within(DIFF, memory, differing_models(tmp_path))
    assert result == 1
    assert peak <= memory


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_beyond_float64_precision_differ(dtype: str):
    sides = [{"w": stored(np.array([1, 2**53 + k], dtype).view(np.uint64), DTYPES[dtype])} for k in (0, 1)]
    (result,) = diff(Pairing(*sides), **PLENTY)
    assert result.outcome == "differs"
    assert result.deviation is not None and (result.deviation.num_differing, result.deviation.first) == (
        1,
        (1,),
    )


def test_trees_may_be_empty():
    assert diff(Pairing(Tree({}).arrays, {}), **PLENTY) == ()  # type: ignore[arg-type]
