"""Report incomplete arrays: missing or truncated chunks, mismatched metadata, the wrong version of zarr."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError
from ckpttools.diagnosis.arrays import array_findings
from ckpttools.diagnosis.base import Check, Finding, finding_of
from ckpttools.diagnosis.inventory import Directory, Inventory, ListedItem, json_or_error
from ckpttools.formats.zarr.read import may_omit_chunks
from ckpttools.formats.zarr.zarr3 import DOCUMENT
from ckpttools.stores.location import Location


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for item in inventory.items:
        if not item.is_unfinished:
            yield from array_findings(item)
    for location in inventory.hierarchies:
        yield from _hierarchy(location)


def _hierarchy(location: Location) -> Iterator[Finding]:
    """Report faults in zarr hierarchies.

    Plain zarr omits chunks of the fill value; ckpttools writes all chunks.
    """
    root = json_or_error(location / DOCUMENT)
    leaves_out = not isinstance(root, CheckpointError) and may_omit_chunks(root)
    item = ListedItem(Directory(location, (), ()), location, may_omit_chunks=leaves_out)
    if isinstance(item.database, CheckpointError):
        yield finding_of(item.database, location)
    else:
        yield from array_findings(item)


CHECK = Check(
    "chunks", "missing, cut or contradictory chunks, missing data files, wrong zarr version", _examine
)
