"""The same values in another dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ckpttools.dtypes import DType
from ckpttools.ir.array import LazyArray
from ckpttools.ir.nodes import elementwise
from ckpttools.ir.tree import Tree, spelled
from ckpttools.mapping.values import Cast
from ckpttools.notes import Note, Notes
from ckpttools.transforms.base import Transformed


@dataclass(frozen=True, slots=True)
class CastTo:
    """All floating-point arrays in `dtype`."""

    dtype: DType

    def __call__(self, tree: Tree) -> Transformed:
        arrays = {spelled(path): array for path, array in tree.arrays.items()}
        leaves = {
            path: cast(leaf, self.dtype) if isinstance(leaf, LazyArray) else leaf
            for path, leaf in tree.items()
        }
        return Transformed(Tree(leaves, tree.metadata), Notes(tuple(cast_notes(arrays, self.dtype))))


def cast(array: LazyArray, dtype: DType) -> LazyArray:
    """`array` in `dtype`; itself where it is that already, or holds no floating-point numbers."""
    if array.dtype == dtype or not array.dtype.is_float:
        return array
    return elementwise(array, Cast(dtype, array.dtype))


def cast_notes(arrays: Mapping[str, LazyArray], dtype: DType) -> list[Note]:
    """What a cast of `arrays` to `dtype` loses, one note for each reason."""
    casts = [
        Cast(dtype).exactness(array.dtype)
        for array in arrays.values()
        if array.dtype.is_float and array.dtype != dtype
    ]
    reasons = Counter(each.reason for each in casts if not each.exact)
    return [Note(f"{count} arrays", reason) for reason, count in reasons.items()]
