"""Find the step of a DeepSpeed run: a file next to the steps names it."""

from __future__ import annotations

from collections.abc import Callable
from shlex import quote

from ckpttools.core.errors import FormatError
from ckpttools.core.text import sample_names, sort_naturally
from ckpttools.stores.location import Location

LATEST, UNIVERSAL = "latest", "latest_universal"
# A file with this name may be something else: read at most this many bytes.
_LONGEST = 4096


def text_in(file: Location) -> str:
    """Return the name of a step in a file."""
    with file.open() as result:
        return result.read(0, min(result.size, _LONGEST)).decode("utf-8", "replace").strip()


def step_named(path: Location, latest: str) -> Location:
    """Return the directory of the step that a file named `latest` names; `path` without one."""
    file = path / latest
    if not file.is_file():
        return path
    tag = text_in(file)
    return path / tag if tag and "/" not in tag and tag not in (".", "..") and "\0" not in tag else path


def missing_step(path: Location, latest: str, is_step: Callable[[Location], object]) -> FormatError | None:
    """Return the error if a file names a missing step although others exist; None otherwise.

    Args:
        path: the directory of steps.
        latest: name of the file.
        is_step: returns whether a directory is a step.
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
