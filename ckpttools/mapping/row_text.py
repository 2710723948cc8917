"""Parse the text of a row; errors name the column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import MappingError, did_you_mean
from ckpttools.mapping.axes import Side, parse_side
from ckpttools.mapping.factor import Factor
from ckpttools.mapping.keys import Key, parse_key
from ckpttools.mapping.values import Exactness, Fill, Scale, Shift, ValueOp, Whole

OPS = ("scale", "shift", "fill", "factor", "whole")
_FORMS = "scale AXIS POWER [DTYPE], shift AMOUNT, fill NUMBER, factor or whole DTYPE DTYPE"
_WHOLE = [dtype.name for dtype in DTYPES.values() if dtype.kind in ("int", "uint") and dtype.bits >= 8]


def parse_op(text: str) -> ValueOp:
    """Parse an op; the inverse of `op_text`.

    Raises:
        MappingError: The text is not an op.
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
            return Whole(_integer_type(left, text), _integer_type(right, text))
    raise MappingError("not a value op", got=repr(text), expected=_FORMS)


def op_text(op: ValueOp) -> str:
    """Format an op.

    Raises:
        MappingError: The op has no text form, such as an op from a plug-in.
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


def op_to_json(op: ValueOp) -> str:
    """Format an op as text, or as its Python repr if it has no text form."""
    try:
        return op_text(op)
    except MappingError:
        return repr(op)


def exactness_of(op: ValueOp) -> Exactness:
    """Return whether the reverse conversion restores the bits of bfloat16 values, for all model sizes."""
    match op:
        case Scale():
            return Exactness(False, f"times {_factor(op)}: exact if that is a power of two, else rounded")
        case Shift():
            return op.bound({}).exactness(DTYPES["bfloat16"])
        case Fill():
            return op.bound({}).exactness(DTYPES["float32"])
        case Whole():
            return op.bound({}).exactness(DTYPES[op.right])
    return Exactness(False, f"{op!r}: see the plan of the conversion")


def _factor(scale: Scale) -> str:
    known = {0.5: f"sqrt({scale.axis})", -0.5: f"1/sqrt({scale.axis})"}
    rounded = "" if scale.factor_dtype == "float32" else f" in {scale.factor_dtype}"
    return known.get(scale.power, f"{scale.axis}**{_number_text(scale.power)}") + rounded


def _number_text(number: float) -> str:
    """Return the shortest text that parses back to the number."""
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
    return _one_of(floats, name, text, "not a floating-point dtype")


def _integer_type(name: str, text: str) -> str:
    return _one_of(_WHOLE, name, text, "not an integer dtype")


def _one_of(known: Sequence[str], name: str, text: str, message: str) -> str:
    if name in known:
        return name
    raise MappingError(message, location=text, got=name, expected=_FORMS, hint=did_you_mean(name, known))


ARROW = "<->"
_SIDES = f"NAME: AXES {ARROW} NAME: AXES"
_PREFIXES = f"below NAME {ARROW} NAME"
_FLAGS = ("when", "unless", "above")
_KEYWORDS = (*OPS, *_FLAGS, "below")
_HEADINGS = ("below", *_FLAGS)
EMPTY_KEYS = Key(()), Key(())


@dataclass(frozen=True, slots=True)
class _Excerpt:
    """A slice of a row's text with its position: `whole[start:end]`."""

    whole: str
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.whole[self.start : self.end]

    @property
    def masked(self) -> str:
        """Return the text with its fields masked; colons, commas and spaces in them are not separators."""
        first, *rest = self.text.split("{")
        for item in rest:
            inside, closed, after = item.partition("}")
            first += "_" * (len(inside) + 2) + after if closed else "{" + item
        return first

    def cut(self, start: int, end: int | None = None) -> _Excerpt:
        """Return a slice of this excerpt without surrounding spaces; positions count from its start."""
        part = self.text[start:end]
        first = self.start + start + len(part) - len(part.lstrip())
        return _Excerpt(self.whole, first, first + len(part.strip()))

    def parts(self, separator: str) -> Iterator[_Excerpt]:
        at = 0
        for part in self.masked.split(separator):
            yield self.cut(at, at + len(part))
            at += len(part) + len(separator)

    def wrong(self, error: MappingError) -> MappingError:
        """Return an error with the column of `got`, or of this excerpt if `got` is not in the text."""
        # For a duplicate axis, the error points to the second occurrence.
        last = max(_locations(error.raw.got, self.text), default=0) if error.raw.got else 0
        return error.at(f"column {self.start + last + 1} of {self.whole!r}")


def _locations(words: str, text: str) -> Iterator[int]:
    """Yield the positions of these words in a text, but not inside longer words."""
    for at in range(len(text)):
        around = text[at - 1 : at] + text[at + len(words) :][:1]
        within = words.isidentifier() and any(item.isalnum() or item == "_" for item in around)
        if text.startswith(words, at) and not within:
            yield at


def single_spaced(*names: str) -> str:
    """Join names with single spaces."""
    return " ".join(" ".join(names).split())


