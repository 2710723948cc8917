"""Value ops as text, for files and listings: `scale embed 0.5 bfloat16`, `shift 1`, `whole int32 int64`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import MappingError, did_you_mean
from ckpttools.mapping.factor import Factor
from ckpttools.mapping.fill import Fill
from ckpttools.mapping.values import Exactness, Scale, Shift, ValueOp
from ckpttools.mapping.whole_numbers import Whole

OPS = ("scale", "shift", "fill", "factor", "whole")
_FORMS = "scale AXIS POWER [DTYPE], shift AMOUNT, fill NUMBER, factor or whole DTYPE DTYPE"
_WHOLE = [dtype.name for dtype in DTYPES.values() if dtype.kind in ("int", "uint") and dtype.bits >= 8]


def parse_op(text: str) -> ValueOp:
    """The op that a text describes; the inverse of `op_text`.

    Raises:
        MappingError: it describes none.
    """
    match text.split():
        case ["scale", axis, power] if axis.isidentifier():
            return Scale(axis, _number(power, text))
        case ["scale", axis, power, dtype] if axis.isidentifier():
            return Scale(axis, _number(power, text), _float_type(dtype, text))
        case ["shift", amount]:
            return Shift(_number(amount, text))
        case ["fill", number]:
            return Fill(_number(number, text))
        case ["factor"]:
            return Factor()
        case ["whole", left, right]:
            return Whole(_whole_type(left, text), _whole_type(right, text))
    raise MappingError("not a value op", got=repr(text), expected=_FORMS)


def op_text(op: ValueOp) -> str:
    """An op as text.

    Raises:
        MappingError: an op that has no text, as those of plug-ins.
    """
    match op:
        case Scale(axis=axis, power=power, factor_dtype="float32"):
            return f"scale {axis} {_number_text(power)}"
        case Scale(axis=axis, power=power, factor_dtype=dtype):
            return f"scale {axis} {_number_text(power)} {dtype}"
        case Shift(amount=amount):
            return f"shift {_number_text(amount)}"
        case Factor():
            return "factor"
        case Fill(number=number):
            return f"fill {_number_text(number)}"
        case Whole(left=left, right=right):
            return f"whole {left} {right}"
    raise MappingError("this value op cannot be written as text", got=repr(op), expected=_FORMS)


def op_said(op: ValueOp) -> str:
    """An op as text, or as Python says it."""
    try:
        return op_text(op)
    except MappingError:
        return repr(op)


def exactness_of(op: ValueOp) -> Exactness:
    """Whether the way back gives bfloat16 values' bits, whatever the sizes of the model."""
    match op:
        case Scale():
            return Exactness(False, f"times {_factor(op)}: exact where that is a power of two, else rounded")
        case Shift():
            return op.bound({}).exactness(DTYPES["bfloat16"])
        case Fill():
            return op.bound({}).exactness(DTYPES["float32"])
        case Whole():
            return op.bound({}).exactness(DTYPES[op.right])
    return Exactness(False, f"{op!r}: as the plan of a conversion says")


def _factor(scale: Scale) -> str:
    known = {0.5: f"sqrt({scale.axis})", -0.5: f"1/sqrt({scale.axis})"}
    rounded = "" if scale.factor_dtype == "float32" else f" in {scale.factor_dtype}"
    return known.get(scale.power, f"{scale.axis}**{_number_text(scale.power)}") + rounded


def _number_text(number: float) -> str:
    """The shortest text that gives the number back."""
    return repr(float(number)).removesuffix(".0")


def _number(word: str, text: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise MappingError("not a number", location=text, got=word, expected=_FORMS)
    return number


def _float_type(name: str, text: str) -> str:
    floats = [dtype.name for dtype in DTYPES.values() if dtype.is_float]
    return _one_of(floats, name, text, "not a floating-point type")


def _whole_type(name: str, text: str) -> str:
    return _one_of(_WHOLE, name, text, "not a type of whole numbers")


def _one_of(known: Sequence[str], name: str, text: str, message: str) -> str:
    if name in known:
        return name
    raise MappingError(message, location=text, got=name, expected=_FORMS, hint=did_you_mean(name, known))
