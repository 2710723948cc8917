"""Quantized weights as the numbers that they stand for: every scheme against products made one by one."""

from __future__ import annotations

import tracemalloc
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import quantized_weights as built
from support.internals import (
    Dequantize,
    Scratch,
    Stored,
    by_name,
    elementwise,
    quantized_view,
    relayout,
    take,
)
from support.quantized_weights import Made

from ckpttools import DTYPES, DamagedScalesError, FormatError, Region, Tree
from ckpttools.array.nodes import Dequantized, distinct_arrays, source_arrays
from ckpttools.quantized.decoding import Like
from ckpttools.quantized.scale_checks import list_all_damaged, scale_check_of, value_faults
from ckpttools.testing.strategies import regions, stored

SIDES = st.integers(1, 40)


@st.composite
def weights(draw: st.DrawFn) -> Made:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    rows, columns, few = draw(SIDES), draw(SIDES), draw(st.integers(1, 3))
    match draw(st.sampled_from(("blocks", "experts", "rows", "tensor", "fp4", "mxfp4", "int4", "nvfp4"))):
        case "blocks" | "experts" as kind:
            dtype = draw(st.sampled_from((*built.SCALE_DTYPES, "ue8m0", "float8_e8m0fnu")))
            lead = (few,) if kind == "experts" else ()
            return built.fp8_blocks(rng, (*lead, rows, columns), (draw(SIDES), draw(SIDES)), dtype)
        case "rows":
            return built.fp8_rows(rng, (rows, columns), draw(st.sampled_from(built.SCALE_DTYPES)))
        case "tensor":
            return built.fp8_tensor(rng, (rows, columns), draw(st.sampled_from(built.SCALE_DTYPES)))
        case "fp4":
            return built.fp4_experts(rng, rows, few)
        case "mxfp4":
            return built.mxfp4(rng, few, rows, draw(st.integers(1, 3)))
        case "int4":
            cut, shifted, numbers = draw(st.integers(0, 7)), draw(st.booleans()), few * 16
            whole = [item for item in range(1, numbers) if (numbers - cut) % item == 0]
            group = draw(st.sampled_from(whole if cut else (4, 5, 8, 32, 48)))
            return built.int4(rng, rows, few * 2, group, shifted=shifted, cut=cut)
        case _:
            return built.nvfp4(rng, rows, few, divides=draw(st.booleans()))


def logical_array(weight: Made, dtype: str = "bfloat16", like: Like = "float32"):
    done = quantized_view(weight.tree).dequantized(DTYPES[dtype], like=like)
    return done.tree.arrays[(weight.name,)]


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


@settings(max_examples=120)
@given(weights(), st.data())
def test_region_equals_product_of_codes_and_scales(weight, data):
    """Into memory of any order, with the scratch that is projected."""
    to = data.draw(st.sampled_from(("bfloat16", "float32", "float16")))
    array = logical_array(weight, to)
    with np.errstate(over="ignore"):
        expected = weight.product.astype(DTYPES[to].numpy)
    if not np.isfinite(expected.astype(np.float32)).all():
        return
    assert array.shape == expected.shape
    region = data.draw(regions(array.shape))
    order = data.draw(st.permutations(range(len(region.shape))))
    out = np.empty([region.shape[axis] for axis in order], array.dtype.carrier).transpose(np.argsort(order))
    try:
        array.read_into(region, out, Scratch(array.scratch_bytes))
    except FormatError:
        # Scales of which the largest code would be beyond the dtype.
        assert to == "float16"
        return
    assert (out == bits(expected[region.slices])).all()


@settings(max_examples=100)
@given(weights())
def test_dequantized_tree_keeps_other_leaves(weight):
    tree = weight.tree
    plain = {("norm.weight",): logical_array(weight), **tree.leaves}
    done = quantized_view(Tree(plain, tree.metadata)).dequantized()
    biases = [name for name in weight.arrays if name.endswith("_bias")]
    assert {name for (name,) in done.tree} == {"norm.weight", weight.name, *biases}
    assert "quantization_config" not in done.tree.metadata.config
    (descriptor,) = done.weights.values()
    assert descriptor.scheme == weight.scheme
    assert done.tree.arrays[weight.name,].shape == weight.product.shape
    assert quantized_view(done.tree).readable == {}


