"""Checkpoints somewhere below a directory that is none itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ckpttools.core.errors import CheckpointError
from ckpttools.formats.orbax.hosts import hosts_at
from ckpttools.formats.orbax.steps import directories
from ckpttools.formats.registry import is_checkpoint
from ckpttools.stores.place import Place

# Levels that are searched, and directories that are looked at in all.
_DEEPEST, _MOST_TRIED = 4, 200


def checkpoints_below(place: Place, most: int) -> list[Place]:
    """The first checkpoints and runs in a directory and in those below it; nothing in them is searched."""
    return list(islice(_found(place), most))


def _found(place: Place) -> Iterator[Place]:
    level, left = [place], _MOST_TRIED
    for _ in range(_DEEPEST):
        further: list[Place] = []
        for each in (below for above in level for below in _directories(above)):
            if not left:
                return
            left -= 1
            if _is_one(each):
                yield each
            else:
                further.append(each)
        level = further


def _directories(place: Place) -> list[Place]:
    try:
        return sorted(directories(place), key=str)
    except CheckpointError:
        return []  # only advice depends on it


def _is_one(place: Place) -> bool:
    try:
        return is_checkpoint(place) or bool(hosts_at(place))
    except CheckpointError:
        return False
