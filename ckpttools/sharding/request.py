"""What of a checkpoint goes where: the caller's tree, shardings and rules, checked before any read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, Tree, spelled
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import (
    CheckpointError,
    CoverageError,
    MappingError,
    UsageError,
    listing,
    near_names,
)
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count, some, type_text
from ckpttools.core.wording import option
from ckpttools.maxtext.axis_names import AxisNames, axis_names
from ckpttools.maxtext.view import view_of
from ckpttools.roles.names import is_wrapper
from ckpttools.sharding.matching import match
from ckpttools.sharding.mesh import MeshShape
from ckpttools.sharding.placing import Target
from ckpttools.sharding.rules import Rules, own_axes
from ckpttools.sharding.specs import Spec, shard_shape
from ckpttools.sharding.templates import Template, Wanted
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import CastMap, cast, cast_notes

LIKE = "like"
_MOST_NEAR = 20


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array to be loaded.

    Attributes:
        path: in the checkpoint, after all that was made of it.
        array: what is read.
        target: where it goes.
        key_impl: of PRNG keys the name of their implementation.
        number: the Python type of what becomes a number.
        wanted: what the caller wants of it.
    """

    path: Path
    array: LazyArray
    target: Target
    key_impl: str | None = None
    number: type | None = None
    wanted: Wanted = field(default_factory=lambda: Wanted((), None, None))

    @property
    def name(self) -> str:
        """As the caller has it."""
        return self.wanted.name


# What numbers of Python are made of without loss.
_KINDS: Mapping[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: ("int", "uint"),
    float: ("float", "int", "uint"),
    complex: ("complex", "float", "int", "uint"),
}


@dataclass(frozen=True)
class Where:
    """What the caller says of places; the first that is there counts: `shardings`, rules, the tree itself.

    Attributes:
        shardings: one for all, or those of paths of the caller's tree.
        rules: with the mesh that they are for.
        mesh: its devices.
        memory_kind: such as "pinned_host"; None for that of the shardings.
    """

    shardings: jax.sharding.Sharding | Mapping[Path, jax.sharding.Sharding] | None = None
    rules: Rules | None = None
    mesh: jax.sharding.Mesh | None = None
    memory_kind: str | None = None


@dataclass(frozen=True)
class Request:
    """All that is to be loaded.

    Attributes:
        leaves: arrays, in the order in which `filled` takes them.
        filled: makes what the caller gets.
        notes: what the user should know.
    """

    leaves: tuple[Leaf, ...]
    filled: Callable[[Sequence[Any]], Any]
    notes: Notes = field(default_factory=Notes)


def request(
    tree: Tree, template: Template | None, where: Where, dtype: DType | str | None, place: str
) -> Request:
    """Checks all that was asked for against a checkpoint.

    Args:
        tree: the checkpoint; all of it is loaded where there is no template.
        template: what the caller wants to have; None for the tree as it is.
        where: on which devices.
        dtype: of floating-point arrays; "like" for those of the template; None for those stored.
        place: of the checkpoint, for messages.

    Raises:
        CoverageError: names, shapes or dtypes that the checkpoint has not, axes that cannot be divided, and
            dtypes that JAX would narrow; lists all of them.
        UsageError: rules without a mesh, or for other axes than it has.
    """
    if dtype == LIKE and template is None:
        raise UsageError(f"{option('dtype', LIKE)} needs {option('like')}")
    pairs, problems, remarks = _pairs(tree, template)
    notes = Notes()
    if dtype is not None:
        try:
            changed = _cast(tree, pairs, dtype)
        except MappingError as error:
            raise error.at(hint="load these arrays as they are, and cast them there") from error
        tree, notes = changed.tree, changed.notes
    asking = _Asking(tree, where)
    leaves: list[Leaf] = []
    for path, wanted in pairs:
        leaf = asking.leaf(path, wanted)
        problems += asking.problems(leaf, wanted)
        leaves.append(leaf)
    if problems:
        raise CoverageError(
            f"the checkpoint and what was asked for do not fit:{listing(problems)}",
            place=place or None,
            hint=_hint(problems),
        )
    filled = template.filled if template is not None else _whole(tree, [leaf.path for leaf in leaves])
    said = Notes(remarks=(*remarks, *asking.remarks(leaves)))
    return Request(tuple(leaves), filled, notes + said)