@settings(max_examples=80)
@given(weights(), st.data())
def test_rearranged_array_equals_rearranged_product(weight, data):
    """Axes split, reordered, merged and taken: below the product where that can be, and above."""
    array, truth = logical_array(weight), weight.bfloat16
    for _ in range(data.draw(st.integers(1, 2))):
        split = [data.draw(st.sampled_from(factors(length))) for length in array.shape]
        atoms = [length for group in split for length in group]
        order = data.draw(st.permutations(range(len(atoms))))
        merge = data.draw(st.sampled_from(([1] * len(atoms), [len(atoms) - 1, 1], [1, len(atoms) - 1])))
        array = relayout(array, split, order, merge)
        truth = truth.reshape(atoms).transpose(order).reshape(array.shape)
    assert array.shape == truth.shape
    index = data.draw(st.integers(0, array.shape[0] - 1))
    taken = take(array, 0, index)
    region = data.draw(regions(taken.shape))
    assert (bits(taken.read(region)) == bits(truth[index][region.slices])).all()
    scratch = Scratch(array.scratch_bytes)
    out = np.empty(array.shape, array.dtype.carrier)
    array.read_into(Region.whole(array.shape), out, scratch)
    assert (out == bits(truth)).all()


class WatchedScratch(Scratch):
    """Remembers how much of it was ever taken."""

    limit = 0

    @contextmanager
    def take(self, shape, dtype):
        with super().take(shape, dtype) as taken:
            self.limit = max(self.limit, self._top)
            yield taken


def damaged(weight: Made) -> Made:
    """Codes that are no numbers are looked up in a table, one by one."""
    weight.arrays[weight.name][:] = np.nan
    return weight


@pytest.mark.parametrize(
    "made_by",
    [
        lambda rng: built.int4(rng, 120, 513, 7, shifted=True, cut=2),
        lambda rng: damaged(built.fp8_blocks(rng, (300, 1031), (7, 2))),
        lambda rng: built.fp8_blocks(rng, (9, 10_000, 3), (128, 1)),
        lambda rng: built.mxfp4(rng, 2, 136, 60),
    ],
    ids=["int4", "fp8", "narrow", "mxfp4"],
)
def test_reading_stays_within_projected_memory(made_by):
    """Of the scratch, and of memory beside it, which numpy tells to tracemalloc."""
    array = logical_array(made_by(np.random.default_rng(0)))
    out = np.empty(array.shape, array.dtype.carrier)
    array.read(Region.whole((1,) * array.ndim))
    scratch = WatchedScratch(array.scratch_bytes)
    tracemalloc.start()
    try:
        array.read_into(Region.whole(array.shape), out, scratch)
        _, beside = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert beside > 1 << 16
    assert scratch.limit + beside <= scratch.nbytes


