"""Notes about a conversion for the user, in its plan and its receipt."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import plural


@dataclass(frozen=True, slots=True)
class Note:
    """A fact that the user should know before the conversion.

    Attributes:
        subject: the subject, such as a row.
        text: what happens to it.
        arrays: how many the subject counts; None where it names something.
    """

    subject: str
    text: str
    arrays: int | None = None

    @classmethod
    def of_arrays(cls, count: int, text: str) -> Note:
        """Return a note about a number of arrays."""
        return cls(plural(count, "array"), text, count)


@dataclass(frozen=True)
class Notes:
    """The effects of a conversion besides moving bytes; can be added.

    Attributes:
        inexact: values that will not come back bit by bit, with the reason.
        values: values that are changed and come back exactly.
        dropped: source arrays left out on purpose.
        remarks: further remarks for the user, one sentence each.
    """

    inexact: tuple[Note, ...] = ()
    values: tuple[Note, ...] = ()
    dropped: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def __add__(self, other: Notes) -> Notes:
        return Notes(
            self.inexact + other.inexact,
            self.values + other.values,
            self.dropped + other.dropped,
            self.remarks + other.remarks,
        )
