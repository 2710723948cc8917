"""Find the other hosts' parts of an item, as in emergency and multi-tier checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote

from ckpttools.core.errors import FormatError, StorageError
from ckpttools.core.message_terms import action
from ckpttools.core.text import first_names
from ckpttools.formats.orbax.index import PROCESSES, processes_of
from ckpttools.formats.orbax.metadata import TREE_FILE
from ckpttools.formats.orbax.steps import Step, directories, is_item
from ckpttools.stores.location import Location

_HOST_DIRECTORY = "process_metadata"
_PEER_DIRECTORY = "state"
_MAX_NAMED = 8


def is_part_of_a_host(item: Location) -> bool:
    """Return whether an item is one host's share of a save, so that other hosts have some of its chunks."""
    return any((location / _HOST_DIRECTORY).is_dir() for location in (item, item.parent))


def other_hosts(item: Location) -> list[Location]:
    """Return the same item in the directories of other hosts, next to this one: `HOST/STEP/ITEM`."""
    item = item.absolute()
    for host in item.parents[1:3]:
        below = item.relative_to(host)
        try:
            siblings = [location for location in host.parent.iterdir() if location != host]
            result = [location / below for location in siblings if (location / below / TREE_FILE).is_file()]
        except StorageError:
            continue  # This only affects a hint.
        if result:
            return result
    return []


def hosts_at(path: Location) -> dict[Location, list[Location]]:
    """Return the host directories of emergency, multi-tier and peer-to-peer checkpoints, with their items.

    Each host directory contains `STEP/ITEM` and `STEP/process_metadata`. In peer-to-peer checkpoints, each
    contains the chunks of a different process of the job.

    Raises:
        StorageError: A directory cannot be listed.
    """
    marked: dict[Location, list[Location]] = {}
    peers: dict[Location, list[Location]] = {}
    for host in directories(path):
        steps = [step for step in directories(host) if Step(step).number is not None]
        for step in steps:
            is_marked = (step / _HOST_DIRECTORY).is_dir()
            items = [item for item in directories(step) if is_item(item)] if is_marked else []
            if items:
                marked.setdefault(host, []).extend(items)
            elif is_item(step / _PEER_DIRECTORY):
                peers.setdefault(host, []).append(step / _PEER_DIRECTORY)
    return marked or _peers(peers)


def _peers(result: dict[Location, list[Location]]) -> dict[Location, list[Location]]:
    """Return the hosts that have the chunks of a single process each, in runs with several processes."""
    processes = {
        host: {location.name for item in items for location in item.glob(PROCESSES)}
        for host, items in result.items()
    }
    own = {host: next(iter(names)) for host, names in processes.items() if len(names) == 1}
    return {host: result[host] for host in own} if len(set(own.values())) > 1 else {}


def incomplete_hosts_error(
    path: Location, hosts: Mapping[Location, Sequence[Location]], missing_text: str = ""
) -> FormatError:
    """Return the error for a directory of hosts that have no complete step.

    Args:
        path: The directory of hosts.
        hosts: The result of `hosts_at`.
        missing_text: Lines that list what is missing.
    """
    names = [host.name for host in hosts]
    hint = f"{action('list_saves', str(path))} lists the hosts that would provide it"
    others = [directory for directory in directories(path) if directory not in hosts]
    if others:
        names_text = ", ".join(other.name for other in others[:3])
        hint += f"; these entries next to them are not host directories: {names_text}"
    return FormatError(
        f"this directory has checkpoint shares of several hosts, and no step is complete{missing_text}",
        location=path,
        got=f"directories of hosts: {first_names(names, _MAX_NAMED)}",
        expected="directories of enough hosts for all chunks of a step",
        hint=hint,
    )


def _assemble_command(hosts: Location) -> str:
    """Return the command that assembles one checkpoint from all hosts below `hosts`."""
    return action("assemble", str(hosts), "DST")


def missing_chunks_hint(item: Location, may_be_old: bool) -> str:
    """Return a hint on where an item's missing chunks may be.

    Args:
        item: Directory of the item.
        may_be_old: Whether the metadata does not declare that all chunks were stored.
    """
    if is_part_of_a_host(item):
        others = [quote(str(location)) for location in other_hosts(item)]
        where = f": {first_names(others, _MAX_NAMED)}" if others else ""
        hint = (
            "this is one host's share; the rest is in the directories of the other hosts"
            f"{where}; {action('assemble', 'HOST…', 'DST')} assembles them"
        )
        hosts = item.parent.parent.parent
        is_all = bool(others) and all(
            location.parent.parent.parent == hosts for location in other_hosts(item)
        )
        return f"{hint}: {_assemble_command(hosts)}" if is_all else hint
    processes = ", ".join(location.name for location in processes_of(item))
    if processes:
        return (
            f"this is what {processes} wrote: if other processes stored theirs elsewhere, copy "
            "their ocdbt.process_* into this directory, or pass all such directories to "
            f"{action('assemble')}; "
            "otherwise chunks were lost and must be fetched again"
        )
    lost = (
        f"it was lost or not copied: fetch the checkpoint again; {action('doctor', str(item))} shows details"
    )
    if may_be_old:
        lost += (
            ". Only if an old version of Orbax omitted it because it contains only the fill "
            f'value, declare that in {TREE_FILE}: "store_array_data_equal_to_fill_value": false'
        )
    return lost
