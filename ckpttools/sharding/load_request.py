"""Requests: the caller's tree, shardings and rules, matched with a checkpoint and checked before any read."""

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
    similar_names,
)
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count, format_type, sample_names
from ckpttools.maxtext.view import view_of
from ckpttools.roles.names import is_wrapper
from ckpttools.sharding.assignments import Assigner, Assignment, DeviceOptions
from ckpttools.sharding.mesh import MeshShape, shard_shape, spec_from_entries
from ckpttools.sharding.templates import ExpectedLeaf, TreeTemplate
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import CastMap, can_cast, cast, cast_notes

LIKE = "like"
_MAX_SUGGESTIONS = 20
# Maximum fraction of the loaded bytes that may match no rule. Norms of stacked layers, which rules leave out,
# are less than 1%.
_MAX_UNMATCHED = 0.1


@dataclass(frozen=True)
class Request:
    """All arrays to load.

    Attributes:
        arrays: The arrays, in the order of the values that `fill` takes.
        fill: Builds the result from the values.
        notes: Notes for the user.
    """

    arrays: tuple[Assignment, ...]
    fill: Callable[[Sequence[Any]], Any]
    notes: Notes = field(default_factory=Notes)


def build_request(
    tree: Tree,
    template: TreeTemplate | None,
    devices: DeviceOptions,
    dtype: DType | str | None,
    location: str,
) -> Request:
    """Check a request against a checkpoint.

    Args:
        tree: The checkpoint; without a template, all of it is loaded.
        template: The expected leaves; None for the tree of the checkpoint.
        devices: The destination.
        dtype: Dtype of floating-point arrays; "like" for those of the template; None for the stored dtypes.
        location: Location of the checkpoint, for messages.

    Raises:
        CoverageError: The checkpoint lacks names, shapes or dtypes, axes cannot be divided, or JAX would
            narrow dtypes. The message lists all problems.
        UsageError: Rules are given without a mesh, or name axes that the mesh lacks.
    """
    if dtype == LIKE and template is None:
        raise UsageError(f"{option('dtype', LIKE)} needs {option('like')}")
    pairs, texts, problems, remarks = _match_leaves(tree, template)
    notes = Notes()
    if dtype is not None:
        try:
            changed = _cast(tree, pairs, dtype)
        except MappingError as error:
            raise error.at(hint="load these arrays as they are, and cast them there") from error
        tree, notes = changed.tree, changed.notes
    assigner = Assigner(tree, devices)
    arrays = [assigner.assigned(path, expected) for path, expected in pairs]
    problems += _find_mismatches(arrays, tree, devices)
    if problems:
        raise CoverageError(
            f"the checkpoint does not match the request:{listing(problems)}",
            location=location or None,
            hint=_hint(arrays, tree),
        )
    paths = [array.path for array in arrays]
    fill = _tree_filler(tree, paths) if template is None else _template_filler(template, texts)
    uncut = tuple(assigner.remarks(arrays))
    if assigner.unmatched_share(arrays) > _MAX_UNMATCHED:
        warnings.warn("; ".join(uncut), UncutArraysWarning, stacklevel=2)
    return Request(tuple(arrays), fill, notes + Notes(remarks=(*remarks, *uncut)))


Pairs = list[tuple[Path, ExpectedLeaf]]


def _match_leaves(
    tree: Tree, template: TreeTemplate | None
) -> tuple[Pairs, Mapping[Path, str], list[str], list[str]]:
    """Return matched pairs of path and leaf, texts by caller path, problems, and remarks."""
    if template is None:
        return [(path, ExpectedLeaf(path, None, None)) for path in tree.arrays], {}, [], []
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
        remarks.append(f"the requested names are below {keystr(result.below)} in the checkpoint")
    unread = [path for path in result.unread if path in tree.arrays]
    if unread:
        names = sample_names(map(keystr, unread))
        remarks.append(f"not requested: {array_count(unread)} of the checkpoint, {names}")
    problems = [*_missing_lines(result.missing, tree), *_kind_mismatches(matched, tree)]
    if result.others:
        locations = " and ".join(map(keystr, result.others))
        name = keystr(template.leaves[0].path)
        problems.append(
            f"{name}: matches {locations}; add their keys to {option('like')}, or give {option('keep')}"
        )
    read = {item.path: texts[path] for path, item in matched if item.is_text and path in texts}
    return pairs, read, problems, remarks


