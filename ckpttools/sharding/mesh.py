"""Device meshes as axis names and lengths, and partition specs that shard arrays over them.

8                     one axis, called 0
4x2                   two axes, called 0 and 1
data=4,fsdp=2         two axes with names
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isqrt, prod
from typing import TYPE_CHECKING, Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ShapeError, UsageError, did_you_mean
from ckpttools.core.region import Shape
from ckpttools.formats.zarr.chunking import LARGEST, SMALLEST

if TYPE_CHECKING:
    import jax

_EXPECTED_MESH = "such as 8, 4x2 or data=4,fsdp=2"
_LENGTH = re.compile(r"\s*[1-9][0-9]{0,17}\s*")
_MAX_DEVICES = 1 << 20


@dataclass(frozen=True, slots=True)
class MeshShape:
    """A grid of devices.

    Attributes:
        axes: Number of devices along each axis, by axis name.
    """

    axes: Mapping[str, int]

    @property
    def size(self) -> int:
        """Number of devices."""
        return prod(self.axes.values())

    @property
    def is_unnamed(self) -> bool:
        """Whether the axes are named after their indices."""
        return list(self.axes) == [str(number) for number in range(len(self.axes))]

    def __str__(self) -> str:
        if self.is_unnamed:
            return "x".join(map(str, self.axes.values()))
        return ",".join(f"{name}={length}" for name, length in self.axes.items())


def parse_mesh(text: str) -> MeshShape:
    """Parse the text of a mesh, such as "8", "4x2" or "data=4,fsdp=2".

    Raises:
        UsageError: The text is not a mesh.
    """
    words = text.split(",") if "=" in text else text.lower().split("x")
    pairs = [word.partition("=") for word in words]
    named = {name.strip(): length for name, _, length in pairs} if "=" in text else {}
    lengths = list(named.values()) if named else words
    if named and len(lengths) != len(words):
        raise UsageError(
            f"{text!r} is not a mesh", got="an axis that is named twice", expected=_EXPECTED_MESH
        )
    if not all(_LENGTH.fullmatch(length) for length in lengths):
        raise UsageError(f"{text!r} is not a mesh", expected=_EXPECTED_MESH)
    names = list(named) if named else [str(number) for number in range(len(lengths))]
    mesh = MeshShape(dict(zip(names, map(int, lengths), strict=True)))
    if "" in mesh.axes or mesh.size > _MAX_DEVICES:
        raise UsageError(
            f"{text!r} is not a mesh", expected=f"{_EXPECTED_MESH}; at most {_MAX_DEVICES:,} devices"
        )
    return mesh


def mesh_chunk(
    shape: Shape, shard: Shape, itemsize: int, stacked: Collection[int], limit: int | None = None
) -> Shape:
    """Return the chunk shape of an array for a mesh.

    Args:
        shape: Shape of the array; no axis is empty.
        shard: Shape of each device's shard, which divides `shape`.
        itemsize: Bytes per element.
        stacked: Axes of layers and experts, which are divided first.
        limit: Maximum bytes of a chunk, in full elements; None for `LARGEST`.

    Returns:
        The shard or an even division of it; the full shape for a small array.
    """
    limit = LARGEST if limit is None else limit
    if prod(shape) * itemsize <= min(SMALLEST, limit):
        return shape
    chunk = list(shard)
    # Divide outer axes first, so that the rest of a row is read at once.
    order = [*sorted(stacked), *(axis for axis in range(len(shape)) if axis not in stacked)]
    for axis in order:
        while chunk[axis] > 1 and prod(chunk) * itemsize > limit:
            chunk[axis] //= _smallest_factor(chunk[axis])
    return tuple(chunk)


def _smallest_factor(number: int) -> int:
    """Return the smallest prime factor of a number greater than 1."""
    return next((item for item in range(2, isqrt(number) + 1) if number % item == 0), number)


Spec = tuple[tuple[str, ...], ...]
"""A partition spec: for each axis of an array, the mesh axes over which it is sharded.

Axes of the array beyond the last entry are not sharded, as in `jax.sharding.PartitionSpec`.
"""

_EXPECTED_SPEC = "such as P('fsdp', None) or P(('data', 'fsdp'))"


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
        raise UsageError(f"{text!r} is not a partition spec", expected=_EXPECTED_SPEC)
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
            raise UsageError(f"{text!r} is not a partition spec", expected=_EXPECTED_SPEC)


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
        "not an entry of a partition spec", location=location, got=repr(entry), expected=_EXPECTED_SPEC
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
        raise UsageError("a mesh axis can shard only one axis of an array", got=location)
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
