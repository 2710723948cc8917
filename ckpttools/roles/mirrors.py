"""Find subtrees with the paths and shapes of the parameters: moments of an optimizer, or copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

from ckpttools.array.tree import Path
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape
from ckpttools.roles.names import (
    FACTORED,
    MOMENTS,
    REMEMBERED,
    STEPS,
    SUMMED,
    WEIGHTS,
    is_wrapper,
    unwrapped,
    wraps,
)

# A path that more arrays share than this, such as the `weight` of numbered layers, is not that of one
# parameter.
_SAME = 8


class ArrayFacts(NamedTuple):
    """The relevant properties of an array. Integers include booleans, and words are uint32."""

    shape: Shape
    is_whole_number: bool
    is_words: bool = False


_PathIndex = Mapping[Path, list[Path]]


class Moment(NamedTuple):
    """An array named like a moment that mirrors a parameter: head/mu/parameter or head/parameter/m.

    Attributes:
        head: The keys above the moment's name and the parameter's path.
        name: The moment's name.
        parameter: The path of the parameter in the tree.
        root: The keys above the parameter, which wrap its model.
    """

    head: Path
    name: str | int
    parameter: Path
    root: Path


@dataclass(frozen=True)
class Mirrors:
    """The arrays of a tree, indexed to find those that have the full path of another array."""

    arrays: Mapping[Path, ArrayFacts]

    @cached_property
    def common(self) -> int:
        """Number of leading keys that all paths share."""
        first, last = (
            min(self.arrays, key=_split_words, default=()),
            max(self.arrays, key=_split_words, default=()),
        )
        same = sum(1 for _ in takewhile(lambda keys: keys[0] == keys[1], zip(first, last, strict=False)))
        return min(same, max(len(first) - 1, 0))

    @cached_property
    def _complete_paths(self) -> _PathIndex:
        """Maps full paths, without wrappers, to the arrays that have them."""
        return self._index_paths(self._ends)

    @cached_property
    def _named(self) -> _PathIndex:
        """Maps paths to arrays, without the first key that is not common to all arrays."""
        return self._index_paths(self._inner)

    def _index_paths(self, ends: Callable[[Path], Iterable[Path]]) -> _PathIndex:
        result: dict[Path, list[Path]] = {}
        for path in self.arrays:
            if self.is_step(path):
                continue
            for end in ends(path):
                same = result.setdefault(end, [])
                if len(same) < _SAME:
                    same.append(path)
        return result

    def _ends(self, path: Path) -> Iterator[Path]:
        yield from unwrapped(path)
        # A run name above everything is also not part of the parameter's path.
        key = path[self.common] if 0 < self.common < len(path) else ""
        if is_wrapper(key) and not str(key).isdecimal() and not all(map(is_wrapper, path[: self.common])):
            yield from unwrapped(path, self.common + 1)

    def _inner(self, path: Path) -> Iterator[Path]:
        # Below an unknown name, a single key such as `kernel` is not the full path of a parameter.
        if len(path) > self.common + 2 and not str(path[self.common]).isdecimal():
            yield from unwrapped(path, self.common + 1)

    def is_step(self, path: Path) -> bool:
        """Return whether an array is a step count (of any dtype), judged by its name."""
        return self.arrays[path].shape == () and path[-1:] != () and path[-1] in STEPS

    def is_count(self, path: Path) -> bool:
        """Return whether an array is a counter or a boolean."""
        array = self.arrays[path]
        return array.shape == () and (array.is_whole_number or self.is_step(path))

    def is_whole(self, tail: Path, outside: Path) -> bool:
        """Return whether a path is the full path, without wrappers, of an array outside a subtree."""
        return any(of[: len(outside)] != outside for of in self._complete_paths.get(tail, ()))

    def mirrors(self, path: Path, start: int) -> bool:
        """Return whether the path below the first `start` keys matches an outside array of the same shape."""
        for k in range(start, len(path)):
            for of in self._outside(path, path[:start], path[k:], start, self._complete_paths):
                if self.arrays[path].shape == self.arrays[of].shape:
                    return True
        return self.moment(path, start) is not None

    def moment(self, path: Path, start: int = 0) -> Moment | None:
        """Return the array as the moment of a parameter outside its first `start` keys, or None."""
        return next(self._moments(path, start, self._complete_paths), None)

    def moment_below_names(self, path: Path) -> Moment | None:
        """Return the array as the moment of a parameter below a name that no framework uses, or None."""
        return next(self._moments(path, 0, self._named), None)

    def mismatched_moment(self, path: Path) -> Moment | None:
        """Return the moment that an array would be if it had the right shape, or if it is a part of one."""
        for tails in (path, path[:-1]):
            for index in (self._complete_paths, self._named):
                for result in self._candidates(tails, 0, index):
                    return result
        return None

    def _moments(self, path: Path, start: int, index: _PathIndex) -> Iterator[Moment]:
        shape = self.arrays[path].shape
        for result in self._candidates(path, start, index):
            if is_moments_shape(result.name, shape, self.arrays[result.parameter].shape):
                yield result

    def _candidates(self, path: Path, start: int, index: _PathIndex) -> Iterator[Moment]:
        """Yield arrays named like moments that have a parameter's full path below or above the name."""
        for k in range(start, len(path)):
            if path[k] in MOMENTS:
                for tail in unwrapped(path, k + 1):
                    yield from self._iter_moments(path, path[:k], path[k], tail, start, index)
        if path[-1:] and path[-1] in MOMENTS:
            for k in range(start, len(path) - 1):
                yield from self._iter_moments(path, path[:k], path[-1], path[k:-1], start, index)

    def _iter_moments(
        self, path: Path, head: Path, name: str | int, tail: Path, start: int, index: _PathIndex
    ) -> Iterator[Moment]:
        for of in self._outside(path, head, tail, start, index):
            yield Moment(head, name, of, of[: len(of) - len(tail)])

    def _outside(self, path: Path, head: Path, tail: Path, start: int, index: _PathIndex) -> Iterator[Path]:
        """Yield the arrays with the same full path in another subtree and another module."""
        for of in index.get(tail, ()):
            within = bool(start) and of[:start] == path[:start]
            if of != path and not within and not _is_same_module(of, head, len(of) - len(tail)):
                yield of