def _kind_mismatches(matched: Pairs, tree: Tree) -> Iterator[str]:
    """Yield the leaves that are arrays on one side and strings on the other."""
    for path, item in matched:
        array = tree.arrays.get(path)
        if array is None and not item.is_text:
            yield f"{item.name}: is a string, expected an array or a number"
        elif array is not None and item.is_text:
            yield f"{item.name}: is {format_type(array.dtype, array.shape)}, expected a string"


def _template_filler(template: TreeTemplate, texts: Mapping[Path, str]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds the tree from the values of all leaves except strings."""

    def fill(values: Sequence[Any]) -> Any:
        others = iter(values)
        return template.fill([texts[leaf.path] if leaf.is_text else next(others) for leaf in template.leaves])

    return fill


def _missing_lines(paths: Sequence[Path], tree: Tree) -> Iterator[str]:
    known = [keystr(path) for path in tree.arrays]
    for number, path in enumerate(paths):
        near = similar_names(keystr(path), known, 1) if number < _MAX_SUGGESTIONS else []
        yield f"{keystr(path)}: does not exist" + (f"; did you mean {near[0]}?" if near else "")


def _find_mismatches(arrays: Sequence[Assignment], tree: Tree, devices: DeviceOptions) -> Iterator[str]:
    """Yield the reasons why arrays cannot be loaded as expected."""
    for array in arrays:
        yield from mismatch_reasons(array, tree.metadata.key_impls.get(array.path))
        if array.number is None and devices.lacks_sharding(array.expected):
            yield f"{array.name}: has no sharding in `shardings`"


def _hint(arrays: Sequence[Assignment], tree: Tree) -> str | None:
    """Suggest a cast if one is possible for all arrays whose dtypes differ."""
    differing = [array for array in arrays if array.expected.dtype not in (None, array.array.dtype)]
    if differing and all(_can_cast_like(item, tree) for item in differing):
        return f"{option('dtype', LIKE)} casts, if only dtypes differ"
    return None


def _can_cast_like(assigned: Assignment, tree: Tree) -> bool:
    """Return whether dtype="like" casts an array.

    PRNG keys are never cast, and arrays never to lossy dtypes.
    """
    expected, dtype = assigned.expected, assigned.array.dtype
    is_key = expected.key_impl is not None or assigned.path in tree.metadata.key_impls
    return expected.dtype is not None and not is_key and can_cast(dtype, expected.dtype)


def _cast(tree: Tree, pairs: Sequence[tuple[Path, ExpectedLeaf]], dtype: DType | str) -> Transformed:
    """Return the tree with its arrays cast to the expected dtypes."""
    if dtype != LIKE:
        return CastMap({}, dtype)(tree)
    both = [(path, tree.arrays[path], item.dtype) for path, item in pairs if item.dtype]
    differing = {path: (array, expected) for path, array, expected in both if array.dtype != expected}
    # The transform handles integers and arrays that may be quantized.
    if all(_is_plain(array.dtype) and expected.is_of_weights for array, expected in differing.values()):
        result = {path: cast(array, expected) for path, (array, expected) in differing.items()}
        kinds = {(array.dtype, expected): array for array, expected in differing.values()}
        notes = [note for (_, expected), array in kinds.items() for note in cast_notes({"": array}, expected)]
        return Transformed(Tree({**tree.leaves, **result}, tree.metadata), Notes(tuple(notes)))
    return CastMap({keystr(path): expected for path, (_, expected) in differing.items()})(tree)


def _is_plain(dtype: DType) -> bool:
    return dtype.is_float and dtype.bits > 8


def _tree_filler(tree: Tree, paths: Sequence[Path]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds the tree as dictionaries and lists, with values in place of arrays."""

    def fill(values: Sequence[Any]) -> Any:
        return _fill_node(tree.nested(), (), dict(zip(paths, values, strict=True)))

    return fill


def _fill_node(node: Any, path: Path, values: Mapping[Path, Any]) -> Any:
    if isinstance(node, LazyArray):
        return values[path]
    if isinstance(node, dict):
        return {key: _fill_node(value, (*path, key), values) for key, value in node.items()}
    if isinstance(node, list):
        return [_fill_node(value, (*path, location), values) for location, value in enumerate(node)]
    return node


# Dtype kinds that convert to each Python number type without loss.
_KINDS: Mapping[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: ("int", "uint"),
    float: ("float", "int", "uint"),
    complex: ("complex", "float", "int", "uint"),
}


def mismatch_reasons(assigned: Assignment, stored_impl: str | None) -> Iterator[str]:
    """Yield the reasons why an array cannot be loaded as expected.

    Args:
        assigned: The array and the expected leaf.
        stored_impl: The stored implementation of PRNG keys; None for other arrays.
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
        yield from _jax_mismatches(assigned)
    elif array.size != 1:
        yield f"{name}: is {format_type(array.dtype, array.shape)}, expected a number"
    elif array.dtype.kind not in _KINDS[assigned.number]:
        yield f"{name}: is {array.dtype}, expected a {assigned.number.__name__}"


def _jax_mismatches(assigned: Assignment) -> Iterator[str]:
    """Yield the reasons why an array cannot become a JAX array on its devices."""
    dtype, name = assigned.array.dtype, assigned.name
    config: Any = jax.config
    if dtype.number_bytes == 8 and not config.jax_enable_x64:
        yield f"{name}: {dtype} needs jax_enable_x64; without it JAX would keep half of its bits"
    elif not _supports_dtype(dtype):
        yield f"{name}: JAX {jax.__version__} has no {dtype}"
    yield from _uneven_axes(assigned)


def _uneven_axes(assigned: Assignment) -> Iterator[str]:
    target = assigned.target
    try:
        if isinstance(target.sharding, jax.sharding.NamedSharding):
            spec = spec_from_entries(target.sharding.spec, None)
            shard_shape(target.shape, spec, MeshShape(dict(target.sharding.mesh.shape)))
        _ = target.part
    except CheckpointError as error:
        yield f"{assigned.name}: {error.raw.message}: {error.raw.got}; expected {error.raw.expected}"
    except ValueError as error:
        yield f"{assigned.name}: {error}"


@cache
def _supports_dtype(dtype: DType) -> bool:
    """Return whether JAX supports a dtype."""
    try:
        jax.device_put(np.zeros((0,), dtype.numpy), jax.local_devices()[0])
    except Exception:  # The type of the exception depends on version and dtype.
        return False
    return True


Name = tuple[str, ...]
_VALUE = "value"
# Number of sampled names, from which the wrapper keys of all names are found.
_SAMPLES = 16
_MAX_SHARED_KEYS = 3


@dataclass(frozen=True)
class Match:
    """The correspondence of names in two trees.

    Attributes:
        result: Path in the checkpoint for each of the caller's names.
        missing: Caller's names that the checkpoint lacks.
        unread: Paths in the same subtree of the checkpoint that the caller does not name.
        below: Keys of the checkpoint above the names.
        others: If several subtrees match equally well, the path of the first name in each, starting with the
            chosen one; empty if the match is unique.
    """

    result: Mapping[Path, Path]
    missing: tuple[Path, ...]
    unread: tuple[Path, ...]
    below: Path = ()
    others: tuple[Path, ...] = ()


def match(
    expected: Sequence[Path], known: Iterable[Path], is_parameter: Callable[[Path], bool] = lambda path: True
) -> Match:
    """Find the expected names in a checkpoint: unchanged, all under one key, or all without a wrapper key.

    Integer keys equal their text and list indices. A trailing key `value`, as in NNX, is ignored.

    Args:
        expected: Names of the caller.
        known: Paths of the checkpoint.
        is_parameter: Returns whether a path is a parameter. If several subtrees match equally well,
            parameters are preferred to their moments.
    """
    paths = {_name(path): path for path in known}
    names = [(path, _name(path)) for path in expected]
    choices = _best_choices([name for _, name in names], paths)
    if len(choices) > 1:
        choices = [
            choice for choice in choices if all(map(is_parameter, _matching_paths(choice, paths)))
        ] or choices
    best = choices[0]
    result = dict(zip(expected, best.names, strict=True))
    below, reached = best.below, set(best.names)
    unread = tuple(
        path for name, path in paths.items() if name[: len(below)] == below and name not in reached
    )
    firsts = [path for choice in choices for path in _matching_paths(choice, paths)[:1]]
    return Match(
        {path: paths[name] for path, name in result.items() if name in paths},
        tuple(path for path, name in result.items() if name not in paths),
        unread,
        below,
        tuple(firsts) if len(firsts) > 1 else (),
    )


class _Choice(NamedTuple):
    """A subtree that may contain the names.

    Attributes:
        below: Keys of the checkpoint above the names.
        names: All names under these keys.
    """

    below: Name
    names: tuple[Name, ...]


def _matching_paths(choice: _Choice, paths: Mapping[Name, Path]) -> list[Path]:
    return [paths[name] for name in choice.names if name in paths]


def _name(path: Path) -> Name:
    name = tuple(map(str, path))
    return name[:-1] if len(name) > 1 and name[-1] == _VALUE else name


def _best_choices(names: Sequence[Name], paths: Mapping[Name, Path]) -> list[_Choice]:
    """Return the subtrees that contain the most names, best first."""
    as_they_are = _Choice((), tuple(names))
    if all(name in paths for name in names):
        return [as_they_are]
    shared = _count_shared_keys(names)
    by_last: dict[str, list[Name]] = {}
    for known in paths:
        by_last.setdefault(known[-1] if known else "", []).append(known)
    locations: dict[tuple[Name, int], None] = {((), 0): None}
    for name in names[:: max(1, len(names) // _SAMPLES)]:
        locations.update(dict.fromkeys(_candidates(name, shared, by_last.get(name[-1] if name else "", []))))
    # Different keys can lead to the same names.
    choices: dict[tuple[Name, ...], _Choice] = {}
    for below, above in sorted(locations, key=lambda location: (location[1], len(location[0]))):
        result = tuple(below + name[above:] for name in names)
        choices.setdefault(result, _Choice(below, result))
    counts = {result: sum(name in paths for name in result) for result in choices}
    limit = max(counts.values())
    best = [choice for result, choice in choices.items() if counts[result] == limit]
    return [as_they_are] if as_they_are in best else best


def _candidates(name: Name, shared: int, same_last: Sequence[Name]) -> Iterator[tuple[Name, int]]:
    """Yield the possible positions of a name: under other keys, or without its own wrapper keys.

    The two are never combined: `params/w` is not another name of `ema/w`.
    """
    yield from ((known[: len(known) - len(name)], 0) for known in same_last if known[-len(name) :] == name)
    for above in range(1, shared + 1):
        if is_wrapper(name[above - 1]) and name[above:] in same_last:
            yield (), above
        elif not is_wrapper(name[above - 1]):
            return


def _count_shared_keys(names: Sequence[Name]) -> int:
    """Return the number of leading keys, at most `_MAX_SHARED_KEYS`, that all names share before the last."""
    least = min(_MAX_SHARED_KEYS, min(map(len, names)) - 1)
    return next((k for k in range(least) if len({name[k] for name in names}) > 1), max(0, least))
