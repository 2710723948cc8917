import ml_dtypes
import numpy as np
import pytest

from ckpttools import DTYPES, UnknownNameError
from ckpttools.core.dtypes import from_safetensors, from_zarr3, parse_dtype

EVERY = pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)


@EVERY
def test_table_agrees_with_numpy_and_ml_dtypes(dtype):
    known = dtype.numpy
    assert known.name == dtype.name
    assert known.itemsize == dtype.itemsize == dtype.carrier.itemsize
    assert known.newbyteorder("<") == known
    assert str(dtype) == dtype.name
    assert dtype.bits <= 8 * dtype.itemsize


@EVERY
def test_dtype_kind_matches_numpy(dtype):
    if dtype.kind == "float":
        try:
            info = np.finfo(dtype.numpy)
        except ValueError:
            info = ml_dtypes.finfo(dtype.numpy)
        assert info.bits in (dtype.bits, 8 * dtype.itemsize)
        assert dtype.is_float
    elif dtype.kind in ("int", "uint"):
        info = ml_dtypes.iinfo(dtype.numpy)
        assert (info.min < 0) == (dtype.kind == "int")
        assert info.bits <= dtype.bits
    else:
        assert dtype.numpy.kind == {"bool": "b", "complex": "c"}[dtype.kind]
    assert dtype.is_float == (dtype.kind == "float")


@EVERY
def test_carrier_keeps_all_bits(dtype):
    raw = np.random.default_rng(0).integers(0, 256, 16 * dtype.itemsize, np.uint8)
    carried = raw.view(dtype.carrier)
    assert carried.copy().tobytes() == raw.tobytes()
    assert carried.view(dtype.numpy).view(dtype.carrier).tobytes() == raw.tobytes()


@EVERY
def test_spellings_round_trip(dtype):
    assert parse_dtype(dtype.name) is dtype
    assert parse_dtype(f"torch.{dtype.name}") is dtype
    if dtype.safetensors is not None:
        assert from_safetensors(dtype.safetensors) is dtype
    if dtype.zarr3 is not None:
        assert from_zarr3(dtype.zarr3) is dtype


def test_spellings_are_unique():
    for spelling in ("safetensors", "zarr3"):
        names = [getattr(dtype, spelling) for dtype in DTYPES.values() if getattr(dtype, spelling)]
        assert len(names) == len(set(names))


def test_packed_types_match_safetensors():
    assert {d.safetensors: d.bits for d in DTYPES.values() if d.packed} == {
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16", "bfloat16"),
        ("torch.bf16", "bfloat16"),
        ("fp16", "float16"),
        ("f16", "float16"),
        ("fp32", "float32"),
        ("f32", "float32"),
        ("torch.bfloat16", "bfloat16"),
    ],
)
def test_short_names_are_accepted(text, name):
    assert parse_dtype(text).name == name


@pytest.mark.parametrize(
    ("text", "near"), [("bfloat", "bfloat16"), ("float8_e4m3", "float8_e4m3fn"), ("flaot32", "float32")]
)
def test_misspelled_name_gets_a_hint(text, near):
    with pytest.raises(UnknownNameError, match=f"unknown dtype '{text}'") as caught:
        parse_dtype(text)
    assert caught.value.hint == f"did you mean {near}?"
    assert caught.value.expected is None


@pytest.mark.parametrize("text", ["float8", "torch.float8"])
def test_name_prefix_suggests_matching_dtypes(text):
    with pytest.raises(UnknownNameError) as caught:
        parse_dtype(text)
    assert "float8_e4m3fn, " in caught.value.expected and "float64" not in caught.value.expected


@pytest.mark.parametrize("text", ["", "zzz", "torch.", "F"])
def test_unknown_name_gets_a_general_hint(text):
    with pytest.raises(UnknownNameError) as caught:
        parse_dtype(text)
    assert caught.value.hint is None and caught.value.expected.startswith("one of bool, ")


def test_unknown_format_codes_return_none():
    assert from_safetensors("BF17") is None
    assert from_zarr3("float6_e2m3fn") is None


@EVERY
def test_small_float_properties_match_ml_dtypes(dtype):
    """All of them, as ml_dtypes and numpy read their patterns."""
    if not dtype.is_float or dtype.bits > 16:
        pytest.skip("too many to look at each, or whole numbers")
    with np.errstate(all="ignore"):
        numbers = np.arange(1 << dtype.bits, dtype=dtype.carrier).view(dtype.numpy).astype(np.float64)
    finite = np.unique(numbers[np.isfinite(numbers)])
    assert dtype.has_infinity == bool(np.isinf(numbers).any())
    assert dtype.has_nan == bool(np.isnan(numbers).any())
    assert dtype.has_zero == (0 in finite)
    assert dtype.layout.sign == bool((finite < 0).any())
    assert dtype.epsilon == finite[finite > 1][0] - 1
    # Every whole number of so many digits that is in range, and not the first that has one more.
    whole = np.arange(not dtype.has_zero, 2**dtype.digits + 1)
    assert np.isin(whole[whole <= finite[-1]], finite).all()
    assert 2**dtype.digits + 1 not in finite
    step = dtype.epsilon * 2 ** np.floor(np.log2(finite[-1]))
    assert dtype.beyond_range == finite[-1] + step / 2
    if dtype.layout.sign:
        half, first = numbers[: 1 << dtype.bits - 1], dtype.not_finite_from
        assert half[dtype.normal_from] == dtype.smallest_normal
        assert dtype.layout.in_order == bool(np.isfinite(numbers[1 << dtype.bits - 1]))
        if first is not None:
            assert np.isfinite(half[:first]).all() and (np.diff(half[:first]) > 0).all()
            assert not np.isfinite(half[first:]).any()


@EVERY
def test_integer_limits_match_numpy(dtype):
    if not dtype.is_whole:
        assert dtype.kind in ("float", "complex")
    elif dtype.kind == "bool":
        assert dtype.limits == (0, 1)
    else:
        info = ml_dtypes.iinfo(dtype.numpy)
        assert dtype.limits == (info.min, info.max)


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128"])
def test_wide_type_layouts_match_numpy(name):
    dtype, info = DTYPES[name], np.finfo(name)
    assert dtype.layout.mantissa == info.nmant
    assert dtype.epsilon == info.eps
    assert dtype.smallest_normal == info.smallest_normal
    if dtype.is_float:
        assert dtype.not_finite_from == int(np.array(np.inf, name).view(dtype.carrier))
    else:
        assert dtype.not_finite_from is None
