"""A row read one way, and what is settled of all rows before arrays are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.mapping.axes import Side
from ckpttools.mapping.fill import Fill
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.joining import part_of
from ckpttools.mapping.row import Row
from ckpttools.mapping.row_conversion import RowConversion
from ckpttools.mapping.sizes import Size
from ckpttools.mapping.values import BoundOp
from ckpttools.mapping.whole_numbers import Recoded


@dataclass(frozen=True, slots=True)
class Direction:
    """A row read one way: to the left, or back as its inverse."""

    row: Row
    inverse: bool

    @property
    def source(self) -> Side:
        return self.row.left if self.inverse else self.row.right

    @property
    def target(self) -> Side:
        return self.row.right if self.inverse else self.row.left

    @property
    def fills(self) -> bool:
        """Whether it makes arrays of which the source side has none."""
        return isinstance(self.row.op, Fill) and not self.inverse

    def conversion(self, sizes: Mapping[str, int], exact: Collection[DType] = ()) -> RowConversion:
        """The expressions that this makes; errors as `Table.to_left`.

        Args:
            sizes: lengths of axes.
            exact: the dtypes of source arrays of which nothing may be lost; none where that may be.
        """
        op = self.row.op.bound(sizes) if self.row.op else None
        if isinstance(op, Recoded):
            op = replace(op, name=str(self.target.key))
        if op and self.inverse:
            op = op.inverse()
        elif op and exact:
            op = _exact(op, self, exact)
        return RowConversion(self.source, self.target, sizes, op)

    def parts(self, arrays: Mapping[str, LazyArray], sizes: Mapping[str, int]) -> Mapping[str, LazyArray]:
        """The source arrays; where the row is of a part of them, that part."""
        if self.source.join is None:
            return arrays
        keys = [key for key in self.source.keys(sizes) if key in arrays]
        return {key: part_of(self.source, arrays[key], sizes) for key in keys}

    def dtypes(self, sizes: Mapping[str, int], arrays: Mapping[str, LazyArray]) -> list[DType]:
        """The dtypes of the source arrays, each once."""
        return list(dict.fromkeys(arrays[key].dtype for key in self.source.keys(sizes)))


@dataclass(frozen=True, slots=True)
class Settled:
    """What is known before arrays are compared with the rows.

    Attributes:
        arrays: source arrays, without those that are dropped.
        dropped: source keys that were left out on purpose.
        flags: all of them.
        directions: rows that the model has; `absent`: the others.
        sizes: axes whose length is known.
    """

    arrays: Mapping[str, LazyArray]
    dropped: tuple[str, ...]
    flags: Mapping[str, Flag]
    directions: list[Direction]
    absent: list[Direction]
    sizes: Mapping[str, Size]


def _exact(op: BoundOp, direction: Direction, dtypes: Collection[DType]) -> BoundOp:
    """The op, or the wider one that is exact.

    Raises:
        UsageError: neither is, for values of one of these dtypes.
    """
    candidates = (op, op.widened())
    result = next(
        (candidate for candidate in candidates if all(candidate.exactness(d).exact for d in dtypes)), None
    )
    if result is not None:
        return result
    lossy = next(dtype for dtype in dtypes if not op.widened().exactness(dtype).exact)
    raise UsageError(
        "these values cannot be stored so that the way back is exact",
        location=str(direction.target.key),
        got=f"{lossy}, {op.exactness(lossy).reason}",
        expected="values of 16 bits or fewer",
        hint=f"leave {option('exact', True)} out",
    )
