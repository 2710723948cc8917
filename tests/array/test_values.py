from fractions import Fraction
from functools import cache
from math import prod

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.internals import Cast, Multiply, Scale, Shift

from ckpttools import DTYPES, MappingError
from ckpttools.mapping import values
from ckpttools.mapping.values import Add
from ckpttools.testing.strategies import noise, shapes

FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_float]
SMALL = [dtype for dtype in FLOATS if dtype.bits <= 16]
BF16, F16, F32, F64 = (DTYPES[name] for name in ("bfloat16", "float16", "float32", "float64"))
QUERY_SCALE = 128**-0.5


def patterns(dtype):
    """Every bit pattern of a type of at most 16 bits, as carriers."""
    return np.arange(1 << min(dtype.bits, 16), dtype=np.uint32).astype(dtype.carrier)


def applied(op, carriers, dtype):
    target = np.zeros(carriers.shape, op.result(dtype).carrier)
    op.apply(carriers, target, dtype)
    return target


def there_and_back(op, carriers, dtype):
    there = applied(op, carriers, dtype)
    return there, applied(op.inverse(), there, op.result(dtype))


def numbers(carriers, dtype):
    with np.errstate(invalid="ignore"):
        return carriers.view(dtype.numpy).astype(np.float64)


def key_order(carriers, dtype):
    """Bit patterns as whole numbers in the order of the values: neighbors are one ulp apart."""
    bits = carriers.astype(np.int64)
    sign = 1 << (dtype.bits - 1)
    return np.where(bits & sign, -(bits & (sign - 1)), bits)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("to", FLOATS, ids=str)
def test_exact_casts_round_trip(dtype, to):
    op = Cast(to, dtype)
    all_bits = patterns(dtype)
    there, back = there_and_back(op, all_bits, dtype)
    nan = np.isnan(numbers(all_bits, dtype))
    if op.exactness(dtype).exact:
        assert (back == all_bits)[~nan].all()
        assert np.isnan(numbers(there, to))[nan].all()
        assert np.isnan(numbers(back, dtype))[nan].all()
        np.testing.assert_array_equal(numbers(there, to), numbers(all_bits, dtype))
    else:
        assert op.exactness(dtype).reason == f"cast from {dtype} to {to}: rounded"


@pytest.mark.parametrize(
    ("dtype", "to", "exact"),
    [
        (BF16, F32, True),
        (BF16, F64, True),
        (F16, F32, True),
        (F32, F64, True),
        (F32, F32, True),
        (DTYPES["float8_e4m3fn"], BF16, True),
        (BF16, F16, False),
        (F16, BF16, False),
        (F32, BF16, False),
        (F64, F32, False),
        (BF16, DTYPES["float8_e4m3fn"], False),
    ],
)
def test_cast_exactness_is_declared(dtype, to, exact):
    assert Cast(to).exactness(dtype).exact is exact


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_float32_survives_a_float64_round_trip(floats):
    bits = np.array(floats, np.float32).view(F32.carrier)
    _, back = there_and_back(Cast(F64, F32), bits, F32)
    nan = np.isnan(np.array(floats))
    assert (back == bits)[~nan].all()
    assert np.isnan(back.view(np.float32))[nan].all()


@settings(max_examples=50)
@given(st.integers(0, 1 << 30))
def test_bfloat16_is_rounded_to_nearest_even(seed):
    bits = noise((2000,), F32, seed)
    bits[:500] &= np.uint32(0xFFFF8000)  # many ties
    wide = bits.astype(np.uint64)
    expected = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(bits.view(np.float32))
    got = applied(Cast(BF16), bits, F32)
    assert (got == expected)[~nan].all()
    assert np.isnan(numbers(got, BF16))[nan].all()


@settings(max_examples=50)
@given(st.integers(0, 1 << 30))
def test_float16_is_rounded_to_nearest_even(seed):
    floats = np.random.default_rng(seed).normal(0, 1, 200).astype(np.float32)
    got = numbers(applied(Cast(F16), floats.view(F32.carrier), F32), F16)
    np.testing.assert_array_equal(got, [nearest(x, F16) for x in floats.tolist()])


def nearest(x, dtype):
    """The value of `dtype` nearest to x, by exact fractions; of two the one with an even last bit."""
    every = SORTED[dtype]
    at = int(np.searchsorted(every.values, x))
    around = every.values[max(0, at - 1) : at + 1]
    even = every.bits[max(0, at - 1) : at + 1] & 1
    away = [abs(Fraction(float(v)) - Fraction(x)) for v in around]
    return float(min(zip(away, even, around, strict=True))[2])


