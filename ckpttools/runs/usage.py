"""What directories take of a disk, and what of it would be free if they were deleted."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.stores.place import Place


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of files, each counted once, however many names it has.

    Attributes:
        nbytes: of all files.
        own: of those that have no name elsewhere: what deleting all of the directories frees.
        files: how many there are.
        modified: when the newest was changed, in nanoseconds since 1970; None where the store does not say.
    """

    nbytes: int
    own: int
    files: int
    modified: int | None

    @property
    def shared(self) -> int:
        """Bytes of files that have a name elsewhere, too: deleting these names frees nothing."""
        return self.nbytes - self.own


def usage_of(*directories: Place) -> Usage:
    """That of directories together, none of which is in another; StorageError if one cannot be listed."""
    names: dict[object, int] = {}
    sizes: dict[object, int] = {}
    links: dict[object, int] = {}
    newest: int | None = None
    for place, found in ((each / name, found) for each in directories for name, found in each.walk()):
        # A store without links knows no file by anything but its name.
        file = str(place) if found.identity is None else found.identity
        names[file] = names.get(file, 0) + 1
        sizes[file], links[file] = found.size, found.links
        if found.modified is not None:
            newest = max(newest or 0, found.modified)
    own = sum(sizes[file] for file, count in names.items() if count >= links[file])
    return Usage(sum(sizes.values()), own, sum(names.values()), newest)
