"""What each array of a tree is: a parameter, state of an optimizer, or something else. Told by structure.

    opt_state/0/mu/params/decoder/norm/scale     mirrors  params/params/decoder/norm/scale
    1/opt_state/0/{count, mu/…, nu/…}            mirrors  0/…                  an NNX (model, optimizer) tuple
    state/param_states/decoder/norm/scale/v_row  mirrors  target/decoder/norm/scale             T5X
    1/0/{count, mu/…, nu/…}                      mirrors  0/…                  no name tells, the counter does

State of an optimizer has the parameters' paths, and an integer that counts steps beside them or a name that
optimizers have. Whatever is neither that nor a random state nor a counter is a parameter: a learned number is
never taken for bookkeeping. What mirrors the parameters and shows no sign of an optimizer, such as an average
of them, is a parameter, too, but named among those that are unclear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple, Protocol

from ckpttools.ir.tree import Path, Tree
from ckpttools.region import Shape

Role = Literal["parameter", "optimizer", "other"]

# Keys with an optimizer's state below them; also with a number behind, as Pax's opt_states_0.
_CONTAINERS = frozenset(
    ("opt_state", "opt_states", "optimizer", "optimizers", "optimizer_state", "optimizer_states")
) | {"param_states"}
_PER_PARAMETER = "param_states"
# Names that modules of a model may have as well.
_WEAK_CONTAINERS = frozenset(("opt", "optim"))
_STRONG_CONTAINERS = _CONTAINERS - {"optimizer", "optimizers"}
# Keys of what optimizers keep of each parameter.
_MOMENTS = frozenset(
    ("mu", "nu", "m", "v", "trace", "momentum", "v_row", "v_col", "acc_grads", "nu_max", "exp_avg")
) | {"exp_avg_sq", "grad_ema", "sum_of_squares", "accumulator", "hessian"}
# Keys with weights below them, also where they lie in an optimizer, as in T5X's optimizer/target.
_WEIGHTS = frozenset(("params", "model", "target", "mdl_vars", "model_params", "base", "weights"))
# Keys around a whole state; so are places in a tuple.
_WRAPPERS = (_WEIGHTS - {"params"}) | {"state", "train_state", "nnx_aux"}
_AVERAGES = frozenset(("ema", "average", "averages", "averaged", "polyak", "swa", "shadow"))
_RANDOM = "rngs"
# Keys of a state, outside of the model, that hold nothing learned.
_STATES = frozenset(("state", "train_state"))
_COUNTERS = frozenset(("step", "global_step", "epoch", "rng", "prng", "dropout_rng"))
_LOSS_SCALES = frozenset(("loss_scale", "dynamic_scale"))
_VALUE = "value"


class Kind(Protocol):
    """What must be known of an array: its shape and dtype."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> object: ...


class _Array(NamedTuple):
    shape: Shape
    is_integer: bool

    @property
    def is_count(self) -> bool:
        return self.is_integer and self.shape == ()


_Arrays = Mapping[Path, _Array | None]


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
    """

    optimizer: frozenset[Path] = frozenset()
    weights: frozenset[Path] = frozenset()
    others: frozenset[Path] = frozenset()
    unclear: tuple[Path, ...] = ()
    mirrored: Path | None = None
    _lengths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        known = self.optimizer | self.weights | self.others
        object.__setattr__(self, "_lengths", tuple(sorted({len(each) for each in known}, reverse=True)))

    def of(self, path: Path) -> Role:
        """The role of the leaf at a path."""
        keys = _keys(path)
        for length in self._lengths:
            above = keys[:length]
            if above in self.weights:
                break
            if above in self.optimizer:
                return "optimizer"
            if above in self.others:
                return "other"
        return "other" if _is_bookkeeping(keys) else "parameter"

    def below_optimizer(self, path: Path) -> Path:
        """The path of a leaf of the optimizer within its state: below the last key that is named as one."""
        keys = _keys(path)
        named = [k + 1 for k, key in enumerate(keys) if _container(key)]
        heads = [length for length in self._lengths if keys[:length] in self.optimizer]
        return keys[max((*named, *heads), default=0) :]

    def unclear_of(self, path: Path) -> Path | None:
        """The unclear subtree that a leaf belongs to."""
        keys = _keys(path)
        return next((each for each in self.unclear if keys[: len(each)] == each), None)


def roles(tree: Tree) -> Roles:
    """The roles in a tree, worked out once. Reads nothing."""
    return tree.once(_roles)


def role(tree: Tree, path: Path) -> Role:
    """The role of one leaf."""
    return roles(tree).of(path)


def _roles(tree: Tree) -> Roles:
    typed = (_keys(path) for path in tree.metadata.key_impls)
    return roles_of(tree.arrays, tree.leaves.keys() - tree.arrays.keys(), typed)


def roles_of(arrays: Mapping[Path, Kind], empty: Iterable[Path] = (), random: Iterable[Path] = ()) -> Roles:
    """The roles of arrays, told from paths, shapes and dtypes.

    Args:
        arrays: path -> array. A path of one key that was joined by "/" or "." is taken apart.
        empty: paths of leaves without data.
        random: paths of arrays that are states of random number generators.
    """
    random = [core for core in map(_core, random) if not _is_bookkeeping(core)]
    if not any(map(_may_tell, chain(arrays, empty))) and not _may_be_twice(arrays):
        return Roles(others=frozenset(random))
    known = {_core(path): _Array(each.shape, _is_integer(each)) for path, each in arrays.items()}
    others = frozenset((*random, *_random_states(known)))
    learnable = {path: each for path, each in known.items() if not _within(path, others)}
    learnable = {path: each for path, each in learnable.items() if not _is_bookkeeping(path)}
    return _Analysis(learnable, frozenset(map(_keys, empty))).roles(others)


def _keys(path: Path) -> Path:
    """A path's keys; of names that were joined, those that were joined."""
    if len(path) == 1 and isinstance(path[0], str):
        joint = "/" if "/" in path[0] else "."
        return tuple(path[0].split(joint)) if joint in path[0] else path
    return path