class Sorted:
    def __init__(self, dtype):
        bits = patterns(dtype)
        value = numbers(bits, dtype)
        keep = np.isfinite(value) & ~((value == 0) & (bits != 0))
        order = np.argsort(value[keep])
        self.values, self.bits = value[keep][order], bits[keep][order]


SORTED = {dtype: Sorted(dtype) for dtype in (BF16, F16, DTYPES["float8_e4m3fn"], DTYPES["float8_e5m2"])}


@pytest.mark.parametrize("to", SORTED, ids=str)
@settings(max_examples=100)
@given(data=st.data())
def test_float64_is_rounded_once(to, data):
    """Values a hair's breadth from the middle of two neighbors are what rounding twice gets wrong."""
    every = SORTED[to].values
    at = data.draw(st.integers(0, len(every) - 2))
    middle = every[at] / 2 + every[at + 1] / 2
    x = middle * (1 + data.draw(st.sampled_from((0, 1, -1))) * 2.0 ** -data.draw(st.integers(20, 52)))
    bits = np.array([x], np.float64).view(F64.carrier)
    assert numbers(applied(Cast(to), bits, F64), to)[0] == nearest(x, to)


def test_float64_edges_survive_the_cast():
    edges = np.array([0.0, -0.0, np.inf, -np.inf, 1e300, -1e300, 1e-320, -1e-320], np.float64)
    got = applied(Cast(BF16), edges.view(F64.carrier), F64)
    assert got.tolist() == [0, 0x8000, 0x7F80, 0xFF80, 0x7F80, 0xFF80, 0, 0x8000]
    nan = applied(Cast(BF16), np.array([np.nan]).view(F64.carrier), F64)
    assert np.isnan(numbers(nan, BF16)).all()


@pytest.mark.parametrize(
    ("dtype", "to"),
    [("int32", "float32"), ("int64", "int32"), ("float32", "int32"), ("bool", "bfloat16"), ("uint8", "int8")],
)
def test_casts_losing_integers_are_refused(dtype, to):
    with pytest.raises(MappingError, match="can lose integers"):
        Cast(DTYPES[to]).result(DTYPES[dtype])


def test_inverse_cast_needs_the_original_dtype():
    assert Cast(F32, BF16).inverse() == Cast(BF16, F32)
    with pytest.raises(MappingError, match="unknown origin"):
        Cast(F32).inverse()


@pytest.mark.parametrize("power", [-7, -3, -1, 0, 1, 4])
@pytest.mark.parametrize("divide", [False, True])
def test_powers_of_two_are_exact_on_every_normal_bfloat16(power, divide):
    op = Multiply(2.0**power, divide)
    every = patterns(BF16)
    there, back = there_and_back(op, every, BF16)
    value, scaled = numbers(every, BF16), numbers(every, BF16) * 2.0 ** (-power if divide else power)
    largest, tiny = 3.3895313892515355e38, 2.0**-126
    safe = (np.abs(scaled) >= tiny) & (np.abs(scaled) <= largest) | (value == 0) | np.isinf(value)
    np.testing.assert_array_equal(numbers(there, BF16)[safe], scaled[safe])
    assert (back == every)[safe].all()
    nan = np.isnan(value)
    assert np.isnan(numbers(back, BF16))[nan].all()
    claim = op.exactness(BF16)
    assert claim.exact
    lost = np.abs(value[(back != every) & ~nan])
    if lost.size:
        assert ("largest" in claim.reason) == bool((lost > 1).all())
        assert ("smallest" in claim.reason) == bool((lost < 1).all())


@settings(max_examples=30)
@given(st.integers(-8, 8), st.integers(0, 1 << 30), st.booleans())
def test_powers_of_two_are_exact_on_normal_float32(power, seed, divide):
    bits = noise((2000,), F32, seed)
    size = np.abs(bits.view(np.float32))
    bits = bits[(size > 2.0**-117) & (size < 2.0**119)]
    op = Multiply(2.0**power, divide)
    assert op.exactness(F32).exact
    assert (there_and_back(op, bits, F32)[1] == bits).all()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 8, 80, 96, 128, 512])
