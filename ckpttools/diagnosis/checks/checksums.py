"""Check data for flipped bits with the checksums in the files, on request.

torch writes a CRC-32 with each storage but does not check any. Conversions do not either, because they read
storages in parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError
from ckpttools.core.text import first_names
from ckpttools.diagnosis.base import ERROR, Check, Finding, finding_of
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.formats.base import SupportsChecksums
from ckpttools.formats.known_formats import formats
from ckpttools.stores.checksums import ChecksummedRange, DamagedRanges, find_damage
from ckpttools.stores.location import Location, require_file_error, suppress_file_errors

_MAX_NAMED = 3
_REASON = (
    "other values than the saved ones would be read, without an error; a program that edits the file in "
    "place also leaves such checksums"
)


def has_checksums(inventory: Inventory) -> bool:
    """Return whether any file is in a format with checksums."""
    return any(True for _ in _locations(inventory))


def _locations(inventory: Inventory) -> Iterator[tuple[SupportsChecksums, Location]]:
    """Yield locations in formats with checksums, each with its format."""
    for name, item in formats().items():
        if isinstance(item, SupportsChecksums):
            yield from ((item, location) for location in inventory.locations(name))


def _examine(inventory: Inventory) -> Iterator[Finding]:
    if inventory.reading is None:
        return
    files = _group_by_file(inventory)
    for result, damaged in zip(files, find_damage(files, inventory.reading), strict=True):
        if isinstance(damaged, CheckpointError):
            yield finding_of(require_file_error(damaged, inventory.path), inventory.path)
        elif damaged:
            yield _finding(damaged, len(result))


def _group_by_file(inventory: Inventory) -> list[list[ChecksummedRange]]:
    """Return the ranges with checksums, by file."""
    result: dict[str, dict[int, ChecksummedRange]] = defaultdict(dict)
    for kind, location in _locations(inventory):
        with suppress_file_errors(location):
            for checksum in kind.checksums(location, inventory.read):
                result[checksum.file.path][checksum.offset] = checksum
    return [[*item.values()] for item in result.values()]


def _finding(damaged: DamagedRanges, count: int) -> Finding:
    lines = [
        f"{item.name} (bytes {item.offset:,} to {item.offset + item.nbytes:,}) has CRC-32 {got:08x}, and was "
        f"written with {item.crc32:08x}"
        for item, got in damaged
    ]
    problem = (
        f"the data of {len(damaged):,} of {count:,} storages is damaged: {first_names(lines, _MAX_NAMED)}"
    )
    location = damaged[0][0].file.path
    return Finding(ERROR, location, problem, _REASON, "fetch the file again, or restore it from another copy")


CHECK = Check(
    "checksums",
    "on request: data that does not match the checksum written with it",
    _examine,
)
