"""Symbolic links that lead into steps of a run: what has them would lose what it links to.

Hard links need nothing: a file stays as long as it has a name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from ckpttools.core.errors import StorageError
from ckpttools.stores.place import Place

# Below the directories beside the run: RUN/../other/checkpoints/STEP/ITEM.
_DEEPEST = 4
# More directories than that are not those of runs.
_MOST = 20_000


def links_into(run: Place) -> Mapping[str, tuple[str, ...]]:
    """Name of a step -> links that lead into it, from anywhere in the run and from directories beside it.

    Raises:
        StorageError: the run may not be listed.
    """
    if run.store.scheme != "file":
        return {}
    top, found = run.resolve(), defaultdict(list)
    seen = [_MOST]
    for place in (*_links(run, None, seen), *_links(run.absolute().parent, _DEEPEST, seen, without=run)):
        target = place.resolve()
        try:
            name = target.relative_to(top).partition("/")[0]
        except ValueError:
            continue
        # One within a step is gone with it.
        if name and not _is_inside(place, run / name):
            found[name].append(str(place))
    return {name: tuple(links) for name, links in found.items()}


def _is_inside(place: Place, directory: Place) -> bool:
    return directory.absolute() in place.absolute().parents


def _links(
    directory: Place, deepest: int | None, left: list[int], without: Place | None = None
) -> Iterator[Place]:
    """Links in a directory and below it."""
    try:
        entries = directory.entries()
    except StorageError:
        if deepest is None:
            raise
        return
    for entry in entries:
        place = directory / entry.name
        if entry.is_link:
            yield place
        elif (
            entry.is_dir and deepest != 0 and left[0] and place.absolute() != (without and without.absolute())
        ):
            left[0] -= 1
            yield from _links(place, None if deepest is None else deepest - 1, left)