def _core(path: Path) -> Path:
    """The keys without NNX's `value` behind them."""
    keys = _keys(path)
    return keys[:-1] if len(keys) > 1 and keys[-1] == _VALUE else keys


def _may_tell(path: Path) -> bool:
    """Whether a key is one that some state has; where none is, there is little to work out.

    A tree of 100,000 tensors has a budget of its own, which copies of all names would not fit into.
    """
    keys = _keys(path)
    return not _MOMENTS.isdisjoint(keys) or keys[-1:] == ("key",) or any(map(_container, keys))


def _may_be_twice(arrays: Iterable[Path]) -> bool:
    """Whether a third of the arrays lies beside the others, so that it may be a copy of half of them."""
    counts = Counter(path[: 1 + wraps(path[0])] for path in arrays if len(path) > 1)
    return 3 * max(counts.values(), default=0) <= 2 * counts.total()


def _is_integer(array: Kind) -> bool:
    return str(getattr(array.dtype, "name", array.dtype)).startswith(("int", "uint"))


def _is_bookkeeping(keys: Path) -> bool:
    """Whether names say that it is a random state, the number of steps, or a scale of the loss."""
    if _RANDOM in keys:
        return True
    core = keys[:-1] if keys[-1:] == (_VALUE,) else keys
    outer = next((k for k, key in enumerate(core) if not _is_state(key)), len(core))
    first, *below = core[outer : outer + 3] or ("",)
    return (first in _COUNTERS and not below) or (first in _LOSS_SCALES and len(below) < 2)


def _is_state(key: str | int) -> bool:
    return key in _STATES or str(key).isdecimal()


def wraps(key: str | int) -> bool:
    """Whether a key may stand around a whole model or state: a place in a tuple, or a name as `target`."""
    return key in _WRAPPERS or str(key).isdecimal()


def _random_states(known: _Arrays) -> Iterator[Path]:
    """Keys of random number generators with their counters beside them, as NNX keeps them."""
    for path, array in known.items():
        if _RANDOM in path:
            continue
        beside = known.get((*path[:-1], "count")) if path[-1:] == ("key",) else None
        if array and beside and array.is_integer and beside.is_integer and array.shape[-1:] in ((2,), (4,)):
            yield path[:-1]


def _within(path: Path, heads: Collection[Path]) -> bool:
    return bool(heads) and any(path[:length] in heads for length in range(len(path) + 1))


@lru_cache(maxsize=4096)
def _container(key: str | int) -> str | None:
    """The name of a container without its number; None for any other key."""
    name, _, number = str(key).rpartition("_")
    name = name if number.isdecimal() and name else str(key)
    return name if name in _CONTAINERS | _WEAK_CONTAINERS else None


def _is_average(key: str | int) -> bool:
    words = str(key).lower().split("_")
    return key not in _MOMENTS and not _AVERAGES.isdisjoint(words)


def _bare(tail: Path) -> Path:
    """A parameter's path without the collections around it."""
    while len(tail) > 1 and tail[0] == "params":
        tail = tail[1:]
    return tail


