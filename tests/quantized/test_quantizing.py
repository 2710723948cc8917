"""Arrays quantized on the way: the codes and scales that direct formulas give, whatever region is read."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.internals import Describer, Fp8BlockEncoder, NodeLines, Nodes, Scratch, relayout

from ckpttools import DTYPES, FormatError, ShapeError
from ckpttools.array import read_blocks
from ckpttools.array.blockwise import (
    BlockCodes,
    BlockScales,
    block_codes,
    drop_error_counts,
    error_sums,
    quantization_errors,
    total_error,
)
from ckpttools.array.scratch import add_counts
from ckpttools.core.region import ceil_div
from ckpttools.quantized.encoders import Mxfp4Encoder, decode_codes, round_to_narrow_float
from ckpttools.testing.strategies import regions, stored, tilings

DTYPE = st.sampled_from(("bfloat16", "float16", "float32", "float64"))
E4M3, E2M1 = "float8_e4m3fn", "float4_e2m1fn"


def values(shape, dtype, seed):
    """Numbers of many magnitudes, blocks of zeros among them."""
    rng = np.random.default_rng(seed)
    built = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 6, shape))
    built[..., : shape[-1] // 3] *= rng.integers(0, 2)
    return np.clip(built, -6e4, 6e4).astype(DTYPES[dtype].numpy)


def by_formula(truth, rows, columns):
    """Codes and scales of FP8 blocks of one matrix, block by block."""
    wide = truth.astype(np.float32)
    codes = np.empty(truth.shape, DTYPES[E4M3].numpy)
    scales = np.ones((ceil_div(truth.shape[0], rows), ceil_div(truth.shape[1], columns)), np.float32)
    for i, j in np.ndindex(scales.shape):
        cell = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        largest = np.abs(wide[cell]).max()
        if largest:
            scales[i, j] = max(largest / np.float32(448), np.float32(2.0**-126))
        codes[cell] = (wide[cell] / scales[i, j]).astype(codes.dtype)
    return codes, scales


@st.composite
def matrices(draw):
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 24)))
    shape = shape[draw(st.integers(0, 1)) :]
    return values(shape, draw(DTYPE), draw(st.integers(0, 99)))


@given(truth=matrices(), rows=st.integers(1, 9), columns=st.integers(1, 9), data=st.data())
def test_fp8_blocks_match_the_formula_in_any_region(truth, rows, columns, data):
    array = stored(truth, DTYPES[str(truth.dtype)])
    codes, scales = block_codes(array, Fp8BlockEncoder(rows, columns))
    expected = [by_formula(item, rows, columns) for item in truth.reshape(-1, *truth.shape[-2:])]
    for built, stacked in zip((codes, scales), zip(*expected, strict=True), strict=True):
        whole = np.reshape(stacked, built.shape)
        assert built.read().tobytes() == whole.tobytes()
        region = data.draw(regions(built.shape))
        assert built.read(region).tobytes() == whole[region.slices].tobytes()


@given(seed=st.integers(0, 99), groups=st.integers(1, 3), dtype=DTYPE, data=st.data())
def test_mxfp4_error_is_at_most_half_a_step_in_any_region(seed, groups, dtype, data):
    truth = values((2, 3, 32 * groups), dtype, seed)
    codes, scales = block_codes(stored(truth, DTYPES[dtype]), Mxfp4Encoder())
    assert codes.shape == (2, 3, 16 * groups) and scales.shape == (2, 3, groups)
    whole = codes.read()
    exponents = scales.read().astype(int) - 127
    nibbles = np.stack([whole & 15, whole >> 4], -1).reshape(truth.shape)
    steps = np.exp2(exponents)[..., None].astype(np.float64)
    wide = truth.astype(np.float32).astype(np.float64).reshape(2, 3, groups, 32) / steps
    assert np.abs(wide).max() <= 6
    nearest = wide.astype(np.float32).astype(DTYPES[E2M1].numpy).view(np.uint8)
    assert (nibbles.reshape(nearest.shape) == nearest).all()
    # One power of two less would not do.
    largest = np.abs(wide).max(-1)
    assert ((largest > 3) | (largest == 0) | (exponents == -127)).all()
    region = data.draw(regions(codes.shape))
    assert codes.read(region).tobytes() == whole[region.slices].tobytes()


@pytest.mark.parametrize("dtype", [E4M3, E2M1])
def test_every_pattern_rounds_to_nearest_even(dtype):
    patterns = np.arange(0, 1 << 32, 65521, dtype=np.uint64).astype(np.uint32)
    near = decode_codes(np.arange(1 << DTYPES[dtype].bits, dtype=np.uint8), dtype)
    near = near[np.isfinite(near)]
    between = (np.sort(near)[1:] + np.sort(near)[:-1]) / 2
    around = [np.nextafter(between, np.float32(side)) for side in (-np.inf, np.inf)]
    result = np.concatenate([patterns.view(np.float32), near, between, *around])
    result = result[np.abs(result) <= near.max()]
    assert (round_to_narrow_float(result, dtype) == result.astype(DTYPES[dtype].numpy).view(np.uint8)).all()


def test_overflow_is_rounded_to_largest():
    assert decode_codes(round_to_narrow_float(np.array([1e30, -500], np.float32), E4M3), E4M3).tolist() == [
        448,
        -448,
    ]


@settings(max_examples=40)
@given(truth=matrices(), data=st.data())
def test_quantization_loss_is_counted_once(truth, data):
    encoder = Fp8BlockEncoder(4, 8)
    codes, scales = block_codes(stored(truth, DTYPES[str(truth.dtype)]), encoder, "w")
    counts: dict[str, float] = {}
    for region in data.draw(tilings(codes.shape)):
        scratch = Scratch(codes.scratch_bytes)
        codes.read_into(region, np.empty(region.shape, np.uint8), scratch)
        add_counts(counts, scratch.take_counts())
    many = np.repeat(np.repeat(scales.read(), 4, -2), 8, -1)[..., : truth.shape[-2], : truth.shape[-1]]
    exact = truth.astype(np.float64)
    apart = exact - (codes.read().astype(np.float32) * many).astype(np.float64)
    result = quantization_errors({"w": {**counts, "overflowed": 3}})["w"]
    squares, own = (apart**2).sum(), (exact**2).sum()
    assert result.elements == truth.size and drop_error_counts({"w": {**counts, "overflowed": 3}}) == {
        "w": {"overflowed": 3}
    }
    assert result.largest == pytest.approx(np.abs(apart).max(), rel=1e-5, abs=1e-37)
    assert result.rms == pytest.approx(np.sqrt(squares / truth.size), rel=1e-4, abs=1e-30)
    assert result.relative == pytest.approx(np.sqrt(squares / own) if own else 0, rel=1e-4, abs=1e-9)
    together = total_error({"a": result, "b": result})
    assert together.elements == 2 * truth.size and together.relative == pytest.approx(result.relative)


def test_lossless_arrays_count_in_the_total_error():
    ones = np.ones(100, np.float32)
    counts = {"lossy": error_sums(ones, 0.9 * ones), "exact": error_sums(ones, ones)}
    assert total_error(quantization_errors(counts)).relative == pytest.approx(0.005**0.5)


@given(seed=st.integers(0, 999), dtype=st.sampled_from(("bfloat16", "float32")))
@example(seed=0, dtype="bfloat16")
def test_requantizing_dequantized_values_is_stable(seed, dtype):
    encoder = Fp8BlockEncoder(4, 8)

    def round_trip(array):
        codes, scales = (code.read() for code in block_codes(stored(array, DTYPES[dtype]), encoder))
        many = np.repeat(np.repeat(scales, 4, 0), 8, 1)[: array.shape[0], : array.shape[1]]
        return codes, scales, (codes.astype(np.float32) * many).astype(array.dtype)

    first = round_trip(values((9, 17), dtype, seed))
    second = round_trip(first[2])
    third = round_trip(second[2])
    assert first[0].tobytes() == second[0].tobytes() == third[0].tobytes()
    if dtype == "bfloat16":
        assert second[1].tobytes() == third[1].tobytes() and second[2].tobytes() == third[2].tobytes()


@given(seed=st.integers(0, 999))
def test_mxfp4_values_survive_requantization(seed):
    rng = np.random.default_rng(seed)
    codes, exponents = rng.integers(0, 16, (3, 64), np.uint8), rng.integers(-20, 20, (3, 2))
    truth = np.ldexp(decode_codes(codes, E2M1).reshape(3, 2, 32), exponents[..., None]).reshape(3, 64)
    array = stored(truth.astype(DTYPES["bfloat16"].numpy), DTYPES["bfloat16"])
    again = Mxfp4Encoder().decoded(*(code.read() for code in block_codes(array, Mxfp4Encoder())))
    assert (again == truth).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("encoder", [Fp8BlockEncoder(2, 2), Mxfp4Encoder()])
def test_non_finite_values_are_refused_with_their_array(bad, dtype, encoder):
    truth = np.ones((5, 32), DTYPES[dtype].numpy)
    truth[4, 31] = bad
    for code in block_codes(stored(truth, DTYPES[dtype]), encoder, "model.w"):
        with pytest.raises(FormatError, match="cannot be quantized") as caught:
            code.read()
        assert caught.value.location == "model.w"


def test_float64_beyond_float32_is_refused():
    with pytest.raises(FormatError, match="cannot be quantized"):
        block_codes(stored(np.full((2, 2), 1e300), DTYPES["float64"]), Fp8BlockEncoder())[1].read()


def test_arrays_without_blocks_are_refused():
    for shape, dtype, encoder in (
        ((4,), "float32", Fp8BlockEncoder()),
        ((4, 4), "int8", Fp8BlockEncoder()),
        ((4, 5), "float32", Mxfp4Encoder()),
    ):
        with pytest.raises(ShapeError, match="in blocks"):
            block_codes(stored(np.zeros(shape, dtype), DTYPES[dtype]), encoder)


def test_large_arrays_are_read_in_long_pieces_within_scratch(monkeypatch):
    monkeypatch.setattr(read_blocks, "READ_BLOCK_BYTES", 4096)
    truth = values((70, 300), "bfloat16", 1)
    codes, scales = block_codes(stored(truth, DTYPES["bfloat16"]), Fp8BlockEncoder(16, 16))
    assert codes.scratch_bytes < truth.nbytes
    expected = by_formula(truth, 16, 16)
    assert (
        codes.read().tobytes() == expected[0].tobytes() and scales.read().tobytes() == expected[1].tobytes()
    )


def test_quantized_nodes_round_trip_through_plan_lines():
    array = stored(values((6, 64), "float32", 3), DTYPES["float32"])
    swapped = relayout(array, ((6,), (64,)), (0, 1), (1, 1))
    for built in (
        *block_codes(swapped, Fp8BlockEncoder(4, 4), "w"),
        *block_codes(swapped, Mxfp4Encoder(), "w"),
    ):
        lines = NodeLines(lambda source: 0)
        number = lines.number(built)
        again = Nodes([line.encode() for line in lines.lines], lambda number: array.source).array(number)
        assert (
            isinstance(again, BlockCodes | BlockScales) and again.read().tobytes() == built.read().tobytes()
        )
        assert json.dumps(list(Describer().lines(built))) == json.dumps(list(Describer().lines(again)))
