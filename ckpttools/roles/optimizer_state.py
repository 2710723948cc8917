"""Find optimizer state: below the names of optimizers, or by shape where no name identifies it."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

from ckpttools.array.tree import Path
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape
from ckpttools.roles.mirrors import (
    ArrayFacts,
    Heads,
    Mirrors,
    Moment,
    below_moments,
    branch,
    inside,
    is_moments_shape,
    mostly,
    outside,
    raise_heads,
    sizes,
)
from ckpttools.roles.names import (
    ENCLOSED,
    IDENTIFYING_SIBLINGS,
    KERAS,
    KERAS_RATE,
    KERAS_STEPS,
    MOMENTS,
    PER_PARAMETER,
    SHARED,
    STEPS,
    WEIGHTS,
    container,
    identifies_state,
    identifying_sibling,
    is_average,
    is_container,
    is_hyperparameter,
    is_keras_iterate,
    is_outer,
    is_part,
    is_strong,
    is_wrapper,
    iterates,
    keras_parameter,
    unwrapped,
    wraps,
    wraps_states,
)


def named_state(mirrors: Mirrors, empty: Collection[Path]) -> Heads:
    """Identify optimizer state by names, with the weights inside it and unclear subtrees."""
    around = _parents_of_enclosed(mirrors.arrays) | _parents_of_keras(mirrors.arrays)
    containers = _containers(mirrors, empty, around)
    models = _Models(mirrors, frozenset(containers))
    result = Heads()
    for head, inner in containers.items():
        result |= _Container(mirrors, models, head, inner).result(head in around)
    return result


def _parents_of_enclosed(paths: Collection[Path]) -> set[Path]:
    """Return keys directly above the state of an enclosed optimizer, which hold an optimizer."""
    enclosed = (path for path in paths if not ENCLOSED.isdisjoint(path))
    around = {path[:k] for path in enclosed for k, key in enumerate(path) if key in ENCLOSED}
    return (around | {iterate[:-1] for iterate in iterates(paths)}) - {()}


def _parents_of_keras(arrays: Mapping[Path, ArrayFacts]) -> set[Path]:
    """Return keys directly above the variables of a Keras optimizer: its step counts and moments.

    A block of a model may also have arrays named `iteration` and `norm`. An optimizer also has a learning
    rate, or it has moments of most of the model and nothing else.
    """
    steps = (path for path, item in arrays.items() if item.shape == () and path[-1:])
    heads = {path[:-1] for path in steps if path[-1] in KERAS_STEPS} - {()}
    if not heads:
        return set()
    large = {path: item for path, item in arrays.items() if item.shape}
    joined: dict[tuple[str, Shape], list[Path]] = {}
    variables: dict[Path, list[Path]] = {}
    for path, item in large.items():
        for tail in unwrapped(path):
            joined.setdefault(("_".join(map(str, tail)), item.shape), []).append(path)
        if path[:-1] in heads:
            variables.setdefault(path[:-1], []).append(path)
    inner = sizes(list(large), heads)
    result: set[Path] = set()
    for head, paths in variables.items():
        names = [(keras_parameter(path[-1]), arrays[path].shape) for path in paths]
        of = {
            name
            for name, shape in names
            if name and any(item[: len(head)] != head for item in joined.get((name, shape), ()))
        }
        is_whole = all(name for name, _ in names) and mostly(len(of), len(large) - inner[head])
        if of and (is_whole or _is_rate(arrays.get((*head, KERAS_RATE)))):
            result.add(head)
    return result


def _is_rate(array: ArrayFacts | None) -> bool:
    return array is not None and array.shape == () and not array.is_whole_number


def _containers(
    mirrors: Mirrors, empty: Collection[Path], around: Collection[Path]
) -> dict[Path, list[Path]]:
    """Return keys that are named like optimizer states, or identified otherwise, with the arrays below."""
    result: dict[Path, list[Path]] = {}
    for paths, are_arrays in ((mirrors.arrays, True), (empty, False)):
        for path in paths:
            at = next((k for k, key in enumerate(path) if container(key) or path[: k + 1] in around), None)
            if at is not None:
                below = result.setdefault(path[: at + 1], [])
                if are_arrays:
                    below.append(path)
    return result


@dataclass(frozen=True)
class _Models:
    """The arrays outside subtrees that are named like optimizer states.

    Attributes:
        containers: The prefixes of those subtrees.
    """

    mirrors: Mirrors
    containers: frozenset[Path]

    @cached_property
    def joined(self) -> dict[str, Shape]:
        """Shapes by path joined with "_", as in names of Keras optimizers."""
        return {"_".join(map(str, path)): shape for path, shape in self.shapes.items()}

    @cached_property
    def shapes(self) -> dict[Path, Shape]:
        """Shapes of arrays by full path, without the wrappers of a model."""
        result: dict[Path, Shape] = {}
        for path in outside(self.mirrors.arrays, self.containers):
            for tail in (*unwrapped(path), *unwrapped(path, self.mirrors.common + 1)):
                result.setdefault(tail, self.mirrors.arrays[path].shape)
        return result


@dataclass(frozen=True)
class _Container:
    """A key named like an optimizer's state, and the arrays below it."""

    mirrors: Mirrors
    models: _Models
    head: Path
    inner: list[Path]

    def result(self, is_sure: bool) -> Heads:
        head = frozenset([self.head])
        if is_sure:
            return Heads(state=head) | self._parameters_in_state()
        if not is_container(self.head):
            # A module of a model may have the same name.
            if self._is_complete_state():
                return Heads(state=head) | self._unknown(frozenset())
            return Heads(unclear=head) if self._is_partly_identified() else Heads()
        if self._has_state():
            return Heads(state=head) | self._parameters_in_state()
        return Heads(unclear=head) if self.inner and not self._is_model() else Heads()

    def _is_model(self) -> bool:
        """Return whether only weights are left, as in T5X's optimizer/target without its state."""
        start = len(self.head)
        return len(self.inner) == len(self.mirrors.arrays) and all(
            path[start] in WEIGHTS for path in self.inner if len(path) > start
        )

    def _large(self) -> list[Path]:
        return [path for path in self.inner if self.mirrors.arrays[path].shape]

    def _has_state(self) -> bool:
        """Return whether anything below an optimizer's name is optimizer state."""
        start, large = len(self.head), self._large()
        return (
            not large
            or any(map(self.mirrors.is_count, self.inner))
            or any(below_moments(path[start : start + 2]) for path in large)
            or all(path[-1] in MOMENTS for path in large)
            or any(is_strong(key) for path in self.inner for key in path[start:])
            or any(map(self._is_known, large))
            or any(self.mirrors.mirrors(path, start) for path in large)
            or any(map(self._is_moment, large))
        )

    def _is_moment(self, path: Path) -> bool:
        """Return whether an array is named like a moment and matches the path and shape of a parameter."""
        shapes, shape = self.models.shapes, self.mirrors.arrays[path].shape
        start = len(self.head)
        named = ((k, tail) for k in range(start, len(path) - 1) for tail in unwrapped(path, k + 1))
        below = ((path[k], tail) for k, tail in named if is_part(path[k]))
        above = ((path[-1], path[k:-1]) for k in range(start, len(path) - 1) if is_part(path[-1]))
        return any(
            tail in shapes and is_moments_shape(name, shape, shapes[tail]) for name, tail in (*below, *above)
        )

    def _is_complete_state(self) -> bool:
        """Return whether everything below an ambiguous name mirrors parameters and includes a step count."""
        large, start = self._large(), len(self.head)
        if not any(map(self.mirrors.is_step, self.inner)):
            # SGD does not count steps. Each of its arrays has the name, path and shape of a parameter's
            # momentum.
            return bool(large) and is_outer(self.head) and all(self.mirrors.moment(p, start) for p in large)
        return bool(large or is_outer(self.head)) and all(self.mirrors.mirrors(path, start) for path in large)

    def _is_partly_identified(self) -> bool:
        """Return whether there is a step count, and all names are those of moments but not of parameters."""
        large, start = self._large(), len(self.head)
        named = is_outer(self.head) and all(below_moments(path[start:]) for path in large)
        last = is_outer(self.head[self.mirrors.common :]) and all(path[-1] in MOMENTS for path in large)
        if not ((named or last) and any(map(self.mirrors.is_step, self.inner))):
            return False
        return any(item.shape and path[:start] != self.head for path, item in self.mirrors.arrays.items())

    def _parameters_in_state(self) -> Heads:
        """Return the parameters that exist only in the state, and possible copies of weights."""
        own, averages = set[Path](), self._averages()
        start = len(self.head)
        for path in self.inner:
            below = path[start:-1]
            if (
                not below
                or below[0] not in WEIGHTS
                or self.head[-1] == PER_PARAMETER
                or _is_below(path, averages)
            ):
                continue
            if identifies_state(path[-1]):
                continue
            is_state = self._labels.get(path[: start + 1])
            if not (is_state or self._is_next_to_state(path, start)):
                has_second_copy = any(
                    self.mirrors.is_whole(tail, self.head) for tail in unwrapped(path, start + 1)
                )
                (own if is_state is None and not has_second_copy else averages).add(path[: start + 1])
        heads = Heads(weights=frozenset(own | averages), unclear=frozenset(averages))
        return heads | self._unknown(heads.weights)

    @cached_property
    def _labels(self) -> dict[Path, bool]:
        """Keys named like weights that may be labels in a chain -> whether they certainly are.

        All arrays below such a key have names of state parts and of parameters outside. This is certain if
        they also have the parameters' shapes.
        """
        named: dict[Path, list[Path]] = {}
        for path in self._large():
            if path[len(self.head)] in WEIGHTS:
                named.setdefault(path[: len(self.head) + 1], []).append(path)
        return {
            label: all(map(self._is_moment, paths))
            for label, paths in named.items()
            if all(self._is_part_of_parameter(path, self.models.shapes) for path in paths)
        }

    def _unknown(self, weights: frozenset[Path]) -> Heads:
        """Return keys that no name identifies as state, and that may be another copy of the model."""
        within = outside(self._large(), weights)
        if not (unknown := [path for path in within if not self._is_known(path)]):
            return Heads()
        shapes = (
            ChainMap(dict(self._iter_own_weights(weights)), self.models.shapes)
            if weights
            else self.models.shapes
        )
        unknown = [path for path in unknown if not self._is_part_of_parameter(path, shapes)]
        if not (possible_weights := {path for path in unknown if self._may_be_weights(path, shapes)}):
            return Heads()
        start = len(self.head)
        clear = (path[start:] for path in self.inner if path not in possible_weights and self._is_clear(path))
        heads = frozenset(
            self.head + item for item in raise_heads({path[start:] for path in possible_weights}, clear)
        )
        return Heads(weights=heads, unclear=heads)

    def _is_clear(self, path: Path) -> bool:
        return bool(self.mirrors.arrays[path].shape) or self.mirrors.is_step(path)

    def _iter_own_weights(self, weights: Collection[Path]) -> Iterator[tuple[Path, Shape]]:
        for path in inside(self.inner, weights):
            for tail in unwrapped(path, len(self.head)):
                yield tail, self.mirrors.arrays[path].shape

    def _is_known(self, path: Path) -> bool:
        """Return whether names identify an array as state, with only wrappers of states above it."""
        if self._is_keras_moment(path):
            return True
        start = len(self.head)
        first = next((k for k in range(start, len(path)) if not wraps_states(path, k)), None)
        if first is None:
            return False
        if is_part(path[first]) or self._is_next_to_state(path, first):
            return True
        return is_part(path[-1]) and PER_PARAMETER in path[:first]

    def _is_keras_moment(self, path: Path) -> bool:
        """Return whether an array is a moment that Keras names after its parameter."""
        if (name := keras_parameter(path[-1])) is None or is_keras_iterate(path):
            return False
        return self.head[-1] == KERAS or self.models.joined.get(name) == self.mirrors.arrays[path].shape

    def _is_next_to_state(self, path: Path, k: int) -> bool:
        name = identifying_sibling(path[k])
        return name is not None and (*path[:k], name) in self._identifying_paths

    @cached_property
    def _identifying_paths(self) -> set[Path]:
        """Paths down to the keys that identify their siblings as state."""
        named = (path for path in self.inner if not IDENTIFYING_SIBLINGS.isdisjoint(path))
        return {path[: k + 1] for path in named for k, key in enumerate(path) if key in IDENTIFYING_SIBLINGS}

    def _is_part_of_parameter(self, path: Path, shapes: Mapping[Path, Shape]) -> bool:
        """Return whether a path names a part of a state and its parameter, regardless of other keys."""
        start = len(self.head)
        for k in range(start, len(path) - 1):
            if not (is_part(path[k]) or self._is_next_to_state(path, k)):
                continue
            if any(tail in shapes or tail[:-1] in shapes for tail in unwrapped(path, k + 1)):
                return True
        if is_part(path[-1]) and any(path[k:-1] in shapes for k in range(start, len(path) - 1)):
            return True
        return any(map(identifies_state, path[start:]))

    def _may_be_weights(self, path: Path, shapes: Mapping[Path, Shape]) -> bool:
        """Return whether an array has floating-point numbers, or the path and shape of a parameter."""
        array = self.mirrors.arrays[path]
        if not array.is_whole_number:
            return True
        return any(shapes.get(path[k:]) == array.shape for k in range(len(self.head), len(path)))

    def _averages(self) -> set[Path]:
        start = len(self.head)
        large = [path for path in self._large() if not self._is_keras_moment(path)]
        named = ((path, k) for path in large for k in range(start, len(path)) if is_average(path[k]))
        return _first(path[: k + 1] for path, k in named) | iterates(self.inner)


