"""Partition specs: the mesh axes that shard each axis of an array, outermost first."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttools.core.errors import ShapeError, UsageError, did_you_mean
from ckpttools.core.region import Shape
from ckpttools.sharding.mesh import MeshShape

if TYPE_CHECKING:
    import jax

Spec = tuple[tuple[str, ...], ...]
"""A partition spec.

Axes of the array beyond the last entry are not sharded, as in `jax.sharding.PartitionSpec`.
"""

_EXPECTED = "such as P('fsdp', None) or P(('data', 'fsdp'))"


def parse_spec(text: str) -> Spec:
    """Parse text such as `P('fsdp', None)`. Names need no quotes.

    Raises:
        UsageError: The text is not a partition spec, or names a mesh axis twice.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        node = None
    is_call = isinstance(node, ast.Call) and not node.keywords and isinstance(node.func, ast.Name)
    if not isinstance(node, ast.Call) or not is_call or ast.unparse(node.func) not in ("P", "PartitionSpec"):
        raise UsageError(f"{text!r} is not a partition spec", expected=_EXPECTED)
    spec = tuple(_mesh_axes(argument, text) for argument in node.args)
    return check_spec(spec, text)


def _mesh_axes(node: ast.expr, text: str) -> tuple[str, ...]:
    match node:
        case ast.Constant(value=None):
            return ()
        case ast.Constant(value=str() | int() as name):
            return (str(name),)
        case ast.Name(id=name):
            return (name,)
        case ast.Tuple(elts=nodes) | ast.List(elts=nodes):
            return tuple(name for item in nodes for name in _mesh_axes(item, text))
        case _:
            raise UsageError(f"{text!r} is not a partition spec", expected=_EXPECTED)


def spec_from_entries(entries: Iterable[object], location: object) -> Spec:
    """Return the spec for a sequence whose entries are None, names, or sequences of names.

    Raises:
        UsageError: An entry is something else, or a mesh axis is named twice.
    """
    return check_spec(tuple(_parse_entry(entry, location) for entry in entries), location)


def _parse_entry(entry: object, location: object) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, Sequence) and all(isinstance(name, str) for name in entry):
        return tuple(entry)
    raise UsageError(
        "not an entry of a partition spec", location=location, got=repr(entry), expected=_EXPECTED
    )


def to_partition_spec(spec: Spec) -> jax.sharding.PartitionSpec:
    """Convert the spec to JAX's `PartitionSpec`; `spec_from_entries` is the reverse conversion."""
    import jax

    built: Any = jax.sharding.PartitionSpec
    result: jax.sharding.PartitionSpec = built(
        *(item[0] if len(item) == 1 else item or None for item in spec)
    )
    return result


def check_spec(spec: Spec, location: object) -> Spec:
    """Check a spec, and return it unchanged.

    Raises:
        UsageError: The spec names a mesh axis twice.
    """
    names = mesh_axes(spec)
    if len(set(names)) != len(names):
        raise UsageError("a mesh axis can cut only one axis of an array", got=location)
    return spec


def mesh_axes(spec: Spec) -> list[str]:
    """Return every mesh axis that the spec names, in order."""
    return [name for entry in spec for name in entry]


def require_axes(spec: Spec, mesh: MeshShape, location: object) -> None:
    """Raise UsageError if the mesh lacks an axis of the spec."""
    for name in mesh_axes(spec):
        if name not in mesh.axes:
            raise UsageError(
                f"the mesh has no axis {name!r}",
                location=location,
                got=spec_text(spec),
                expected="one of " + ", ".join(mesh.axes),
                hint=did_you_mean(name, mesh.axes),
            )


def shard_counts(rank: int, spec: Spec, mesh: MeshShape) -> Shape:
    """Return the number of shards along each axis of an array."""
    lengths = [prod(mesh.axes[name] for name in entry) for entry in spec]
    return (*lengths, *(1 for _ in range(rank - len(lengths))))


def shard_shape(shape: Shape, spec: Spec, mesh: MeshShape) -> Shape:
    """Return the shape of each device's shard of an array. All shards are equal, as JAX requires.

    Raises:
        ShapeError: The spec has more entries than the array has axes, or an axis is not divisible.
        UsageError: The mesh lacks an axis of the spec.
    """
    require_axes(spec, mesh, None)
    if len(spec) > len(shape):
        raise ShapeError(
            "a partition spec has more entries than the array has axes",
            got=spec_text(spec),
            expected=f"at most {len(shape)} for the shape {list(shape)}",
        )
    counts = shard_counts(len(shape), spec, mesh)
    for axis, (length, count) in enumerate(zip(shape, counts, strict=True)):
        if length % count:
            raise ShapeError(
                "an axis cannot be divided evenly over the mesh",
                got=f"axis {axis} of {list(shape)}, {spec_text(spec)} on {mesh}",
                expected=f"a multiple of {count}, not {length}",
            )
    return tuple(length // count for length, count in zip(shape, counts, strict=True))


def spec_text(spec: Spec) -> str:
    """Return the spec as text that `parse_spec` accepts."""
    entries = [repr(entry[0]) if len(entry) == 1 else repr(entry) if entry else "None" for entry in spec]
    return f"P({', '.join(entries)})"
