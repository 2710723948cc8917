"""Normalize arguments as users write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from ckpttools.codecs.base import Codec
from ckpttools.core.dtypes import DType, parse_dtype
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.formats.zarr.given_chunks import GivenChunks
from ckpttools.stores.registry import LocationLike

Size = int | str
"""Bytes: an integer, or text such as "512MiB" and "2GB"."""
Patterns = str | Sequence[str]
"""A glob of paths, or several; see `ckpttools.array.patterns`."""


class Storing(TypedDict, total=False):
    """Types of the options of how Orbax stores output: `ckpttools.formats.orbax.options.STORAGE`."""

    ocdbt: bool | None
    zarr3: bool | None
    compression: str | Codec | None
    chunks: str | Mapping[str, Sequence[int | None]] | GivenChunks | None
    target_data_file_size: Size | None
    reference: bool | None


def dtype_of(dtype: DType | str | None) -> DType | None:
    """Return an element type, given itself or its name.

    Raises:
        UnknownNameError: no dtype has this name.
    """
    return None if dtype is None else parse_dtype(dtype)


def float_dtype_of(dtype: DType | str | None) -> DType | None:
    """Return a floating-point type; integer types would round weights to 0.

    Raises:
        UsageError: it is of other than floating-point numbers, or of scales (float8_e8m0fnu).
        UnknownNameError: as of `dtype_of`.
    """
    known = dtype_of(dtype)
    if known is None or known.is_of_weights:
        return known
    raise UsageError(
        "weights are floating-point numbers, and would be lost",
        got=option("dtype", known),
        expected="a dtype of floating-point numbers, such as bfloat16",
    )


def patterns_of(patterns: Patterns) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def text_of(path: LocationLike | None) -> str | None:
    """Return a name or a path as text."""
    return None if path is None else str(path)
