"""Classify the arrays of a tree as parameters, optimizer state or something else, by structure.

    opt_state/0/mu/params/decoder/norm/scale     mirrors  params/params/decoder/norm/scale
    1/opt_state/0/{count, mu/…, nu/…}            mirrors  0/…                  an NNX (model, optimizer) tuple
    state/param_states/decoder/norm/scale/v_row  mirrors  target/decoder/norm/scale             T5X
    1/0/{count, mu/…, nu/…}                      mirrors  0/…                  by its counter
    inner/decoder/norm/scale/{v_row, v_col}      mirrors  net/decoder/norm/scale          likewise

Optimizer state is below an optimizer's name, or is named like moments, with the full paths and shapes of
parameters and a step count next to it. All other arrays except random states and counters are parameters: a
learned number never counts as bookkeeping, whatever its name. Random states are integer arrays, counters are
single integers, and a single floating-point number is a loss scale only if there is an optimizer. Arrays that
mirror parameters but lack one of these signs, such as averages, are unclear parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from itertools import chain
from typing import Literal, Protocol

from ckpttools.array.tree import Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape
from ckpttools.roles.mirrors import (
    ArrayFacts,
    Copies,
    Heads,
    Mirrors,
    branch,
    copies,
    inside,
    outside,
    raise_heads,
)
from ckpttools.roles.names import (
    KEYS,
    LONE_KEY,
    MOMENTS,
    container,
    core_of,
    first_keys,
    is_bookkeeping,
    is_random,
    is_wrapper,
    keys_of,
    may_be_bookkeeping,
    may_identify_state,
    unwrapped,
)
from ckpttools.roles.optimizer_state import collect_branch_state, named_state, unnamed_state

Role = Literal["parameter", "optimizer", "other"]
ROLES: tuple[Role, ...] = ("parameter", "optimizer", "other")
"""Roles in the order of reports."""
# Number of leading keys that distinguish the largest parts of a tree, apart from nested wrappers.
_HEAD = 4
# The dtypes of JAX random keys and of the states that torch stores.
_COUNT = "count"
_WORDS, _BYTES = "uint32", "uint8"


class Typed(Protocol):
    """The relevant properties of an array: its shape and dtype."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a tree's leaves, by subtree.

    A role applies to a full subtree, unless a subtree of it has another role.

    Attributes:
        optimizer: Prefixes of optimizer states.
        weights: Prefixes of parameters inside optimizer states.
        others: Random states that names do not identify.
        unclear: Subtrees that may be parameters or optimizer state; they count as parameters unless the user
            decides otherwise.
        mirrored: Prefix of the parameters that the unclear subtrees mirror; None if unknown.
        learned: Arrays that are learned although their names suggest bookkeeping.
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
        object.__setattr__(self, "_unclear_lengths", tuple(sorted({len(item) for item in self.unclear})))
        known = self.optimizer | self.weights | self.others
        object.__setattr__(self, "_lengths", tuple(sorted({len(item) for item in known}, reverse=True)))

    def of(self, path: Path) -> Role:
        """Return the role of the leaf at a path."""
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

    def is_random(self, path: Path) -> bool:
        """Return whether the leaf at a path is the state of a random number generator."""
        if self.of(path) != "other":
            return False
        keys = keys_of(path)
        return is_random(keys) or any(keys[:length] in self.others for length in self._lengths)

    def below_optimizer(self, path: Path) -> Path:
        """Return a leaf's path inside its optimizer state: below the last key that names an optimizer."""
        keys = keys_of(path)
        named = [k + 1 for k, key in enumerate(keys) if container(key)]
        heads = [length for length in self._lengths if keys[:length] in self.optimizer]
        return keys[max((*named, *heads), default=0) :]

    def unclear_of(self, path: Path) -> Path | None:
        """Return the unclear subtree that contains a leaf."""
        keys = keys_of(path)
        return next((keys[:n] for n in self._unclear_lengths if keys[:n] in self._unclear), None)


def roles(tree: Tree) -> Roles:
    """Return the roles in a tree, which are cached; reads no array data."""
    return tree.once(_roles)


def _roles(tree: Tree) -> Roles:
    typed = (keys_of(path) for path in tree.metadata.key_impls)
    return roles_of(tree.arrays, tree.leaves.keys() - tree.arrays.keys(), typed)


def roles_of(arrays: Mapping[Path, Typed], empty: Iterable[Path] = (), random: Iterable[Path] = ()) -> Roles:
    """Infer the roles of arrays from paths, shapes and dtypes.

    Args:
        arrays: Path -> array. A path with a single key that was joined by "/" or "." is split.
        empty: Paths of leaves without data.
        random: Paths of random states.
    """
    keys = _keys(chain(arrays, empty))
    if not may_be_bookkeeping(keys):
        return _infer_roles(arrays, empty, random, keys)
    named = {path: item for path, item in arrays.items() if is_bookkeeping(keys_of(path))}
    learned = {path for path, item in named.items() if _is_learned(keys_of(path), item)}
    result = _infer_roles(arrays, empty, random, keys, learned)
    if not (result.optimizer or result.unclear):
        learned |= {path for path, item in named.items() if not _is_of_any_model(keys_of(path), item)}
    elif scales := [path for path, item in named.items() if _is_fraction(item) and path not in learned]:
        moments = {tail for path in arrays for tail in _below_moment(keys_of(path))}
        learned |= {path for path in scales if not moments.isdisjoint(unwrapped(keys_of(path)))}
    return replace(result, learned=frozenset(map(keys_of, learned)))


def _below_moment(keys: Path) -> Iterator[Path]:
    """Yield the possible parameter paths of a moment."""
    for k, key in enumerate(keys):
        if key in MOMENTS:
            yield from unwrapped(keys, k + 1)


