"""Booleans: of the 256 values of a byte only 0 and 1 are such, and tensorstore refuses an array of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError

if TYPE_CHECKING:
    import numpy as np


def require_booleans(values: np.ndarray, dtype: DType, name: str) -> None:
    """Refuses what would be read differently by everyone.

    Args:
        values: elements as carriers of `dtype`, which may be any.
        dtype: of the array.
        name: of the array, or the file that it is in, for the message.

    Raises:
        FormatError: the array is of booleans, and a byte is neither 0 nor 1.
    """
    if dtype.kind == "bool" and values.size and (limit := int(values.max())) > 1:
        raise FormatError(
            "an array of booleans has a byte that is not a boolean",
            location=name,
            got=f"{limit}",
            expected="0 or 1 in every byte",
            hint="fetch the checkpoint again; if it was written so, write it again as uint8",
        )