def _pairs(tree: Tree, template: Template | None) -> tuple[list[tuple[Path, Wanted]], list[str], list[str]]:
    """Paths and what is wanted of each; names that are not there; remarks."""
    if template is None:
        return [(path, Wanted(path, None, None)) for path in tree.arrays], [], []
    known = view_of(tree).roles
    found = match(
        [each.path for each in template.leaves], tree.arrays, lambda path: known.of(path) == "parameter"
    )
    pairs = [(found.found[each.path], each) for each in template.leaves if each.path in found.found]
    remarks = []
    if found.found and not all(map(is_wrapper, found.below)):
        remarks.append(f"what is asked for is found below {spelled(found.below)} of the checkpoint")
    if found.unread:
        names = some(map(spelled, found.unread))
        remarks.append(f"{array_count(found.unread)} of the checkpoint are not asked for: {names}")
    problems = list(_missing(found.missing, tree))
    if found.others:
        places = " and ".join(map(spelled, found.others))
        name = spelled(template.leaves[0].path)
        problems.append(
            f"{name}: there are {places}; give {option('like')} their keys, too, or {option('keep')}"
        )
    return pairs, problems, remarks


def _missing(paths: Sequence[Path], tree: Tree) -> Iterator[str]:
    known = [spelled(path) for path in tree.arrays]
    for number, path in enumerate(paths):
        near = near_names(spelled(path), known, 1) if number < _MOST_NEAR else []
        yield f"{spelled(path)}: not there" + (f"; did you mean {near[0]}?" if near else "")


def _hint(problems: Sequence[str]) -> str | None:
    if any("wanted " in each and " is " in each for each in problems):
        return f"{option('dtype', LIKE)} casts, if only dtypes differ"
    return None


def _cast(tree: Tree, pairs: Sequence[tuple[Path, Wanted]], dtype: DType | str) -> Transformed:
    """The tree with its numbers in the dtypes that are wanted."""
    if dtype != LIKE:
        return CastMap({}, dtype)(tree)
    both = [(path, tree.arrays[path], each.dtype) for path, each in pairs if each.dtype]
    differing = {path: (array, wanted) for path, array, wanted in both if array.dtype != wanted}
    # Whole numbers and what may be quantised are for the transform to judge.
    if all(_is_plain(array.dtype) and wanted.is_float for array, wanted in differing.values()):
        made = {path: cast(array, wanted) for path, (array, wanted) in differing.items()}
        kinds = {(array.dtype, wanted): array for array, wanted in differing.values()}
        notes = [note for (_, wanted), array in kinds.items() for note in cast_notes({"": array}, wanted)]
        return Transformed(Tree({**tree.leaves, **made}, tree.metadata), Notes(tuple(notes)))
    return CastMap({spelled(path): wanted for path, (_, wanted) in differing.items()})(tree)


def _is_plain(dtype: DType) -> bool:
    return dtype.is_float and dtype.bits > 8


