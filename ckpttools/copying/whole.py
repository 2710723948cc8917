"""Whether all that a step or an item names is in it: what lies elsewhere would not be copied along."""

from __future__ import annotations

from ckpttools.core.errors import FormatError
from ckpttools.formats.orbax.entries import entries_of
from ckpttools.formats.orbax.steps import OrbaxItem, Step, described
from ckpttools.stores.place import Place


def check_whole(place: Place) -> None:
    """Looks into the indexes of the items at a place; other formats name no files elsewhere.

    Raises:
        FormatError: an index refers to files that lie outside of its item, are missing or end too early.
        StorageError: it cannot be read.
    """
    found = described(place)
    items = (found,) if isinstance(found, OrbaxItem) else found.items if isinstance(found, Step) else ()
    for item in items:
        _check_item(item.directory)


def _check_item(item: Place) -> None:
    # What is read of an index is refused where it names a file above its directory.
    fault = next(iter(entries_of(item).faults.values()), None)
    if fault is not None:
        raise FormatError("not all that the index names is there", place=item, got=fault, hint=fault.hint)
