"""What the user should know of a conversion before it happens: said by the plan and by the receipt."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import plural


@dataclass(frozen=True, slots=True)
class Note:
    """Something the user should know before it happens.

    Attributes:
        subject: what it is about, such as a row.
        text: what happens to it.
        arrays: how many the subject counts; None where it names something.
    """

    subject: str
    text: str
    arrays: int | None = None

    @classmethod
    def of_arrays(cls, count: int, text: str) -> Note:
        """One about so many arrays, whichever they are."""
        return cls(plural(count, "array"), text, count)


@dataclass(frozen=True)
class Notes:
    """What a conversion does beside moving bytes. Adds up.

    Attributes:
        inexact: values that will not come back bit by bit, with the reason.
        values: values that are changed and come back exactly.
        dropped: source arrays left out on purpose.
        remarks: what else the user should know, a sentence each.
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
