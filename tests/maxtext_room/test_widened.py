"""Which of what a conversion makes is compared without rounding: what is stored so among what is not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.trees import lazy

from ckpttools.compare.align import as_wide_as

BF16, F32 = ml_dtypes.bfloat16, np.float32


def arrays(**dtypes):
    return {name: lazy(np.ones(2, dtype)) for name, dtype in dtypes.items()}


def never():
    raise AssertionError("nothing is to be made exactly")


@pytest.mark.parametrize(
    "there",
    [
        pytest.param({"a": BF16, "b": BF16}, id="none is wide"),
        pytest.param({"a": F32, "b": F32}, id="all are: the conversion was to cast them"),
        pytest.param({"a": F32}, id="all that are there are"),
        pytest.param({"b": np.int32}, id="whole numbers are not wide"),
        pytest.param({}, id="nothing is there"),
    ],
)
def test_wide_enough_arrays_are_returned_unchanged(there):
    built = arrays(a=BF16, b=BF16, c=F32)
    assert as_wide_as(arrays(**there), built, never) is built


def test_exact_arrays_are_widened():
    built, exact = arrays(a=BF16, b=BF16, c=F32, d=BF16), arrays(a=F32, b=F32, c=F32, d=F32)
    result = as_wide_as(arrays(a=F32, b=BF16, c=F32, other=F32), built, lambda: exact)
    assert result == built | {"a": exact["a"]}
