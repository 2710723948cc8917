"""Meshes and partition specs as text: how a reader's devices share an array.

mesh   8                     one axis, called 0
       4x2                   two axes, called 0 and 1
       data=4,fsdp=2         two axes with names
spec   axis0                 the array's first axis over the whole mesh; axis-1 is the last
       axis0=0,axis1=1       the first axis over the mesh axis 0, the second over 1
       layer                 the axis on which layers are stacked, over the whole mesh
       replicated            all of every array on every device
       P('fsdp', None)       as in JAX; names may stand without quotes, P(('data', 'fsdp')) joins axes
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpttools.core.errors import UsageError

_MESH = "such as 8, 4x2 or data=4,fsdp=2"
_SPEC = "axis0, axis-1, layer, replicated, axis0=0,axis1=1 or P('fsdp', None)"
_MOST_DEVICES = 1 << 20


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices in a grid.

    Attributes:
        axes: name of each axis, and devices along it.
    """

    axes: Mapping[str, int]

    @property
    def size(self) -> int:
        return prod(self.axes.values())


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """Which mesh axes partition which axis of an array.

    Attributes:
        text: as the user wrote it.
        parts: (array axis, mesh axes); an array axis below zero counts from the end, None is that of layers.
        most_axes: arrays of fewer axes are not partitioned: a spec of this length cannot be theirs.
    """

    text: str
    parts: tuple[tuple[int | None, tuple[str, ...]], ...]
    most_axes: int = 0

    def pieces(self, rank: int, layer_axis: int | None, mesh: Mesh) -> tuple[int, ...]:
        """Into how many shards each axis of an array is divided."""
        counts = [1] * rank
        if rank < self.most_axes:
            return tuple(counts)
        for axis, names in self.parts:
            place = layer_axis if axis is None else axis
            if place is not None and -rank <= place < rank:
                counts[place] *= prod(mesh.axes[name] for name in names)
        return tuple(counts)


def parse_mesh(text: str) -> Mesh:
    """A mesh.

    Raises:
        UsageError: the text is not a mesh.
    """
    words = text.split(",") if "=" in text else text.lower().split("x")
    pairs = [word.partition("=") for word in words]
    named = {name.strip(): size for name, _, size in pairs} if "=" in text else {}
    sizes = list(named.values()) if named else words
    if named and len(sizes) != len(words):
        raise UsageError(f"{text!r} is no mesh", got="an axis that is named twice", wanted=_MESH)
    if not all(re.fullmatch(r"\s*[1-9][0-9]{0,17}\s*", size) for size in sizes):
        raise UsageError(f"{text!r} is no mesh", wanted=_MESH)
    names = list(named) if named else [str(number) for number in range(len(sizes))]
    mesh = Mesh(dict(zip(names, map(int, sizes), strict=True)))
    if "" in mesh.axes or mesh.size > _MOST_DEVICES:
        raise UsageError(f"{text!r} is no mesh", wanted=f"{_MESH}; at most {_MOST_DEVICES:,} devices")
    return mesh


def parse_spec(text: str, mesh: Mesh) -> PartitionSpec:
    """A partition spec over the axes of a mesh.

    Raises:
        UsageError: the text is not a spec, or names an axis twice or one that the mesh lacks.
    """
    stripped = text.strip()
    if stripped == "replicated":
        return PartitionSpec(text, ())
    if stripped.startswith(("P(", "PartitionSpec(")):
        parts = _partition_spec(stripped, text)
        spec = PartitionSpec(
            text, tuple((axis, names) for axis, names in enumerate(parts) if names), len(parts)
        )
    else:
        spec = PartitionSpec(text, tuple(_part(word, mesh, text) for word in stripped.split(",")))
    _check(spec, mesh)
    return spec


def _part(word: str, mesh: Mesh, text: str) -> tuple[int | None, tuple[str, ...]]:
    left, equals, right = (each.strip() for each in word.partition("="))
    match = re.fullmatch(r"axis(-?[0-9]{1,2})", left)
    if match is None and left != "layer":
        raise UsageError(f"{text!r} is no partition spec", got=left, wanted=_SPEC)
    return int(match[1]) if match else None, tuple(right.split("+")) if equals else tuple(mesh.axes)


def _partition_spec(call: str, text: str) -> list[tuple[str, ...]]:
    try:
        node = ast.parse(call, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        node = None
    if not isinstance(node, ast.Call) or node.keywords:
        raise UsageError(f"{text!r} is no partition spec", wanted=_SPEC)
    return [_mesh_axes(argument, text) for argument in node.args]


def _mesh_axes(node: ast.expr, text: str) -> tuple[str, ...]:
    match node:
        case ast.Constant(value=None):
            return ()
        case ast.Constant(value=str() | int() as name):
            return (str(name),)
        case ast.Name(id=name):
            return (name,)
        case ast.Tuple(elts=nodes) | ast.List(elts=nodes):
            return tuple(name for each in nodes for name in _mesh_axes(each, text))
        case _:
            raise UsageError(f"{text!r} is no partition spec", wanted=_SPEC)


def _check(spec: PartitionSpec, mesh: Mesh) -> None:
    used: Sequence[str] = [name for _, names in spec.parts for name in names]
    unknown = [name for name in used if name not in mesh.axes]
    if unknown:
        axes = ", ".join(mesh.axes)
        raise UsageError(f"the mesh has no axis {unknown[0]!r}", got=spec.text, wanted=f"one of {axes}")
    if len(set(used)) != len(used):
        raise UsageError("a mesh axis can cut only one axis of an array", got=spec.text)
