"""Disk usage of directories, and the part that deleting them would free."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.stores.location import Location


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of files, counting each file once even if it has several names.

    Attributes:
        nbytes: Size of all files, in bytes.
        own: Bytes of files without links elsewhere, which deleting the directories frees.
        files: Number of files.
        modified: Time of the last change, in nanoseconds since 1970; None if the store does not report it.
    """

    nbytes: int
    own: int
    files: int
    modified: int | None

    @property
    def shared(self) -> int:
        """Bytes of files that have a name elsewhere, too, so that deleting these names frees nothing."""
        return self.nbytes - self.own


def measure_usage(*directories: Location) -> Usage:
    """Measure several disjoint directories together; StorageError if one cannot be listed."""
    names: dict[object, int] = {}
    sizes: dict[object, int] = {}
    links: dict[object, int] = {}
    newest: int | None = None
    for location, result in (
        (directory / name, result) for directory in directories for name, result in directory.walk()
    ):
        # In a store without links, each name is a separate file.
        file = str(location) if result.identity is None else result.identity
        names[file] = names.get(file, 0) + 1
        sizes[file], links[file] = result.size, result.links
        if result.modified is not None:
            newest = max(newest or 0, result.modified)
    own = sum(sizes[file] for file, count in names.items() if count >= links[file])
    return Usage(sum(sizes.values()), own, sum(names.values()), newest)
