"""Views of numpy arrays."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING

from ckpttools.core.region import Region

if TYPE_CHECKING:
    import numpy as np


def subview(array: np.ndarray, region: Region) -> np.ndarray:
    """The region of an array as a view, where plain indexing makes a copy: at rank 0, too."""
    index: tuple[slice | EllipsisType, ...] = (*region.slices, ...)
    view: np.ndarray = array[index]
    return view
