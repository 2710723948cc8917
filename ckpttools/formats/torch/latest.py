"""Find the step of a DeepSpeed run that a file next to the steps names."""

from __future__ import annotations

from collections.abc import Callable
from shlex import quote

from ckpttools.core.errors import FormatError
from ckpttools.core.text import sample_names, sort_naturally
from ckpttools.stores.location import Location

LATEST, UNIVERSAL = "latest", "latest_universal"
# A file with this name may be something else, so at most this many bytes are read.
_LONGEST = 4096


def text_in(file: Location) -> str:
    """Read the name of a step from a file."""
    with file.open() as result:
        return result.read(0, min(result.size, _LONGEST)).decode("utf-8", "replace").strip()


def step_named(path: Location, latest: str) -> Location:
    """Return the step directory that the file `latest` names, or `path` if there is no such file."""
    file = path / latest
    if not file.is_file():
        return path
    tag = text_in(file)
    return path / tag if tag and "/" not in tag and tag not in (".", "..") and "\0" not in tag else path


def missing_step(path: Location, latest: str, is_step: Callable[[Location], object]) -> FormatError | None:
    """Return an error if a file names a missing step but other steps exist; None otherwise.

    Args:
        path: The directory of steps.
        latest: Name of the file.
        is_step: Returns whether a directory is a step.
    """
    named = step_named(path, latest)
    if named == path or is_step(named):
        return None
    steps = sort_naturally(directory.name for directory in path.directories() if is_step(directory))
    if not steps:
        return None
    last = quote(str(path / steps[-1]))
    return FormatError(
        f"the file {latest} names the step {named.name}, which does not exist",
        location=path / latest,
        expected=f"one that exists: {sample_names(steps)}",
        hint=f"pass the step itself, such as {last}; DeepSpeed finds it if {latest} names it",
    )
