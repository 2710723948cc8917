"""Which step of a training by DeepSpeed is meant: a file beside the steps names it."""

from __future__ import annotations

from collections.abc import Callable
from shlex import quote

from ckpttools.core.errors import FormatError
from ckpttools.core.text import sample_names, sort_naturally
from ckpttools.stores.location import Location

LATEST, UNIVERSAL = "latest", "latest_universal"
# Of a file that is called so and is something else, no more is read.
_LONGEST = 4096


def text_in(file: Location) -> str:
    """What a file says that names a step."""
    with file.open() as result:
        return result.read(0, min(result.size, _LONGEST)).decode("utf-8", "replace").strip()


def step_named(path: Location, latest: str) -> Location:
    """Return the directory of a step: the one that a file names which is called `latest`, or `path`."""
    file = path / latest
    if not file.is_file():
        return path
    tag = text_in(file)
    return path / tag if tag and "/" not in tag and tag not in (".", "..") and "\0" not in tag else path


def missing_step(path: Location, latest: str, is_step: Callable[[Location], object]) -> FormatError | None:
    """Return the error of a file that names a step which is not there, where others are; None if all is well.

    Args:
        path: the directory of steps.
        latest: name of the file.
        is_step: says whether a directory is a step.
    """
    named = step_named(path, latest)
    if named == path or is_step(named):
        return None
    steps = sort_naturally(directory.name for directory in path.directories() if is_step(directory))
    if not steps:
        return None
    last = quote(str(path / steps[-1]))
    return FormatError(
        f"the file {latest} names the step {named.name}, which is not here",
        location=path / latest,
        expected=f"one that is: {sample_names(steps)}",
        hint=f"name the step itself, such as {last}; DeepSpeed finds it once {latest} names it",
    )
