"""Element types: their spelling in each format, and the values they represent.

numpy and ml_dtypes are imported only when an array is created, so inspecting the structure of a checkpoint
needs neither.
"""

from __future__ import annotations

from functools import cached_property
from math import frexp
from typing import TYPE_CHECKING, NamedTuple

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UnknownNameError, similar_names

if TYPE_CHECKING:
    import numpy as np


class Float(NamedTuple):
    """Layout of a floating-point type.

    Attributes:
        mantissa: Number of mantissa bits.
        infinity, nan, zero, sign: Whether the type has them.
        in_order: Whether magnitudes are ordered like their bit patterns, with infinity and NaN last.
    """

    mantissa: int
    infinity: bool = True
    nan: bool = True
    zero: bool = True
    sign: bool = True
    in_order: bool = True


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: Name in numpy or ml_dtypes, or the name in ckpttools if neither has the type.
        bits: Bits of one element as packed by safetensors; 4 and 6 do not fill a byte.
        kind: "float", "int", "uint", "bool" or "complex".
        safetensors: Code in a safetensors header; None if the format lacks the type.
        zarr3: `data_type` in zarr.json as written by tensorstore; None if tensorstore lacks the type.
        layout: Layout of a floating-point type, or of the parts of a complex type; None for other types.
        value_bits: Number of bits that encode the value; None if all bits do.
    """

    name: str
    bits: int
    kind: str
    safetensors: str | None = None
    zarr3: str | None = None
    layout: Float | None = None
    value_bits: int | None = None

    @cached_property
    def numpy(self) -> np.dtype[np.generic]:
        """The in-memory dtype, little-endian; sub-byte types take one byte per element."""
        import numpy as np

        if not hasattr(np, self.name):
            import ml_dtypes  # noqa: F401  (importing it registers its types under their names)
        dtype: np.dtype[np.generic] = np.dtype(self.name)
        return dtype

    @cached_property
    def carrier(self) -> np.dtype[np.generic]:
        """The unsigned numpy dtype of the same size, used to move elements without interpreting them."""
        import numpy as np

        return np.dtype({1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}[self.itemsize])

    def __repr__(self) -> str:
        """Return an expression for the dtype; plans are fingerprinted by their repr."""
        return f"DTYPES[{self.name!r}]"

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element in memory and in zarr; sub-byte types take a full byte."""
        return max(1, self.bits // 8)

    @property
    def number_bytes(self) -> int:
        """Return the size of an element in bytes, or of each part of a complex element."""
        return self.itemsize // 2 if self.kind == "complex" else self.itemsize

    @property
    def zarr2(self) -> str | None:
        """`dtype` in a `.zarray`: `<f4`, `|b1`, `bfloat16`; None if zarr v2 and tensorstore lack the type.

        NumPy's own types are spelled as in NumPy's array interface. The others are not part of zarr v2;
        tensorstore (0.1.86), and therefore Orbax, writes their plain names.
        """
        if self.name.startswith("float6_"):
            return None
        if self.value_bits not in (None, 1) or self.name == "bfloat16" or "_" in self.name:
            return self.name
        return f"{'|' if self.itemsize == 1 else '<'}{_LETTERS[self.kind]}{self.itemsize}"

    @property
    def packed(self) -> bool:
        """Whether safetensors stores several elements in one byte."""
        return self.bits % 8 != 0

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_whole(self) -> bool:
        """Return whether all values are integers or booleans."""
        return self.kind in ("int", "uint", "bool")

    @property
    def limits(self) -> tuple[int, int]:
        """Return the smallest and the largest value of an integer type."""
        bits = self.value_bits or self.bits
        return (-(1 << bits - 1), (1 << bits - 1) - 1) if self.kind == "int" else (0, (1 << bits) - 1)

    @property
    def digits(self) -> int:
        """Return the significant binary digits of a floating-point type; 0 for others."""
        return self.layout.mantissa + 1 if self.layout else 0

    @property
    def epsilon(self) -> float:
        """Return the distance from 1 to the next value; 1 for integers."""
        return 2.0**-self.layout.mantissa if self.layout else 1.0

    @property
    def is_of_weights(self) -> bool:
        """Return whether the type can represent weights, which need zero and both signs."""
        return self.is_float and self.layout is not None and self.layout.zero and self.layout.sign

    @property
    def has_infinity(self) -> bool:
        return self.layout is not None and self.layout.infinity

    @property
    def has_nan(self) -> bool:
        return self.layout is not None and self.layout.nan

    @property
    def has_zero(self) -> bool:
        return self.layout is None or self.layout.zero

    @property
    def not_finite_from(self) -> int | None:
        """Return the first bit pattern, without sign, of infinity or NaN; None if they are not last."""
        layout = self.layout
        if not (self.is_float and layout and layout.in_order and layout.sign and layout.nan):
            return None
        limit = (1 << self.bits - 1) - 1
        return limit & -1 << layout.mantissa if layout.infinity else limit

    @property
    def normal_from(self) -> int:
        """Return the bit pattern of the smallest normal value."""
        return 1 << self.layout.mantissa if self.layout else 0

    @cached_property
    def smallest_normal(self) -> float:
        """Return the smallest normal magnitude; 0 for types without subnormal values."""
        if not self.layout:
            return 0.0
        from ml_dtypes import finfo

        return float(finfo(self.numpy).smallest_normal)  # type: ignore[no-untyped-call]

    @cached_property
    def beyond_range(self) -> float:
        """Return the smallest magnitude that does not round to a finite value."""
        from ml_dtypes import finfo

        limit = float(finfo(self.numpy).max)  # type: ignore[no-untyped-call]
        return limit + 2.0 ** (frexp(limit)[1] - 2) * self.epsilon

    def __str__(self) -> str:
        return self.name


_FN = Float(3, infinity=False)
_FNUZ = Float(3, infinity=False, in_order=False)
_E5M2FNUZ = Float(2, infinity=False, in_order=False)
_E8M0 = Float(0, infinity=False, zero=False, sign=False)
# Spellings: safetensors from the Dtype enum of its Rust crate (0.8), zarr3 from tensorstore 0.1.86.
# Layouts: OCP 8-bit floating point (E4M3, E5M2) and microscaling formats (the others), ml_dtypes.
_TABLE = (
    DType("bool", 8, "bool", "BOOL", "bool", value_bits=1),
    DType("int4", 8, "int", None, "int4", value_bits=4),
    DType("int2", 8, "int", None, "int2", value_bits=2),
    DType("int8", 8, "int", "I8", "int8"),
    DType("int16", 16, "int", "I16", "int16"),
    DType("int32", 32, "int", "I32", "int32"),
    DType("int64", 64, "int", "I64", "int64"),
    DType("uint8", 8, "uint", "U8", "uint8"),
    DType("uint16", 16, "uint", "U16", "uint16"),
    DType("uint32", 32, "uint", "U32", "uint32"),
    DType("uint64", 64, "uint", "U64", "uint64"),
    DType("float4_e2m1fn", 4, "float", "F4", "float4_e2m1fn", layout=Float(1, infinity=False, nan=False)),
    DType("float6_e2m3fn", 6, "float", "F6_E2M3", None, layout=Float(3, infinity=False, nan=False)),
    DType("float6_e3m2fn", 6, "float", "F6_E3M2", None, layout=Float(2, infinity=False, nan=False)),
    DType("float8_e3m4", 8, "float", None, "float8_e3m4", layout=Float(4)),
    DType("float8_e4m3fn", 8, "float", "F8_E4M3", "float8_e4m3fn", layout=_FN),
    DType("float8_e4m3fnuz", 8, "float", "F8_E4M3FNUZ", "float8_e4m3fnuz", layout=_FNUZ),
    DType("float8_e4m3b11fnuz", 8, "float", None, "float8_e4m3b11fnuz", layout=_FNUZ),
    DType("float8_e5m2", 8, "float", "F8_E5M2", "float8_e5m2", layout=Float(2)),
    DType("float8_e5m2fnuz", 8, "float", "F8_E5M2FNUZ", "float8_e5m2fnuz", layout=_E5M2FNUZ),
    DType("float8_e8m0fnu", 8, "float", "F8_E8M0", "float8_e8m0fnu", layout=_E8M0),
    DType("float16", 16, "float", "F16", "float16", layout=Float(10)),
    DType("bfloat16", 16, "float", "BF16", "bfloat16", layout=Float(7)),
    DType("float32", 32, "float", "F32", "float32", layout=Float(23)),
    DType("float64", 64, "float", "F64", "float64", layout=Float(52)),
    DType("complex64", 64, "complex", "C64", "complex64", layout=Float(23)),
    DType("complex128", 128, "complex", None, "complex128", layout=Float(52)),
)
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _TABLE}
_LETTERS = {"bool": "b", "int": "i", "uint": "u", "float": "f", "complex": "c"}
_BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}
_BY_ZARR3 = {dtype.zarr3: dtype for dtype in _TABLE if dtype.zarr3}
_BY_ZARR2 = {dtype.zarr2[1:]: dtype for dtype in _TABLE if dtype.zarr2 and dtype.zarr2[0] in "<|"}
# Names in PyTorch, vLLM and safetensors; `fp8` is E4M3 in vLLM.
_SHORT = {
    "bf16": "bfloat16",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    **{f"{prefix}{bits}": f"float{bits}" for prefix in ("f", "fp") for bits in (16, 32, 64)},
    **dict.fromkeys(("fp8", "e4m3", "fp8_e4m3"), "float8_e4m3fn"),
    **dict.fromkeys(("e5m2", "fp8_e5m2"), "float8_e5m2"),
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def parse_dtype(text: str | DType) -> DType:
    """Parse a dtype name: numpy's, with a `torch.` prefix, or short such as `bf16` and `fp32`.

    A `DType` is returned unchanged.

    Raises:
        UnknownNameError: The dtype does not exist. The message suggests a similar name or lists all names.
    """
    if isinstance(text, DType):
        return text
    name = text.removeprefix("torch.").lower()
    name = _SHORT.get(name, name)
    if name in DTYPES:
        return DTYPES[name]
    full_name = f"float{name[2:]}" if name.startswith("fp") else name
    near = similar_names(full_name, DTYPES, 1)
    if near and (full_name.isalpha() or not near[0].startswith(full_name)):
        # "float8" is the start of seven names, not a misspelling of float64, and "int" of several.
        near = [dtype for dtype in DTYPES if dtype.startswith(full_name)] or near
    raise UnknownNameError(
        f"unknown dtype {text!r}",
        expected=None if len(near) == 1 else f"one of {', '.join(near or DTYPES)}",
        hint=f"did you mean {near[0]}?" if len(near) == 1 else None,
    )


def dtype_like(value: object) -> DType | None:
    """Return the `DType` of a NumPy, ml_dtypes, JAX or torch dtype or scalar type; None otherwise."""
    if type(value).__module__ == "torch":
        return DTYPES.get(str(value).removeprefix("torch."))
    import numpy as np

    # Python's `float` would be float64, which is rarely intended; numpy treats its own float64 as equal.
    is_of_python = isinstance(value, type) and value in (bool, int, float, complex)
    if is_of_python or not isinstance(value, type | np.dtype):
        return None
    try:
        return DTYPES.get(np.dtype(value).name)
    except TypeError:
        return None


def from_safetensors(code: str) -> DType | None:
    """Return the dtype of a safetensors header code such as `BF16`, or None."""
    return _BY_SAFETENSORS.get(code)


def from_zarr3(name: str) -> DType | None:
    """Return the dtype of a zarr.json `data_type` that tensorstore writes, or None."""
    return _BY_ZARR3.get(name)


def from_zarr2(name: str) -> DType | None:
    """Return the dtype of a `.zarray` in NumPy's (`<f4`) or tensorstore's spelling, or None."""
    return _BY_ZARR2.get(name[1:]) if name[:1] in ("<", ">", "|") else DTYPES.get(name)