def _is_below(path: Path, heads: Collection[Path]) -> bool:
    return bool(heads) and any(path[:length] in heads for length in range(1, len(path) + 1))


def _first(heads: Iterable[Path]) -> set[Path]:
    """Return the prefixes that are not inside another prefix."""
    result = set(heads)
    return {head for head in result if not any(head[:k] in result for k in range(1, len(head)))}


# A module may be named like a moment and have the paths of one or two parameters of another module.
_MAX_FEW_PARAMETERS = 2
# A prefix of moments has at least this many keys: the name of the moment and a name above it.
_MIN_KEYS = 2


def unnamed_state(mirrors: Mirrors, rest: list[Path]) -> Heads:
    """Return moments that are not below an optimizer's name: certain state and unclear subtrees."""
    if _is_state_alone(mirrors, rest):
        return Heads(state=frozenset([()]))
    named = [path for path in rest if below_moments(path)]
    moments = {path: moment for path in named if (moment := mirrors.moment(path))}
    others = [path for path in named if path not in moments]
    below_names = {path: moment for path in others if (moment := mirrors.moment_below_names(path))}
    mismatched = {
        path: moment
        for path in others
        if path not in below_names and (moment := mirrors.mismatched_moment(path))
    }
    if not named:
        return Heads()
    result = _Evidence(mirrors, rest, moments, below_names, mismatched).result()
    return result if result != Heads() else _moments_of_few(mirrors, rest)


