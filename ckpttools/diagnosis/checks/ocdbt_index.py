"""Report damaged OCDBT indexes, and data files that no index names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import call
from ckpttools.diagnosis.base import ERROR, INFO, WARNING, Check, Finding, finding_of
from ckpttools.diagnosis.inventory import Inventory, ListedItem
from ckpttools.formats.orbax.entries import Entries, files_below
from ckpttools.formats.orbax.ocdbt import MANIFEST, Extent
from ckpttools.stores.location import Location

# First bytes of a B+tree node.
NODE_MAGIC = bytes.fromhex("0cdb20de")
_LARGE_BYTES = 64 << 20


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for item in inventory.items:
        if isinstance(item.database, CheckpointError):
            yield finding_of(
                item.database, item.path, reason="without its index no array of this item can be read"
            )
        elif item.database.manifests:
            yield from _unreferenced_findings(item, item.database)
        elif item.needs_index and not (item.tables and item.tables.documents):
            problem = f"no {MANIFEST}, although _METADATA declares arrays in OCDBT"
            reason = (
                "the location of the arrays is unknown: the save did not finish, or the copy is incomplete"
            )
            yield Finding(ERROR, str(item.path), problem, reason, "copy all of it again: cp -a SRC DST")


def _unreferenced_findings(item: ListedItem, database: Entries) -> Iterator[Finding]:
    """Report data files that the current index does not name.

    Every save leaves nodes that its later commits have superseded. They are reported only if they take much
    space; unreachable chunks are always reported.
    """
    named = {node.file for node in database.nodes}
    named |= {entry.file for entry in database.all.values() if isinstance(entry, Extent)}
    loose = {
        name: status.size
        for name, status in files_below(item.path)
        if name not in named and "/d/" in f"/{name}"
    }
    chunks = {name: size for name, size in loose.items() if not _starts_with_a_node(item.path / name)}
    if chunks:
        reason = "they contain no arrays: another save or a replaced index left them; they take up space"
        yield _index_finding(WARNING, item, chunks, reason)
    elif sum(loose.values()) >= _LARGE_BYTES:
        yield _index_finding(
            INFO, item, loose, "nodes of the index that later ones superseded; they take up space"
        )


def _index_finding(level: str, item: ListedItem, files: Mapping[str, int], reason: str) -> Finding:
    largest = max(files, key=lambda name: files[name])
    number = "a data file" if len(files) == 1 else f"{len(files)} data files"
    problem = (
        f"{number} that the index does not reference: {sum(files.values()):,} bytes, the largest {largest}"
    )
    command = call("convert", item.path, "DST", format="orbax")
    return Finding(
        level, str(item.path), problem, reason, f"{command} writes a checkpoint without them", command=command
    )


def _starts_with_a_node(path: Location) -> bool:
    try:
        file = path.open()
        try:
            return file.size >= len(NODE_MAGIC) and file.read(0, len(NODE_MAGIC)) == NODE_MAGIC
        finally:
            file.close()
    except CheckpointError:
        return True  # The check of access reports this.


CHECK = Check("index", "damaged OCDBT manifests and nodes, data files that no index names", _examine)
