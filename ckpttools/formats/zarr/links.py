"""Symbolic links to directories of arrays, which are followed and can give a directory several names.

Cycles are rejected, and so are chains of links that double the number of names at each level.
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
"""Targets of the links that were followed to reach a directory."""


@dataclass(frozen=True)
class FollowedLinks:
    """The links that were followed in a directory and below.

    Attributes:
        names: The number of names of each directory.
    """

    names: Counter[Location] = field(default_factory=Counter)

    def into(self, folder: Location, entry: DirEntry, way: Way) -> Way:
        """Return the followed links of a subdirectory, given those of its parent.

        Raises:
            FormatError: A link leads to one of its parents, or links give a directory too many names.
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
                expected="a separate directory for each array",
                hint="remove the links",
            )
        return (*way, target)
