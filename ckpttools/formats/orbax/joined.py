"""Open a save of several hosts as one tree, once replicated chunks are known to be equal.

Every replica of a model stores the same chunks. If they differ, one was corrupted by a disk, by memory,
or by an accelerator that computed a wrong result, which nothing else in a job checks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.text import plural
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.orbax.entries import FileFault, Indexed
from ckpttools.formats.orbax.hosts import hosts_at, incomplete_hosts_error
from ckpttools.formats.orbax.index import Index, named_file
from ckpttools.formats.orbax.ocdbt import Entry, Extent, length_of
from ckpttools.formats.orbax.saves import Save, has_numbers, newest_complete, saves_of, shares_of
from ckpttools.stores.base import File
from ckpttools.stores.concurrency import map_in_threads
from ckpttools.stores.location import Location

# Number of values to compare at both ends on opening, among those that several hosts have. If the hosts had
# different saves, all of these values would differ.
_MAX_COMPARED = 256


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
        return {}  # Such files are on another host or missing.

    def file(self, extent: Extent) -> File:
        if extent.file not in self._files:
            number, _, name = extent.file.partition("/")
            self._files[extent.file] = named_file(self._save.shares[int(number)].item, name)
        return self._files[extent.file]


def join_save(path: Location, hosts: Mapping[Location, Sequence[Location]], options: ReadOptions) -> Save:
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
        raise incomplete_hosts_error(path, hosts, listing([_describe_missing(item) for item in saves]))
    refuse_differing(save, list(save.twins)[:: len(save.twins) // _MAX_COMPARED + 1])
    return save


def _describe_missing(save: Save) -> str:
    chunks = sum(item.num_missing for item in save.missing)
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


_AT_ONCE = 4 << 20
_ENDS = 64 << 10
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A chunk whose bytes differ between hosts.

    Attributes:
        key: Key of the chunk.
        groups: Groups of hosts with equal bytes, the largest first.
    """

    key: str
    groups: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.key}: {' against '.join(' and '.join(group) for group in self.groups)}"


@dataclass(frozen=True, slots=True)
class ReplicaComparison:
    """The result of comparing replicas.

    Attributes:
        chunks: Number of values that several hosts have.
        nbytes: Number of bytes that were read.
        disagreements: The values that differ.
    """

    chunks: int
    nbytes: int
    disagreements: tuple[Disagreement, ...]


def compare_replicas(save: Save, observe: Callable[[int], None] = lambda nbytes: None) -> ReplicaComparison:
    """Compare all bytes of all values that several hosts have.

    Args:
        save: The save to compare.
        observe: Called with the number of bytes after each read, from several threads.

    Raises:
        FormatError, StorageError: A value cannot be read.
    """
    keys = list(save.twins)
    sizes = [sum(_lengths(save, key)) for key in keys]
    compare = partial(_disagreement, save, observe, compare_all=True)
    first = save.shares[0].host.store
    result = map_in_threads(max(_THREADS, first.costs.requests or 0), compare, keys)
    return ReplicaComparison(len(keys), sum(sizes), tuple(item for item in result if item is not None))


def refuse_differing(save: Save, keys: Sequence[str]) -> None:
    """Compare the two ends of some values.

    Raises:
        FormatError: The values of two hosts differ.
    """
    compare = partial(_disagreement, save, lambda nbytes: None, compare_all=False)
    result = [key for key in map(compare, keys) if key is not None]
    if result:
        raise unlike(save, result)


def unlike(save: Save, disagreements: Sequence[Disagreement]) -> FormatError:
    """Return the error for hosts whose values differ."""
    return FormatError(
        f"hosts disagree on {plural(len(disagreements), 'chunk')} of step {save.step}"
        + listing(list(map(str, disagreements))),
        expected="the same bytes: one of them is damaged, or they come from different runs",
        hint="find out which host is right from an older step, the loss after resuming, or a third copy; "
        f"then pass {option('prefer', 'HOST_DIR')}, or leave out the other directory",
    )