def _is_learned(keys: Path, array: Typed) -> bool:
    """Return whether an array cannot be the bookkeeping that its name suggests, even in a training state."""
    if _is_fraction(array):
        return bool(array.shape) or is_random(keys)
    # Other integer arrays are tables, but a random generator has a counter.
    is_state = _name(array) in (_WORDS, _BYTES) or core_of(keys)[-1] == _COUNT
    return is_random(keys) and bool(array.shape) and _is_integer(array) and not is_state


def _is_of_any_model(keys: Path, array: Typed) -> bool:
    """Return whether an array is bookkeeping by name even without training state or loss scale."""
    return not _is_fraction(array) and (array.shape == () or is_random(keys))


def _keys(paths: Iterable[Path]) -> frozenset[str | int]:
    """Return all keys of a tree."""
    return frozenset().union(*map(keys_of, paths))


def _infer_roles(
    arrays: Mapping[Path, Typed],
    empty: Iterable[Path],
    random: Iterable[Path],
    keys: Collection[str | int],
    learned: Collection[Path] = (),
) -> Roles:
    random = [core for core in map(core_of, random) if not is_bookkeeping(core)]
    # The memory limit for a tree of 100,000 tensors does not allow copies of all names.
    if not (
        any(map(may_identify_state, keys)) or _may_be_random(arrays, keys) or _may_contain_copies(arrays)
    ):
        return Roles(others=frozenset(random))
    known = {
        core_of(path): ArrayFacts(item.shape, _is_integer(item), _name(item) == _WORDS)
        for path, item in arrays.items()
    }
    others = frozenset((*random, *_random_states(known)))
    own = set(map(core_of, learned))
    paths = outside((path for path in known if path in own or not is_bookkeeping(path)), others)
    return _analyze(Mirrors({path: known[path] for path in paths}), frozenset(map(keys_of, empty)), others)


def _analyze(mirrors: Mirrors, empty: frozenset[Path], others: frozenset[Path]) -> Roles:
    """Find state by names first, then by moment names and mirrored parameters, then by mirroring alone."""
    result = named_state(mirrors, empty)
    result |= unnamed_state(mirrors, outside(mirrors.arrays, result.state))
    state = outside(inside(mirrors.arrays, result.state), result.weights)
    state_paths = frozenset(state)
    kept = [path for path in mirrors.arrays if path not in state_paths]
    duplicates = copies(mirrors, outside(kept, result.unclear), state)
    result |= Heads(unclear=duplicates.others)
    result |= collect_branch_state(mirrors, kept, result, _branches_with_steps(mirrors, duplicates))
    clear = (path for path in outside(mirrors.arrays, result.unclear) if not mirrors.is_count(path))
    ambiguous = sorted(raise_heads(result.unclear, clear), key=str)
    return Roles(result.state, result.weights, others, tuple(ambiguous), duplicates.parameters)


def _branches_with_steps(mirrors: Mirrors, duplicates: Copies) -> set[Path]:
    """Return branches with a copy of the parameters and a step counter."""
    branches = {branch(head, duplicates.parameters or ()) for head in duplicates.others} - {()}
    steps = {path[: len(item)] for path in mirrors.arrays if mirrors.is_step(path) for item in branches}
    return branches & steps


def _may_be_random(arrays: Mapping[Path, Typed], keys: Collection[str | int]) -> bool:
    """Return whether there may be random keys; attention also has a `key`, with a kernel below it."""
    return not KEYS.isdisjoint(keys) and any(
        not KEYS.isdisjoint(keys_of(path)[-2:]) and _is_integer(item) for path, item in arrays.items()
    )


def _may_contain_copies(arrays: Mapping[Path, Typed]) -> bool:
    """Return whether the rest is large enough to contain copies of the largest part of the tree."""
    heads = Counter([_head(path) for path, item in arrays.items() if item.shape])
    for start in range(2):
        counts: Counter[Path] = Counter()
        for keys, count in heads.items():
            if len(keys) > start + 1:
                counts[_top(keys, start)] += count
        in_branches = counts.total() - max(counts.values(), default=0)
        if in_branches:
            return 4 * in_branches >= counts.total()
    return False


def _head(path: Path) -> Path:
    """Return a few leading keys of a path; the full path if all of them may be wrappers."""
    keys = first_keys(path, _HEAD)
    return keys if len(keys) < _HEAD or not all(map(is_wrapper, keys[1:])) else keys_of(path)


def _top(keys: Path, start: int) -> Path:
    """Return the leading keys up to the first that is not a wrapper, which distinguishes parts of a tree."""
    first = next((k for k in range(start, len(keys)) if not is_wrapper(keys[k])), len(keys))
    return keys[: first + 1]


def _name(array: Typed) -> str:
    return str(getattr(array.dtype, "name", array.dtype))


def _is_fraction(array: Typed) -> bool:
    return "float" in _name(array) or "complex" in _name(array)


def _is_integer(array: Typed) -> bool:
    return _name(array).startswith(("int", "uint", "bool"))


def _random_states(known: Mapping[Path, ArrayFacts]) -> Iterator[Path]:
    """Yield random keys with counters next to them, as NNX and optax store them.

    A random key has words along its last axis and a counter for each of its other elements. The table of a
    codebook with usage counts does not match this.
    """
    for path, array in known.items():
        if path[-1] not in KEYS or is_random(path):
            continue
        if not array.is_words or array.shape[-1:] not in ((2,), (4,)):
            continue
        count = (*path[:-1], _COUNT)
        sibling = known.get(count)
        is_counted = sibling is not None and sibling.is_whole_number and sibling.shape == array.shape[:-1]
        yield from (path,) * (is_counted or path[-1] == LONE_KEY)
        yield from (count,) * is_counted
