"""Links to directories of arrays: they are followed, and a directory may have several names by them.

Not as many as chains of links make, each step of which doubles them, nor without end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.stores.base import DirEntry
from ckpttools.stores.location import Location

_MOST_NAMES = 1000

Way = tuple[Location, ...]
"""Where the links lead that were followed on the way to a directory."""


@dataclass(frozen=True)
class FollowedLinks:
    """What links were followed in a directory and below.

    Attributes:
        names: how many each directory has by them.
    """

    names: Counter[Location] = field(default_factory=Counter)

    def into(self, folder: Location, entry: DirEntry, way: Way) -> Way:
        """Return the way into a directory in one that was come to on this way.

        Raises:
            FormatError: a link leads to where it lies itself, or links give a directory too many names.
        """
        if entry.is_own_dir:
            return way
        link = folder / entry.name
        target, around = link.resolve(), link.parent.resolve()
        if target in (*way, around, *around.parents):
            raise FormatError(
                "a link leads to a directory that it is in", location=link, hint="remove the link"
            )
        self.names[target] += 1
        if self.names[target] > _MOST_NAMES:
            raise FormatError(
                f"links give a directory more than {_MOST_NAMES:,} names",
                location=link,
                got=f"one more for {target}",
                expected="a directory of its own for each array",
                hint="remove the links",
            )
        return (*way, target)
