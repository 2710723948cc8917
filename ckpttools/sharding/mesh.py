"""Device meshes as axis names and lengths, for planning without devices.

8                     one axis, called 0
4x2                   two axes, called 0 and 1
data=4,fsdp=2         two axes with names
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import isqrt, prod

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.region import Shape
from ckpttools.formats.zarr.chunking import LARGEST, SMALLEST

_EXPECTED = "such as 8, 4x2 or data=4,fsdp=2"
_LENGTH = re.compile(r"\s*[1-9][0-9]{0,17}\s*")
_MAX_DEVICES = 1 << 20


@dataclass(frozen=True, slots=True)
class MeshShape:
    """A grid of devices.

    Attributes:
        axes: Number of devices along each axis, by axis name.
    """

    axes: Mapping[str, int]

    @property
    def size(self) -> int:
        """Number of devices."""
        return prod(self.axes.values())

    @property
    def is_unnamed(self) -> bool:
        """Whether the axes are named after their indices."""
        return list(self.axes) == [str(number) for number in range(len(self.axes))]

    def __str__(self) -> str:
        if self.is_unnamed:
            return "x".join(map(str, self.axes.values()))
        return ",".join(f"{name}={length}" for name, length in self.axes.items())


def parse_mesh(text: str) -> MeshShape:
    """Parse a mesh.

    Raises:
        UsageError: The text is not a mesh.
    """
    words = text.split(",") if "=" in text else text.lower().split("x")
    pairs = [word.partition("=") for word in words]
    named = {name.strip(): length for name, _, length in pairs} if "=" in text else {}
    lengths = list(named.values()) if named else words
    if named and len(lengths) != len(words):
        raise UsageError(f"{text!r} is not a mesh", got="an axis that is named twice", expected=_EXPECTED)
    if not all(_LENGTH.fullmatch(length) for length in lengths):
        raise UsageError(f"{text!r} is not a mesh", expected=_EXPECTED)
    names = list(named) if named else [str(number) for number in range(len(lengths))]
    mesh = MeshShape(dict(zip(names, map(int, lengths), strict=True)))
    if "" in mesh.axes or mesh.size > _MAX_DEVICES:
        raise UsageError(f"{text!r} is not a mesh", expected=f"{_EXPECTED}; at most {_MAX_DEVICES:,} devices")
    return mesh


def mesh_chunk(
    shape: Shape, shard: Shape, itemsize: int, stacked: Collection[int], limit: int | None = None
) -> Shape:
    """Return the chunk shape of an array for a mesh.

    Args:
        shape: Shape of the array; no axis is empty.
        shard: Shape of each device's shard, which divides `shape`.
        itemsize: Bytes per element.
        stacked: Axes of layers and experts, which are divided first.
        limit: Maximum bytes of a chunk, in full elements; None for `LARGEST`.

    Returns:
        The shard or an even division of it; the full shape for a small array.
    """
    limit = LARGEST if limit is None else limit
    if prod(shape) * itemsize <= min(SMALLEST, limit):
        return shape
    chunk = list(shard)
    # Divide outer axes first, so that the rest of a row is read at once.
    order = [*sorted(stacked), *(axis for axis in range(len(shape)) if axis not in stacked)]
    for axis in order:
        while chunk[axis] > 1 and prod(chunk) * itemsize > limit:
            chunk[axis] //= _smallest_factor(chunk[axis])
    return tuple(chunk)


def _smallest_factor(number: int) -> int:
    """Return the smallest prime factor of a number greater than 1."""
    return next((item for item in range(2, isqrt(number) + 1) if number % item == 0), number)