def losers(save: Save, disagreement: Disagreement) -> set[int]:
    """Return the indices of shares whose bytes differ from the ones that are used."""
    taken = save.shares[save.owners[disagreement.key]].name
    right = next(group for group in disagreement.groups if taken in group)
    return {number for number in save.twins[disagreement.key] if save.shares[number].name not in right}


def keys_alone(save: Save, number: int) -> list[str]:
    """Return the keys that only one share has."""
    return [key for key, owner in save.owners.items() if owner == number and key not in save.twins]


def refuse_mixed(save: Save, disagreements: Sequence[Disagreement]) -> None:
    """Raise an error if a share that disagrees with the others, but is partly used, seems to be another save.

    Bit flips affect few values, while in another run nearly all values differ.

    Raises:
        FormatError: A host differs in most values that it shares with others, and has values that only it
            has.
    """
    losses = Counter(number for item in disagreements for number in losers(save, item))
    for number, count in losses.items():
        common = [key for key, shares in save.twins.items() if number in shares and has_many(save, key)]
        own_keys = keys_alone(save, number)
        if count > 1 and 2 * count > len(common) and own_keys:
            raise FormatError(
                f"{save.shares[number].host} seems to be from another save: it differs in {count:,} of "
                f"{len(common):,} values that others have, too",
                got=f"{plural(len(own_keys), 'chunk')} that only it has, such as {own_keys[0]}",
                expected="hosts of one run, with a few damaged values at most",
                hint="leave out its directory",
            )


def has_many(save: Save, key: str) -> bool:
    """Return whether a value of a save is numeric data; see `has_numbers`."""
    return has_numbers(key, save.shares[save.owners[key]].entries[key])


def _lengths(save: Save, key: str) -> Iterator[int]:
    return (length_of(save.shares[number].entries[key]) for number in save.twins[key])


def _disagreement(
    save: Save, observe: Callable[[int], None], key: str, *, compare_all: bool
) -> Disagreement | None:
    numbers = save.twins[key]
    lengths = set(_lengths(save, key))
    if len(lengths) == 1 and _is_same(save, observe, key, lengths.pop(), compare_all):
        return None
    groups: dict[str, list[str]] = {}
    for number in numbers:
        groups.setdefault(_digest(save, key, number), []).append(save.shares[number].name)
    ranked = sorted(groups.values(), key=len, reverse=True)
    # If the values are equal when read again, another program is writing.
    return Disagreement(key, tuple(map(tuple, ranked)))


def _is_same(save: Save, observe: Callable[[int], None], key: str, length: int, compare_all: bool) -> bool:
    first, *others = save.twins[key]
    for start, stop in _parts(length, compare_all):
        expected = _read(save, key, first, start, stop)
        observe(stop - start)
        for number in others:
            if _read(save, key, number, start, stop) != expected:
                return False
            observe(stop - start)
    return True


def _parts(length: int, is_complete: bool) -> Iterator[tuple[int, int]]:
    if is_complete:
        yield from ((start, min(start + _AT_ONCE, length)) for start in range(0, length, _AT_ONCE))
    else:
        yield 0, min(length, _ENDS)
        yield max(0, length - _ENDS), length


def _read(save: Save, key: str, number: int, start: int, stop: int) -> bytes:
    share = save.shares[number]
    entry = share.entries[key]
    if isinstance(entry, bytes):
        return entry[start:stop]
    try:
        return share.index.file(entry).read(entry.offset + start, stop - start)
    except CheckpointError as error:
        raise error.at(f"{share.item}: {key}") from error


def _digest(save: Save, key: str, number: int) -> str:
    entry: Entry = save.shares[number].entries[key]
    result = hashlib.blake2b(digest_size=16)
    for start, stop in _parts(length_of(entry), is_complete=True):
        result.update(_read(save, key, number, start, stop))
    return result.hexdigest()
