"""Parse meshes and partition specs, which describe how devices share an array.

mesh   8                     one axis, named 0
       4x2                   two axes, named 0 and 1
       data=4,fsdp=2         two axes with names
spec   axis0                 the array's first axis over the whole mesh; axis-1 is the last
       axis0=0,axis1=1       the first axis over the mesh axis 0, the second over 1
       layer                 the axis on which layers are stacked, over the whole mesh
       replicated            all of every array on every device
       P('fsdp', None)       as in JAX; names may stand without quotes, P(('data', 'fsdp')) joins axes
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.sharding.mesh import MeshShape, Spec, shard_counts, spec_text
from ckpttools.sharding.mesh import parse_spec as parse_call

_SPEC = "axis0, axis-1, layer, replicated, axis0=0,axis1=1 or P('fsdp', None)"


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """The mesh axes that partition each axis of an array.

    Attributes:
        text: The spec as the user wrote it.
        parts: Pairs of array axis and mesh axes. Negative array axes count from the end; None is the axis of
            layers.
        most_axes: Maximum number of axes; other arrays, which have fewer axes, are not partitioned.
    """

    text: str
    parts: tuple[tuple[int | None, tuple[str, ...]], ...]
    most_axes: int = 0

    @property
    def cuts(self) -> bool:
        """Whether the spec divides any axis."""
        return bool(self.parts)

    def of(self, path: str) -> PartitionSpec:
        """Return the spec of one array, which is the same for all arrays."""
        return self

    def entries(self, rank: int, layer_axis: int | None) -> Spec:
        """Return the spec in JAX's form, for an array of this rank."""
        result: list[tuple[str, ...]] = [()] * rank
        if rank >= self.most_axes:
            for axis, names in self.parts:
                location = layer_axis if axis is None else axis
                if location is not None and -rank <= location < rank:
                    result[location] += names
        return tuple(result)

    def pieces(self, rank: int, layer_axis: int | None, mesh: MeshShape) -> tuple[int, ...]:
        """Return the number of shards along each axis of an array."""
        return shard_counts(rank, self.entries(rank, layer_axis), mesh)


@dataclass(frozen=True, slots=True)
class PathSpecs:
    """A partition spec for each array, from rules.

    Attributes:
        text: The rules as the user wrote them.
        specs: Spec of each array by path.
    """

    text: str
    specs: Mapping[str, Spec]

    @property
    def cuts(self) -> bool:
        """Whether a spec divides any axis of any array."""
        return any(map(any, self.specs.values()))

    def of(self, path: str) -> PartitionSpec:
        """Return the spec of one array."""
        spec = self.specs.get(path, ())
        parts = tuple((axis, names) for axis, names in enumerate(spec) if names)
        return PartitionSpec(spec_text(spec), parts, len(spec))


Specs = PartitionSpec | PathSpecs


def parse_spec(text: str, mesh: MeshShape) -> PartitionSpec:
    """Parse a partition spec over the axes of a mesh.

    Raises:
        UsageError: The text is not a spec, names an axis twice, or names an axis that the mesh lacks.
    """
    stripped = text.strip()
    if stripped == "replicated":
        return PartitionSpec(text, ())
    if stripped.startswith(("P(", "PartitionSpec(")):
        parts = _parsed(stripped, text)
        spec = PartitionSpec(
            text, tuple((axis, names) for axis, names in enumerate(parts) if names), len(parts)
        )
    else:
        spec = PartitionSpec(text, tuple(_part(word, mesh, text) for word in stripped.split(",")))
    _check(spec, mesh)
    return spec


def _part(word: str, mesh: MeshShape, text: str) -> tuple[int | None, tuple[str, ...]]:
    left, equals, right = (item.strip() for item in word.partition("="))
    match = re.fullmatch(r"axis(-?[0-9]{1,2})", left)
    if match is None and left != "layer":
        raise UsageError(f"{text!r} is not a partition spec", got=left, expected=_SPEC)
    return int(match[1]) if match else None, tuple(right.split("+")) if equals else tuple(mesh.axes)


def _parsed(call: str, text: str) -> Sequence[tuple[str, ...]]:
    try:
        return parse_call(call)
    except UsageError as error:
        if error.raw.expected is None:
            raise
        raise UsageError(f"{text!r} is not a partition spec", expected=_SPEC) from None


def _check(spec: PartitionSpec, mesh: MeshShape) -> None:
    used: Sequence[str] = [name for _, names in spec.parts for name in names]
    unknown = [name for name in used if name not in mesh.axes]
    if unknown:
        axes = ", ".join(mesh.axes)
        raise UsageError(f"the mesh has no axis {unknown[0]!r}", got=spec.text, expected=f"one of {axes}")
    if len(set(used)) != len(used):
        raise UsageError("a mesh axis can shard only one axis of an array", got=spec.text)