def _moments_of_few(mirrors: Mirrors, rest: list[Path]) -> Heads:
    """Return the moments of a model with at most two parameters, below any name."""
    large = [path for path in rest if mirrors.arrays[path].shape]
    if len(large) > 2 * _MAX_FEW_PARAMETERS:
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
    if len(head) < _MIN_KEYS or (head[-1] in SHARED and not (counted and head[-1] != "v")):
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
        groups = _group_by_branch({**self.moments, **self.below_names})
        sure = frozenset(head for group in groups if self._is_state(group) for head in group.heads)
        unclear = frozenset(
            path[: len(moment.head) + 1]
            for group in groups
            if not self._is_state(group) and self._may_be_state(group)
            for path, moment in group.moments.items()
        )
        mismatched = [
            item for item in _group_by_branch(self.odd) if self._may_be_state(item) and self._is_counted(item)
        ]
        unclear |= {head for item in mismatched for head in item.heads if head not in sure}
        branches = {group.branch for group in (*groups, *mismatched) if group.branch}
        known = Heads(sure, unclear=unclear)
        return known | collect_branch_state(self.mirrors, self.rest, known, branches - self._above_models())

    def _above_models(self) -> set[Path]:
        """Return keys that also have parameters below them."""
        of = {moment.parameter for moment in (*self.moments.values(), *self.below_names.values())}
        return {path[:length] for path in of for length in range(len(path))}

    @cached_property
    def _steps(self) -> set[Path]:
        identified = self.moments.keys() | self.below_names.keys()
        return {path for path in self.rest if path not in identified and self.mirrors.is_step(path)}

    @cached_property
    def _other_paths(self) -> list[Path]:
        identified = self.moments.keys() | self.below_names.keys() | self._steps
        return [path for path in self.rest if path not in identified]

    @cached_property
    def _sizes(self) -> Counter[Path]:
        known = (*self.moments.values(), *self.below_names.values(), *self.odd.values())
        return sizes(self._other_paths, {key for item in known for key in (item.head, item.root)})

    def _is_state(self, group: _BranchMoments) -> bool:
        # A single moment with a counter below its own key may also be a module.
        sign = len(group.names) > 1 or all(all(map(wraps, head)) for head in group.heads)
        is_separate = not any(self._sizes[head] for head in group.heads)
        has_many_parameters = self._has_known_names(group) or len(group.parameters) > _MAX_FEW_PARAMETERS
        return (
            has_many_parameters
            and sign
            and is_separate
            and self._is_complete(group)
            and self._is_counted(group)
        )

    def _may_be_state(self, group: _BranchMoments) -> bool:
        complete, counted = self._is_complete(group), self._is_counted(group)
        if self._has_known_names(group):
            return complete or counted
        has_many_parameters = len(group.parameters) > _MAX_FEW_PARAMETERS
        return complete and (has_many_parameters or (counted and len(group.names) > 1))

    def _has_known_names(self, group: _BranchMoments) -> bool:
        return group.moments.keys() <= self.moments.keys()

    def _is_complete(self, group: _BranchMoments) -> bool:
        """Return whether a group mirrors most of the model, and most outside arrays are mirrored."""
        model = max(self._sizes[root] for root in group.roots)
        if not mostly(len(group.parameters), model):
            return False
        if self._has_known_names(group):
            return True
        own = inside(self._other_paths, [group.branch])
        return mostly(model, len(self._other_paths) - len(own))

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


