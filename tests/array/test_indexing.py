"""Lazy arrays indexed as numpy indexes: the same elements, and no more read than the box that has them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices
from support.internals import Bytes, Stored

from ckpttools import DTYPES
from ckpttools.array.lazy import parse_index

INT32 = DTYPES["int32"]


def both(shape):
    values = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    return Stored(shape, INT32, Bytes("memory", values.tobytes()), 0), values


@st.composite
def indexed(draw):
    shape = draw(array_shapes(min_dims=0, max_dims=4, max_side=5))
    return shape, draw(basic_indices(shape, allow_newaxis=False))


@given(indexed())
def test_index_gives_same_result_as_numpy(case):
    shape, index = case
    array, values = both(shape)
    assert np.array_equal(array[index], values[index])
    assert array[index].dtype == values.dtype and array[index].shape == values[index].shape


@given(indexed())
def test_index_region_is_the_smallest_box(case):
    shape, index = case
    locations = np.indices(shape).reshape((len(shape), *shape))
    region = parse_index(shape, index).region
    for axis, result in enumerate(locations):
        taken = result[index]
        if taken.size:
            assert (region.start[axis], region.stop[axis]) == (taken.min(), taken.max() + 1)
        else:
            assert region.size == 0


@pytest.mark.parametrize(
    "index, words",
    [
        (4, "out of bounds for axis 0 of length 4"),
        ((0, -4), "out of bounds for axis 1 of length 3"),
        ((0, 0, 0), "3 indices for an array of 2 axes"),
        ((..., 0, ...), "more than one ellipsis"),
        (True, "by integers, slices and ..., not by True"),
        ([0, 1], "not by"),
        (None, "not by None"),
        (1.0, "not by 1.0"),
        ("name", "not by 'name'"),
        (np.array([0, 1]), "not by array"),
        (slice(None, 1.5), "not by slice"),
        (slice(None, None, 0), "not by slice"),
    ],
)
def test_unsupported_index_is_refused(index, words):
    with pytest.raises(IndexError, match=words.replace(".", r"\.")):
        both((4, 3))[0][index]


def test_lazy_array_converts_to_numpy():
    array, values = both((4, 3))
    assert array.ndim == 2
    assert np.array_equal(np.asarray(array), values)
    assert np.asarray(array, dtype=np.float64).dtype == np.float64
    assert np.array_equal(np.stack(list(array)), values)
    assert np.array_equal(np.sum(array, axis=0), values.sum(axis=0))
    with pytest.raises(ValueError, match="no memory that numpy could share"):
        np.array(array, copy=False)
    assert np.asarray(both(())[0]) == 0