def factors(length: int) -> list[tuple[int, ...]]:
    pairs = [(item, length // item) for item in range(1, length + 1) if length % item == 0]
    return [(length,), *pairs]


def test_interleaved_rows_are_decoded_once():
    """gpt-oss has rows of two projections in turn: only those of one are decoded, and moved once."""
    weight = built.mxfp4(np.random.default_rng(0), 2, 8, 1)
    array = logical_array(weight)
    gate = take(relayout(array, [(2,), (32,), (4, 2)], (3, 0, 1, 2), (1, 1, 1, 1)), 0, 1)
    (moved,) = source_arrays(gate)
    (decoded,) = source_arrays(moved)
    assert isinstance(decoded, Dequantized)
    assert decoded.shape == (2, 4, 2, 32)
    assert all(isinstance(item, Stored) for item in source_arrays(decoded))
    assert (bits(gate.read()) == bits(weight.bfloat16[:, :, 1::2])).all()


def test_ragged_blocks_use_declared_block_size():
    """transformers 5.23 (`Fp8Dequantize`) takes rows // scales for the block, which is 96 here, not 128.

    Its result was compared: 16.7 % of the elements of this shape differ, in rows 96 to 127; those of 256 x
    384 are equal bit for bit, and 576 rows it refuses.
    """
    weight = built.fp8_blocks(np.random.default_rng(0), (192, 256), (128, 128))
    codes, scales = weight.arrays[weight.name], weight.arrays[f"{weight.name}_scale_inv"]
    assert scales.shape == (2, 2)
    derived = built.scaled(codes, scales, (192 // 2, 256 // 2)).astype(ml_dtypes.bfloat16)
    ours = logical_array(weight).read()
    assert (bits(ours) == bits(weight.bfloat16)).all()
    wrong = bits(derived) != bits(ours)
    assert 0.15 < wrong.mean() <= 1 / 6
    assert set(np.nonzero(wrong.any(axis=1))[0]) == set(range(96, 128))


def test_deepseek_ragged_blocks_are_dequantized():
    """`kv_a_proj_with_mqa` has 576 rows and 7168 columns, and 5 x 56 scales."""
    weight = built.fp8_blocks(np.random.default_rng(0), (576, 7168), (128, 128))
    assert weight.arrays[f"{weight.name}_scale_inv"].shape == (5, 56)
    array = logical_array(weight)
    assert (bits(array.read()) == bits(weight.bfloat16)).all()
    exact = weight.arrays[weight.name].astype(np.float64)
    exact *= np.repeat(np.repeat(weight.arrays[f"{weight.name}_scale_inv"], 128, 0), 128, 1)[:576]
    assert np.abs(array.read().astype(np.float64) - exact).max() <= np.abs(exact).max() * 2**-8


def test_regions_may_start_inside_a_block():
    weight = built.fp8_blocks(np.random.default_rng(0), (23, 31), (5, 7))
    array = logical_array(weight)
    for row in range(11):
        for column in (0, 3, 8):
            part = (slice(row, row + 9), slice(column, column + 20))
            assert (bits(array[part]) == bits(weight.bfloat16[part])).all()


@pytest.mark.parametrize("byte", [253, 254, 255])
def test_reading_refuses_exponents_out_of_range(byte):
    weight = built.mxfp4(np.random.default_rng(0), 2, 8, 2)
    name = next(name for name in weight.arrays if name.endswith("_scales"))
    weight.arrays[name][1, 3, 1] = byte
    array = logical_array(weight)
    assert (bits(array[0]) == bits(weight.bfloat16[0])).all()
    with pytest.raises(FormatError, match="values that are not finite") as error:
        array.read()
    assert error.value.location == f"{weight.name}_scales"


@given(
    weights(),
    st.sampled_from(("bfloat16", "float32", "float16")),
    st.sampled_from(("float32", "maxtext")),
    st.data(),
)
def test_scale_checks_and_reading_refuse_the_same_scales(weight, to, like, data):
    """Of most only those of least and largest magnitude are made numbers of; reading looks at each."""
    (result,) = quantized_view(weight.tree).readable.values()
    scales = weight.arrays[data.draw(st.sampled_from([scale.name for scale in result.scales]))]
    carriers = scales.reshape(-1).view(f"u{scales.dtype.itemsize}")
    locations = st.integers(0, carriers.size - 1)
    patterns = st.integers(0, 2 ** (8 * scales.dtype.itemsize) - 1)
    for location, pattern in data.draw(st.dictionaries(locations, patterns, max_size=2)).items():
        carriers[location] = pattern
    array = logical_array(weight, to, like)
    try:
        array.read()
        is_refused = False
    except DamagedScalesError:
        is_refused = True
    declared = value_faults(by_name(weight.tree.arrays), [result], DTYPES[to], like)
    assert bool(declared.damaged) == is_refused
    decoding = next(item for item in distinct_arrays([array]) if isinstance(item, Dequantized)).decoding
    factors = decoding.factors([carriers_of(weight.arrays[scale.name]) for scale in result.scales])
    first = result.scales[0]
    cells = (at // length for at, length in zip(np.indices(result.shape), first.block, strict=True))
    of_each = factors.reshape(first.shape)[*cells]
    numbers = weight.product.swapaxes(-1, -2) if result.is_swapped else weight.product
    vanishing = (of_each == 0) & (numbers.reshape(result.shape) != 0)
    assert bool(declared.not_positive) == bool((factors < 0).any() or vanishing.any())


ZEROS = {
    "fp8": lambda: built.fp8_blocks(np.random.default_rng(0), (9, 20), (4, 8)),
    "nvfp4": lambda: built.nvfp4(np.random.default_rng(0), 6, 3, divides=True),
    "int4": lambda: built.int4(np.random.default_rng(0), 6, 4, 16, shifted=True),
}


@pytest.mark.parametrize("scheme", ZEROS)
def test_zero_scale_is_allowed_for_zero_codes(scheme):
    """Other numbers vanish with it, which is told."""
    weight = ZEROS[scheme]()
    (result,) = quantized_view(weight.tree).readable.values()
    scale, codes = result.scales[0], weight.arrays[result.codes]
    weight.arrays[scale.name][1, -1] = 0
    rows = slice(scale.block[0], 2 * scale.block[0])
    at = rows, slice((scale.shape[1] - 1) * scale.block[1] // result.packed, None)
    zero = weight.arrays[result.zero_points][0, -1] >> 4 & 15 if result.zero_points else 0
    bytes_ = np.full_like(codes[at].view(np.uint8), int(zero) * 0x11)
    codes[at] = bytes_.view(codes.dtype)
    assert value_faults(by_name(weight.tree.arrays), [result]).not_positive == ()
    bytes_[-1, -1] ^= 0x20
    codes[at] = bytes_.view(codes.dtype)
    assert value_faults(by_name(weight.tree.arrays), [result]).not_positive == (f"{result.scale_names}: 0",)
    (told,) = (remark for remark in Dequantize()(weight.tree).notes.remarks if "zero or negative" in remark)
    assert f"({result.scale_names}: 0)" in told


def test_zero_scale_is_reported_next_to_nan_scale():
    weight = built.fp8_blocks(np.random.default_rng(0), (8, 8), (4, 4))
    weight.arrays[f"{weight.name}_scale_inv"][:] = [[0, np.nan], [1, 1]]
    (result,) = quantized_view(weight.tree).readable.values()
    declared = value_faults(by_name(weight.tree.arrays), [result])
    assert declared.damaged and declared.not_positive == (f"{result.scale_names}: 0",)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_divisor_is_refused(value):
    weight = built.nvfp4(np.random.default_rng(0), 4, 2, divides=True)
    weight.arrays[f"{weight.name}_global_scale"][0] = value
    with pytest.raises(DamagedScalesError):
        logical_array(weight).read()


@pytest.mark.parametrize("value", [0, -1])
def test_scalar_scale_is_checked(value):
    weight = built.fp8_tensor(np.random.default_rng(0), (4, 6))
    name = f"{weight.name}_scale"
    arrays = {**weight.arrays, name: np.asarray(value, np.float32)}
    tree = built.tree_of(arrays, {"quantization_config": weight.config})
    assert arrays[name].shape == ()
    declared = value_faults(by_name(tree.arrays), quantized_view(tree).readable.values())
    assert declared.not_positive == (f"{name}: {value}",)


@pytest.mark.parametrize(
    ("method", "shape", "scales"), [("fp8", (4, 6), ()), ("fbgemm_fp8", (2, 4, 6), (2, 1, 6))]
)
def test_integer_exponents_without_blocks_are_read(method, shape, scales):
    codes = np.ones(shape, ml_dtypes.float8_e4m3fn)
    arrays = {"w.weight": codes, "w.weight_scale": np.full(scales, 130, np.uint8)}
    declared = {"quant_method": method, "scale_fmt": "ue8m0", "weight_block_size": None}
    array = (
        quantized_view(built.tree_of(arrays, {"quantization_config": declared}))
        .dequantized()
        .tree.arrays["w.weight",]
    )
    assert (array.read() == 8).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm.weight_scale_inv", np.ones(1, np.float32)),
        ("m.up_proj.weight_global_scale", np.ones(1, np.int32)),
    ],
)
def test_misplaced_scales_and_integers_are_faults(name, value):
    rng = np.random.default_rng(0)
    is_of_norm = name.startswith("norm")
    weight = built.fp8_blocks(rng, (4, 4), (2, 2)) if is_of_norm else built.nvfp4(rng, 4, 2, divides=True)
    arrays = {**weight.arrays, "norm.weight": np.ones(4, ml_dtypes.float8_e4m3fn), name: value}
    result = quantized_view(built.tree_of(arrays, {"quantization_config": weight.config}))
    assert any(fault.startswith(f"{name}: ") for fault in result.faults)


def test_scales_with_equal_names_are_all_checked():
    """Zero points are of the weight that they are taken from; averaged models have the same names."""
    rng = np.random.default_rng(0)
    damaged, whole = built.int4(rng, 16, 4, 16, shifted=True), built.int4(rng, 16, 4, 16, shifted=True)
    damaged.arrays[f"{damaged.name}_scale"][0, 0] = np.nan
    for order in ((damaged, whole), (whole, damaged)):
        named = list_all_damaged(DamagedScalesError("one"), [logical_array(item) for item in order])
        assert str(named).count(f"{damaged.name}_scale: nan") == 1
    undamaged = DamagedScalesError("changed since")
    assert list_all_damaged(undamaged, [logical_array(whole)]) is undamaged


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_shared_scale_check_accounts_for_zero_points(order):
    """Numbers are 15 apart at most then, else 8 from zero: 5000 times that is beyond float16, and is not."""
    arrays, groups = {}, {}
    for shifted in order:
        weight = built.int4(np.random.default_rng(0), 16, 4, 16, shifted=shifted)
        weight.arrays[f"{weight.name}_scale"][...] = 5000
        arrays |= {f"{shifted}.{name}": array for name, array in weight.arrays.items()}
        groups[str(shifted)] = weight.config["config_groups"]["group_0"]
    tree = built.tree_of(arrays, {"quantization_config": {**weight.config, "config_groups": groups}})
    (declared,) = value_faults(
        by_name(tree.arrays), quantized_view(tree).readable.values(), DTYPES["float16"]
    ).damaged
    assert declared.startswith("True.")


def test_remaining_scalar_scales_are_checked():
    codes, one = DTYPES["float8_e4m3fn"], np.asarray(1, np.float32)
    scales = {"whole": one, "broken": one * np.nan}
    named = {name: stored(item, DTYPES["float32"]) for name, item in scales.items()}
    arrays = [elementwise(item, scale_check_of(item, codes, name)) for name, item in named.items()]
    assert "broken: nan" in str(list_all_damaged(DamagedScalesError("one"), arrays))


def carriers_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
