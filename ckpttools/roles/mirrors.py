"""Find arrays with the full path and shape of a parameter: moments of an optimizer, or copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    is_wrapper,
    unwrapped,
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
        first, last = min(self.arrays, key=_words, default=()), max(self.arrays, key=_words, default=())
        same = sum(1 for _ in takewhile(lambda keys: keys[0] == keys[1], zip(first, last, strict=False)))
        return min(same, max(len(first) - 1, 0))

    @cached_property
    def _whole(self) -> _PathIndex:
        """Maps full paths, without wrappers, to the arrays that have them."""
        return self._indexed(self._ends)

    @cached_property
    def _named(self) -> _PathIndex:
        """Maps paths to arrays, without the first key that is not common to all arrays."""
        return self._indexed(self._inner)

    def _indexed(self, ends: Callable[[Path], Iterable[Path]]) -> _PathIndex:
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
        return any(of[: len(outside)] != outside for of in self._whole.get(tail, ()))

    def mirrors(self, path: Path, start: int) -> bool:
        """Return whether the path below the first `start` keys matches an outside array of the same shape."""
        for k in range(start, len(path)):
            for of in self._outside(path, path[:start], path[k:], start, self._whole):
                if self.arrays[path].shape == self.arrays[of].shape:
                    return True
        return self.moment(path, start) is not None

    def moment(self, path: Path, start: int = 0) -> Moment | None:
        """Return the array as the moment of a parameter outside its first `start` keys, or None."""
        return next(self._moments(path, start, self._whole), None)

    def moment_below_names(self, path: Path) -> Moment | None:
        """Return the array as the moment of a parameter below a name that no framework uses, or None."""
        return next(self._moments(path, 0, self._named), None)

    def odd_moment(self, path: Path) -> Moment | None:
        """Return the moment that an array would be if it had the right shape, or if it is a part of one."""
        for tails in (path, path[:-1]):
            for index in (self._whole, self._named):
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
                    yield from self._of(path, path[:k], path[k], tail, start, index)
        if path[-1:] and path[-1] in MOMENTS:
            for k in range(start, len(path) - 1):
                yield from self._of(path, path[:k], path[-1], path[k:-1], start, index)

    def _of(
        self, path: Path, head: Path, name: str | int, tail: Path, start: int, index: _PathIndex
    ) -> Iterator[Moment]:
        for of in self._outside(path, head, tail, start, index):
            yield Moment(head, name, of, of[: len(of) - len(tail)])

    def _outside(self, path: Path, head: Path, tail: Path, start: int, index: _PathIndex) -> Iterator[Path]:
        """Yield the arrays with the same full path in another subtree and another module."""
        for of in index.get(tail, ()):
            within = bool(start) and of[:start] == path[:start]
            if of != path and not within and not _same_module(of, head, len(of) - len(tail)):
                yield of


def _same_module(of: Path, head: Path, root: int) -> bool:
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


def _words(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))
