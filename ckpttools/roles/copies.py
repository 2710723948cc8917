"""Find the parameters of a tree, and copies with the same paths and shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ckpttools.array.tree import Path
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape
from ckpttools.roles.mirrors import Mirrors, is_moments_shape
from ckpttools.roles.names import MOMENTS, WEIGHTS, wraps
from ckpttools.roles.subtrees import mostly, sizes

# Maximum size of a tuple of states: a model, its average, an optimizer and random states.
_LOCATIONS = 4


@dataclass(frozen=True)
class Copies:
    """The location of the parameters, and of subtrees with the same paths and shapes.

    Attributes:
        parameters: The prefix of the parameters; None if unknown.
        others: The prefixes of state and copies.
    """

    parameters: Path | None
    others: frozenset[Path]


def copies(mirrors: Mirrors, kept: list[Path], state: list[Path]) -> Copies:
    """Find the parameters and their copies.

    Args:
        mirrors: All arrays.
        kept: The arrays that were not identified as optimizer state.
        state: The arrays that were identified as optimizer state.
    """
    search = _CopySearch(mirrors, kept, state)
    expected = search.trained() or search.beside_others()
    result = [location for path in kept if (location := search.location(path, expected))] if expected else []
    counts = Counter(location.head for location in result)
    main = _main(counts, {location.head for location in result if location.is_moment}, _counted(mirrors))
    below = sizes(kept, counts.keys())
    others = (
        head
        for head, count in counts.items()
        if head not in (main, ()) and (mostly(count, len(expected)) or (count > 1 and below[head] == count))
    )
    return Copies(main, frozenset(others))


def _counted(mirrors: Mirrors) -> set[Path]:
    """Return keys directly above a step count; these are not a model's if there are other candidates."""
    return {path[:-1] for path in mirrors.arrays if mirrors.is_step(path)} - {()}


def _main(counts: Mapping[Path, int], moments: set[Path], counted: set[Path]) -> Path | None:
    """Return the prefix with the most parameters, preferring names of weights, then the first in order."""
    order = {head: k for k, head in enumerate(counts)}
    candidates = counts.keys() - moments

    def rank(head: Path) -> tuple[int, bool, bool, int]:
        is_state = any(head[:length] in counted for length in range(1, len(head)))
        return counts[head], not is_state, bool(WEIGHTS & set(head)), -order[head]

    return max(candidates, key=rank, default=None)


class _TailMatch(NamedTuple):
    """Where a path has the tail of a parameter's path, and whether it also has the name of a moment."""

    head: Path
    tail: Path
    is_moment: bool


@dataclass(frozen=True)
class _CopySearch:
    mirrors: Mirrors
    kept: list[Path]
    state: list[Path]

    def location(self, path: Path, expected: Mapping[Path, Shape]) -> _TailMatch | None:
        """Return where a path ends like one of `expected` with its shape, with or without a moment's name."""
        last = path[-1] if path and path[-1] in MOMENTS else ""
        for k in range(len(path)):
            tail = path[k:]
            # Drop the last key only if it names a moment.
            for end in (tail, tail[:-1]) if last else (tail,):
                if end not in expected:
                    continue
                name = last if end != tail else _moment_above(path, k)
                if is_moments_shape(name, self.mirrors.arrays[path].shape, expected[end]):
                    return _TailMatch(path[:k], end, bool(name))
        return None

    def trained(self) -> dict[Path, Shape]:
        """Return the paths and shapes of the parameters that the optimizer state mirrors."""
        ends: dict[Path, Shape] = {}
        for path in self.kept if self.state else ():
            shape = self.mirrors.arrays[path].shape
            for k in range(len(path)):
                ends.setdefault(path[k:], shape)
        locations = (self.location(path, ends) for path in self.state if not self.mirrors.is_step(path))
        # If longer paths match, a shared last key such as `scale` is not the path of a parameter.
        return {_bare(location.tail): ends[location.tail] for location in locations if location}

    def beside_others(self) -> dict[Path, Shape]:
        """Return the paths and shapes of parameters that have a name of their own next to other objects."""
        first = next(iter(self._below_weights() or self._numbered()), None)
        if first is None:
            return {}
        mine = [path for path in self.kept if path[: len(first)] == first and len(path) > len(first)]
        # A copy has most of the parameters. If there are fewer other arrays than that, their names need not
        # be checked.
        if not mostly(len(self.kept) - len(mine), len(mine)):
            return {}
        return {_bare(path[len(first) :]): self.mirrors.arrays[path].shape for path in mine}

    def _below_weights(self) -> list[Path]:
        """Return prefixes that end in a name for weights."""
        common = self.mirrors.common
        named = (path for path in self.kept if not WEIGHTS.isdisjoint(path))
        outer = ((path, next(k for k, key in enumerate(path) if key in WEIGHTS)) for path in named)
        return [path[: k + 1] for path, k in outer if all(map(wraps, path[common:k]))]

    def _numbered(self) -> list[Path]:
        """Return prefixes that are a tuple index; none if there are too many for a tuple of states."""
        numbered = (path[:1] for path in self.kept if len(path) > 1 and str(path[0]).isdecimal())
        locations = list(dict.fromkeys(numbered))
        return locations if len(locations) <= _LOCATIONS else []


def _moment_above(path: Path, end: int) -> str | int:
    return next((key for key in reversed(path[:end]) if key in MOMENTS), "")


def _bare(tail: Path) -> Path:
    """Return the path of a parameter without the collections around it."""
    while len(tail) > 1 and tail[0] == "params":
        tail = tail[1:]
    return tail
