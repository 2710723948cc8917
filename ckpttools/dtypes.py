"""Element types, each with every spelling the formats use. One table; no other file spells a dtype.

numpy and ml_dtypes are imported only when an array is really made, so that looking at a checkpoint's
structure needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ckpttools.errors import UnknownNameError, near_names

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes:
        name: our name, which is numpy's or ml_dtypes' where they have the type.
        bits: bits of one element as safetensors packs it (4 and 6 are not whole bytes).
        kind: "float", "int", "uint", "bool" or "complex".
        safetensors: spelling in a safetensors header, or None where the format lacks the type.
        zarr3: `data_type` in zarr.json as tensorstore spells it, or None where it lacks the type.
    """

    name: str
    bits: int
    kind: str
    safetensors: str | None = None
    zarr3: str | None = None

    @cached_property
    def numpy(self) -> np.dtype[np.generic]:
        """The in-memory dtype, little-endian; sub-byte types take one byte an element."""
        import numpy as np

        if not hasattr(np, self.name):
            import ml_dtypes  # noqa: F401  (importing it registers its types under their names)
        dtype: np.dtype[np.generic] = np.dtype(self.name)
        return dtype

    @cached_property
    def carrier(self) -> np.dtype[np.generic]:
        """The numpy dtype in which elements are moved without being looked at: unsigned, same size."""
        import numpy as np

        return np.dtype({1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}[self.itemsize])

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory and in zarr; sub-byte types take a whole byte."""
        return max(1, self.bits // 8)

    @property
    def packed(self) -> bool:
        """Whether safetensors stores several elements in one byte."""
        return self.bits % 8 != 0

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    def __str__(self) -> str:
        return self.name


# Spellings: safetensors from the Dtype enum of its Rust crate (0.8), zarr3 from tensorstore 0.1.86.
_TABLE = (
    DType("bool", 8, "bool", "BOOL", "bool"),
    DType("int4", 8, "int", None, "int4"),
    DType("int2", 8, "int", None, "int2"),
    DType("int8", 8, "int", "I8", "int8"),
    DType("int16", 16, "int", "I16", "int16"),
    DType("int32", 32, "int", "I32", "int32"),
    DType("int64", 64, "int", "I64", "int64"),
    DType("uint8", 8, "uint", "U8", "uint8"),
    DType("uint16", 16, "uint", "U16", "uint16"),
    DType("uint32", 32, "uint", "U32", "uint32"),
    DType("uint64", 64, "uint", "U64", "uint64"),
    DType("float4_e2m1fn", 4, "float", "F4", "float4_e2m1fn"),
    DType("float6_e2m3fn", 6, "float", "F6_E2M3", None),
    DType("float6_e3m2fn", 6, "float", "F6_E3M2", None),
    DType("float8_e3m4", 8, "float", None, "float8_e3m4"),
    DType("float8_e4m3fn", 8, "float", "F8_E4M3", "float8_e4m3fn"),
    DType("float8_e4m3fnuz", 8, "float", "F8_E4M3FNUZ", "float8_e4m3fnuz"),
    DType("float8_e4m3b11fnuz", 8, "float", None, "float8_e4m3b11fnuz"),
    DType("float8_e5m2", 8, "float", "F8_E5M2", "float8_e5m2"),
    DType("float8_e5m2fnuz", 8, "float", "F8_E5M2FNUZ", "float8_e5m2fnuz"),
    DType("float8_e8m0fnu", 8, "float", "F8_E8M0", "float8_e8m0fnu"),
    DType("float16", 16, "float", "F16", "float16"),
    DType("bfloat16", 16, "float", "BF16", "bfloat16"),
    DType("float32", 32, "float", "F32", "float32"),
    DType("float64", 64, "float", "F64", "float64"),
    DType("complex64", 64, "complex", "C64", "complex64"),
    DType("complex128", 128, "complex", None, "complex128"),
)
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _TABLE}
_BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}
_BY_ZARR3 = {dtype.zarr3: dtype for dtype in _TABLE if dtype.zarr3}
_SHORT = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
}


def parse_dtype(text: str) -> DType:
    """The dtype a user or a config means: our names, `torch.` in front of them, `bf16`, `fp32`, …

    Raises:
        UnknownNameError: no such name; says which are near and which are known.
    """
    name = text.removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name in DTYPES:
        return DTYPES[name]
    near = near_names(name, DTYPES)
    raise UnknownNameError(
        f"unknown dtype {text!r}",
        wanted=", ".join(DTYPES),
        hint=f"did you mean {near[0]}?" if near else "use one of the names above",
    )


def from_safetensors(code: str) -> DType | None:
    """The dtype of a safetensors header code such as `BF16`, or None if the format has no such code."""
    return _BY_SAFETENSORS.get(code)


def from_zarr3(name: str) -> DType | None:
    """The dtype of a zarr.json `data_type`, or None if it is not one that tensorstore writes."""
    return _BY_ZARR3.get(name)
