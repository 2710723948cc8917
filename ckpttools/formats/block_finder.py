"""Finds the blocks of arrays that are derived from stored arrays without moving elements."""

from __future__ import annotations

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Chunked, Relayout, Stack, Stored, Take, Window
from ckpttools.formats.blocks import Blocks, blocks_of_grid, blocks_of_stored, stacked
from ckpttools.formats.orbax.arrays import Grid


class Finder:
    """Finds the blocks of arrays; caches results for arrays that many others are derived from."""

    def __init__(self) -> None:
        self._known: dict[int, Blocks | None] = {}

    def blocks(self, array: LazyArray) -> Blocks | None:
        """Return the array as blocks; None if its elements are not stored unchanged."""
        match array:
            case Stored():
                return blocks_of_stored(array)
            case Chunked(part=Grid() as grid):
                return blocks_of_grid(grid)
            case Stack(parts=parts):
                result = [self.blocks(part) for part in parts]
                alike = [item for item in result if item is not None]
                return stacked(alike, array.axis) if len(alike) == len(result) else None
            case Take() | Relayout() | Window():
                return self._moved(array, self._shared(array.source))
            case _:
                return None

    def _moved(self, array: Take | Relayout | Window, inner: Blocks | None) -> Blocks | None:
        if inner is None:
            return None
        match array:
            case Take(axis=axis, index=index):
                return inner.taken(axis, index)
            case Window(start=start):
                return inner.windowed(start, array.shape)
            case Relayout():
                return inner.relaid(array.split, array.order, array.merge)

    def _shared(self, array: LazyArray) -> Blocks | None:
        """Return the cached blocks of an array that other arrays may also be derived from."""
        if isinstance(array, Stored):
            return blocks_of_stored(array)
        if id(array) not in self._known:
            self._known[id(array)] = self.blocks(array)
        return self._known[id(array)]
