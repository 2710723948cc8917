"""Errors for paths that are empty, do not exist, or contain an interrupted conversion."""

from __future__ import annotations

from ckpttools.core.errors import CheckpointError, FormatError, MissingPathError
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import SUFFIX, Unfinished, find_unfinished, read_unfinished
from ckpttools.stores.registry import parse


def absent(location: Location) -> CheckpointError:
    """Return the error for a location that does not exist."""
    known = location.store.absence_reason(location.key)
    if known is not None:
        return known
    left = find_unfinished(location)
    hint = f"{location.spelling_hint()}{_hub_name_hint(location)}" if left is None else next_step(left)
    return MissingPathError(f"{location} does not exist", hint=hint)


def _hub_name_hint(location: Location) -> str:
    """Return a hint for a path that looks like the name of a Hub model, OWNER/NAME."""
    is_relative = str(location) == "/".join(location.parts)
    if not is_relative or len(location.parts) != 2 or location.parts[0] == ".." or location.parent.exists():
        return ""
    return f"; a model on the Hugging Face Hub is named hf://{location}"


def refuse_empty(location: Location) -> None:
    """Raise FormatError if `location` is an empty directory."""
    if location.is_dir() and not any(location.iterdir()):
        raise empty_error(location)


def empty_error(location: Location) -> FormatError:
    """Return the error for an empty directory."""
    return FormatError(f"{location} is an empty directory", hint="name one with a checkpoint in it")


def interrupted_error(location: Location, left: Unfinished) -> FormatError:
    """Return the error for a directory with a conversion in progress."""
    state = "a checkpoint that is being written" if left.writer else f"an interrupted {left.kind}"
    return FormatError(f"{state} is not a checkpoint yet", location=location, hint=next_step(left))


def find_interrupted_copy(directory: Location) -> Unfinished | None:
    """Return the interrupted copy of a run in a directory or one level below, or None."""
    for above in (directory, directory / "checkpoints"):
        for item in above.directories() if above.is_dir() else ():
            if item.name.endswith(SUFFIX) and (left := read_unfinished(item)) is not None:
                return left
    return None


def next_step(left: Unfinished) -> str:
    """Return a hint on what to do with an interrupted conversion."""
    if left.replaced is not None:
        return f"{left.replaced} holds the previous checkpoint: move it back"
    if left.writer:
        return f"{left.location} is being written by {left.writer}: {left.wait}"
    return f"{left.location} is an interrupted {left.kind}: {resume_hint(left)} to resume it"


def resume_hint(left: Unfinished) -> str:
    """Return a hint on how to resume an interrupted conversion."""
    if not left.command:
        return "run its command again"
    is_here = left.directory in ("", str(parse(".").absolute()))
    return f"run `{left.command}` again{'' if is_here else f' in {left.directory}'}"
