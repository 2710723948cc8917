"""Find symbolic links into the steps of a run, which deleting a step would break.

Hard links need no care: a file exists as long as it has a name.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import chain

from ckpttools.core.errors import StorageError
from ckpttools.stores.location import Location

# Depth of the search in directories next to the run: RUN/../other/checkpoints/STEP/ITEM.
_DEEPEST = 4
MOST_BESIDE = 20_000
"""Number of directories next to the run to search, nearest first.

Directories beyond this number do not belong to runs.
"""


def find_links_into(run: Location) -> Mapping[str, tuple[str, ...]]:
    """Return the links into each step, from anywhere in the run and from sibling directories.

    Raises:
        StorageError: The run cannot be listed.
    """
    if run.store.scheme != "file":
        return {}
    top, result = run.resolve(), defaultdict(list)
    for location in chain(_within(run), _beside(run.absolute())):
        target = location.resolve()
        try:
            name = target.relative_to(top).partition("/")[0]
        except ValueError:
            continue
        # A link inside a step is deleted with the step.
        if name and not _is_inside(location, run / name):
            result[name].append(str(location))
    return {name: tuple(links) for name, links in result.items()}


def _is_inside(location: Location, directory: Location) -> bool:
    return directory.absolute() in location.absolute().parents


def _within(directory: Location) -> Iterator[Location]:
    """Yield all links in a directory and below it."""
    for entry in directory.entries():
        if entry.is_link:
            yield directory / entry.name
        elif entry.is_dir:
            yield from _within(directory / entry.name)


def _beside(run: Location) -> Iterator[Location]:
    """Yield the links in the directory that contains a run, and below it, except for those in the run."""
    waiting = deque([(run.parent, 0)])
    for _ in range(MOST_BESIDE):
        if not waiting:
            return
        directory, depth = waiting.popleft()
        try:
            entries = directory.entries()
        except StorageError:
            continue  # The directory belongs to another user.
        for entry in entries:
            location = directory / entry.name
            if entry.is_link:
                yield location
            elif entry.is_dir and depth < _DEEPEST and location != run:
                waiting.append((location, depth + 1))
