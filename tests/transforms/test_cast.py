"""Casts equal those of ml_dtypes bit for bit, round once, and count lost values."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import ended as run
from support.golden_data import golden_checkpoint
from support.internals import Convert, Scratch, TaskDone, cast, elementwise, relayout
from support.locations import HF
from support.trees import lazy

import ckpttools
from ckpttools import (
    DTYPES,
    CastMap,
    CastTo,
    MappingError,
    Metadata,
    Region,
    Tree,
    UnknownNameError,
    UsageError,
    plan_save,
    save,
)
from ckpttools.array.nodes import Elementwise
from ckpttools.plan import plan as planning
from ckpttools.run import threads
from ckpttools.testing.strategies import lazy_arrays, noise, stored, tilings
from ckpttools.transforms.cast import is_lossless

FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_float]
WHOLE = [dtype for dtype in DTYPES.values() if dtype.kind in ("int", "uint")]
# Significant bits, written down apart from the package; largest power of two below infinity.
DIGITS = {"bfloat16": (8, 127), "float16": (11, 15), "float32": (24, 127), "float64": (53, 1023)}


def converted(values, dtype, to):
    """Return the bits of `values` after the conversion, and the counts."""
    target = np.zeros(values.shape, to.carrier)
    counts = Convert(to).apply(values.view(dtype.carrier), target, dtype)
    return target, dict(counts)


def random_floats(dtype, seed, count=20_000):
    """Draw arbitrary bits, values of every magnitude, and edge cases."""
    bits = noise((count,), dtype, seed).view(dtype.numpy)
    with np.errstate(all="ignore"):
        usual = (np.random.default_rng(seed).standard_normal(count) * 8).astype(np.float32)
        edges = [
            0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            1,
            -1,
            448,
            449,
            464,
            465,
            65504,
            65520,
            1e-8,
            6,
            6.9,
            7,
            7.5,
        ]
        return np.concatenate(
            [bits, usual.astype(dtype.numpy), np.array(edges, np.float32).astype(dtype.numpy)]
        )


def as_float(values):
    with np.errstate(all="ignore"):
        return values.astype(np.float32).astype(np.float64) if values.dtype != np.float64 else values


@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_cast_equals_ml_dtypes_bit_for_bit(name, to):
    dtype = DTYPES[name]
    values = random_floats(dtype, seed=len(to.name))
    got, _ = converted(values, dtype, to)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float32).astype(to.numpy)
    same = got == expected.view(to.carrier)
    # NaN may have any bits, and stays NaN.
    both_nan = np.isnan(as_float(got.view(to.numpy))) & np.isnan(as_float(expected))
    assert (same | both_nan).all()
    if to.has_nan and to.name != "float8_e8m0fnu":
        assert np.isnan(as_float(got.view(to.numpy))[np.isnan(as_float(values))]).all()


@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float8_e5m2"])
def test_loss_counts_match_the_values(name, to):
    dtype = DTYPES[name]
    values = random_floats(dtype, seed=len(to.name))
    got, counts = converted(values, dtype, to)
    before, after = as_float(values), as_float(got.view(to.numpy))
    expected = {"underflowed": np.sum((before != 0) & (after == 0))}
    if np.isinf(float(np.array(np.inf).astype(to.numpy))):
        expected["overflowed"] = np.sum(np.isfinite(before) & np.isinf(after))
    elif to.bits >= 8:
        expected["overflowed"] = np.sum(~np.isnan(before) & np.isnan(after))
    else:
        limit = {"float4_e2m1fn": 7, "float6_e2m3fn": 7.75, "float6_e3m2fn": 30}[to.name]
        expected["saturated"] = np.sum(np.abs(before) >= limit)
        expected["nan_lost"] = np.sum(np.isnan(before))
    assert counts == {kind: count for kind, count in expected.items() if count}


def whole(numbers, dtype):
    wide = np.int64 if dtype.kind == "int" else np.uint64
    return np.array(numbers, wide).astype(dtype.numpy)


def nearest(number, digits, largest):
    """Round an integer to a number of binary digits, ties to even; infinite beyond the largest power."""
    shift = max(0, abs(number).bit_length() - digits)
    quotient, rest = divmod(abs(number), 1 << shift)
    half = Fraction(rest, 1 << shift) - Fraction(1, 2)
    quotient += half > 0 or (half == 0 and quotient % 2)
    result = quotient << shift
    result = float("inf") if result.bit_length() > largest + 1 else float(result)
    return -result if number < 0 else result


@given(st.data(), st.sampled_from(WHOLE), st.sampled_from(sorted(DIGITS)))
def test_integers_are_rounded_once_to_nearest_even(data, dtype, name):
    least, limit = dtype.limits
    near_ties = st.builds(
        lambda a, b, c: (a << b) + c, st.integers(1, 999), st.integers(0, 62), st.integers(-1, 1)
    )
    inside = near_ties.filter(lambda number: least <= number <= limit)
    numbers = data.draw(st.lists(st.one_of(st.integers(least, limit), inside), min_size=1, max_size=20))
    got, counts = converted(whole(numbers, dtype), dtype, DTYPES[name])
    expected = [nearest(number, *DIGITS[name]) for number in numbers]
    assert as_float(got.view(DTYPES[name].numpy)).tolist() == expected
    overflowed = sum(map(np.isinf, expected))
    assert counts == ({"overflowed": overflowed} if overflowed else {})
    if is_lossless(dtype, DTYPES[name]):
        assert expected == numbers


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=20),
    st.sampled_from([DTYPES["float32"], DTYPES["float64"]]),
    st.sampled_from(WHOLE),
)
def test_float_to_integer_cast_rounds_and_clips(numbers, dtype, to):
    got, counts = converted(np.array(numbers, dtype.numpy), dtype, to)
    least, limit = to.limits
    finite = {n: round(n) if np.isfinite(n) else n for n in numbers if not np.isnan(n)}
    expected = [0 if np.isnan(n) else int(min(max(finite[n], least), limit)) for n in numbers]
    assert got.view(to.numpy).astype(object).tolist() == expected
    lost = {
        "saturated": sum(not np.isnan(n) and not least <= finite[n] <= limit for n in numbers),
        "underflowed": sum(not np.isnan(n) and n != 0 and finite[n] == 0 for n in numbers),
        "nan_lost": sum(map(np.isnan, numbers)),
    }
    assert counts == {kind: count for kind, count in lost.items() if count}


@given(st.data(), st.sampled_from(WHOLE), st.sampled_from(WHOLE))
def test_integer_to_integer_cast_clips(data, dtype, to):
    least, limit = dtype.limits
    numbers = data.draw(st.lists(st.integers(least, limit), min_size=1, max_size=20))
    got, counts = converted(whole(numbers, dtype), dtype, to)
    low, high = to.limits
    assert got.view(to.numpy).astype(object).tolist() == [min(max(n, low), high) for n in numbers]
    assert counts.get("saturated", 0) == sum(not low <= n <= high for n in numbers)
    assert not is_lossless(dtype, to) or not counts


@given(st.data())
def test_each_value_is_counted_once(data):
    """Cast through nested nodes in arbitrary pieces; cut merged axes cause overlapping reads."""
    known = data.draw(lazy_arrays(dtype=DTYPES["float32"], values=False))
    fp8 = DTYPES["float8_e4m3fn"]
    array = cast(known.array, fp8)
    scratch = Scratch(array.scratch_bytes)
    out = np.empty(array.shape, fp8.carrier)
    for tile in data.draw(tilings(array.shape)):
        array.read_into(tile, out[(*tile.slices, ...)], scratch)
    expected, counts = converted(known.truth.view(np.float32), DTYPES["float32"], fp8)
    assert np.array_equal(out, expected)
    assert scratch.take_counts() == counts
    assert scratch.take_counts() == {}


def test_overlapping_reads_are_allowed_for_moved_elements():
    """If elements are only moved, the rule that keeps counts right would only cost reads."""
    dtype = DTYPES["float32"]
    plain = relayout(stored(noise((24, 6), dtype), dtype), [(4, 6), (6,)], (1, 0, 2), (1, 1, 1))
    computed = elementwise(plain, Convert(DTYPES["bfloat16"]))
    assert not plain.is_computed
    assert computed.is_computed
    assert isinstance(computed.source, Elementwise)


def named(metadata=None, **arrays):
    leaves = {tuple(name.split("__")): lazy(values) for name, values in arrays.items()}
    return Tree(leaves, metadata or Metadata(step=3))


LOSSY = np.array([[1e30, 1e-30, 2.0, np.inf], [np.nan, 0, -1e30, 3e5]], np.float32)


class TestTransforms:
    def test_only_floats_are_cast(self):
        tree = named(w=np.ones(3, np.float32), step=np.arange(2), flags=np.ones(2, bool))
        built = tree.pipe(CastTo("bfloat16"))
        assert {path[0]: array.dtype.name for path, array in built.arrays.items()} == {
            "w": "bfloat16",
            "step": "int64",
            "flags": "bool",
        }
        assert built.metadata.notes.inexact[0].text == "cast from float32 to bfloat16: rounded"

    def test_first_matching_pattern_wins(self):
        tree = named(a__norm=np.ones(1, np.float32), a__w=np.ones(1, np.float32), b=np.ones(1, np.float32))
        built = tree.pipe(CastMap({"*norm": "float64", "a": "float16"}, "bfloat16"))
        assert [array.dtype.name for array in built.arrays.values()] == ["float64", "float16", "bfloat16"]

    def test_lossless_cast_adds_no_note(self):
        built = named(w=np.ones(1, np.float32), n=np.arange(3, dtype=np.int8)).pipe(
            CastMap({"n": "float16"}, "float64")
        )
        assert built.metadata.notes.inexact == ()
        assert built.arrays["n",].read().tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        ("array", "dtype"),
        [
            (np.arange(3), "float32"),
            (np.arange(3, dtype=np.int32), "bfloat16"),
            (np.ones(3, np.float32), "int8"),
            (np.arange(3), "int32"),
        ],
    )
    def test_casts_that_can_lose_integers_need_force(self, array, dtype):
        tree = named(n=array)
        with pytest.raises(MappingError, match="can lose integers") as caught:
            tree.pipe(CastMap({"n": dtype}))
        assert f"n: {array.dtype.name} to {dtype}" in str(caught.value)
        assert tree.pipe(CastMap({"n": dtype}, force=True)).arrays["n",].dtype.name == dtype

    def test_casts_that_can_lose_signs_need_force(self):
        """Scale dtypes hold only exponents, so zero and negative values become NaN."""
        values, scales = np.array([-1, 0, 2], np.float32), "float8_e8m0fnu"
        for declared in (CastTo(scales), CastMap({"w": scales})):
            with pytest.raises(MappingError, match="can lose signs and zeros") as caught:
                named(w=values).pipe(declared)
            assert f"w: float32 to {scales}" in str(caught.value) and "bfloat16" in str(caught.value.hint)
        built = named(w=values).pipe(CastTo(scales, force=True)).arrays["w",]
        assert np.isnan(built.read().astype(np.float32)).tolist() == [True, True, False]

    @pytest.mark.parametrize(
        ("kind", "dtype"), [("complex64", "float32"), ("float32", "bool"), ("float32", "complex64")]
    )
    def test_impossible_casts_are_refused(self, kind, dtype):
        with pytest.raises(MappingError, match="cannot be cast"):
            named(n=np.ones(2, kind)).pipe(CastMap({"n": dtype}, force=True))

    def test_random_keys_are_not_cast(self):
        tree = named(Metadata(key_impls={("rng",): "threefry2x32"}), rng=np.ones(2, np.uint32))
        with pytest.raises(MappingError, match="PRNG"):
            tree.pipe(CastMap({"rng": "float32"}, force=True))

    def test_unmatched_pattern_and_unknown_dtype_are_refused(self):
        tree = named(kernel=np.ones(2, np.float32))
        with pytest.raises(UsageError, match="did you mean kernel"):
            tree.pipe(CastMap({"kernle": "float16"}))
        with pytest.raises(UnknownNameError):
            tree.pipe(CastTo("float17"))


def test_overflow_counts_start_at_the_first_unrepresentable_value():
    tree = named(w=np.array([2.0**31, 2.0**31 - 128, -(2.0**31), -(2.0**31) - 256], np.float32))
    built = tree.pipe(CastMap({"w": "int32"}, force=True)).arrays["w",]
    scratch = Scratch(built.scratch_bytes)
    built.read_into(Region.whole((4,)), np.empty(4, built.dtype.carrier), scratch)
    assert scratch.take_counts() == {"saturated": 2}


class TestRuns:
    """Counts appear in the receipt of a plan and on the command line."""

    def test_losses_are_counted_for_every_array(self, tmp_path):
        tree = named(a=LOSSY, b=np.ones((2, 2), np.float32), c=LOSSY.T.copy())
        receipt = save(tree.pipe(CastTo("float16")), tmp_path / "out", "orbax")
        each = {"overflowed": 3, "underflowed": 1}
        assert receipt.counts == {"a": each, "c": each}

    def test_resumed_run_counts_all_values(self, tmp_path, monkeypatch):
        monkeypatch.setattr(planning, "LARGEST_TASK", 1 << 10)
        monkeypatch.setattr(planning, "_SMALLEST_TASK", 1 << 9)
        monkeypatch.setattr(threads, "_SYNC_SECONDS", 0.001)
        values = random_floats(DTYPES["float32"], 1)[:20_000].reshape(100, 200)
        _, expected = converted(values, DTYPES["float32"], DTYPES["float16"])
        conversion = plan_save(named(w=values).pipe(CastTo("float16")), "zarr3")
        seen = []

        def stop(event):
            seen.append(event)
            if sum(isinstance(item, TaskDone) for item in seen) == 20:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            conversion.run(tmp_path / "out", observe=stop)
        receipt = conversion.run(tmp_path / "out")
        assert 0 < receipt.tasks_resumed < receipt.tasks
        assert receipt.counts == {"w": expected}

    def test_cast_map_works_on_the_command_line(self, tmp_path):
        save(named(a=LOSSY, b=np.ones(3, np.float32)), tmp_path / "src", "orbax")
        done = run("cast", tmp_path / "src", tmp_path / "out", "--dtype", "float8_e4m3fn")
        assert "4 values became infinite or NaN in 1 array" in done.output
        assert "1 value became zero in 1 array" in done.output
        assert "infinity and values that are too large become NaN" in " ".join(done.output.split())
        done = run("cast", tmp_path / "src", tmp_path / "json", "--dtype", "bfloat16", "--json")
        assert json.loads(done.stdout)["counts"] == {}
        done = run("cast", tmp_path / "src", tmp_path / "map", "--dtype-map", "a=int8", "--force", "--json")
        assert json.loads(done.stdout)["counts"] == {"a": {"saturated": 4, "underflowed": 1, "nan_lost": 1}}


@pytest.mark.parametrize("source", [HF, golden_checkpoint(True)], ids=["safetensors", "orbax"])
def test_cast_keeps_the_checkpoint_format(tmp_path, source):
    run("cast", source, tmp_path / "out", "--dtype", "float32", "--dtype-map", "*norm*=float16")
    before, after = ckpttools.open(source), ckpttools.open(tmp_path / "out")
    assert after.metadata.format == before.metadata.format
    assert set(after) == set(before)
    for path, array in before.arrays.items():
        expected = "float16" if "norm" in str(path) else "float32"
        if array.dtype.is_float:
            assert after.arrays[path].dtype.name == expected
            assert np.array_equal(after.arrays[path].read(), array.read().astype(expected))
        else:
            assert np.array_equal(after.arrays[path].read(), array.read())


def test_cast_result_loads_with_safetensors_and_orbax(tmp_path):
    import orbax.checkpoint as ocp
    from safetensors.numpy import load_file

    run("cast", HF, tmp_path / "st", "--dtype", "float16")
    loaded = load_file(tmp_path / "st" / "model.safetensors")
    expected = ckpttools.open(HF)
    assert all(np.array_equal(loaded[k], expected[k,].read().astype(np.float16)) for (k,) in expected)
    run("cast", golden_checkpoint(False), tmp_path / "orbax", "--dtype", "float32")
    restored = ocp.StandardCheckpointer().restore(tmp_path / "orbax" / "0" / "items")
    scale = restored["params"]["params"]["decoder"]["decoder_norm"]["scale"]
    source = ckpttools.open(golden_checkpoint(False))
    path = ("params", "params", "decoder", "decoder_norm", "scale")
    assert np.array_equal(np.asarray(scale), source[path].read().astype(np.float32))


class TestBadInput:
    def test_missing_target_dtype_is_refused(self, tmp_path):
        assert "--dtype" in run("cast", HF, tmp_path / "out", code=2).output

    def test_invalid_cast_map_is_refused(self, tmp_path):
        output = run("cast", HF, tmp_path / "out", "--dtype-map", "bfloat16", code=2).output
        assert "PATTERN=DTYPE" in output

    def test_lossy_cast_requires_force(self, tmp_path):
        output = run(
            "cast", golden_checkpoint(True), tmp_path / "out", "--dtype-map", "step=float32", code=3
        ).output
        assert "step: int64 to float32" in output
        assert "--force" in output
        assert not (tmp_path / "out").exists()

    def test_force_and_format_options_are_accepted(self, tmp_path):
        output = run("convert", "to-zarr3", HF, tmp_path / "out", "--force", code=2).output
        assert "--force applies only to casts" in output
        output = run("cast", HF, tmp_path / "out", "--dtype", "float32", "--no-ocdbt", code=2).output
        assert "safetensors is not stored with these options" in output


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "float8_e8m0fnu"])
def test_weights_are_only_cast_to_floating_point(dtype, tmp_path):
    calls = (
        lambda: ckpttools.average(HF, tmp_path / "out", others=[HF], dtype=dtype),
        lambda: ckpttools.hf_to_maxtext(HF, tmp_path / "out", dtype=dtype),
        lambda: ckpttools.maxtext_to_hf(HF, tmp_path / "out", dtype=dtype),
        lambda: ckpttools.extract_adapter(HF, tmp_path / "out", base=HF, rank=1, dtype=dtype),
        lambda: ckpttools.synth(HF, tmp_path / "out", dtype=dtype),
        lambda: ckpttools.shrink(HF, tmp_path / "out", layers=1, dtype=dtype),
    )
    for call in calls:
        with pytest.raises(UsageError, match="expected a floating-point dtype"):
            call()
    assert not (tmp_path / "out").exists()
