"""Where the rest of an item is: of emergency and multi-tier checkpoints each host keeps a part for itself."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote

from ckpttools.core.errors import FormatError, StorageError
from ckpttools.formats.orbax.index import processes_of
from ckpttools.formats.orbax.metadata import TREE_FILE
from ckpttools.formats.orbax.steps import Step, directories, is_item
from ckpttools.stores.place import Place

_OF_A_HOST = "process_metadata"
_MOST_NAMED = 8


def is_part_of_a_host(item: Place) -> bool:
    """Whether an item is what one host kept for itself, so that some of its chunks are elsewhere."""
    return any((place / _OF_A_HOST).is_dir() for place in (item, item.parent))


def other_hosts(item: Place) -> list[Place]:
    """The same item in directories of other hosts that lie beside this one's: `HOST/STEP/ITEM`."""
    item = item.absolute()
    for host in item.parents[1:3]:
        below = item.relative_to(host)
        try:
            beside = [place for place in host.parent.iterdir() if place != host]
            found = [place / below for place in beside if (place / below / TREE_FILE).is_file()]
        except StorageError:
            continue  # only a hint depends on it
        if found:
            return found
    return []


def hosts_at(path: Place) -> dict[Place, list[Place]]:
    """Directories of hosts of emergency and multi-tier checkpoints at a path: host -> its items.

    Each holds `STEP/ITEM`, with `STEP/process_metadata` beside the item.

    Raises:
        StorageError: a directory may not be listed.
    """
    found: dict[Place, list[Place]] = {}
    for host in directories(path):
        steps = [step for step in directories(host) if Step(step).number is not None]
        parts = [step for step in steps if (step / _OF_A_HOST).is_dir()]
        items = [item for step in parts for item in directories(step) if is_item(item)]
        if items:
            found[host] = items
    return found


def not_together(path: Place, hosts: Mapping[Place, list[Place]]) -> FormatError:
    """The error of a directory that holds those of hosts, each with its part of one checkpoint."""
    names = [host.name for host in hosts]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    common = set.intersection(*({item.parent.name for item in items} for items in hosts.values()))
    hint = "copy the ocdbt.process_* of all hosts, of one step, and one _METADATA into a new directory"
    others = [each for each in directories(path) if each not in hosts]
    if others:
        hint += (
            f"; these beside them are not directories of hosts: {', '.join(each.name for each in others[:3])}"
        )
    if common:
        step = max(common, key=lambda name: (len(name), name))
        item = next(each for each in next(iter(hosts.values())) if each.parent.name == step)
        hint += _OWN_LINE + _putting_together(path, item)
    return FormatError(
        "this holds what several hosts kept for themselves, each a part of one checkpoint (emergency or "
        "multi-tier checkpointing)",
        place=path,
        got=f"directories of hosts: {', '.join(names[:_MOST_NAMED])}{more}",
        wanted="one directory with the parts of all of them, or that of one host",
        hint=hint,
    )


# A command begins a line, so that a whole line is what there is to copy.
_OWN_LINE = "\n         "


def _putting_together(hosts: Place, item: Place) -> str:
    """The command that makes one directory of what all hosts below `hosts` have of the step of `item`."""
    below = f"{quote(str(hosts))}/*/{quote(item.parent.name)}/{quote(item.name)}"
    return f"mkdir NEW && cp -r {below}/ocdbt.process_* {quote(str(item / TREE_FILE))} NEW"


def where_chunks_may_be(item: Place, may_be_old: bool) -> str:
    """The next step for somebody whose item lacks chunks.

    Args:
        item: its directory.
        may_be_old: whether its metadata does not say that all chunks were stored.
    """
    if is_part_of_a_host(item):
        others = [quote(str(place)) for place in other_hosts(item)]
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        where = f": {', '.join(others[:_MOST_NAMED])}{more}" if others else ""
        told = (
            "this is what one host kept for itself, the rest is in the directories of the other hosts"
            f"{where}; copy the ocdbt.process_* of all hosts and one {TREE_FILE} into a new directory, "
            "and give that"
        )
        hosts = item.parent.parent.parent
        is_all = bool(others) and all(place.parent.parent.parent == hosts for place in other_hosts(item))
        return f"{told}: `{_putting_together(hosts, item)}`" if is_all else told
    processes = ", ".join(place.name for place in processes_of(item))
    if processes:
        return (
            f"here is what {processes} wrote: if other processes of the save kept theirs elsewhere, copy "
            "their ocdbt.process_* into this directory; else it was lost, and must be fetched again"
        )
    lost = (
        f"it was lost or not copied: fetch the checkpoint again; `ckpt doctor {quote(str(item))}` says more"
    )
    if may_be_old:
        lost += (
            ". Only if it was left out by an old version of Orbax because it holds nothing but the fill "
            f'value, say so in the {TREE_FILE}: "store_array_data_equal_to_fill_value": false'
        )
    return lost