def _is_same_module(of: Path, head: Path, root: int) -> bool:
    """Return whether a prefix is in the same module as a parameter; modules do not mirror themselves."""
    return of[:root] == head[:root] and of[root : root + 1] == head[root : root + 1] != ()


def is_moments_shape(name: str | int, shape: Shape, parameter: Shape) -> bool:
    """Return whether a moment can have this shape: the parameter's, several of them, or one axis fewer."""
    if shape == parameter or (name in FACTORED and shape == (1,)):
        return True
    if name in REMEMBERED and shape[1:] == parameter:
        return True
    axes = range(len(parameter)) if name in SUMMED else ()
    return any(parameter[:k] + parameter[k + 1 :] == shape for k in axes)


def below_moments(path: Path) -> bool:
    """Return whether any key of a path names a moment."""
    return not MOMENTS.isdisjoint(path)


def _split_words(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))


@dataclass(frozen=True, slots=True)
class Heads:
    """Prefixes of subtrees, by role.

    Attributes:
        state: Prefixes of optimizer states.
        weights: Prefixes of parameters inside optimizer states.
        unclear: Prefixes of subtrees that may be either.
    """

    state: frozenset[Path] = frozenset()
    weights: frozenset[Path] = frozenset()
    unclear: frozenset[Path] = frozenset()

    def __or__(self, more: Heads) -> Heads:
        return Heads(self.state | more.state, self.weights | more.weights, self.unclear | more.unclear)


def outside(paths: Iterable[Path], heads: Collection[Path]) -> list[Path]:
    """Return the paths that are not below any prefix."""
    lengths = sorted({len(head) for head in heads})
    if not lengths:
        return list(paths)
    return [path for path in paths if not any(path[:length] in heads for length in lengths)]


def inside(paths: Iterable[Path], heads: Collection[Path]) -> list[Path]:
    """Return the paths that are below a prefix."""
    lengths = sorted({len(head) for head in heads})
    return [path for path in paths if any(path[:length] in heads for length in lengths)] if lengths else []


def sizes(paths: Iterable[Path], heads: Collection[Path]) -> Counter[Path]:
    """Return the number of paths below each prefix."""
    lengths = {len(head) for head in heads}
    below = (path[:length] for path in paths for length in lengths if length <= len(path))
    return Counter(head for head in below if head in heads)


def raise_heads(heads: Collection[Path], others: Iterable[Path]) -> frozenset[Path]:
    """Shorten each prefix as long as none of the other paths are below it, but never to the root."""
    blocked = {path[:length] for path in others for length in range(len(path))} if heads else set()
    return frozenset(
        next((head[:n] for n in range(1, len(head)) if head[:n] not in blocked), head) for head in heads
    )


def branch(head: Path, root: Path) -> Path:
    """Return the leading keys of a prefix up to the first that differs from a root; () if there is none."""
    shared = next((k for k, (own, other) in enumerate(zip(head, root, strict=False)) if own != other), None)
    shared = min(len(head), len(root)) if shared is None else shared
    return head[: shared + 1] if len(head) > shared else ()


def mostly(part: int, total: int) -> bool:
    """Return whether a part is at least half of the whole."""
    return 2 * part >= total


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
    expected = search.trained() or search.named_next_to_others()
    result = [location for path in kept if (location := search.location(path, expected))] if expected else []
    counts = Counter(location.head for location in result)
    main = _main(
        counts, {location.head for location in result if location.is_moment}, _keys_with_step_counts(mirrors)
    )
    below = sizes(kept, counts.keys())
    others = (
        head
        for head, count in counts.items()
        if head not in (main, ()) and (mostly(count, len(expected)) or (count > 1 and below[head] == count))
    )
    return Copies(main, frozenset(others))


def _keys_with_step_counts(mirrors: Mirrors) -> set[Path]:
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

    def named_next_to_others(self) -> dict[Path, Shape]:
        """Return the paths and shapes of parameters that have a name of their own next to other objects."""
        first = next(iter(self._below_weights() or self._numbered_heads()), None)
        if first is None:
            return {}
        own_paths = [path for path in self.kept if path[: len(first)] == first and len(path) > len(first)]
        # A copy has most of the parameters. If there are fewer other arrays than that, their names need not
        # be checked.
        if not mostly(len(self.kept) - len(own_paths), len(own_paths)):
            return {}
        return {_bare(path[len(first) :]): self.mirrors.arrays[path].shape for path in own_paths}

    def _below_weights(self) -> list[Path]:
        """Return prefixes that end in a name for weights."""
        common = self.mirrors.common
        named = (path for path in self.kept if not WEIGHTS.isdisjoint(path))
        outer = ((path, next(k for k, key in enumerate(path) if key in WEIGHTS)) for path in named)
        return [path[: k + 1] for path, k in outer if all(map(wraps, path[common:k]))]

    def _numbered_heads(self) -> list[Path]:
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
