"""Names of a caller's tree against those of a checkpoint: one may be below a key of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpttools.array.tree import Path
from ckpttools.core.dataclass import dataclass
from ckpttools.roles.names import is_wrapper

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
        below: keys of the checkpoint below which the names are.
        others: for each other choice of paths that is as good, the one of the first name; the first choice's
            comes first. Empty where there is one choice.
    """

    found: Mapping[Path, Path]
    missing: tuple[Path, ...]
    unread: tuple[Path, ...]
    below: Path = ()
    others: tuple[Path, ...] = ()


def match(
    wanted: Sequence[Path], known: Iterable[Path], is_parameter: Callable[[Path], bool] = lambda path: True
) -> Match:
    """Finds each wanted name in a checkpoint: as it is, or all of them below one key, or without one.

    Numbers are the same as text or as places in lists; a last key `value`, as NNX has one, counts for
    nothing.

    Args:
        wanted: names of the caller.
        known: paths of the checkpoint.
        is_parameter: whether one of them is a parameter: of several places where the names are as well found
            it is that of the parameters which is meant, not that of their moments.
    """
    paths = {_name(path): path for path in known}
    names = [(path, _name(path)) for path in wanted]
    choices = _best([name for _, name in names], paths)
    if len(choices) > 1:
        choices = [each for each in choices if all(map(is_parameter, _found(each, paths)))] or choices
    best = choices[0]
    found = dict(zip(wanted, best.names, strict=True))
    below, reached = best.below, set(best.names)
    unread = tuple(
        path for name, path in paths.items() if name[: len(below)] == below and name not in reached
    )
    firsts = [path for each in choices for path in _found(each, paths)[:1]]
    return Match(
        {path: paths[name] for path, name in found.items() if name in paths},
        tuple(path for path, name in found.items() if name not in paths),
        unread,
        below,
        tuple(firsts) if len(firsts) > 1 else (),
    )


class _Choice(NamedTuple):
    """A place where names may be.

    Attributes:
        below: keys that the checkpoint has before them.
        names: all of them there.
    """

    below: Name
    names: tuple[Name, ...]


def _found(choice: _Choice, paths: Mapping[Name, Path]) -> list[Path]:
    return [paths[name] for name in choice.names if name in paths]


def _name(path: Path) -> Name:
    name = tuple(map(str, path))
    return name[:-1] if len(name) > 1 and name[-1] == _VALUE else name


def _best(names: Sequence[Name], paths: Mapping[Name, Path]) -> list[_Choice]:
    """Where most of the names are found; best first of those that are as good."""
    as_they_are = _Choice((), tuple(names))
    if all(name in paths for name in names):
        return [as_they_are]
    shared = _shared(names)
    by_last: dict[str, list[Name]] = {}
    for known in paths:
        by_last.setdefault(known[-1] if known else "", []).append(known)
    places: dict[tuple[Name, int], None] = {((), 0): None}
    for name in names[:: max(1, len(names) // _SAMPLES)]:
        places.update(dict.fromkeys(_choices(name, shared, by_last.get(name[-1] if name else "", []))))
    # The same names may be reached with other keys in common.
    choices: dict[tuple[Name, ...], _Choice] = {}
    for below, above in sorted(places, key=lambda place: (place[1], len(place[0]))):
        made = tuple(below + name[above:] for name in names)
        choices.setdefault(made, _Choice(below, made))
    counts = {made: sum(name in paths for name in made) for made in choices}
    most = max(counts.values())
    best = [choice for made, choice in choices.items() if counts[made] == most]
    return [as_they_are] if as_they_are in best else best


def _choices(name: Name, shared: int, alike: Sequence[Name]) -> Iterator[tuple[Name, int]]:
    """Where a name could be found, in the names that end alike: below keys, or without wrappers of its own.

    Not both: `params/w` is no other name of `ema/w`.
    """
    yield from ((known[: len(known) - len(name)], 0) for known in alike if known[-len(name) :] == name)
    for above in range(1, shared + 1):
        if is_wrapper(name[above - 1]) and name[above:] in alike:
            yield (), above
        elif not is_wrapper(name[above - 1]):
            return


def _shared(names: Sequence[Name]) -> int:
    """How many keys all names have in common, their last ones not counted; few."""
    least = min(_MOST_ABOVE, min(map(len, names)) - 1)
    return next((k for k in range(least) if len({name[k] for name in names}) > 1), max(0, least))
