"""Open everything, as all other commands do. Failures are reported only if no other check explains them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ckpttools.core.errors import CheckpointError
from ckpttools.diagnosis.base import Check, Finding, finding_of
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.registry import open_tree
from ckpttools.stores.location import Location


def _look(inventory: Inventory) -> Iterator[Finding]:
    folders = [w.folder if w.is_whole else w.folder / w.files[0] for w in inventory.weights]
    others = chain(*inventory.others.values())
    # The check of unfinished steps reports uncommitted saves, which are not errors in some stores.
    items = [item.path for item in inventory.items if not item.is_unfinished]
    for location in [*items, *folders, *inventory.locations("zarr3"), *others]:
        yield from _opened(location, inventory.read)


def _opened(location: Location, read: ReadOptions) -> Iterator[Finding]:
    try:
        open_tree(location, read)
    except CheckpointError as error:
        result = finding_of(error, location, why="no command can open it")
        where = "" if result.location == str(location) else f"{result.location}: "
        yield Finding(result.level, str(location), where + result.what, result.why, result.do)


CHECK = Check("opens", "any other reason why a checkpoint cannot be opened", _look)
