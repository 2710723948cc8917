"""What of a checkpoint goes where: the caller's tree, shardings and rules, checked before any read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, Text, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import (
    CheckpointError,
    CoverageError,
    MappingError,
    UncutArraysWarning,
    UsageError,
    listing,
    near_names,
)
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count, format_type, sample_names
from ckpttools.maxtext.view import view_of
from ckpttools.roles.names import is_wrapper
from ckpttools.sharding.assignments import Assigned, Assigning, Devices
from ckpttools.sharding.mesh import MeshShape
from ckpttools.sharding.specs import shard_shape, spec_of
from ckpttools.sharding.templates import Expected, TreeTemplate
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import CastMap, can_cast, cast, cast_notes

LIKE = "like"
_MOST_NEAR = 20
# Of the bytes that are loaded. Norms of stacked layers, which rules leave out, are less than a hundredth.
_MOST_UNCUT = 0.1


@dataclass(frozen=True)
class Request:
    """All that is to be loaded.

    Attributes:
        arrays: in the order in which `filled` takes them.
        filled: makes what the caller gets.
        notes: what the user should know.
    """

    arrays: tuple[Assigned, ...]
    filled: Callable[[Sequence[Any]], Any]
    notes: Notes = field(default_factory=Notes)


def request(
    tree: Tree, template: TreeTemplate | None, devices: Devices, dtype: DType | str | None, location: str
) -> Request:
    """Checks all that was asked for against a checkpoint.

    Args:
        tree: the checkpoint; all of it is loaded where there is no template.
        template: what the caller wants to have; None for the tree as it is.
        devices: where to.
        dtype: of floating-point arrays; "like" for those of the template; None for those stored.
        location: of the checkpoint, for messages.

    Raises:
        CoverageError: names, shapes or dtypes that the checkpoint has not, axes that cannot be divided, and
            dtypes that JAX would narrow; lists all of them.
        UsageError: rules without a mesh, or for other axes than it has.
    """
    if dtype == LIKE and template is None:
        raise UsageError(f"{option('dtype', LIKE)} needs {option('like')}")
    pairs, texts, problems, remarks = _pairs(tree, template)
    notes = Notes()
    if dtype is not None:
        try:
            changed = _cast(tree, pairs, dtype)
        except MappingError as error:
            raise error.at(hint="load these arrays as they are, and cast them there") from error
        tree, notes = changed.tree, changed.notes
    assigning = Assigning(tree, devices)
    arrays = [assigning.assigned(path, expected) for path, expected in pairs]
    problems += _unfit(arrays, tree, devices)
    if problems:
        raise CoverageError(
            f"the checkpoint and what was asked for do not fit:{listing(problems)}",
            location=location or None,
            hint=_hint(arrays, tree),
        )
    paths = [array.path for array in arrays]
    filled = _whole(tree, paths) if template is None else _with_texts(template, texts)
    uncut = tuple(assigning.remarks(arrays))
    if assigning.uncut_share(arrays) > _MOST_UNCUT:
        warnings.warn("; ".join(uncut), UncutArraysWarning, stacklevel=2)
    return Request(tuple(arrays), filled, notes + Notes(remarks=(*remarks, *uncut)))


Pairs = list[tuple[Path, Expected]]


def _pairs(
    tree: Tree, template: TreeTemplate | None
) -> tuple[Pairs, Mapping[Path, str], list[str], list[str]]:
    """Paths and what is expected of each; texts by their names; what is not there; remarks."""
    if template is None:
        return [(path, Expected(path, None, None)) for path in tree.arrays], {}, [], []
    texts = {path: leaf.value for path, leaf in tree.items() if isinstance(leaf, Text)}
    known = view_of(tree).roles
    result = match(
        [item.path for item in template.leaves],
        [*tree.arrays, *texts],
        lambda path: path in texts or known.of(path) == "parameter",
    )
    matched = [(result.result[item.path], item) for item in template.leaves if item.path in result.result]
    pairs = [(path, item) for path, item in matched if path in tree.arrays and not item.is_text]
    remarks = []
    if result.result and not all(map(is_wrapper, result.below)):
        remarks.append(f"what is asked for is found below {keystr(result.below)} of the checkpoint")
    unread = [path for path in result.unread if path in tree.arrays]
    if unread:
        names = sample_names(map(keystr, unread))
        remarks.append(f"not asked for: {array_count(unread)} of the checkpoint, {names}")
    problems = [*_missing(result.missing, tree), *_misread(matched, tree)]
    if result.others:
        locations = " and ".join(map(keystr, result.others))
        name = keystr(template.leaves[0].path)
        problems.append(
            f"{name}: there are {locations}; give {option('like')} their keys, too, or {option('keep')}"
        )
    read = {item.path: texts[path] for path, item in matched if item.is_text and path in texts}
    return pairs, read, problems, remarks


def _misread(matched: Pairs, tree: Tree) -> Iterator[str]:
    """Arrays where texts are expected, and texts where arrays are."""
    for path, item in matched:
        array = tree.arrays.get(path)
        if array is None and not item.is_text:
            yield f"{item.name}: is a text, expected an array or a number"
        elif array is not None and item.is_text:
            yield f"{item.name}: is {format_type(array.dtype, array.shape)}, expected a text"


def _with_texts(template: TreeTemplate, texts: Mapping[Path, str]) -> Callable[[Sequence[Any]], Any]:
    """Makes the tree of values of what is no text."""

    def filled(values: Sequence[Any]) -> Any:
        others = iter(values)
        return template.filled(
            [texts[leaf.path] if leaf.is_text else next(others) for leaf in template.leaves]
        )

    return filled


def _missing(paths: Sequence[Path], tree: Tree) -> Iterator[str]:
    known = [keystr(path) for path in tree.arrays]
    for number, path in enumerate(paths):
        near = near_names(keystr(path), known, 1) if number < _MOST_NEAR else []
        yield f"{keystr(path)}: not there" + (f"; did you mean {near[0]}?" if near else "")


def _unfit(arrays: Sequence[Assigned], tree: Tree, devices: Devices) -> Iterator[str]:
    """Why arrays cannot be loaded as expected."""
    for array in arrays:
        yield from reasons(array, tree.metadata.key_impls.get(array.path))
        if array.number is None and devices.lack(array.expected):
            yield f"{array.name}: `shardings` has none for it"


def _hint(arrays: Sequence[Assigned], tree: Tree) -> str | None:
    """How to cast, where that can be done to all whose dtypes differ."""
    differing = [array for array in arrays if array.expected.dtype not in (None, array.array.dtype)]
    if differing and all(_casts(item, tree) for item in differing):
        return f"{option('dtype', LIKE)} casts, if only dtypes differ"
    return None


def _casts(assigned: Assigned, tree: Tree) -> bool:
    """Whether dtype="like" casts an array, which it does to nothing that is made of keys or loses numbers."""
    expected, dtype = assigned.expected, assigned.array.dtype
    is_key = expected.key_impl is not None or assigned.path in tree.metadata.key_impls
    return expected.dtype is not None and not is_key and can_cast(dtype, expected.dtype)


def _cast(tree: Tree, pairs: Sequence[tuple[Path, Expected]], dtype: DType | str) -> Transformed:
    """The tree with its numbers in the dtypes that are expected."""
    if dtype != LIKE:
        return CastMap({}, dtype)(tree)
    both = [(path, tree.arrays[path], item.dtype) for path, item in pairs if item.dtype]
    differing = {path: (array, expected) for path, array, expected in both if array.dtype != expected}
    # Whole numbers and what may be quantised are for the transform to judge.
    if all(_is_plain(array.dtype) and expected.is_of_weights for array, expected in differing.values()):
        built = {path: cast(array, expected) for path, (array, expected) in differing.items()}
        kinds = {(array.dtype, expected): array for array, expected in differing.values()}
        notes = [note for (_, expected), array in kinds.items() for note in cast_notes({"": array}, expected)]
        return Transformed(Tree({**tree.leaves, **built}, tree.metadata), Notes(tuple(notes)))
    return CastMap({keystr(path): expected for path, (_, expected) in differing.items()})(tree)


def _is_plain(dtype: DType) -> bool:
    return dtype.is_float and dtype.bits > 8


def _whole(tree: Tree, paths: Sequence[Path]) -> Callable[[Sequence[Any]], Any]:
    """Makes the tree as dictionaries and lists, with values in place of arrays."""

    def filled(values: Sequence[Any]) -> Any:
        return _filled(tree.nested(), (), dict(zip(paths, values, strict=True)))

    return filled


def _filled(node: Any, path: Path, values: Mapping[Path, Any]) -> Any:
    if isinstance(node, LazyArray):
        return values[path]
    if isinstance(node, dict):
        return {key: _filled(value, (*path, key), values) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, (*path, location), values) for location, value in enumerate(node)]
    return node


# What numbers of Python are made of without loss.
_KINDS: Mapping[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: ("int", "uint"),
    float: ("float", "int", "uint"),
    complex: ("complex", "float", "int", "uint"),
}


def reasons(assigned: Assigned, stored_impl: str | None) -> Iterator[str]:
    """Why an array cannot be loaded as expected.

    Args:
        assigned: the array, and what the caller wants of it.
        stored_impl: of PRNG keys the name of their implementation, as it is stored.
    """
    array, name, expected = assigned.array, assigned.name, assigned.expected
    if expected.shape is not None and expected.shape != array.shape:
        yield f"{name}: has the shape {list(array.shape)}, expected {list(expected.shape)}"
        return
    if expected.dtype is not None and expected.dtype != array.dtype:
        yield f"{name}: is {array.dtype}, expected {expected.dtype}"
    if stored_impl and expected.key_impl and stored_impl != expected.key_impl:
        yield f"{name}: is a key of {stored_impl}, expected one of {expected.key_impl}"
    if assigned.number is None:
        yield from _no_array(assigned)
    elif array.size != 1:
        yield f"{name}: is {format_type(array.dtype, array.shape)}, expected a number"
    elif array.dtype.kind not in _KINDS[assigned.number]:
        yield f"{name}: is {array.dtype}, expected a {assigned.number.__name__}"


def _no_array(assigned: Assigned) -> Iterator[str]:
    """Why it cannot be an array of JAX on its devices."""
    dtype, name = assigned.array.dtype, assigned.name
    config: Any = jax.config
    if dtype.number_bytes == 8 and not config.jax_enable_x64:
        yield f"{name}: {dtype} needs jax_enable_x64; without it JAX would keep half of its bits"
    elif not _holds(dtype):
        yield f"{name}: JAX {jax.__version__} has no {dtype}"
    yield from _uneven(assigned)


def _uneven(assigned: Assigned) -> Iterator[str]:
    target = assigned.target
    try:
        if isinstance(target.sharding, jax.sharding.NamedSharding):
            spec = spec_of(target.sharding.spec, None)
            shard_shape(target.shape, spec, MeshShape(dict(target.sharding.mesh.shape)))
        _ = target.part
    except CheckpointError as error:
        yield f"{assigned.name}: {error.message}: {error.got}; expected {error.expected}"
    except ValueError as error:
        yield f"{assigned.name}: {error}"


@cache
def _holds(dtype: DType) -> bool:
    """Whether JAX has arrays of a dtype."""
    try:
        jax.device_put(np.zeros((0,), dtype.numpy), jax.local_devices()[0])
    except Exception:  # what it raises differs by version and dtype
        return False
    return True


Name = tuple[str, ...]
_VALUE = "value"
# So many of the names tell below which keys the others are.
_SAMPLES = 16
_MOST_ABOVE = 3


@dataclass(frozen=True)
class Match:
    """How names of two trees belong together.

    Attributes:
        result: name of the caller -> path of the checkpoint.
        missing: names of the caller that the checkpoint has not.
        unread: paths of the checkpoint, from the same place in it, that the caller does not name.
        below: keys of the checkpoint below which the names are.
        others: for each other choice of paths that is as good, the one of the first name; the first choice's
            comes first. Empty where there is one choice.
    """

    result: Mapping[Path, Path]
    missing: tuple[Path, ...]
    unread: tuple[Path, ...]
    below: Path = ()
    others: tuple[Path, ...] = ()


def match(
    expected: Sequence[Path], known: Iterable[Path], is_parameter: Callable[[Path], bool] = lambda path: True
) -> Match:
    """Finds each expected name in a checkpoint: as it is, or all of them below one key, or without one.

    Numbers are the same as text or as places in lists; a last key `value`, as NNX has one, counts for
    nothing.

    Args:
        expected: names of the caller.
        known: paths of the checkpoint.
        is_parameter: whether one of them is a parameter: of several places where the names are as well found
            it is that of the parameters which is meant, not that of their moments.
    """
    paths = {_name(path): path for path in known}
    names = [(path, _name(path)) for path in expected]
    choices = _best([name for _, name in names], paths)
    if len(choices) > 1:
        choices = [choice for choice in choices if all(map(is_parameter, _found(choice, paths)))] or choices
    best = choices[0]
    result = dict(zip(expected, best.names, strict=True))
    below, reached = best.below, set(best.names)
    unread = tuple(
        path for name, path in paths.items() if name[: len(below)] == below and name not in reached
    )
    firsts = [path for choice in choices for path in _found(choice, paths)[:1]]
    return Match(
        {path: paths[name] for path, name in result.items() if name in paths},
        tuple(path for path, name in result.items() if name not in paths),
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
    locations: dict[tuple[Name, int], None] = {((), 0): None}
    for name in names[:: max(1, len(names) // _SAMPLES)]:
        locations.update(dict.fromkeys(_choices(name, shared, by_last.get(name[-1] if name else "", []))))
    # The same names may be reached with other keys in common.
    choices: dict[tuple[Name, ...], _Choice] = {}
    for below, above in sorted(locations, key=lambda location: (location[1], len(location[0]))):
        built = tuple(below + name[above:] for name in names)
        choices.setdefault(built, _Choice(below, built))
    counts = {built: sum(name in paths for name in built) for built in choices}
    limit = max(counts.values())
    best = [choice for built, choice in choices.items() if counts[built] == limit]
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
