"""Templates: the caller's pytree, flattened into leaves with shapes and dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ckpttools.array.tree import Path, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType, parse_dtype
from ckpttools.core.errors import CheckpointError, UsageError
from ckpttools.core.region import Shape
from ckpttools.maxtext.axis_names import AxisNames

# NNX variables and Linen boxes have their array under this key, which checkpoints omit.
_VALUE = "value"
_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@dataclass(frozen=True, slots=True)
class ExpectedLeaf:
    """A leaf of the caller's tree.

    Attributes:
        path: Keys in the caller's tree, without the `value` of variables and boxes.
        shape, dtype: Shape and dtype of the array in the checkpoint, or of the data of PRNG keys; None if any
            is accepted.
        sharding: Sharding of the leaf; None if the tree has none.
        key_impl: Implementation of PRNG keys; None for other leaves.
        number: Python type of a number; None for other leaves.
        is_text: Whether the leaf is a string.
        axes: Names of the array's axes, if a variable or box has them.
    """

    path: Path
    shape: Shape | None
    dtype: DType | None
    sharding: Any = None
    key_impl: str | None = None
    number: type | None = None
    is_text: bool = False
    axes: AxisNames = ()

    @property
    def name(self) -> str:
        return keystr(self.path)


@dataclass(frozen=True)
class TreeTemplate:
    """A tree of expected arrays, flattened to a list.

    Attributes:
        leaves: The expected leaves, in the tree's order.
        fill: Builds the tree from the values of all leaves.
    """

    leaves: tuple[ExpectedLeaf, ...]
    fill: Callable[[Sequence[Any]], Any]


def flatten_template(like: Any) -> TreeTemplate:
    """Flatten a pytree into expected leaves.

    Args:
        like: A pytree of `jax.ShapeDtypeStruct`s, arrays, PRNG keys, numbers or strings; an `nnx.State`; or
            an `nnx.Module`, whose variables, except random states, are filled in place.

    Raises:
        UsageError: The pytree has no leaves, or a leaf is not an array.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(like, nnx.Module):
        state = nnx.state(like, nnx.Not(nnx.RngState))
        inner = flatten_template(state)

        def fill(values: Sequence[Any]) -> Any:
            nnx.update(like, inner.fill(values))
            return like

        return TreeTemplate(inner.leaves, fill)
    result, structure = jax.tree_util.tree_flatten_with_path(like)
    if not result:
        raise UsageError("the tree has no leaves", got=f"like={like!r}")
    names = _axis_names(like)
    leaves = tuple(_expected_leaf(path_from_keys(keys), leaf) for keys, leaf in result)
    leaves = tuple(replace(item, axes=names.get(item.path, ())) for item in leaves)
    return TreeTemplate(leaves, lambda values: jax.tree_util.tree_unflatten(structure, values))


def _axis_names(like: Any) -> dict[Path, AxisNames]:
    """Return the axis names that NNX variables and Linen boxes declare."""
    nnx, meta = sys.modules.get("flax.nnx"), sys.modules.get("flax.core.meta")
    kinds = (*([nnx.Variable] if nnx else []), *([meta.AxisMetadata] if meta else []))
    if not kinds:
        return {}
    result, _ = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda item: isinstance(item, kinds))
    declared = {
        path_from_keys(keys): _box_axis_names(item) for keys, item in result if isinstance(item, kinds)
    }
    return {path: tuple(map(_alternatives, names)) for path, names in declared.items() if names}


def _box_axis_names(box: Any) -> Sequence[Any]:
    if hasattr(box, "get_metadata"):
        box = box.get_metadata()
        return box.get("out_sharding") or box.get("sharding_names") or box.get("sharding") or ()
    return getattr(box, "names", None) or ()


def _alternatives(name: Any) -> tuple[str, ...]:
    return () if name is None else (name,) if isinstance(name, str) else tuple(name)


def path_from_keys(keys: Sequence[Any]) -> Path:
    """Convert JAX's keys to a path."""
    path = tuple(_key(key) for key in keys)
    boxed = keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and path[-1] == _VALUE
    return path[:-1] if boxed else path


def _key(key: Any) -> str | int:
    for attribute in ("key", "idx", "name"):
        value = getattr(key, attribute, None)
        if value is not None:
            return value if isinstance(value, int) else str(value)
    return str(key)


def _expected_leaf(path: Path, leaf: Any) -> ExpectedLeaf:
    if isinstance(leaf, jax.sharding.Sharding):
        return ExpectedLeaf(path, None, None, leaf)
    if isinstance(leaf, bool | int | float):
        return ExpectedLeaf(path, (), None, number=type(leaf))
    if isinstance(leaf, str):
        return ExpectedLeaf(path, None, None, is_text=True)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise UsageError(
            "a leaf is not an array",
            location=keystr(path),
            got=type(leaf).__name__,
            expected="a jax.ShapeDtypeStruct, an array, a PRNG key, a number, a string or a sharding",
            hint="put it on a mesh: jax.sharding.NamedSharding(mesh, spec); or give specs by name, as rules"
            if isinstance(leaf, jax.sharding.PartitionSpec)
            else None,
        )
    # A numpy array has no sharding.
    sharding = getattr(leaf, "sharding", None)
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return ExpectedLeaf(path, data.shape, parse_dtype(str(data.dtype)), sharding, _key_impl(leaf.dtype))
    return ExpectedLeaf(path, tuple(leaf.shape), _dtype(path, leaf.dtype), sharding)


def _dtype(path: Path, dtype: Any) -> DType:
    name = np.dtype(dtype).name
    try:
        return parse_dtype(name)
    except CheckpointError as error:
        raise error.at(keystr(path)) from error


def _key_impl(dtype: Any) -> str | None:
    """Return the implementation name of PRNG keys; None if it is not one of JAX's own."""
    for name in _KEY_IMPLS:
        if jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)).dtype == dtype:
            return name
    return None
