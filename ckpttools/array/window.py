"""Part of an array, and an array with zeros after it: vocabularies that are cut and padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttools.array.lazy import Derived, LazyArray, ReadCost
from ckpttools.array.views import subview
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region, Shape

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch


@dataclass(frozen=True, eq=False, repr=False)
class Window(Derived):
    """The elements of another array from `start` on.

    Attributes:
        start: for each axis the first coordinate that is kept.
    """

    start: Shape

    def _inner(self, region: Region) -> Region:
        return region.shifted(self.start)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        self.source.read_into(self._inner(region), out, scratch)

    @property
    def scratch_bytes(self) -> int:
        return self.source.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        return self.source.read_cost(self._inner(region))

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self.source.first_byte(self._inner(region))


def window(source: LazyArray, start: Shape, shape: Shape) -> LazyArray:
    """The box of `source` of `shape` that begins at `start`; `source` itself where that is all of it.

    Raises:
        ShapeError: the box reaches over an edge.
    """
    if start == (0,) * len(start) and shape == source.shape:
        return source
    inside = all(a >= 0 and a + n <= m for a, n, m in zip(start, shape, source.shape, strict=True))
    if not inside:
        raise ShapeError("a window reaches over the edge", got=(start, shape), wanted=source.shape)
    return Window(shape, source.dtype, source, start)


@dataclass(frozen=True, eq=False, repr=False)
class Padded(Derived):
    """Another array with zeros after it, on any of its axes."""

    def _inner(self, region: Region) -> Region | None:
        """What of the region lies in the source."""
        return region.intersect(Region.whole(self.source.shape))

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        inner = self._inner(region)
        if inner != region:
            out[...] = 0
        if inner is not None:
            self.source.read_into(inner, subview(out, inner.relative_to(region)), scratch)

    @property
    def scratch_bytes(self) -> int:
        return self.source.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        inner = self._inner(region)
        return ReadCost() if inner is None else self.source.read_cost(inner)

    def first_byte(self, region: Region) -> tuple[str, int]:
        inner = self._inner(region)
        return ("", 0) if inner is None else self.source.first_byte(inner)


def padded(source: LazyArray, shape: Shape) -> LazyArray:
    """`source` with zeros after it up to `shape`; `source` itself where nothing is added.

    Raises:
        ShapeError: `shape` is smaller, or of another rank.
    """
    if shape == source.shape:
        return source
    if len(shape) != len(source.shape) or any(n < m for n, m in zip(shape, source.shape, strict=True)):
        raise ShapeError("padding cannot make an array smaller", got=shape, wanted=source.shape)
    return Padded(shape, source.dtype, source)
