"""Check that a destination does not overlap its sources, which a run must not replace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpttools.array.lazy import ByteSource
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import location as called
from ckpttools.stores.abilities import SupportsAliases
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import check_name
from ckpttools.stores.registry import LocationLike, parse


def check_no_overlap(source: LocationLike, destination: LocationLike, name: str | None = None) -> None:
    """Reject a destination that is, contains or is inside the source, also through links, `..` and mounts.

    Args:
        source: The location that is read.
        destination: The location that is written.
        name: Name of the source in messages; None for "the source".

    Raises:
        UsageError: The locations overlap, or a directory cannot have the name of the destination.
    """
    destination_path = parse(destination)
    check_name(destination_path)
    name = name or called("source")
    read, to = _path_aliases(parse(source)), _path_aliases(destination_path)
    if read.is_at(to):
        relation = f"is {name} itself"
    elif read.is_below(to):
        relation = f"contains {name}"
    elif to.is_below(read):
        relation = f"is in {name}"
    else:
        return
    raise _overlap_error(destination_path, relation, f"{name} {source}")


def check_unread(sources: Iterable[ByteSource], taken: Sequence[Location]) -> None:
    """Raise an error if the destination contains a file that will be read.

    Args:
        sources: The sources of the run.
        taken: The locations that are written, replaced or deleted, starting with the destination.

    Raises:
        UsageError: The destination contains a source.
    """
    aliases = [_path_aliases(item) for item in taken]
    directories: set[Location] = set()
    for source in sources:
        location = parse(source.path)
        for parent in (location.parent, location.resolve().parent):
            if parent not in directories:
                real = _path_aliases(parent)
                if any(real.is_at(item) or real.is_below(item) for item in aliases):
                    raise _overlap_error(taken[0], "contains a source file", source.path)
            directories.add(parent)


@dataclass(frozen=True, slots=True)
class _PathAliases:
    """All identifiers of a location and of its parent directories.

    A directory has several paths if it is mounted twice: with `mount --bind`, or as two mounts of one network
    share. Both paths then have the same inode, or the same path within the file system.
    """

    own: frozenset[object]
    parents: frozenset[object]

    def is_at(self, other: _PathAliases) -> bool:
        return not self.own.isdisjoint(other.own)

    def is_below(self, other: _PathAliases) -> bool:
        return not self.parents.isdisjoint(other.own)


def _path_aliases(location: Location) -> _PathAliases:
    real = location.resolve()
    store = real.store
    own: set[object] = {real}
    parents: set[object] = set(real.parents)
    if isinstance(store, SupportsAliases):
        own.update(store.aliases(real.key))
        parents.update(store.parent_aliases(real.key))
    return _PathAliases(frozenset(own), frozenset(parents))


def _overlap_error(destination: Location, relation: str, source: str) -> UsageError:
    return UsageError(
        f"{called('destination')} {relation}: {destination}",
        got=source,
        expected="a destination that does not overlap the source",
        hint="choose another destination, such as a directory next to the source",
    )
