"""Find optimizer state without the name of an optimizer: moments of parameters, and a step count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

from ckpttools.array.tree import Path
from ckpttools.core.dataclass import dataclass
from ckpttools.roles.mirrors import (
    Heads,
    Mirrors,
    Moment,
    below_moments,
    branch,
    inside,
    lifted,
    mostly,
    outside,
    sizes,
)
from ckpttools.roles.names import MOMENTS, SHARED, STEPS, is_hyperparameter, is_wrapper, wraps

# A module may be named like a moment and have the paths of one or two parameters of another module.
_FEW = 2
# Minimum number of keys: the moment's name, and a name above it.
_BELOW_A_NAME = 2


def unnamed_state(mirrors: Mirrors, rest: list[Path]) -> Heads:
    """Return moments that are not below an optimizer's name: certain state and unclear subtrees."""
    if _is_state_alone(mirrors, rest):
        return Heads(state=frozenset([()]))
    named = [path for path in rest if below_moments(path)]
    moments = {path: moment for path in named if (moment := mirrors.moment(path))}
    others = [path for path in named if path not in moments]
    below_names = {path: moment for path in others if (moment := mirrors.moment_below_names(path))}
    odd = {
        path: moment for path in others if path not in below_names and (moment := mirrors.odd_moment(path))
    }
    if not named:
        return Heads()
    result = _Evidence(mirrors, rest, moments, below_names, odd).result()
    return result if result != Heads() else _of_few(mirrors, rest)


def _of_few(mirrors: Mirrors, rest: list[Path]) -> Heads:
    """Return the moments of a model with at most two parameters, below any name."""
    large = [path for path in rest if mirrors.arrays[path].shape]
    if len(large) > 2 * _FEW:
        return Heads()
    named = {path: k for path in large if (k := _first_moment(path)) is not None}
    model = [path for path in large if path not in named]
    heads = {path[: k + 1] for path, k in named.items()}
    if len(heads) != 1 or len(named) != len(model):
        return Heads()
    head = next(iter(heads))
    if inside(model, [head[:-1]]):
        return Heads()
    # Modules may also have such names, and paths of other modules; they are directly below a name of their
    # own.
    counted = any((*head[:-1], step) in mirrors.arrays for step in STEPS)
    if len(head) < _BELOW_A_NAME or (head[-1] in SHARED and not (counted and head[-1] != "v")):
        return Heads()
    shapes = {path[len(head) :]: mirrors.arrays[path].shape for path in named}
    root = {path[: len(path) - len(tail)] for path in model for tail in shapes if path[-len(tail) :] == tail}
    is_copy = any({p[len(item) :]: mirrors.arrays[p].shape for p in model} == shapes for item in root - {()})
    return Heads(unclear=frozenset(heads)) if is_copy else Heads()


def _first_moment(path: Path) -> int | None:
    return next((k for k, key in enumerate(path[:-1]) if key in MOMENTS), None)


def _is_state_alone(mirrors: Mirrors, rest: list[Path]) -> bool:
    """Return whether there are only moments and a step count."""
    if not any(map(mirrors.is_step, rest)):
        return False
    return all(mirrors.is_step(path) or _outermost(path) in MOMENTS for path in rest)


