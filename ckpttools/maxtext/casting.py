"""Casts that leave MaxText's tables of whole numbers as they are: smaller dtypes do not hold them all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpttools.array.tree import Path, Tree, spelled
from ckpttools.core.dtypes import DType
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count
from ckpttools.maxtext.versions import TABLES
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import CastMap


@dataclass(frozen=True, slots=True)
class SparingTables:
    """A cast of all floating-point arrays that leaves tables as they are, unless a pattern names them.

    MaxText trains with them in float32. In bfloat16 expert 257 would be 256: a wrong one, without a word.

    Attributes:
        casts: the cast.
    """

    casts: CastMap

    def __call__(self, tree: Tree) -> Transformed:
        """The tree with its values cast; errors as `CastMap`."""
        kept: dict[str, DType | str] = {
            spelled(path): array.dtype
            for path, array in tree.arrays.items()
            if array.dtype.is_float and is_table(path) and spelled(path) not in self.casts.dtypes
        }
        if self.casts.dtype is None or not kept:
            return self.casts(tree)
        made = replace(self.casts, dtypes={**self.casts.dtypes, **kept})(tree)
        said = f"{array_count(kept)} keep their dtype, as they hold numbers of experts: {next(iter(kept))}"
        return replace(made, notes=made.notes + Notes(remarks=(said,)))


def is_table(path: Path) -> bool:
    """Whether an array is a table of whole numbers, in whichever dtype."""
    return any(path[at : at + len(each)] == each for each in TABLES for at in range(len(path)))
