"""Data of which bits have flipped: compared with the checksums in the files, where a user wants that.

torch writes a CRC-32 with each storage and looks at none, nor do conversions, which read storages in parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError
from ckpttools.core.text import first_of
from ckpttools.doctor.base import ERROR, Check, Finding, finding_of
from ckpttools.doctor.inventory import Inventory
from ckpttools.formats.base import TellsChecksums
from ckpttools.formats.registry import formats
from ckpttools.stores.checksums import Checksummed, Damaged, damage_in
from ckpttools.stores.place import Place
from ckpttools.stores.unanswered import faults_told_elsewhere, kept_unless_unanswered

_MOST_NAMED = 3
_WHY = (
    "other numbers would be read than were saved, without an error; "
    "only a program that changed the file in its place leaves such checksums as well"
)


def has_checksums(inventory: Inventory) -> bool:
    """Whether anything is of a format that keeps some."""
    return any(True for _ in _places(inventory))


def _places(inventory: Inventory) -> Iterator[tuple[TellsChecksums, Place]]:
    """Where something is of such a format, with the format."""
    for name, each in formats().items():
        if isinstance(each, TellsChecksums):
            yield from ((each, place) for place in inventory.places(name))


def _look(inventory: Inventory) -> Iterator[Finding]:
    if inventory.reading is None:
        return
    files = _by_file(inventory)
    for found, damaged in zip(files, damage_in(files, inventory.reading), strict=True):
        if isinstance(damaged, CheckpointError):
            yield finding_of(kept_unless_unanswered(damaged, inventory.path), inventory.path)
        elif damaged:
            yield _finding(damaged, len(found))


def _by_file(inventory: Inventory) -> list[list[Checksummed]]:
    """What has a checksum, by file."""
    found: dict[str, dict[int, Checksummed]] = defaultdict(dict)
    for kind, place in _places(inventory):
        with faults_told_elsewhere(place):
            for each in kind.checksums(place, inventory.read):
                found[each.file.path][each.offset] = each
    return [[*each.values()] for each in found.values()]


def _finding(damaged: Damaged, count: int) -> Finding:
    lines = [
        f"{each.name} (bytes {each.offset:,} to {each.offset + each.nbytes:,}) has CRC-32 {got:08x}, and was "
        f"written with {each.crc32:08x}"
        for each, got in damaged
    ]
    what = f"the data of {len(damaged):,} of {count:,} storages is damaged: {first_of(lines, _MOST_NAMED)}"
    place = damaged[0][0].file.path
    return Finding(ERROR, place, what, _WHY, "fetch the file again, or restore it from another copy")


CHECK = Check("checksums", "with `--checksums`: data that does not have the checksum written with it", _look)
