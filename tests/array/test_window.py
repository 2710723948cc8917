"""Windows, padding, repeating: any region equals the slice of the whole, and what is said of them is so."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Cast, Describer, Scratch, elementwise, pad_array, window

from ckpttools import DTYPES, ShapeError
from ckpttools.array.nodes import Elementwise, Padded, Window, repeat_elements
from ckpttools.testing.strategies import lazy_arrays, noise, regions, stored

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]
MORE = st.sampled_from((0, 0, 1, 4))


def box(draw, shape):
    """Start and shape of a box within an array; whole axes among them."""
    region = draw(regions(shape))
    return region.start, region.shape


def longer(draw, shape):
    """A shape that is as long or longer on each axis."""
    return tuple(length + draw(MORE) for length in shape)


def filled(truth, shape):
    whole = np.zeros(shape, truth.dtype)
    whole[tuple(slice(0, n) for n in truth.shape)] = truth
    return whole


def assert_reads(array, truth, data):
    """The whole and a region of it, into memory that holds something else, with scratch to the byte."""
    assert array.shape == truth.shape
    for region in (None, data.draw(regions(array.shape))):
        cut = truth if region is None else truth[region.slices]
        assert array.read(region).view(array.dtype.carrier).tobytes() == cut.tobytes()
        if region is not None:
            out = np.full(region.shape, 0x5A, array.dtype.carrier)
            array.read_into(region, out, Scratch(array.scratch_bytes))
            assert out.tobytes() == cut.tobytes()


@given(known=lazy_arrays(depth=2), data=st.data())
def test_window_equals_the_slice(known, data):
    start, shape = box(data.draw, known.truth.shape)
    truth = known.truth[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
    assert_reads(window(known.array, start, shape), truth, data)


@given(known=lazy_arrays(depth=2), data=st.data())
def test_padding_appends_zeros(known, data):
    shape = longer(data.draw, known.truth.shape)
    assert_reads(pad_array(known.array, shape), filled(known.truth, shape), data)


@given(known=lazy_arrays(depth=1), times=st.integers(1, 4), data=st.data())
def test_repeat_repeats_each_element(known, times, data):
    shape = known.truth.shape
    axis = data.draw(st.sampled_from(range(len(shape)))) if shape else None
    if axis is None or not shape[axis]:
        return
    length = data.draw(st.integers((shape[axis] - 1) * times + 1, shape[axis] * times))
    truth = np.repeat(known.truth, times, axis).take(range(length), axis)
    assert_reads(repeat_elements(known.array, axis, times, length), truth, data)
    with pytest.raises(ShapeError, match="cannot be repeated"):
        repeat_elements(known.array, axis, times, length + times)


@given(known=lazy_arrays(depth=1), data=st.data())
def test_removing_the_padding_restores_the_array(known, data):
    shape = longer(data.draw, known.truth.shape)
    array = window(pad_array(known.array, shape), (0,) * len(shape), known.truth.shape)
    assert_reads(array, known.truth, data)


@given(data=st.data())
def test_window_costs_equal_the_reads(data):
    source = stored(noise((5, 4), F32), F32)
    wide = pad_array(source, (9, 4))
    region = data.draw(regions(wide.shape))
    inside = np.zeros((9, 4), bool)
    inside[:5] = True
    count = int(inside[region.slices].sum())
    cost = wide.read_cost(region)
    assert (cost.nbytes > 0) == (cost.reads > 0) == (count > 0)
    assert cost.nbytes >= 4 * count
    assert wide.first_byte(region)[0] == (source.source.path if count else "")
    narrow = window(source, (2, 0), (3, 4))
    inner = data.draw(regions(narrow.shape))
    assert narrow.read_cost(inner) == source.read_cost(inner.shifted((2, 0)))
    assert narrow.first_byte(inner) == source.first_byte(inner.shifted((2, 0)))


def test_identity_window_returns_source():
    source = stored(noise((3, 2), F32), F32)
    assert window(source, (0, 0), (3, 2)) is source
    assert pad_array(source, (3, 2)) is source


@pytest.mark.parametrize(("start", "shape"), [((1, 0), (3, 2)), ((0, 0), (4, 2)), ((-1, 0), (2, 2))])
def test_window_beyond_the_edge_is_refused(start, shape):
    with pytest.raises(ShapeError, match="the region exceeds"):
        window(stored(noise((3, 2), F32), F32), start, shape)


@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (3,), (3, 2, 1)])
def test_padding_to_a_smaller_shape_is_refused(shape):
    with pytest.raises(ShapeError, match="cannot make an array smaller"):
        pad_array(stored(noise((3, 2), F32), F32), shape)


def test_element_functions_apply_below_windows_and_above_padding():
    """Zeros that were added are values like others: a function of them need not be zero."""
    source = stored(noise((3, 2), BF16), BF16)
    assert isinstance(elementwise(window(source, (1, 0), (2, 2)), Cast(F32)), Window)
    over = elementwise(pad_array(source, (4, 2)), Cast(F32))
    assert isinstance(over, Elementwise)
    assert isinstance(over.source, Padded)


def test_descriptions_distinguish_arrays():
    source, other = (stored(noise((4, 4), F32, seed), F32, str(seed)) for seed in (0, 1))
    arrays = [
        source,
        other,
        *(window(source, start, (2, 2)) for start in ((0, 0), (1, 0), (0, 1), (2, 2))),
        window(source, (1, 0), (3, 2)),
        window(other, (1, 0), (2, 2)),
        pad_array(source, (5, 4)),
        pad_array(source, (4, 5)),
        pad_array(other, (5, 4)),
        pad_array(window(source, (1, 0), (2, 2)), (4, 4)),
        window(pad_array(source, (5, 4)), (1, 0), (2, 2)),
    ]
    texts = [repr(fingerprinted(array)) for array in arrays]
    assert len(set(texts)) == len(texts)
    assert repr(fingerprinted(window(source, (1, 0), (2, 2)))) == texts[3]


def fingerprinted(array):
    return list(Describer().lines(array))
