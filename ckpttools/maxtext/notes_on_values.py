"""What becomes of values on the way from MaxText to Hugging Face, and of what is left out, in words."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dtypes import DType
from ckpttools.core.notes import Note, Notes
from ckpttools.core.wording import option
from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.mapped import Mapped, ValueNote
from ckpttools.maxtext.to_hf_options import ToHuggingFace
from ckpttools.transforms.cast import cast_notes


def notes_on_values(
    mapped: Mapped, made: Mapping[str, LazyArray], options: ToHuggingFace, dropped: tuple[str, ...]
) -> Notes:
    """What the user should know.

    Args:
        mapped: the arrays and what their rows do to values.
        made: the same, rounded to the dtypes that they had.
        options: what the user wants.
        dropped: what is left out.
    """
    rounded = {key: made[key].dtype for key in mapped.changed if made[key].dtype != mapped.arrays[key].dtype}
    changed = [(each, _of_row(each, rounded)) for each in mapped.values]
    inexact = [Note(each.key, each.reason) for each, back in changed if not (each.exact or back)]
    values = [
        Note(each.key, f"{_operation(each)}, rounded back to {back}" if back else each.reason)
        for each, back in changed
        if each.exact or back
    ]
    for axis, (there, kept) in mapped.cut.items():
        text = f"{there} in MaxText, {kept} in the model: the last {there - kept} are cut off"
        if options.padding_rows is None:
            values.append(Note(axis, f"{text}, all of them zeros"))
        else:
            inexact.append(
                Note(axis, f"{text}, whatever they hold, as {option('padding_rows', 'drop')} says")
            )
    if options.dtype is not None:
        inexact += cast_notes(mapped.arrays, options.dtype)
    return Notes(tuple(inexact), tuple(values), dropped)


def _of_row(note: ValueNote, rounded: Mapping[str, DType]) -> str:
    """The dtypes to which arrays of a row are rounded; "" where none is."""
    key = parse_key(note.key)
    return " and ".join(
        {dtype.name: None for name, dtype in rounded.items() if key.numbers(name) is not None}
    )


def _operation(note: ValueNote) -> str:
    """The first words of a note: what happens to values, without how exact that is."""
    return note.reason.partition(",")[0]
