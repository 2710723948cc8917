"""The record of an item that Orbax is deleting from a step (v1, `_CHECKPOINT_DELETION` in the step).

Until the deletion is finished, all readers consider the item deleted, and nothing else may change the step.
Deleting a complete step leaves no such record.
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
        item: Name of the item.
        destination: Location to which the item is moved; None if it is removed.
    """

    item: str
    destination: str | None


def read_deletion(step: Location) -> Deletion | None:
    """Return a step's running or interrupted deletion; None if there is none.

    Raises:
        FormatError: The record is invalid.
        StorageError: The record cannot be read.
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