def split_rows(text: str) -> list[str]:
    """Split a text into rows, one per line, as described in `ckpttools.mapping.row.rows`."""
    rows: list[str] = []
    for line in text.split("\n"):
        words = line.split()
        if words and words[0] == ARROW:
            rows[-1:] = [single_spaced(*rows[-1:], line)]
        elif words and words[0] != "#":
            rows.append(single_spaced(line))
    return rows


def aligned_texts(texts: Sequence[str], columns: int) -> list[str]:
    """Format rows with aligned columns: name, axes, and the other name."""
    cells = [_cells(text) for text in texts]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:columns]
    padded = [[*map(str.ljust, cell, widths), *cell[len(widths) :]] for cell in cells]
    return [" ".join(filter(None, item)).rstrip() for item in padded]


def _cells(text: str) -> tuple[str, str, str, str]:
    left, left_axes, right, rest = (piece.text for piece in _columns(text))
    return f"{left}:", left_axes, f"{ARROW} {right}:", rest


def read_row(text: str) -> tuple[Side, Side, dict[str, Any]]:
    """Parse the two sides of a row and its options, which are attributes of `Row` by name.

    Raises:
        MappingError: The text is invalid. The location is the column and the text with single spaces.
    """
    left, left_axes, right, rest = _columns(text)
    right_axes, *clauses = rest.parts(",")
    return _side(left, left_axes), _side(right, right_axes), dict(_clauses(clauses, (*OPS, *_FLAGS)))


def _columns(text: str) -> tuple[_Excerpt, _Excerpt, _Excerpt, _Excerpt]:
    """Split a row into the first name, its axes, the second name, and the rest."""
    normalized = single_spaced(text)
    sides = list(_Excerpt(normalized, 0, len(normalized)).parts(f" {ARROW} "))
    if len(sides) != 2:
        number = "one side" if len(sides) == 1 else f"{len(sides)} sides"
        raise sides[-1].wrong(MappingError("a row has two sides", got=number, expected=_SIDES))
    return (*_name(sides[0]), *_name(sides[1]))


def _name(side: _Excerpt) -> tuple[_Excerpt, _Excerpt]:
    """Return the name at the start of a side, and the text after its colon."""
    colon = _colon(side.masked)
    if colon is None:
        raise side.wrong(MappingError("a name has no colon after it", got=side.text, expected=_SIDES))
    name = side.cut(0, colon)
    if " " in name.masked:
        raise name.wrong(MappingError("a name contains a space", got=name.text, expected=_SIDES))
    return name, side.cut(colon + 1)


def _colon(text: str) -> int | None:
    """Find the colon before a space, or before a scalar's comma or end; other colons belong to the name."""
    ends = (
        at for at, item in enumerate(text) if item == ":" and not text[at + 1 :].removeprefix(",")[:1].strip()
    )
    return next(ends, None)


def _side(name: _Excerpt, axes: _Excerpt) -> Side:
    with _add_position(replace(name, end=axes.end)):
        return parse_side(name.text, axes.text)


def is_heading(text: str) -> bool:
    """Return whether a line is a heading rather than a row."""
    return text.split(" ")[0] in _HEADINGS


def read_heading(text: str) -> dict[str, Any]:
    """Parse a heading into attributes of `Row` for the rows below it, and the prefixes of both names.

    Raises:
        MappingError: As for `read_row`.
    """
    return dict(_clauses(_Excerpt(text, 0, len(text)).parts(","), _HEADINGS))


def _clauses(clauses: Iterable[_Excerpt], known: Sequence[str]) -> Iterator[tuple[str, Any]]:
    kinds: set[str] = set()
    for clause in clauses:
        word = clause.text.partition(" ")[0]
        if word not in known:
            raise clause.wrong(_unknown(word, known))
        kind = "op" if word in OPS else word
        if kind in kinds:
            raise clause.wrong(MappingError(f"`{kind}` occurs twice", got=clause.text))
        kinds.add(kind)
        reader = {"op": _op, "below": _prefixes}.get(kind, _names)
        yield kind, reader(clause)


def _unknown(word: str, known: Sequence[str]) -> MappingError:
    return MappingError(
        "not a keyword of rows",
        got=word,
        expected="one of " + ", ".join(known),
        hint=did_you_mean(word, known),
    )


def _op(clause: _Excerpt) -> ValueOp:
    with _add_position(clause):
        return parse_op(clause.text)


def _prefixes(clause: _Excerpt) -> tuple[Key, Key]:
    sides = clause.cut(len("below")).parts(ARROW)
    prefixes = list(sides)
    if len(prefixes) != 2 or any(" " in prefix.masked for prefix in prefixes):
        raise clause.wrong(MappingError("`below` takes two prefixes", got=clause.text, expected=_PREFIXES))
    with _add_position(clause):
        left, right = (parse_key(prefix.text) for prefix in prefixes)
    return left, right


def _names(clause: _Excerpt) -> str:
    _, *names = clause.text.split(" ")
    words = [name for name in names if name in _KEYWORDS]
    if words or not names:
        message = "a comma is missing before a word" if words else "a name is missing after a word"
        raise clause.wrong(MappingError(message, got=words[0] if words else clause.text))
    return " ".join(names)


@contextmanager
def _add_position(piece: _Excerpt) -> Iterator[None]:
    """Add the position in the row's text to errors raised in the block."""
    try:
        yield
    except MappingError as error:
        raise piece.wrong(error) from None
