import ml_dtypes
import numpy as np
import pytest

from ckpttools.dtypes import DTYPES, from_safetensors, from_zarr3, parse_dtype
from ckpttools.errors import UnknownNameError

EVERY = pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)


@EVERY
def test_the_table_agrees_with_numpy_and_ml_dtypes(dtype):
    known = dtype.numpy
    assert known.name == dtype.name
    assert known.itemsize == dtype.itemsize == dtype.carrier.itemsize
    assert known.newbyteorder("<") == known
    assert str(dtype) == dtype.name
    assert dtype.bits <= 8 * dtype.itemsize


@EVERY
def test_the_kind_is_that_of_the_numbers(dtype):
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
def test_any_bits_pass_through_the_carrier(dtype):
    raw = np.random.default_rng(0).integers(0, 256, 16 * dtype.itemsize, np.uint8)
    carried = raw.view(dtype.carrier)
    assert carried.copy().tobytes() == raw.tobytes()
    assert carried.view(dtype.numpy).view(dtype.carrier).tobytes() == raw.tobytes()


@EVERY
def test_spellings_come_back(dtype):
    assert parse_dtype(dtype.name) is dtype
    assert parse_dtype(f"torch.{dtype.name}") is dtype
    if dtype.safetensors is not None:
        assert from_safetensors(dtype.safetensors) is dtype
    if dtype.zarr3 is not None:
        assert from_zarr3(dtype.zarr3) is dtype


def test_no_spelling_is_used_twice():
    for spelling in ("safetensors", "zarr3"):
        names = [getattr(dtype, spelling) for dtype in DTYPES.values() if getattr(dtype, spelling)]
        assert len(names) == len(set(names))


def test_packed_types_are_those_of_safetensors():
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
def test_short_names(text, name):
    assert parse_dtype(text).name == name


@pytest.mark.parametrize(
    ("text", "near"), [("bfloat", "bfloat16"), ("float8_e4m3", "float8_e4m3fn"), ("flaot32", "float32")]
)
def test_a_wrong_name_brings_the_near_one(text, near):
    with pytest.raises(UnknownNameError, match=f"unknown dtype '{text}'") as caught:
        parse_dtype(text)
    assert caught.value.hint == f"did you mean {near}?"
    assert near in caught.value.wanted


@pytest.mark.parametrize("text", ["", "zzz", "torch.", "F"])
def test_a_name_like_no_other(text):
    with pytest.raises(UnknownNameError) as caught:
        parse_dtype(text)
    assert caught.value.hint == "use one of the names above"


def test_codes_that_formats_lack():
    assert from_safetensors("BF17") is None
    assert from_zarr3("float6_e2m3fn") is None
