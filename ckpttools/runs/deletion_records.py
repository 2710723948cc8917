"""Orbax's note of an item that it is deleting from a step (v1, `_CHECKPOINT_DELETION` in the step).

Until that is finished the item is deleted to all readers, and nothing else may change the step. Deleting a
whole step leaves no such record.
"""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.formats.json_file import read_json
from ckpttools.stores.location import Location

RECORD = "_CHECKPOINT_DELETION"


@dataclass(frozen=True, slots=True)
class Deletion:
    """An item of a step that is being deleted.

    Attributes:
        item: its name.
        destination: where it is moved to; None where it is removed.
    """

    item: str
    destination: str | None


def read_deletion(step: Location) -> Deletion | None:
    """Return the deletion that is going on in a step, or was interrupted; None if none is.

    Raises:
        FormatError: the record is none.
        StorageError: it cannot be read.
    """
    location = step / RECORD
    if not location.is_file():
        return None
    declared = read_json(location)
    item, destination = declared.get("checkpointable_name"), declared.get("destination")
    if not isinstance(item, str) or not item or not isinstance(destination, str | None):
        raise FormatError(
            "not a record of a deletion",
            location=location,
            expected="checkpointable_name, and destination or null",
            hint="retry the deletion with Orbax, or restore the step from another copy",
        )
    return Deletion(item, destination)
