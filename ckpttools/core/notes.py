"""Notes for the user about a conversion, shown in its plan and receipt."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import plural


@dataclass(frozen=True, slots=True)
class Note:
    """A fact that the user should know before the conversion.

    Attributes:
        subject: The affected object, such as a row.
        text: What happens to the subject.
        arrays: Number of arrays, if the subject is a count; None if it is a name.
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
    """The effects of a conversion besides moving bytes. Notes can be added with `+`.

    Attributes:
        inexact: Values that the reverse conversion does not restore bit for bit, with the reason.
        values: Values that are changed and that the reverse conversion restores exactly.
        dropped: Source arrays that are omitted on purpose.
        remarks: Further remarks for the user, one sentence each.
        advice: Options to consider for this result, one sentence each; shown after the result.
    """

    inexact: tuple[Note, ...] = ()
    values: tuple[Note, ...] = ()
    dropped: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    def __add__(self, other: Notes) -> Notes:
        return Notes(
            self.inexact + other.inexact,
            self.values + other.values,
            self.dropped + other.dropped,
            self.remarks + other.remarks,
            self.advice + other.advice,
        )