def test_other_scales_are_at_most_one_ulp_off(dtype, size):
    op = Scale("head_dim", -0.5).bound({"head_dim": size})
    every = patterns(dtype)
    there, back = there_and_back(op, every, dtype)
    tiny = {"bfloat16": 2.0**-126, "float16": 2.0**-14}[dtype.name]
    value, scaled = numbers(every, dtype), numbers(there, dtype)
    safe = np.isfinite(value) & (np.abs(scaled) >= tiny) | (value == 0)
    off = np.abs(key_order(back, dtype) - key_order(every, dtype))
    assert off[safe].max() <= 1
    assert not op.exactness(dtype).exact
    assert "1 ulp" in op.exactness(dtype).reason
    assert "smallest" in op.exactness(dtype).reason
    relative = np.abs(scaled[safe] - value[safe] * size**-0.5) <= np.abs(value[safe]) * size**-0.5 * 0.0041
    assert relative.all()


def test_llama_query_scale_is_applied_in_float32():
    bits = np.random.default_rng(0).normal(0, 0.02, 100_000).astype(np.float32).view(F32.carrier)
    op = Multiply(QUERY_SCALE)
    there, back = there_and_back(op, bits, F32)
    assert np.abs(key_order(back, F32) - key_order(bits, F32)).max() <= 1
    assert not op.exactness(F32).exact
    np.testing.assert_array_equal(there.view(np.float32), bits.view(np.float32) * np.float32(QUERY_SCALE))


def test_float16_scale_is_inexact_near_the_range_limits():
    assert not Multiply(0.125).exactness(F16).exact
    assert Multiply(0.125).exactness(F32).exact


def test_scaling_back_is_division():
    assert Multiply(0.3).inverse() == Multiply(0.3, divide=True)
    assert Multiply(0.3).inverse().inverse() == Multiply(0.3)
    assert "divided by 0.3" in Multiply(0.3, True).exactness(BF16).reason
    assert "times 0.3" in Multiply(0.3).exactness(BF16).reason


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("factor", [QUERY_SCALE, 3.0, 80**0.5, 0.1, 0.25])
@pytest.mark.parametrize("divide", [False, True])
def test_wide_scale_round_trips_exactly(dtype, factor, divide):
    op = Multiply(factor, divide).widened()
    assert op.exactness(dtype).exact
    assert op.result(dtype) == F32
    every = patterns(dtype)
    every = every[np.isfinite(numbers(every, dtype))]
    there, back = there_and_back(op, every, dtype)
    value, scaled = numbers(every, dtype), numbers(there, F32)
    expected = value / np.float32(factor) if divide else value * np.float32(factor)
    safe = (np.abs(expected) >= 2.0**-126) & (np.abs(expected) <= 2.0**127) | (value == 0)
    np.testing.assert_allclose(scaled[safe], expected[safe], rtol=2.0**-24)
    narrow = applied(Cast(dtype), back, F32)
    assert (narrow == every)[safe].all()
    lost = np.abs(value[narrow != every])
    edge = "smallest" if (lost < 1).all() else "largest"
    assert not lost.size or f"except for values near the {edge} of the type" in op.exactness(dtype).reason


def test_scaling_keeps_wide_types():
    for dtype in (F32, F64):
        assert Multiply(0.3).widened().result(dtype) == dtype
        assert not Multiply(0.3).widened().exactness(dtype).exact
    assert Add(1.0).widened() == Add(1.0)
    assert Cast(F32).widened() == Cast(F32)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("amount", [1.0, -1.0])
def test_shifted_norm_round_trips_exactly(dtype, amount):
    op = Shift(amount).bound({})
    assert op == Add(amount)
    claim = op.exactness(dtype)
    assert claim.exact
    assert op.result(dtype) == F32
    every = patterns(dtype)
    every = every[np.isfinite(numbers(every, dtype))]
    there, back = there_and_back(op, every, dtype)
    value = numbers(every, dtype)
    np.testing.assert_array_equal(there.view(np.float32), value.astype(np.float32) + np.float32(amount))
    edge = 2.0 ** -int(claim.reason.split("2**-")[1].split(",")[0])
    safe = np.abs(value) >= edge
    assert (applied(Cast(dtype), back, F32) == every)[safe].all()
    assert np.abs(numbers(back, F32)[~safe] - value[~safe]).max(initial=0) <= 2.0**-24


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50),
    st.sampled_from((1.0, -1.0)),
)
def test_float32_shift_is_off_by_at_most_one_ulp(floats, amount):
    op = Add(amount)
    assert not op.exactness(F32).exact
    value = np.array(floats, np.float32)
    there, back = there_and_back(op, value.view(F32.carrier), F32)
    larger = np.maximum(np.abs(value), np.abs(there.view(np.float32)))
    assert (np.abs(back.view(np.float32) - value) <= np.spacing(larger)).all()


