"""What each array of a tree is: a parameter, state of an optimizer, or something else. Told by structure.

    opt_state/0/mu/params/decoder/norm/scale     mirrors  params/params/decoder/norm/scale
    1/opt_state/0/{count, mu/…, nu/…}            mirrors  0/…                  an NNX (model, optimizer) tuple
    state/param_states/decoder/norm/scale/v_row  mirrors  target/decoder/norm/scale             T5X
    1/0/{count, mu/…, nu/…}                      mirrors  0/…                  no name tells, the counter does

State of an optimizer lies below a name that optimizers have, or it is named as moments are, has the whole
paths and the shapes of parameters, and a number of steps beside it. Whatever is neither that nor a random
state nor a counter is a parameter: a learned number is never taken for bookkeeping. What mirrors parameters
and lacks one of these signs, such as an average of them, is a parameter, too, but among those unclear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, NamedTuple, Protocol

from ckpttools.ir.mirrors import Array, Arrays, Mirrors, Moment, below_moments, is_moments_shape, may_tell
from ckpttools.ir.role_names import (
    MOMENTS,
    PER_PARAMETER,
    STEPS,
    WEIGHTS,
    container,
    core_of,
    is_average,
    is_bookkeeping,
    is_container,
    is_outer,
    is_random,
    is_strong,
    is_wrapper,
    keys_of,
    unwrapped,
    wraps,
)
from ckpttools.ir.tree import Path, Tree
from ckpttools.region import Shape

Role = Literal["parameter", "optimizer", "other"]

# A tuple of a model, its average, an optimizer and random states; no more are expected.
_PLACES = 4


class Kind(Protocol):
    """What must be known of an array: its shape and dtype."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a tree's leaves; a subtree has one unless a subtree of it has another.

    Attributes:
        optimizer: where an optimizer's state is; whatever is below a key belongs to it.
        weights: where within it parameters are.
        others: states of random number generators that only their content tells.
        unclear: subtrees that mirror the parameters or lie in an optimizer, and may be either; parameters
            until the user says otherwise.
        mirrored: where the parameters are that these mirror; None where nothing tells.
        learned: arrays of fractions below a key of random states, which are whole numbers.
    """

    optimizer: frozenset[Path] = frozenset()
    weights: frozenset[Path] = frozenset()
    others: frozenset[Path] = frozenset()
    unclear: tuple[Path, ...] = ()
    mirrored: Path | None = None
    learned: frozenset[Path] = frozenset()
    _lengths: tuple[int, ...] = field(init=False)
    _unclear: frozenset[Path] = field(init=False)
    _unclear_lengths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_unclear", frozenset(self.unclear))
        object.__setattr__(self, "_unclear_lengths", tuple(sorted({len(each) for each in self.unclear})))
        known = self.optimizer | self.weights | self.others
        object.__setattr__(self, "_lengths", tuple(sorted({len(each) for each in known}, reverse=True)))

    def of(self, path: Path) -> Role:
        """The role of the leaf at a path."""
        keys = keys_of(path)
        for length in self._lengths:
            above = keys[:length]
            if above in self.weights:
                break
            if above in self.optimizer:
                return "optimizer"
            if above in self.others:
                return "other"
        return "other" if is_bookkeeping(keys) and keys not in self.learned else "parameter"

    def below_optimizer(self, path: Path) -> Path:
        """The path of a leaf of the optimizer within its state: below the last key that is named as one."""
        keys = keys_of(path)
        named = [k + 1 for k, key in enumerate(keys) if container(key)]
        heads = [length for length in self._lengths if keys[:length] in self.optimizer]
        return keys[max((*named, *heads), default=0) :]

    def unclear_of(self, path: Path) -> Path | None:
        """The unclear subtree that a leaf belongs to."""
        keys = keys_of(path)
        return next((keys[:n] for n in self._unclear_lengths if keys[:n] in self._unclear), None)


def roles(tree: Tree) -> Roles:
    """The roles in a tree, worked out once. Reads nothing."""
    return tree.once(_roles)


def role(tree: Tree, path: Path) -> Role:
    """The role of one leaf."""
    return roles(tree).of(path)


def _roles(tree: Tree) -> Roles:
    typed = (keys_of(path) for path in tree.metadata.key_impls)
    return roles_of(tree.arrays, tree.leaves.keys() - tree.arrays.keys(), typed)


def roles_of(arrays: Mapping[Path, Kind], empty: Iterable[Path] = (), random: Iterable[Path] = ()) -> Roles:
    """The roles of arrays, told from paths, shapes and dtypes.

    Args:
        arrays: path -> array. A path of one key that was joined by "/" or "." is taken apart.
        empty: paths of leaves without data.
        random: paths of arrays that are states of random number generators.
    """
    found = _told(arrays, empty, random)
    fractions = (keys_of(path) for path, each in arrays.items() if "float" in _name(each))
    learned = frozenset(keys for keys in fractions if is_random(keys))
    return replace(found, learned=learned) if learned else found


def _told(arrays: Mapping[Path, Kind], empty: Iterable[Path], random: Iterable[Path]) -> Roles:
    random = [core for core in map(core_of, random) if not is_bookkeeping(core)]
    # A tree of 100,000 tensors has a budget of its own, which copies of all names would not fit into.
    if not any(may_tell(keys_of(path)) for path in chain(arrays, empty)) and not _may_be_twice(arrays):
        return Roles(others=frozenset(random))
    known = {core_of(path): Array(each.shape, _is_integer(each)) for path, each in arrays.items()}
    others = frozenset((*random, *_random_states(known)))
    learnable = {
        path: each for path, each in known.items() if not (is_bookkeeping(path) or _within(path, others))
    }
    return _Analysis(Mirrors(learnable), frozenset(map(keys_of, empty))).roles(others)


def _mostly(part: int, whole: int) -> bool:
    """The one measure of what mirrors something: at least half of it."""
    return 2 * part >= whole


def _may_be_twice(arrays: Mapping[Path, Kind]) -> bool:
    """Whether so much lies beside the largest key that it may be what up to three copies are of."""
    large = [path for path, each in arrays.items() if each.shape]
    for start in range(2):
        counts = Counter(_top(keys, start) for path in large if len(keys := keys_of(path)) > start + 1)
        beside = counts.total() - max(counts.values(), default=0)
        if beside:
            return 4 * beside >= counts.total()
    return False


def _top(keys: Path, start: int) -> Path:
    """The key that tells one part of a tree from another, with the wrappers above it."""
    first = next((k for k in range(start, len(keys)) if not is_wrapper(keys[k])), len(keys))
    return keys[: first + 1]


def _name(array: Kind) -> str:
    return str(getattr(array.dtype, "name", array.dtype))


def _is_integer(array: Kind) -> bool:
    return _name(array).startswith(("int", "uint"))


def _random_states(known: Arrays) -> Iterator[Path]:
    """Keys of random number generators with their counters beside them, as NNX keeps them."""
    for path, array in known.items():
        if is_random(path) or path[-1:] != ("key",):
            continue
        beside = known.get((*path[:-1], "count"))
        if beside and array.is_integer and beside.is_integer and array.shape[-1:] in ((2,), (4,)):
            yield path[:-1]


def _within(path: Path, heads: Collection[Path]) -> bool:
    return bool(heads) and any(path[:length] in heads for length in range(len(path) + 1))


@dataclass(frozen=True)
class _Analysis:
    """The arrays that may be learned or an optimizer's, and the leaves without data."""

    mirrors: Mirrors
    empty: frozenset[Path]

    @property
    def arrays(self) -> Arrays:
        return self.mirrors.arrays

    def roles(self, others: frozenset[Path]) -> Roles:
        heads, weights, unclear = self._named()
        rest = [path for path in self.arrays if not _within(path, heads)]
        found, odd = self._unnamed(rest)
        heads |= found
        unclear |= odd
        kept = [p for p in self.arrays if not _within(p, heads) or _within(p, weights)]
        state = [p for p in self.arrays if _within(p, heads) and not _within(p, weights)]
        main, copies = self._copies([p for p in kept if not _within(p, unclear)], state)
        odd = self._lifted(unclear | copies)
        return Roles(frozenset(heads), frozenset(weights), others, tuple(sorted(odd, key=str)), main)

    def _named(self) -> tuple[set[Path], set[Path], set[Path]]:
        """Where names tell of an optimizer's state, of weights within it, and of what is unclear."""
        heads, weights, unclear = set[Path](), set[Path](), set[Path]()
        for head, inner in self._containers().items():
            if not is_container(head):
                # A module of a model may be called so.
                if self._is_whole_state(head, inner):
                    heads.add(head)
                elif self._is_half_told(head, inner):
                    unclear.add(head)
            elif self._has_state(head, inner):
                heads.add(head)
                own, odd = self._weights_in(head, inner)
                weights |= own | odd
                unclear |= odd
            elif inner:
                unclear.add(head)
        return heads, weights, unclear

    def _containers(self) -> dict[Path, list[Path]]:
        """Keys that are named as optimizers' states are -> the arrays below them."""
        found: dict[Path, list[Path]] = {}
        for path in (*self.arrays, *self.empty):
            at = next((k for k, key in enumerate(path) if container(key)), None)
            if at is not None:
                found.setdefault(path[: at + 1], []).extend([path] if path in self.arrays else [])
        return found

    def _large(self, paths: Iterable[Path]) -> list[Path]:
        return [path for path in paths if self.arrays[path].shape]

    def _has_state(self, head: Path, inner: list[Path]) -> bool:
        """Whether anything below an optimizer's name is what an optimizer has."""
        start, large = len(head), self._large(inner)
        return (
            not large
            or any(map(self.mirrors.is_count, inner))
            or any(below_moments(path[start : start + 2]) for path in large)
            or any(is_strong(key) for path in inner for key in path[start:])
            or any(self.mirrors.mirrors(path, start) for path in large)
        )

    def _is_whole_state(self, head: Path, inner: list[Path]) -> bool:
        """Whether all below a name that a module may have mirrors something, and steps are counted there."""
        large = self._large(inner)
        if not any(map(self.mirrors.is_step, inner)):
            return False
        return bool(large or is_outer(head)) and all(self.mirrors.mirrors(path, len(head)) for path in large)

    def _is_half_told(self, head: Path, inner: list[Path]) -> bool:
        """Whether steps are counted, and all is named as moments, but not by the parameters' paths."""
        large = self._large(inner)
        named = is_outer(head) and all(below_moments(path[len(head) :]) for path in large)
        last = is_outer(head[self.mirrors.common :]) and all(path[-1] in MOMENTS for path in large)
        if not ((named or last) and any(map(self.mirrors.is_step, inner))):
            return False
        return any(each.shape and path[: len(head)] != head for path, each in self.arrays.items())

    def _weights_in(self, head: Path, inner: list[Path]) -> tuple[set[Path], set[Path]]:
        """What is kept of an optimizer's state: parameters that lie in it alone, and what is unclear."""
        start, own, odd = len(head), set[Path](), set[Path]()
        for path in inner:
            below = path[start:-1]
            average = next((k for k in range(start, len(path)) if is_average(path[k])), None)
            if average is not None:
                odd.add(path[: average + 1])
            elif below and below[0] in WEIGHTS and head[-1] != PER_PARAMETER:
                twice = any(self.mirrors.is_whole(tail, head) for tail in unwrapped(path, start + 1))
                (odd if twice else own).add(path[: start + 1])
        return own - odd, odd

    def _unnamed(self, rest: list[Path]) -> tuple[set[Path], set[Path]]:
        """Moments that mirror parameters where no name above tells: an optimizer's, and those unclear."""
        if self._is_state_alone(rest):
            return {()}, set()
        found = ((path, self.mirrors.moment(path)) for path in rest if below_moments(path))
        moments = {path: moment for path, moment in found if moment}
        groups: dict[Path, dict[Path, Moment]] = {}
        for path, moment in moments.items():
            groups.setdefault(moment.head, {})[path] = moment
        steps = {path for path in rest if path not in moments and self.mirrors.is_step(path)}
        others = [path for path in rest if path not in moments and path not in steps]
        sizes = _sizes(others, {*groups, *(moment.root for moment in moments.values())})
        sure, unclear = set[Path](), set[Path]()
        for head, group in groups.items():
            mirrored = len({each.parameter for each in group.values()})
            complete = _mostly(mirrored, max(sizes[each.root] for each in group.values()))
            counted = any((*place, name) in steps for place in _places(head, group) for name in STEPS)
            # Below a key of its own, one moment with a counter beside it may be a module's as well.
            sign = len({each.name for each in group.values()}) > 1 or all(map(wraps, head))
            if complete and counted and sign and not sizes[head]:
                sure.add(head)
            elif complete or counted:
                unclear |= {path[: len(head) + 1] for path in group}
        return self._lifted(sure), unclear

    def _is_state_alone(self, rest: list[Path]) -> bool:
        """Whether there is nothing at all but moments and a number of steps."""
        is_step = self.mirrors.is_step
        return any(map(is_step, rest)) and all(is_step(path) or _outermost(path) in MOMENTS for path in rest)

    def _lifted(self, heads: Collection[Path]) -> set[Path]:
        """For each the highest key with nothing below it but these and counters: a whole chain."""
        if not heads:
            return set()
        beside = (
            path for path in self.arrays if not _within(path, heads) and not self.mirrors.is_count(path)
        )
        blocked = {path[:length] for path in beside for length in range(len(path))}
        return {
            next((head[:n] for n in range(1, len(head)) if head[:n] not in blocked), head) for head in heads
        }

    def _copies(self, kept: list[Path], state: list[Path]) -> tuple[Path | None, set[Path]]:
        """Where the parameters are, and what has their paths and shapes once more: state, or a copy."""
        wanted = self._trained(kept, state) or self._beside_others(kept)
        found = {path: place for path in kept if (place := self._place(path, wanted))} if wanted else {}
        counts = Counter(place.head for place in found.values())
        moments = {place.head for place in found.values() if place.is_moment}
        order = {head: k for k, head in enumerate(counts)}
        candidates = counts.keys() - moments
        main = max(
            candidates,
            key=lambda head: (counts[head], bool(WEIGHTS & set(head)), -order[head]),
            default=None,
        )
        sizes = _sizes(kept, counts.keys())
        return main, {
            head
            for head, count in counts.items()
            if head not in (main, ())
            and (_mostly(count, len(wanted)) or (count > 1 and sizes[head] == count))
        }

    def _place(self, path: Path, wanted: Mapping[Path, Shape]) -> _Place | None:
        """Where a path ends as one of `wanted` of the same shape, or as one of them and a moment's name."""
        shape = self.arrays[path].shape
        last = path[-1] if path and path[-1] in MOMENTS else ""
        for k in range(len(path)):
            above = next((key for key in reversed(path[:k]) if key in MOMENTS), "")
            for tail, name in ((path[k:], above), (path[k:-1], last)):
                # Without its last key a path is only a parameter's where that names a moment.
                named = name or len(tail) == len(path) - k
                if named and tail in wanted and is_moments_shape(name, shape, wanted[tail]):
                    return _Place(path[:k], tail, bool(name))
        return None

    def _trained(self, kept: list[Path], state: list[Path]) -> dict[Path, Shape]:
        """The paths and shapes of parameters, as the state of the optimizer mirrors them."""
        ends: dict[Path, Shape] = {}
        for path in kept if state else ():
            for k in range(len(path)):
                ends.setdefault(path[k:], self.arrays[path].shape)
        places = (self._place(path, ends) for path in state if not self.mirrors.is_step(path))
        # A key that only ends alike, such as `scale`, is no path of a parameter where longer ones are.
        return {_bare(place.tail): ends[place.tail] for place in places if place}

    def _beside_others(self, kept: list[Path]) -> dict[Path, Shape]:
        """The paths and shapes of parameters that lie under a name of their own, beside something else."""
        outer = {path: next((k for k, key in enumerate(path) if key in WEIGHTS), None) for path in kept}
        common = self.mirrors.common
        heads = [
            path[: k + 1] for path, k in outer.items() if k is not None and all(map(wraps, path[common:k]))
        ]
        numbered = dict.fromkeys(path[:1] for path in kept if len(path) > 1 and str(path[0]).isdecimal())
        # More numbers than a tuple of states has places are those of layers.
        first = next(iter((*heads, *(numbered if len(numbered) <= _PLACES else ()))), None)
        if first is None:
            return {}
        mine = [path for path in kept if path[: len(first)] == first and len(path) > len(first)]
        # A copy has most of it: fewer arrays beside it are none, and their names need not be looked at.
        if not _mostly(len(kept) - len(mine), len(mine)):
            return {}
        return {_bare(path[len(first) :]): self.arrays[path].shape for path in mine}


class _Place(NamedTuple):
    """Where a path comes to be that of a parameter, and whether a moment's name stands around it."""

    head: Path
    tail: Path
    is_moment: bool


def _bare(tail: Path) -> Path:
    """A parameter's path without the collections around it."""
    while len(tail) > 1 and tail[0] == "params":
        tail = tail[1:]
    return tail


def _sizes(paths: Iterable[Path], heads: Collection[Path]) -> Counter[Path]:
    """How many paths there are below each head."""
    lengths = {len(head) for head in heads}
    below = (path[:length] for path in paths for length in lengths if length <= len(path))
    return Counter(head for head in below if head in heads)


def _places(head: Path, group: Mapping[Path, Moment]) -> Iterator[Path]:
    """Where the number of steps may be: in the state, or beside each moment where these lie by parameter."""
    yield head
    yield from (path[:-1] for path, moment in group.items() if path[-1] == moment.name)


def _outermost(path: Path) -> str | int:
    """The first key that is no wrapper."""
    return next((key for key in path if not is_wrapper(key)), "")
