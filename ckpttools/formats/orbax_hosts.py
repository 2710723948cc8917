"""Where the rest of an item is: of emergency and multi-tier checkpoints each host keeps a part for itself."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from ckpttools.formats.orbax_entries import processes_of
from ckpttools.formats.orbax_metadata import TREE_FILE

_OF_A_HOST = "process_metadata"
_MOST_NAMED = 8


def is_part_of_a_host(item: Path) -> bool:
    """Whether an item is what one host kept for itself, so that some of its chunks are elsewhere."""
    return any((place / _OF_A_HOST).is_dir() for place in (item, item.parent))


def other_hosts(item: Path) -> list[Path]:
    """The same item in directories of other hosts that lie beside this one's: `HOST/STEP/ITEM`."""
    item = item.absolute()
    for host in item.parents[1:3]:
        below = item.relative_to(host)
        try:
            beside = sorted(place for place in host.parent.iterdir() if place != host)
            found = [place / below for place in beside if (place / below / TREE_FILE).is_file()]
        except OSError:
            continue  # only a hint depends on it
        if found:
            return found
    return []


def where_chunks_may_be(item: Path, may_be_old: bool) -> str:
    """The next step for somebody whose item lacks chunks.

    Args:
        item: its directory.
        may_be_old: whether its metadata does not say that all chunks were stored.
    """
    if is_part_of_a_host(item):
        others = [quote(str(place)) for place in other_hosts(item)]
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        where = f": {', '.join(others[:_MOST_NAMED])}{more}" if others else ""
        return (
            "this is what one host kept for itself, the rest is in the directories of the other hosts"
            f"{where}; copy the ocdbt.process_* of all hosts and one {TREE_FILE} into a new directory, "
            "and give that"
        )
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
