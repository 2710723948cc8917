"""The placement of each array on devices, resolved from the caller's shardings, rules or template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import jax

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.sharding.array_targets import ArrayTarget
from ckpttools.sharding.mesh import MeshShape
from ckpttools.sharding.rules import AppliedRules, NamedArray, Rules, mesh_axis_rules
from ckpttools.sharding.specs import Spec, to_partition_spec
from ckpttools.sharding.templates import ExpectedLeaf


@dataclass(frozen=True)
class DeviceOptions:
    """The caller's choice of devices: `shardings`, otherwise rules, otherwise the shardings of the template.

    Attributes:
        shardings: A sharding for all arrays, or one for each path of the caller's tree.
        rules: Sharding rules; they require `mesh`.
        mesh: The devices.
        memory_kind: Memory kind such as "pinned_host"; None for that of the shardings.
    """

    shardings: jax.sharding.Sharding | Mapping[Path, jax.sharding.Sharding] | None = None
    rules: Rules | None = None
    mesh: jax.sharding.Mesh | None = None
    memory_kind: str | None = None

    def lacks_sharding(self, expected: ExpectedLeaf) -> bool:
        """Return whether shardings are given by path and this leaf has none."""
        return isinstance(self.shardings, Mapping) and expected.path not in self.shardings


@dataclass(frozen=True, slots=True)
class Assignment:
    """An array to load.

    Attributes:
        path: Path in the checkpoint, after all transforms.
        array: The source.
        target: The destination.
        key_impl: The implementation of PRNG keys; None for other arrays.
        number: The Python type, for an array that becomes a Python number.
        expected: The caller's leaf.
    """

    path: Path
    array: LazyArray
    target: ArrayTarget
    key_impl: str | None = None
    number: type | None = None
    expected: ExpectedLeaf = field(default_factory=lambda: ExpectedLeaf((), None, None))

    @property
    def name(self) -> str:
        """The name in the caller's tree."""
        return self.expected.name


class Assigner:
    """Resolves the placement of each array of a tree.

    Raises:
        UsageError: Rules are given without a mesh, or name axes that the mesh lacks.
    """

    def __init__(self, tree: Tree, devices: DeviceOptions) -> None:
        self._tree = tree
        self._devices = devices
        self._default: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(_default_device())
        self._mesh = MeshShape(dict(devices.mesh.shape)) if devices.mesh is not None else None
        self._rules: AppliedRules | None = None
        if devices.rules is not None:
            if self._mesh is None:
                raise UsageError("rules need a mesh", hint=f"also give {option('mesh')}")
            self._rules = AppliedRules(devices.rules, tree, self._mesh)

    def assigned(self, path: Path, expected: ExpectedLeaf) -> Assignment:
        """Return the placement of an array."""
        array = self._tree.arrays[path]
        metadata = self._tree.metadata
        is_data = expected.key_impl is None and expected.dtype is not None
        was_number = path in metadata.scalars and not is_data
        number = expected.number or (_number_type(array.dtype) if was_number else None)
        key_impl = expected.key_impl or (None if is_data else metadata.key_impls.get(path))
        target = ArrayTarget(array.shape, array.dtype, self._sharding(path, expected))
        return Assignment(path, array, target, key_impl, number, expected)

    def remarks(self, arrays: Iterable[Assignment]) -> Iterator[str]:
        """Yield remarks on arrays that match no rule."""
        if self._rules is not None:
            yield from self._rules.remarks(
                {self._named_array(array.path, array.expected): array.array.ndim for array in arrays}
            )

    def unmatched_share(self, arrays: Sequence[Assignment]) -> float:
        """Return the fraction of all bytes in arrays that match no rule, as in `remarks`."""
        if self._rules is None:
            return 0.0
        ruled = [(self._named_array(item.path, item.expected), item.array) for item in arrays]
        uncut = sum(array.nbytes for item, array in ruled if self._rules.is_unmatched(item, array.ndim))
        return uncut / max(1, sum(item.array.nbytes for item in arrays))

    def _named_array(self, path: Path, expected: ExpectedLeaf) -> NamedArray:
        assert self._rules is not None
        return self._rules.named_array(path, expected.path, expected.axes)

    def _sharding(self, path: Path, expected: ExpectedLeaf) -> jax.sharding.Sharding:
        result = self._requested_sharding(path, expected) or self._default
        kind = self._devices.memory_kind
        try:
            return result if kind is None else result.with_memory_kind(kind)
        except ValueError as error:
            raise UsageError(
                "this memory kind does not exist", got=option("memory_kind", kind), expected=error
            ) from error

    def _requested_sharding(self, path: Path, expected: ExpectedLeaf) -> jax.sharding.Sharding | None:
        shardings = self._devices.shardings
        if isinstance(shardings, jax.sharding.Sharding):
            return shardings
        if shardings is not None:
            return shardings.get(expected.path)
        if self._rules is not None:
            return self._named_sharding(self._rules.spec(self._named_array(path, expected)))
        if expected.sharding is None and expected.axes and self._mesh is not None:
            return self._named_sharding(
                mesh_axis_rules(self._mesh).spec(expected.path, expected.axes, self._mesh)
            )
        if is_abstract(expected.sharding):
            return jax.sharding.NamedSharding(self._concrete_mesh(expected), expected.sharding.spec)
        result: jax.sharding.Sharding | None = expected.sharding
        return result

    def _named_sharding(self, spec: Spec) -> jax.sharding.Sharding:
        assert self._devices.mesh is not None
        return jax.sharding.NamedSharding(self._devices.mesh, to_partition_spec(spec))

    def _concrete_mesh(self, expected: ExpectedLeaf) -> jax.sharding.Mesh:
        """Return a mesh with devices for a sharding over an abstract mesh."""
        mesh = self._devices.mesh if self._devices.mesh is not None else jax.sharding.get_mesh()
        if not set(expected.sharding.mesh.axis_names) <= set(mesh.axis_names):
            raise UsageError(
                "a sharding is over a mesh without devices",
                location=expected.name,
                got=expected.sharding,
                hint=f"also give {option('mesh')}, or load within `jax.set_mesh`",
            )
        return mesh


def is_abstract(sharding: Any) -> bool:
    """Return whether a sharding is over a mesh without devices, like that of a traced array."""
    return isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)


def _default_device() -> jax.Device:
    config: Any = jax.config
    chosen = config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]


def _number_type(dtype: DType) -> type:
    return {"bool": bool, "float": float, "complex": complex}.get(dtype.kind, int)
