"""Rows tried on arrays without content: to the left in every layout, and back again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import CheckpointError
from ckpttools.core.region import Shape
from ckpttools.family_check.definition import LAYOUTS
from ckpttools.family_check.findings import FamilyFinding, TriedLayout, findings_of, hints_of
from ckpttools.mapping.axes import Side
from ckpttools.mapping.fill import Fill
from ckpttools.mapping.row import Row
from ckpttools.mapping.table import Table

Bind = Callable[[int | None], Table]
"""Makes the table for layers stacked on an axis, or for unscanned ones; all of its flags are known."""
Shapes = Mapping[str, Shape]

_F32 = DTYPES["float32"]


@dataclass(frozen=True)
class RoundTrip:
    """What came of it.

    Attributes:
        findings: what is wrong, in any layout.
        hints: what may explain some of it.
        num_arrays: arrays on the right.
        layouts: those in which everything came back.
    """

    findings: tuple[FamilyFinding, ...] = ()
    hints: tuple[str, ...] = ()
    num_arrays: int = 0
    layouts: tuple[TriedLayout, ...] = ()


def round_trip(bind: Bind, lengths: Mapping[str, int], right: Shapes | None = None) -> RoundTrip:
    """Takes right arrays to the left and back, in every layout.

    Args:
        bind: makes the table of a layout.
        lengths: of every axis.
        right: right keys and shapes; None for those of the rows.
    """
    rows = present_rows(bind(None), lengths)
    findings = list(_made_twice([(row.right, row.left) for row in rows], lengths))
    stored = [row.right for row in rows if not isinstance(row.op, Fill)]
    right = _shapes(stored, lengths) if right is None else right
    hints: list[str] = []
    layouts: list[TriedLayout] = []
    # Where two rows make one key, all else follows from that.
    ambiguous = bool(findings)
    for name, scan_axis in LAYOUTS.items():
        try:
            table = bind(scan_axis)
        except CheckpointError:
            # Unstacked layers were bound above, so MaxText does not scan this number of layers.
            continue
        rows = present_rows(table, lengths)
        left = _shapes([row.left for row in rows], lengths)
        result = list(_made_twice([(row.left, row.right) for row in rows], lengths))
        if not (result or ambiguous):
            try:
                result += _there_and_back(table, right, left)
            except CheckpointError as error:
                result += findings_of(error)
                hints += hints_of(error)
        findings += result
        if not (result or ambiguous):
            layouts.append(TriedLayout(name, len(left)))
    return RoundTrip(tuple(dict.fromkeys(findings)), tuple(dict.fromkeys(hints)), len(right), tuple(layouts))


def present_rows(table: Table, lengths: Mapping[str, int]) -> list[Row]:
    """The rows that a model has, without those of an axis that is empty or of unknown length."""
    return [
        row
        for row in filter(table.has, table.rows)
        if all(lengths.get(axis) for axis in row.left.axes + row.right.axes)
        and (row.left.key.needs | row.right.key.needs) <= lengths.keys()
    ]


def _shapes(sides: Iterable[Side], lengths: Mapping[str, int]) -> dict[str, Shape]:
    """Every key of the sides, with the shape of its array."""
    return {key: side.shape(lengths) for side in sides for key in side.keys(lengths)}


def _made_twice(sides: Sequence[tuple[Side, Side]], lengths: Mapping[str, int]) -> Iterator[FamilyFinding]:
    """Keys that two rows make, or two coordinates of one: pairs are the side that is made and the other."""
    makers: dict[str, int] = {}
    for number, (side, other) in enumerate(sides):
        if side.join is not None and side.join.number > 0:
            # A later part of an array that the row of the first one makes.
            continue
        for key in side.keys(lengths):
            if key not in makers:
                makers[key] = number
            elif makers[key] == number:
                yield FamilyFinding("key", key, f"made twice by {side.key}, at two coordinates")
            else:
                first = sides[makers[key]][1].key
                yield FamilyFinding("key", key, f"made twice, from {first} and from {other.key}")


def _there_and_back(table: Table, right: Shapes, left: Shapes) -> Iterator[FamilyFinding]:
    """Compares what comes out on the left with what its sides say, and what comes back with what went in."""
    # Rows that change values want numbers that can be changed, and give float32 back as float32.
    there = table.to_left({key: Constant(shape, _F32, bytes(4)) for key, shape in right.items()})
    yield from _differing(there.arrays, left)
    kept = {key: shape for key, shape in right.items() if key not in there.dropped}
    yield from _differing(table.to_right(there.arrays).arrays, kept)


def _differing(arrays: Mapping[str, LazyArray], expected: Shapes) -> Iterator[FamilyFinding]:
    yield from (FamilyFinding("missing", key, "no row makes it") for key in expected if key not in arrays)
    for key, array in arrays.items():
        if key not in expected:
            yield FamilyFinding("not expected", key, "no row has this key")
        elif array.shape != expected[key] or (array.dtype.is_float and array.dtype != _F32):
            built = f"{array.dtype}{list(array.shape)}"
            yield FamilyFinding("shape", key, f"got {built}, expected {_F32}{list(expected[key])}")
