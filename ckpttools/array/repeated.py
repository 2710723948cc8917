"""An array of which each element comes several times: scales of blocks as scales of smaller cells."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from ckpttools.array import read_blocks
from ckpttools.array.lazy import LazyArray, Regionwise
from ckpttools.array.views import subview
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region, ceil_div, split_to

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch


@dataclass(frozen=True, eq=False, repr=False)
class Repeated(Regionwise):
    """Another array with each element of an axis `times` times, the last one perhaps fewer times.

    Attributes:
        axis: along which.
        times: how often each comes.
    """

    axis: int
    times: int

    def _source_region(self, region: Region) -> Region:
        start, stop = region.start[self.axis], region.stop[self.axis]
        return region.replaced(self.axis, start // self.times, ceil_div(stop, self.times))

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        import numpy as np

        for block in split_to(region, read_blocks.elements(self.dtype.itemsize)):
            inner = self._source_region(block)
            with scratch.take(inner.shape, self.dtype.carrier) as buffer:
                self.source.read_into(inner, buffer, scratch)
                index = np.arange(block.start[self.axis], block.stop[self.axis]) // self.times
                first = inner.start[self.axis]
                buffer.take(
                    index - first, self.axis, out=subview(out, block.relative_to(region)), mode="clip"
                )

    @property
    def scratch_bytes(self) -> int:
        return read_blocks.scratch(self.source.nbytes) + self.source.scratch_bytes

    @property
    def read_kind(self) -> Hashable:
        return ("repeated", self.shape, self.axis, self.times, self.source.read_kind)


def repeated(source: LazyArray, axis: int, times: int, length: int) -> LazyArray:
    """`source` with each element of an axis `times` times, cut to `length`; itself where that is once each.

    Raises:
        ShapeError: there are not as many elements as that takes.
    """
    if ceil_div(length, times) != source.shape[axis]:
        raise ShapeError(
            "an axis cannot be repeated to this length",
            got=f"{source.shape[axis]}, each {times} times",
            wanted=length,
        )
    if times == 1:
        return source
    shape = (*source.shape[:axis], length, *source.shape[axis + 1 :])
    return Repeated(shape, source.dtype, source, axis, times)
