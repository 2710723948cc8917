"""What an interrupted conversion leaves where somebody looks for a checkpoint: reported instead of opened."""

from __future__ import annotations

from ckpttools.core.errors import CheckpointError, FormatError, MissingPathError
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import SUFFIX, Unfinished, find_unfinished, read_unfinished
from ckpttools.stores.registry import parse


def absent(location: Location) -> CheckpointError:
    """Return the error of a place at which there is nothing."""
    known = location.store.absence_reason(location.key)
    if known is not None:
        return known
    left = find_unfinished(location)
    hint = f"{location.spelling_hint()}{_fetched(location)}" if left is None else next_step(left)
    return MissingPathError(f"{location} does not exist", hint=hint)


def _fetched(location: Location) -> str:
    """What to do where a path looks like the name of a model on the hub, OWNER/NAME."""
    is_relative = str(location) == "/".join(location.parts)
    if not is_relative or len(location.parts) != 2 or location.parts[0] == ".." or location.parent.exists():
        return ""
    return f"; a model on the Hugging Face Hub is named hf://{location}"


def refuse_empty(location: Location) -> None:
    """Raise FormatError if `location` is a directory without anything in it."""
    if location.is_dir() and not any(location.iterdir()):
        raise empty_error(location)


def empty_error(location: Location) -> FormatError:
    """Return the error for an empty directory."""
    return FormatError(f"{location} is an empty directory", hint="name one with a checkpoint in it")


def refuse_interrupted(location: Location) -> None:
    """Raise FormatError if `location` is a directory in which a conversion grows, whatever lies in it."""
    left = read_unfinished(location)
    if left is not None:
        raise interrupted_error(location, left)


def interrupted_error(location: Location, left: Unfinished) -> FormatError:
    """Return the error for a directory in which a conversion grows."""
    what = "what is being written" if left.writer else f"an interrupted {left.kind}"
    return FormatError(f"{what} is not a checkpoint yet", location=location, hint=next_step(left))


def begun_in(directory: Location) -> Unfinished | None:
    """What an interrupted copy of a run has left among its steps, in a directory or one level below."""
    for above in (directory, directory / "checkpoints"):
        for item in above.directories() if above.is_dir() else ():
            if item.name.endswith(SUFFIX) and (left := read_unfinished(item)) is not None:
                return left
    return None


def next_step(left: Unfinished) -> str:
    """What to do about an interrupted conversion."""
    if left.replaced is not None:
        return f"{left.replaced} holds what it was before it was to be replaced: move it back"
    if left.writer:
        return f"{left.location} is the work of {left.writer}: {left.wait}"
    return f"{left.location} is an interrupted {left.kind}: {going_on(left)}, and it goes on"


def going_on(left: Unfinished) -> str:
    """How an interrupted conversion is gone on with."""
    if not left.command:
        return "run its command again"
    is_here = left.directory in ("", str(parse(".").absolute()))
    return f"run `{left.command}` again{'' if is_here else f' in {left.directory}'}"
