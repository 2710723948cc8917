"""Open a save of several hosts as one tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from ckpttools.core.errors import FormatError, listing
from ckpttools.core.message_terms import action
from ckpttools.core.text import plural
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.orbax.entries import FileFault, Indexed
from ckpttools.formats.orbax.hosts import hosts_at, not_together
from ckpttools.formats.orbax.index import Index, named_file
from ckpttools.formats.orbax.ocdbt import Entry, Extent
from ckpttools.formats.orbax.replica_compare import refuse_unlike
from ckpttools.formats.orbax.saves import Save, newest_complete, saves_of
from ckpttools.formats.orbax.shares import shares_of
from ckpttools.stores.base import File
from ckpttools.stores.location import Location

# How many values that several hosts have are compared at their ends on opening. If the hosts had different
# saves, all of these values would differ.
_MOST_COMPARED = 256


class Joined(Indexed):
    """The keys of a save from several hosts. File names in extents start with the index of the share."""

    missing = "no entry in the index of any host"

    def __init__(self, directory: Location, save: Save) -> None:
        super().__init__(directory, Index((), {}, ()))
        self._save = save
        names: dict[tuple[int, str], str] = {}

        def numbered(owner: int, entry: Entry) -> Entry:
            if isinstance(entry, bytes):
                return entry
            name = names.setdefault((owner, entry.file), f"{owner}/{entry.file}")
            return Extent(name, entry.offset, entry.length)

        shares = save.shares
        self._entries = {key: numbered(at, shares[at].entries[key]) for key, at in save.owners.items()}

    @cached_property
    def faults(self) -> Mapping[str, FileFault]:
        return {}  # such files are on another host or missing

    def file(self, extent: Extent) -> File:
        if extent.file not in self._files:
            number, _, name = extent.file.partition("/")
            self._files[extent.file] = named_file(self._save.shares[int(number)].item, name)
        return self._files[extent.file]


def joined_save(path: Location, hosts: Mapping[Location, Sequence[Location]], options: ReadOptions) -> Save:
    """Return the newest complete save of the hosts below a path.

    Args:
        path: The directory of hosts.
        hosts: The result of `hosts_at`; not empty.
        options: The step to open, and options for reading indexes.

    Raises:
        FormatError: No save is complete, or the values of two hosts differ.
        StorageError: A directory cannot be listed.
    """
    shares = [share for host in hosts for share in shares_of(host, options.max_index_bytes)]
    saves = saves_of(shares)
    save = newest_complete(saves, options.step)
    if save is None:
        raise not_together(path, hosts, listing([_lacking(item) for item in saves]))
    refuse_unlike(save, list(save.twins)[:: len(save.twins) // _MOST_COMPARED + 1])
    return save


def _lacking(save: Save) -> str:
    chunks = sum(item.count for item in save.missing)
    names = ", ".join(share.host.name for share in save.shares)
    if save.is_complete:
        return f"step {save.step} of {names}: complete, but not the requested step"
    arrays = plural(len(save.missing), "array")
    return f"step {save.step} of {names}: {plural(chunks, 'chunk')} of {arrays} missing"


def refuse_parts(location: Location) -> FormatError:
    """Return the error for an operation that needs a single item, when each host has its own."""
    return FormatError(
        "this tree is assembled from several hosts, each with its own files",
        location=location,
        expected="the directory of one host, or a checkpoint assembled from all of them",
        hint=(
            f"pass one of {', '.join(host.name for host in list(hosts_at(location))[:3])}; or "
            f"{action('assemble')}"
        ),
    )