def _group_by_branch(moments: Mapping[Path, Moment]) -> list[_BranchMoments]:
    groups: dict[Path, dict[Path, Moment]] = {}
    for path, moment in moments.items():
        groups.setdefault(branch(moment.head, moment.root), {})[path] = moment
    return [_BranchMoments(key, group) for key, group in groups.items()]


def collect_branch_state(
    mirrors: Mirrors, paths: list[Path], known: Heads, branches: Collection[Path]
) -> Heads:
    """Add the rest of the branches that have state: counters belong to it, other arrays are unclear."""
    identified = known.state | known.unclear
    enclosing = {
        key for head in identified for length in range(1, len(head) + 1) if (key := head[:length]) in branches
    }
    left = outside(inside(paths, enclosing), identified)
    loose = {path for path in left if mirrors.is_count(path) or is_hyperparameter(path)}
    branches = _parents_of(known.state, enclosing)
    lengths = {len(key) for key in branches}
    sure = {path for path in loose if any(path[:length] in branches for length in lengths)}
    state = known.state | sure
    heads = raise_heads(state, outside(mirrors.arrays, state))
    return Heads(heads, unclear=known.unclear | {path for path in left if path not in sure})


def _parents_of(heads: Collection[Path], branches: Collection[Path]) -> set[Path]:
    return {item for item in branches if any(head[: len(item)] == item for head in heads)}


def _outermost(path: Path) -> str | int:
    """Return the first key that is not a wrapper."""
    return next((key for key in path if not is_wrapper(key)), "")