def _tails(paths: Iterable[Path]) -> set[Path]:
    """Every end of every path."""
    return {path[k:] for path in paths for k in range(len(path))}


def _tail_in(path: Path, start: int, tails: Collection[Path]) -> tuple[int, Path] | None:
    """Where from `start` on a path ends as one of `tails`, or as one of them and a key of the moment's."""
    for k in range(start, len(path)):
        if path[k:] in tails:
            return k, path[k:]
        if path[-1] in _MOMENTS and path[k:-1] in tails:
            return k, path[k:-1]
    return None


@dataclass(frozen=True)
class _Analysis:
    """The arrays that may be learned or an optimizer's, and the leaves without data."""

    arrays: _Arrays
    empty: frozenset[Path]

    def roles(self, others: frozenset[Path]) -> Roles:
        containers = self._containers()
        heads, weights, unclear = set[Path](), set[Path](), list[Path]()
        named = {each for each in containers if _is_named(each)}
        tails = _tails(p for p in self.arrays if not _within(p, named)) if named else set[Path]()
        for container, inner in sorted(containers.items(), key=lambda item: item[0] not in named):
            if not _is_named(container):
                outside = [path for path in self.arrays if path[: len(container)] != container]
                tails = _tails(path for path in outside if not _within(path, heads))
            if not self._is_optimizer(container, inner, tails):
                unclear += [container] if inner and _is_named(container) else []
                continue
            heads.add(container)
            own, odd = _weights_in(container, inner, tails)
            weights |= own | odd
            unclear += sorted(odd, key=str)
        heads |= self._unnamed([path for path in self.arrays if not _within(path, heads)])
        kept = [p for p in self.arrays if not _within(p, heads) or _within(p, weights)]
        state = [p for p in self.arrays if _within(p, heads) and not _within(p, weights)]
        main, copies = _copies([p for p in kept if not _within(p, unclear)], state)
        return Roles(frozenset(heads), frozenset(weights), others, (*unclear, *copies), main)

    def _containers(self) -> dict[Path, list[Path]]:
        """Keys that are named as optimizers' states are -> the arrays below them."""
        found: dict[Path, list[Path]] = {}
        for path in (*self.arrays, *self.empty):
            at = next((k for k, key in enumerate(path) if _container(key)), None)
            if at is not None:
                found.setdefault(path[: at + 1], []).extend([path] if path in self.arrays else [])
        return found

    def _is_optimizer(self, container: Path, inner: list[Path], tails: Collection[Path]) -> bool:
        """Whether what is below a name is what the name says."""
        start = len(container)
        counts = any((each := self.arrays[path]) and each.is_count for path in inner)
        large = [path for path in inner if (each := self.arrays[path]) and each.shape]
        mirrors = sum(_tail_in(path, start, tails) is not None for path in large)
        if not _is_named(container):
            # A module of a model may be called so.
            return counts and 2 * mirrors >= len(large)
        named = any(not _MOMENTS.isdisjoint(path[start : start + 2]) for path in large)
        nested = any(_container(key) in _STRONG_CONTAINERS for path in inner for key in path[start:])
        return bool(mirrors) or counts or named or nested or not large

    def _unnamed(self, paths: list[Path]) -> set[Path]:
        """Optimizers' states that no name above tells: moments that mirror, with a counter beside them."""
        nodes: dict[Path, set[str | int]] = {}
        for path in paths:
            for k, key in enumerate(path):
                if key in _MOMENTS:
                    nodes.setdefault(path[:k], set()).add(key)
        found: set[Path] = set()
        counts = {path[:-1] for path in paths if (each := self.arrays[path]) is not None and each.is_count}
        for node in (each for each in nodes if each in counts):
            found |= _heads_at(node, nodes[node], paths, self.arrays)
        return {self._lifted(each, found, paths) for each in found}

    def _lifted(self, head: Path, heads: set[Path], paths: list[Path]) -> Path:
        """The highest key with nothing below it but optimizers' states and counters: a whole chain."""
        while head:
            above = head[:-1]
            beside = (path for path in paths if path[: len(above)] == above and not _within(path, heads))
            if not all((each := self.arrays[path]) is not None and each.is_count for path in beside):
                break
            head = above
        return head


def _is_named(container: Path) -> bool:
    """Whether a container's name is no module's, or it lies beside the model, not in it."""
    outer = all(wraps(key) or _container(key) for key in container)
    name = _container(container[-1])
    return name in _STRONG_CONTAINERS or (outer and name not in _WEAK_CONTAINERS)


