"""Normalize the arguments of users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from ckpttools.codecs.base import Codec
from ckpttools.core.dtypes import DType, parse_dtype
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.formats.zarr.chunking import GivenChunks
from ckpttools.stores.registry import LocationLike

Size = int | str
"""A number of bytes: an integer, or text such as "512MiB" and "2GB"."""
Patterns = str | Sequence[str]
"""A glob of paths, or several globs; see `ckpttools.array.patterns`."""


class Storing(TypedDict, total=False):
    """Types of the options for storing Orbax output: `ckpttools.formats.orbax.options.STORAGE`."""

    ocdbt: bool | None
    zarr3: bool | None
    compression: str | Codec | None
    chunks: str | Mapping[str, Sequence[int | None]] | GivenChunks | None
    target_data_file_size: Size | None
    reference: bool | None


def dtype_of(dtype: DType | str | None) -> DType | None:
    """Return the `DType` for a dtype or its name.

    Raises:
        UnknownNameError: No dtype has this name.
    """
    return None if dtype is None else parse_dtype(dtype)


def float_dtype_of(dtype: DType | str | None) -> DType | None:
    """Return a floating-point dtype. Integer dtypes would round weights to 0.

    Raises:
        UsageError: The dtype is not a floating-point type, or is only for scales (float8_e8m0fnu).
        UnknownNameError: No dtype has this name.
    """
    known = dtype_of(dtype)
    if known is None or known.is_of_weights:
        return known
    raise UsageError(
        "other dtypes would lose the values of weights",
        got=option("dtype", known),
        expected="a floating-point dtype, such as bfloat16",
    )


def patterns_of(patterns: Patterns) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def text_of(path: LocationLike | None) -> str | None:
    """Return a name or a path as text."""
    return None if path is None else str(path)