def test_float64_shift_stays_float64():
    assert Add(1.0).result(F64) == F64
    there, _ = there_and_back(Add(1.0), np.array([2.0**-40]).view(F64.carrier), F64)
    assert there.view(np.float64)[0] == 1 + 2.0**-40


@pytest.mark.parametrize("op", [Add(1.0), Multiply(2.0)], ids=str)
@pytest.mark.parametrize("dtype", ["int8", "bool", "uint32"])
def test_integer_arithmetic_is_refused(op, dtype):
    with pytest.raises(MappingError, match="only floating-point values"):
        op.result(DTYPES[dtype])


def test_factor_is_rounded_first_if_configured():
    assert Scale("embed", 0.5, "bfloat16").bound({"embed": 2560}) == Multiply(50.5)
    assert Scale("embed", 0.5).bound({"embed": 2560}) == Multiply(float(np.float32(2560**0.5)))


@pytest.fixture(params=[1, 7, 64])
def block(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "_BLOCK", request.param)
        yield request.param


def spread(carriers, order, step):
    """The same numbers in a strided view with its axes in another memory order."""
    base = np.zeros([carriers.shape[k] * step for k in order], carriers.dtype)
    view = base.transpose([int(k) for k in np.argsort(order)])
    view = view[(*(slice(0, n * step, step) for n in carriers.shape), ...)]
    view[...] = carriers
    return view


orders = cache(st.permutations)


@given(shape=shapes(limit=600), data=st.data())
def test_blockwise_equals_the_complete_array(block, shape, data):
    bits = noise(shape, BF16, 1)
    bits &= np.uint16(0xBFFF)  # no NaN
    order = data.draw(orders(range(len(shape))))
    step = data.draw(st.integers(1, 2))
    source = spread(bits, order, step)
    target = spread(np.zeros(shape, F32.carrier), data.draw(orders(range(len(shape)))), step)
    Cast(F32).apply(source, target, BF16)
    assert (target == bits.astype(np.uint32) << 16).all()


@given(
    shape=st.sampled_from([(1, 200), (1, 1, 150), (1, 3, 1, 70), (2, 1, 100), (1,), (), (0,), (0, 3), (3, 0)])
)
def test_long_row_is_processed_in_blocks(block, shape):
    seen = []
    source, target = noise(shape, F32, 2), np.zeros(shape, F32.carrier)

    def function(part):
        seen.append(part.size)
        return part

    values.blockwise(source, target, F32, F32, function)
    assert (source == target).all()
    assert sum(seen) == prod(shape)
    assert all(size <= block for size in seen)


@settings(max_examples=60)
@given(
    name=st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
    power=st.integers(-30, 30),
    divide=st.booleans(),
    seed=st.integers(0, 99),
    odd=st.sampled_from([None, 0.0, -0.0, float("inf"), float("nan"), 1e-7]),
)
@example("bfloat16", -3, False, 0, float("inf"))
@example("bfloat16", 3, False, 0, float("-inf"))
@example("float16", -3, False, 0, float("inf"))
@example("float32", 3, True, 0, float("inf"))
@example("float64", -3, False, 0, float("-inf"))
@example("bfloat16", -3, False, 0, 0.0)
@example("float32", 3, False, 0, 0.0)
@example("bfloat16", 100, False, 0, 1e30)
@example("float32", -100, False, 0, 1e-30)
def test_powers_of_two_equal_plain_arithmetic(name, power, divide, seed, odd):
    """Blocks of normal numbers are scaled by their exponents, others by multiplying: nobody can tell."""
    dtype = DTYPES[name]
    values = np.random.default_rng(seed).normal(0, 0.02, 64).astype(dtype.numpy)
    if odd is not None:
        values[seed % 64] = odd
    wide = np.float64 if name == "float64" else np.float32
    factor = wide(2.0**power)
    with np.errstate(all="ignore"):
        exact = values.astype(wide) / factor if divide else values.astype(wide) * factor
        expected = exact.astype(dtype.numpy)
    built = np.empty(64, dtype.carrier)
    Multiply(2.0**power, divide).apply(values.view(dtype.carrier), built, dtype)
    same = built == expected.view(dtype.carrier)
    assert (same | np.isnan(expected.astype(np.float64))).all()
