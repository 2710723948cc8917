"""Names of a caller's tree against those of a checkpoint: one may be below a key of the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.array.tree import Path

Name = tuple[str, ...]
_VALUE = "value"
# So many of the names tell below which keys the others are.
_SAMPLES = 16
_MOST_ABOVE = 3


@dataclass(frozen=True)
class Match:
    """How names of two trees belong together.

    Attributes:
        found: name of the caller -> path of the checkpoint.
        missing: names of the caller that the checkpoint has not.
        unread: paths of the checkpoint, from the same place in it, that the caller does not name.
        below: keys of the checkpoint below which its names are the caller's.
    """

    found: Mapping[Path, Path]
    missing: tuple[Path, ...]
    unread: tuple[Path, ...]
    below: Path = ()


def match(wanted: Sequence[Path], known: Iterable[Path]) -> Match:
    """Finds each wanted name in a checkpoint: as it is, or all of them below one key, or without one.

    Numbers are the same as text or as places in lists; a last key `value`, as NNX has one, counts for
    nothing.
    """
    paths = {_name(path): path for path in known}
    names = [(path, _name(path)) for path in wanted]
    below, above = _best([name for _, name in names], paths)
    found = {path: below + name[above:] for path, name in names}
    reached = {name for name in found.values() if name in paths}
    unread = tuple(
        path for name, path in paths.items() if name[: len(below)] == below and name not in reached
    )
    return Match(
        {path: paths[name] for path, name in found.items() if name in paths},
        tuple(path for path, name in found.items() if name not in paths),
        unread,
        below,
    )


def _name(path: Path) -> Name:
    name = tuple(map(str, path))
    return name[:-1] if len(name) > 1 and name[-1] == _VALUE else name


def _best(names: Sequence[Name], paths: Mapping[Name, Path]) -> tuple[Name, int]:
    """Keys that the checkpoint has before the names, and how many keys the names have before its."""
    if all(name in paths for name in names):
        return (), 0
    shared = _shared(names)
    by_last: dict[str, list[Name]] = {}
    for known in paths:
        by_last.setdefault(known[-1] if known else "", []).append(known)
    choices: dict[tuple[Name, int], None] = {((), 0): None}
    for name in names[:: max(1, len(names) // _SAMPLES)]:
        choices.update(dict.fromkeys(_choices(name, shared, by_last.get(name[-1] if name else "", []))))

    def score(choice: tuple[Name, int]) -> tuple[int, int, int]:
        below, above = choice
        return sum(below + name[above:] in paths for name in names), -above, -len(below)

    return max(choices, key=score)


def _choices(name: Name, shared: int, alike: Iterable[Name]) -> Iterator[tuple[Name, int]]:
    """Where a name could be found, in the names that end alike."""
    for above in range(shared + 1):
        own = name[above:]
        yield from ((known[: len(known) - len(own)], above) for known in alike if known[-len(own) :] == own)


def _shared(names: Sequence[Name]) -> int:
    """How many keys all names have in common, their last ones not counted; few."""
    least = min(_MOST_ABOVE, min(map(len, names)) - 1)
    return next((k for k in range(least) if len({name[k] for name in names}) > 1), max(0, least))