class _Asking:
    """Resolves where arrays go, and gathers what cannot be."""

    def __init__(self, tree: Tree, where: Where) -> None:
        self._tree = tree
        self._where = where
        self._names = axis_names(tree) if where.rules is not None else {}
        self._default: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(_default_device())
        self._mesh = MeshShape(dict(where.mesh.shape)) if where.mesh is not None else None
        if where.rules is not None:
            if self._mesh is None:
                raise UsageError("rules are for a mesh", hint=f"also give {option('mesh')}")
            where.rules.check(self._mesh)

    def leaf(self, path: Path, wanted: Wanted) -> Leaf:
        """What becomes of an array."""
        array = self._tree.arrays[path]
        metadata = self._tree.metadata
        is_data = wanted.key_impl is None and wanted.dtype is not None
        was_number = path in metadata.scalars and not is_data
        number = wanted.number or (_number_type(array.dtype) if was_number else None)
        key_impl = wanted.key_impl or (None if is_data else metadata.key_impls.get(path))
        target = Target(array.shape, array.dtype, self._sharding(path, wanted))
        return Leaf(path, array, target, key_impl, number, wanted)

    def _sharding(self, path: Path, wanted: Wanted) -> jax.sharding.Sharding:
        found = self._said(path, wanted) or self._default
        kind = self._where.memory_kind
        try:
            return found if kind is None else found.with_memory_kind(kind)
        except ValueError as error:
            raise UsageError(
                "there is no such memory", got=option("memory_kind", kind), wanted=error
            ) from error

    def _said(self, path: Path, wanted: Wanted) -> jax.sharding.Sharding | None:
        where = self._where
        if isinstance(where.shardings, jax.sharding.Sharding):
            return where.shardings
        if where.shardings is not None:
            return where.shardings.get(wanted.path)
        if where.rules is not None and where.mesh is not None and self._mesh is not None:
            spec = where.rules.spec(wanted.path, self._axes(path, wanted), self._mesh)
            return self._named(spec)
        if wanted.sharding is None and wanted.axes and self._mesh is not None:
            return self._named(own_axes(self._mesh).spec(wanted.path, wanted.axes, self._mesh))
        if is_abstract(wanted.sharding):
            return jax.sharding.NamedSharding(self._devices(wanted), wanted.sharding.spec)
        found: jax.sharding.Sharding | None = wanted.sharding
        return found

    def _named(self, spec: Spec) -> jax.sharding.Sharding:
        assert self._where.mesh is not None
        entries = [entry[0] if len(entry) == 1 else entry or None for entry in spec]
        made: Any = jax.sharding.PartitionSpec
        return jax.sharding.NamedSharding(self._where.mesh, made(*entries))

    def _devices(self, wanted: Wanted) -> jax.sharding.Mesh:
        """The mesh with devices for a sharding over one without."""
        mesh = self._where.mesh if self._where.mesh is not None else jax.sharding.get_mesh()
        if not set(wanted.sharding.mesh.axis_names) <= set(mesh.axis_names):
            raise UsageError(
                "a sharding is over a mesh without devices",
                place=wanted.name,
                got=wanted.sharding,
                hint=f"also give {option('mesh')}, or load within `jax.set_mesh`",
            )
        return mesh

    def _axes(self, path: Path, wanted: Wanted) -> AxisNames:
        """What axes are called: by the template, and by the checkpoint."""
        own, known = wanted.axes, self._names.get(path, ())
        if len(own) != len(known):
            return own or known
        return tuple((*first, *second) for first, second in zip(own, known, strict=True))

    def problems(self, leaf: Leaf, wanted: Wanted) -> Iterator[str]:
        """Why an array cannot be loaded as wanted."""
        array, name = leaf.array, leaf.name
        config: Any = jax.config
        if wanted.shape is not None and wanted.shape != array.shape:
            yield f"{name}: has the shape {list(array.shape)}, wanted {list(wanted.shape)}"
            return
        if wanted.dtype is not None and wanted.dtype != array.dtype:
            yield f"{name}: is {array.dtype}, wanted {wanted.dtype}"
        stored = self._tree.metadata.key_impls.get(leaf.path)
        if stored and wanted.key_impl and stored != wanted.key_impl:
            yield f"{name}: is a key of {stored}, wanted one of {wanted.key_impl}"
        if leaf.number is not None:
            if array.size == 1 and array.dtype.kind not in _KINDS[leaf.number]:
                yield f"{name}: is {array.dtype}, wanted a {leaf.number.__name__}"
            elif array.size != 1:
                yield f"{name}: is {type_text(array.dtype, array.shape)}, wanted a number"
            return
        if array.dtype.number_bytes == 8 and not config.jax_enable_x64:
            yield f"{name}: {array.dtype} needs jax_enable_x64; without it JAX would keep half of its bits"
        elif not _holds(array.dtype):
            yield f"{name}: JAX {jax.__version__} has no {array.dtype}"
        if self._where.shardings is not None and self._said(leaf.path, wanted) is None:
            yield f"{name}: `shardings` has none for it"
        yield from _uneven(leaf)

    def remarks(self, leaves: Sequence[Leaf]) -> Iterator[str]:
        """What the user should know of rules that are about few arrays."""
        rules = self._where.rules
        if rules is None:
            return
        others = [
            leaf.name
            for leaf in leaves
            if leaf.array.ndim > 1 and not rules.applies(leaf.wanted.path, self._axes(leaf.path, leaf.wanted))
        ]
        if others:
            yield f"no rule is about {array_count(others)}, of which every device has all: {some(others)}"


def is_abstract(sharding: Any) -> bool:
    """Whether a sharding is over a mesh without devices, as that of an array that was only traced."""
    return isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)


def _uneven(leaf: Leaf) -> Iterator[str]:
    target = leaf.target
    try:
        if isinstance(target.sharding, jax.sharding.NamedSharding):
            spec = tuple(_entry(each) for each in target.sharding.spec)
            shard_shape(target.shape, spec, MeshShape(dict(target.sharding.mesh.shape)))
        _ = target.part
    except CheckpointError as error:
        yield f"{leaf.name}: {error.message}: {error.got}; wanted {error.wanted}"
    except ValueError as error:
        yield f"{leaf.name}: {error}"


def _entry(entry: Any) -> tuple[str, ...]:
    if entry is None or isinstance(entry, str):
        return () if entry is None else (entry,)
    return tuple(entry)


def _default_device() -> jax.Device:
    config: Any = jax.config
    chosen = config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]


@cache
def _holds(dtype: DType) -> bool:
    """Whether JAX has arrays of a dtype."""
    try:
        jax.device_put(np.zeros((0,), dtype.numpy), jax.local_devices()[0])
    except Exception:  # what it raises differs by version and dtype
        return False
    return True


def _number_type(dtype: DType) -> type:
    return {"bool": bool, "float": float, "complex": complex}.get(dtype.kind, int)


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
        return [_filled(value, (*path, place), values) for place, value in enumerate(node)]
    return node
