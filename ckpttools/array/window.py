"""Part of an array, and an array with zeros after it: vocabularies that are cut and padded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray, Regionwise
from ckpttools.array.views import subview
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region, Shape

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch


@dataclass(frozen=True, eq=False, repr=False)
class Window(Regionwise):
    """The elements of another array from `start` on.

    Attributes:
        start: for each axis the first coordinate that is kept.
    """

    start: Shape

    def _source_region(self, region: Region) -> Region:
        return region.shifted(self.start)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        self.source.read_into(self._source_region(region), out, scratch)


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
class Padded(Regionwise):
    """Another array with zeros after it, on any of its axes."""

    def _source_region(self, region: Region) -> Region | None:
        return region.intersect(Region.whole(self.source.shape))

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        inner = self._source_region(region)
        if inner != region:
            out[...] = 0
        if inner is not None:
            self.source.read_into(inner, subview(out, inner.relative_to(region)), scratch)


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