@dataclass(frozen=True)
class _Evidence:
    """Arrays that mirror parameters, by certainty.

    Attributes:
        rest: The arrays that no name identifies.
        moments: Moments of parameters of a model that is unwrapped or has a framework's name.
        below_names: Moments of parameters below another name.
        odd: Arrays that are named like moments of parameters but have another shape, or are parts of moments.
    """

    mirrors: Mirrors
    rest: list[Path]
    moments: Mapping[Path, Moment]
    below_names: Mapping[Path, Moment]
    odd: Mapping[Path, Moment]

    def result(self) -> Heads:
        groups = _grouped({**self.moments, **self.below_names})
        sure = frozenset(head for group in groups if self._is_state(group) for head in group.heads)
        unclear = frozenset(
            path[: len(moment.head) + 1]
            for group in groups
            if not self._is_state(group) and self._may_be_state(group)
            for path, moment in group.moments.items()
        )
        odd = [item for item in _grouped(self.odd) if self._may_be_state(item) and self._is_counted(item)]
        unclear |= {head for item in odd for head in item.heads if head not in sure}
        branches = {group.branch for group in (*groups, *odd) if group.branch}
        known = Heads(sure, unclear=unclear)
        return known | in_branches(self.mirrors, self.rest, known, branches - self._above_models())

    def _above_models(self) -> set[Path]:
        """Return keys that also have parameters below them."""
        of = {moment.parameter for moment in (*self.moments.values(), *self.below_names.values())}
        return {path[:length] for path in of for length in range(len(path))}

    @cached_property
    def _steps(self) -> set[Path]:
        told = self.moments.keys() | self.below_names.keys()
        return {path for path in self.rest if path not in told and self.mirrors.is_step(path)}

    @cached_property
    def _others(self) -> list[Path]:
        told = self.moments.keys() | self.below_names.keys() | self._steps
        return [path for path in self.rest if path not in told]

    @cached_property
    def _sizes(self) -> Counter[Path]:
        known = (*self.moments.values(), *self.below_names.values(), *self.odd.values())
        return sizes(self._others, {key for item in known for key in (item.head, item.root)})

    def _is_state(self, group: _BranchMoments) -> bool:
        # A single moment with a counter below its own key may also be a module.
        sign = len(group.names) > 1 or all(all(map(wraps, head)) for head in group.heads)
        alone = not any(self._sizes[head] for head in group.heads)
        many = self._is_of_known_names(group) or len(group.parameters) > _FEW
        return many and sign and alone and self._is_complete(group) and self._is_counted(group)

    def _may_be_state(self, group: _BranchMoments) -> bool:
        complete, counted = self._is_complete(group), self._is_counted(group)
        if self._is_of_known_names(group):
            return complete or counted
        many = len(group.parameters) > _FEW
        return complete and (many or (counted and len(group.names) > 1))

    def _is_of_known_names(self, group: _BranchMoments) -> bool:
        return group.moments.keys() <= self.moments.keys()

    def _is_complete(self, group: _BranchMoments) -> bool:
        """Return whether a group mirrors most of the model, and most outside arrays are mirrored."""
        model = max(self._sizes[root] for root in group.roots)
        if not mostly(len(group.parameters), model):
            return False
        if self._is_of_known_names(group):
            return True
        own = inside(self._others, [group.branch])
        return mostly(model, len(self._others) - len(own))

    def _is_counted(self, group: _BranchMoments) -> bool:
        """Return whether a group has a step count, for the full state or for each parameter."""
        return any((*location, name) in self._steps for location in group.locations() for name in STEPS)


@dataclass(frozen=True)
class _BranchMoments:
    """The moments in one branch of a tree, which is separate from the model's branch."""

    branch: Path
    moments: Mapping[Path, Moment]

    @cached_property
    def heads(self) -> set[Path]:
        return {moment.head for moment in self.moments.values()}

    @cached_property
    def roots(self) -> set[Path]:
        return {moment.root for moment in self.moments.values()}

    @cached_property
    def names(self) -> set[str | int]:
        return {moment.name for moment in self.moments.values()}

    @cached_property
    def parameters(self) -> set[Path]:
        return {moment.parameter for moment in self.moments.values()}

    def locations(self) -> Iterator[Path]:
        """Yield the possible parent paths of the step count."""
        yield from self.heads
        yield from (path[:-1] for path, moment in self.moments.items() if path[-1] == moment.name)


def _grouped(moments: Mapping[Path, Moment]) -> list[_BranchMoments]:
    groups: dict[Path, dict[Path, Moment]] = {}
    for path, moment in moments.items():
        groups.setdefault(branch(moment.head, moment.root), {})[path] = moment
    return [_BranchMoments(key, group) for key, group in groups.items()]


def in_branches(mirrors: Mirrors, paths: list[Path], known: Heads, branches: Collection[Path]) -> Heads:
    """Add the rest of the branches that have state: counters belong to it, other arrays are unclear."""
    told = known.state | known.unclear
    held = {key for head in told for length in range(1, len(head) + 1) if (key := head[:length]) in branches}
    left = outside(inside(paths, held), told)
    loose = {path for path in left if mirrors.is_count(path) or is_hyperparameter(path)}
    branches = _above(known.state, held)
    lengths = {len(key) for key in branches}
    sure = {path for path in loose if any(path[:length] in branches for length in lengths)}
    state = known.state | sure
    whole = lifted(state, outside(mirrors.arrays, state))
    return Heads(whole, unclear=known.unclear | {path for path in left if path not in sure})


def _above(heads: Collection[Path], branches: Collection[Path]) -> set[Path]:
    return {item for item in branches if any(head[: len(item)] == item for head in heads)}


def _outermost(path: Path) -> str | int:
    """Return the first key that is not a wrapper."""
    return next((key for key in path if not is_wrapper(key)), "")
