"""The same values in another dtype."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.dtypes import DType
from ckpttools.ir.array import LazyArray
from ckpttools.ir.nodes import elementwise
from ckpttools.mapping.values import Cast, Exactness


def cast(array: LazyArray, dtype: DType) -> LazyArray:
    """`array` in `dtype`; itself where it is that already, or holds no floating-point numbers."""
    if array.dtype == dtype or not array.dtype.is_float:
        return array
    return elementwise(array, Cast(dtype, array.dtype))


def cast_exactness(arrays: Mapping[str, LazyArray], dtype: DType) -> dict[str, Exactness]:
    """For each array that a cast to `dtype` changes, whether the way back is exact."""
    return {
        key: Cast(dtype).exactness(array.dtype)
        for key, array in arrays.items()
        if array.dtype.is_float and array.dtype != dtype
    }
