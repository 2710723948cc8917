"""Casts between bfloat16 and float32, by integer arithmetic or by ml_dtypes.

The casts of ml_dtypes hold the interpreter lock: 4,000 casts of 65,536 numbers take 0.12 s in one thread, but
0.25 s in each of two threads. They are used only if the process has a single thread, where they take 0.08 ns
per element to float32 and 0.41 ns back; integer arithmetic takes 0.13 and 0.54. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from threading import active_count, local
from typing import TYPE_CHECKING

from ckpttools.core.dtypes import DTYPES, DType

if TYPE_CHECKING:
    import numpy as np


def as_float32(values: np.ndarray) -> np.ndarray:
    """Convert floating-point elements of up to 32 bits to float32; return float32 arrays unchanged."""
    import numpy as np

    if values.dtype != DTYPES["bfloat16"].numpy or is_only_reference():
        return values.astype(np.float32, copy=False)
    bits = values.view(np.uint16).astype(np.uint32)
    return np.left_shift(bits, 16, out=bits).view(np.float32)


def widen(values: np.ndarray, out: np.ndarray) -> None:
    """Convert floating-point elements into `out`, a float32 or float64 array that can represent them."""
    import numpy as np

    if values.dtype == DTYPES["bfloat16"].numpy and out.dtype == np.float32:
        if is_only_reference():
            np.copyto(out, values)
            return
        bits = out.view(np.uint32)
        np.copyto(bits, values.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, as_float32(values) if values.itemsize < 4 else values, casting="same_kind")


def round_to(dtype: DType, numbers: np.ndarray, out: np.ndarray, spare: np.ndarray | None = None) -> None:
    """Write numbers into `out`, rounded to nearest, ties to even.

    Args:
        dtype: A floating-point dtype of at most 32 bits.
        numbers: The float32 numbers to round.
        out: Destination of the same shape for carriers of `dtype`, with any strides.
        spare: Temporary uint32 array of the same shape; None uses memory of the current thread.
    """
    import numpy as np

    if dtype.name == "float32":
        out[...] = numbers.view(np.uint32)
    elif dtype.name != "bfloat16" or is_only_reference() or np.isnan(np.max(numbers, initial=-np.inf)):
        np.copyto(out.view(dtype.numpy), numbers, casting="unsafe")
    else:
        # Add half a unit in the last place minus one bit, plus one bit if the last place is odd.
        bits = numbers.view(np.uint32)
        result = np.right_shift(
            bits, 16, out=reusable_buffer(bits.shape, bits.dtype) if spare is None else spare
        )
        np.bitwise_and(result, 1, out=result)
        np.add(result, 0x7FFF, out=result)
        np.add(result, bits, out=result)
        np.copyto(out, np.right_shift(result, 16, out=result), casting="unsafe")


def is_only_reference() -> bool:
    """Return whether there is only one Python thread, so that nothing waits for the interpreter lock."""
    return active_count() == 1


_BUFFERS = local()
_MAX_BUFFER_BYTES = 1 << 20


def reusable_buffer(shape: Sequence[int], dtype: np.dtype[np.generic]) -> np.ndarray:
    """Return temporary memory; a thread gets the same small buffer in each call.

    Rounding takes 2.1 ns per element with a new array, which needs new pages, and 0.5 with a reused buffer.
    """
    import numpy as np

    nbytes = prod(shape) * dtype.itemsize
    if nbytes > _MAX_BUFFER_BYTES:
        return np.empty(shape, dtype)
    if not hasattr(_BUFFERS, "spare"):
        _BUFFERS.spare = np.empty(_MAX_BUFFER_BYTES, np.uint8)
    result: np.ndarray = _BUFFERS.spare[:nbytes].view(dtype).reshape(shape)
    return result