def _weights_in(container: Path, inner: list[Path], tails: Collection[Path]) -> tuple[set[Path], set[Path]]:
    """What is kept of an optimizer's state: parameters, where they lie in it alone, and what is unclear."""
    start, own, odd = len(container), set[Path](), set[Path]()
    for path in inner:
        below = path[start:-1]
        average = next((k for k, key in enumerate(path) if k >= start and _is_average(key)), None)
        if average is not None:
            odd.add(path[: average + 1])
        elif below and below[0] in _WEIGHTS and container[-1] != _PER_PARAMETER:
            head = path[: start + 1]
            (odd if _bare(path[start + 1 :]) in tails else own).add(head)
    return own - odd, odd


def _heads_at(node: Path, moments: set[str | int], paths: list[Path], arrays: _Arrays) -> set[Path]:
    """What below a node with a counter is an optimizer's: moments that mirror something, or all."""
    start = len(node)
    own = [path for path in paths if path[:start] == node]
    state = [path for path in own if len(path) > start + 1 and path[start] in moments]
    learnable = [p for p in paths if not ((each := arrays[p]) is not None and each.is_count)]
    beyond = _tails(path for path in learnable if path[:start] != node)
    rest = [p for p in own if len(p) > start + 1 and p[start] not in moments]
    beside = _tails(path[start + 1 :] for path in rest if path in learnable)
    flat = [path for path in own if len(path) == start + 1 and path[start] in moments]
    if not state:
        # A single array as the model: two moments of one shape, and an array of that shape elsewhere.
        shapes = {arrays[path] for path in flat}
        outer = {arrays[path] for path in paths if path[:start] != node}
        return {node} if len(flat) > 1 and len(shapes) == 1 and shapes <= outer and not rest else set()
    mirrors = [path for path in state if _bare(path[start + 1 :]) in beyond | beside]
    # Where there is nothing else at all, this is the state of an optimizer stored alone.
    alone = not beyond and not beside
    if 2 * len(mirrors) < len(state) and not alone:
        return set()
    if all(_tail_in(path, start + 1, beyond) and not _is_average(path[start]) for path in rest):
        return {node}
    counts = {
        path for path in own if len(path) == start + 1 and (a := arrays[path]) is not None and a.is_count
    }
    return {(*node, key) for key in moments} | counts


def _copies(kept: list[Path], state: list[Path]) -> tuple[Path | None, list[Path]]:
    """Where the parameters are, and what has their paths once more, which may be state or a copy of them."""
    wanted = _trained(kept, state) or _beside_others(kept)
    if not wanted:
        return None, []
    places = {path: _tail_in(path, 0, wanted) for path in kept}
    counts = Counter(path[: place[0]] for path, place in places.items() if place)
    if not counts:
        return None, []
    order = {head: k for k, head in enumerate(counts)}
    main = max(counts, key=lambda head: (counts[head], bool(_WEIGHTS & set(head)), -order[head]))
    groups: dict[Path, int] = {}
    for path, place in places.items():
        if place is not None and path[: place[0]] != main:
            groups[path[: place[0]]] = groups.get(path[: place[0]], 0) + 1
    sizes = Counter(path[:k] for path in kept for k in {len(head) for head in groups} if k < len(path))
    copies = [
        head
        for head, count in groups.items()
        if head and (2 * count >= len(wanted) or (count > 1 and sizes[head] == count))
    ]
    return main, copies


def _trained(kept: list[Path], state: list[Path]) -> set[Path]:
    """The paths of parameters, as the state of the optimizer mirrors them."""
    tails = _tails(kept) if state else set[Path]()
    places = (_tail_in(path, 0, tails) for path in state)
    # A key that only ends alike, such as `scale`, is no path of a parameter where longer ones are.
    return {_bare(place[1]) for place in places if place}


def _beside_others(kept: list[Path]) -> set[Path]:
    """The paths of parameters that lie under a name of their own, where something lies beside them."""
    outer = {path: next((k for k, key in enumerate(path) if key in _WEIGHTS), None) for path in kept}
    heads = [path[: k + 1] for path, k in outer.items() if k is not None and all(map(wraps, path[:k]))]
    numbered = [path[:1] for path in kept if len(path) > 1 and str(path[0]).isdecimal()]
    first = next(iter((*heads, *numbered)), None)
    if first is None:
        return set()
    mine = [path for path in kept if path[: len(first)] == first and len(path) > len(first)]
    # A copy has most of it: fewer arrays beside it are none, and their names need not be looked at.
    return {_bare(path[len(first) :]) for path in mine} if 3 * len(mine) <= 2 * len(kept) else set()
