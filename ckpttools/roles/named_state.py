"""State of an optimizer below a name that optimizers have, and the weights that lie in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckpttools.array.tree import Path
from ckpttools.roles.mirrors import Mirrors, below_moments
from ckpttools.roles.names import (
    ENCLOSED,
    MOMENTS,
    PER_PARAMETER,
    WEIGHTS,
    container,
    is_average,
    is_container,
    is_outer,
    is_strong,
    iterates,
    unwrapped,
)
from ckpttools.roles.subtrees import Found


def named_state(mirrors: Mirrors, empty: Collection[Path]) -> Found:
    """Where names tell of an optimizer's state, of weights within it, and of what is unclear."""
    around = _around_enclosed(mirrors.arrays)
    found = Found()
    for head, inner in _containers(mirrors, empty, around).items():
        found |= _Container(mirrors, head, inner).found(head in around)
    return found


def _around_enclosed(paths: Collection[Path]) -> set[Path]:
    """Keys with the state of another optimizer right below: the state of one, whatever they are called."""
    enclosed = (path for path in paths if not ENCLOSED.isdisjoint(path))
    around = {path[:k] for path in enclosed for k, key in enumerate(path) if key in ENCLOSED}
    return (around | {iterate[:-1] for iterate in iterates(paths)}) - {()}


def _containers(
    mirrors: Mirrors, empty: Collection[Path], around: Collection[Path]
) -> dict[Path, list[Path]]:
    """Keys that are named as optimizers' states are, or told otherwise -> the arrays below them."""
    found: dict[Path, list[Path]] = {}
    for paths, are_arrays in ((mirrors.arrays, True), (empty, False)):
        for path in paths:
            at = next((k for k, key in enumerate(path) if container(key) or path[: k + 1] in around), None)
            if at is not None:
                below = found.setdefault(path[: at + 1], [])
                if are_arrays:
                    below.append(path)
    return found


@dataclass(frozen=True)
class _Container:
    """A key that is named as an optimizer's state, and the arrays below it."""

    mirrors: Mirrors
    head: Path
    inner: list[Path]

    def found(self, is_sure: bool) -> Found:
        here = frozenset([self.head])
        if is_sure:
            return Found(state=here) | self._kept()
        if not is_container(self.head):
            # A module of a model may be called so.
            if self._is_whole_state():
                return Found(state=here)
            return Found(unclear=here) if self._is_half_told() else Found()
        if self._has_state():
            return Found(state=here) | self._kept()
        return Found(unclear=here) if self.inner else Found()

    def _large(self) -> list[Path]:
        return [path for path in self.inner if self.mirrors.arrays[path].shape]

    def _has_state(self) -> bool:
        """Whether anything below an optimizer's name is what an optimizer has."""
        start, large = len(self.head), self._large()
        return (
            not large
            or any(map(self.mirrors.is_count, self.inner))
            or any(below_moments(path[start : start + 2]) for path in large)
            or any(is_strong(key) for path in self.inner for key in path[start:])
            or any(self.mirrors.mirrors(path, start) for path in large)
        )

    def _is_whole_state(self) -> bool:
        """Whether all below a name that a module may have mirrors something, and steps are counted there."""
        large = self._large()
        if not any(map(self.mirrors.is_step, self.inner)):
            return False
        return bool(large or is_outer(self.head)) and all(
            self.mirrors.mirrors(path, len(self.head)) for path in large
        )

    def _is_half_told(self) -> bool:
        """Whether steps are counted, and all is named as moments, but not by the parameters' paths."""
        large, start = self._large(), len(self.head)
        named = is_outer(self.head) and all(below_moments(path[start:]) for path in large)
        last = is_outer(self.head[self.mirrors.common :]) and all(path[-1] in MOMENTS for path in large)
        if not ((named or last) and any(map(self.mirrors.is_step, self.inner))):
            return False
        return any(each.shape and path[:start] != self.head for path, each in self.mirrors.arrays.items())

    def _kept(self) -> Found:
        """What is kept of it: parameters that lie in it alone, and what may be weights once more."""
        own, odd = set[Path](), self._averages()
        for path in self.inner:
            below = path[len(self.head) : -1]
            if below and below[0] in WEIGHTS and self.head[-1] != PER_PARAMETER and not _lies_in(path, odd):
                tails = unwrapped(path, len(self.head) + 1)
                twice = any(self.mirrors.is_whole(tail, self.head) for tail in tails)
                (odd if twice else own).add(path[: len(self.head) + 1])
        return Found(weights=frozenset(own | odd), unclear=frozenset(odd))

    def _averages(self) -> set[Path]:
        start = len(self.head)
        named = ((path, k) for path in self.inner for k in range(start, len(path)) if is_average(path[k]))
        return _first(path[: k + 1] for path, k in named) | iterates(self.inner)


def _lies_in(path: Path, heads: Collection[Path]) -> bool:
    return bool(heads) and any(path[:length] in heads for length in range(1, len(path) + 1))


def _first(heads: Iterable[Path]) -> set[Path]:
    """The heads that lie in no other one."""
    found = set(heads)
    return {head for head in found if not any(head[:k] in found for k in range(1, len(head)))}
