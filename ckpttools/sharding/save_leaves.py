"""Convert a pytree of arrays to a tree of lazy arrays, with the paths and metadata of Orbax."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import InMemoryArray, distinct_arrays, rebuild_arrays
from ckpttools.array.tree import Empty, Leaf, Metadata, Path, Text, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import UnknownNameError, UsageError
from ckpttools.core.region import Region
from ckpttools.sharding.processes import is_spread
from ckpttools.sharding.save_shards import (
    Abstract,
    Shard,
    ShardHolder,
    content_version,
    refuse_deleted,
    shards_of,
)
from ckpttools.stores.location import Location


def tree_from_pytree(pytree: Any, custom: Mapping[str, Any] | None = None) -> Tree:
    """Convert a pytree to a tree without reading any element.

    Args:
        pytree: Dictionaries, lists, named tuples, Flax states and modules, or any other JAX pytree, of JAX
            and numpy arrays, lazy arrays, numbers, strings and `jax.ShapeDtypeStruct`s.
        custom: User metadata.

    Raises:
        UsageError: A leaf is none of these, or there are no arrays.
        UnknownNameError: No format supports an array's dtype.
    """
    _refuse_path(pytree)
    result = _LeafCollector()
    for path, leaf in _leaves(pytree):
        result.add(path, leaf)
    if not any(isinstance(leaf, LazyArray) for leaf in result.leaves.values()):
        raise UsageError("the tree has no array to save", got=type(pytree).__name__)
    metadata = Metadata(custom=custom or {}, scalars=frozenset(result.scalars), key_impls=result.key_impls)
    return Tree(result.leaves, metadata)


def _refuse_path(pytree: Any) -> None:
    if isinstance(pytree, str | Location) or hasattr(pytree, "__fspath__"):
        raise UsageError(
            "a path is not a tree of arrays",
            got=pytree,
            expected="an opened tree, or arrays in memory",
            hint="ckpttools.save(ckpttools.open(path), …), or ckpttools.convert(path, …)",
        )


def holders(tree: Tree) -> Iterator[ShardHolder | Abstract]:
    """Yield the holders of the arrays in a tree, without duplicates."""
    seen: set[int] = set()
    for array in distinct_arrays(tree.arrays.values()):
        if isinstance(array, InMemoryArray) and id(array.holder) not in seen:
            seen.add(id(array.holder))
            assert isinstance(array.holder, ShardHolder | Abstract)
            yield array.holder


def copy_holders(tree: Tree) -> Tree:
    """Return the tree with new holders of the same elements, so that the user's holders stay unchanged."""
    if not any(holders(tree)):
        return tree
    result: dict[int, InMemoryArray] = {}

    def renew(array: LazyArray) -> LazyArray:
        if not isinstance(array, InMemoryArray) or not isinstance(array.holder, ShardHolder):
            return array
        return result.setdefault(id(array.holder), replace(array, holder=array.holder.clone()))

    return replace(tree, leaves={**tree.leaves, **rebuild_arrays(tree.arrays, renew)})


def has_remote_parts(tree: Tree) -> bool:
    """Return whether other processes have elements that process 0 lacks."""
    return any(isinstance(holder, ShardHolder) and holder.has_remote_parts for holder in holders(tree))


def is_shared(tree: Tree | Any) -> bool:
    """Return whether several processes have parts of the arrays of a tree or pytree."""
    if isinstance(tree, Tree):
        return any(isinstance(holder, ShardHolder) and holder.is_spread for holder in holders(tree))
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return False
    leaves = [leaf for _, leaf in _leaves(tree)]
    arrays = (leaf for leaf in leaves if isinstance(leaf, jax.Array))
    lazy: dict[Path, Leaf] = {
        (number,): leaf for number, leaf in enumerate(leaves) if isinstance(leaf, LazyArray)
    }
    return any(is_spread(array.sharding) for array in arrays) or is_shared(Tree(lazy))


@dataclass
class _LeafCollector:
    """The leaves collected so far. An array that occurs several times is held once."""

    leaves: dict[Path, Leaf] = field(default_factory=dict)
    scalars: list[Path] = field(default_factory=list)
    key_impls: dict[Path, str] = field(default_factory=dict)
    _known: dict[int, LazyArray] = field(default_factory=dict)

    def add(self, path: Path, leaf: Any) -> None:
        import numpy as np

        if path in self.leaves:
            raise UsageError(
                "two leaves have the same path when keys are converted to text",
                location=keystr(path),
                hint="rename one of the keys",
            )
        match leaf:
            case LazyArray():
                self.leaves[path] = leaf
            case str():
                self.leaves[path] = Text(leaf)
            case bool() | int() | float() | complex() | np.number():
                self.scalars.append(path)
                self.leaves[path] = self._array(path, leaf)
            case _ if (kind := _empty_kind(leaf)) is not None:
                self.leaves[path] = Empty(kind)
            case _:
                if _is_random_key(leaf):
                    self.key_impls[path] = _impl(leaf)
                self.leaves[path] = self._array(path, leaf)

    def _array(self, path: Path, leaf: Any) -> LazyArray:
        if id(leaf) not in self._known:
            self._known[id(leaf)] = _local_array(keystr(path), leaf)
        return self._known[id(leaf)]


def _leaves(pytree: Any) -> Iterator[tuple[Path, Any]]:
    """Yield leaves with their paths. Empty nodes and None are leaves, as in Orbax."""
    from jax import tree_util

    result, _ = tree_util.tree_flatten_with_path(_replace_modules(pytree), is_leaf=_is_empty)
    for keys, leaf in result:
        yield tuple(map(_key, keys)), leaf


def _replace_modules(pytree: Any) -> Any:
    """Replace Flax modules, which are graphs that contain more than arrays, by their states."""
    from jax import tree_util

    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return pytree

    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Module | nnx.Rngs | nnx.RngStream)

    def with_state(node: Any) -> Any:
        return nnx.state(node) if is_module(node) else node

    return tree_util.tree_map(with_state, pytree, is_leaf=is_module)


def _is_empty(node: Any) -> bool:
    from jax import tree_util

    if isinstance(node, LazyArray):
        return True
    if tree_util.all_leaves([node]):
        return False
    children, _ = tree_util.tree_flatten(node, is_leaf=lambda item: item is not node)
    return not children


def _empty_kind(leaf: Any) -> str | None:
    """Return Orbax's name for a node without children; None for a leaf with a value."""
    if leaf is None or (isinstance(leaf, tuple) and hasattr(leaf, "_fields")):
        return "None"
    if isinstance(leaf, list):
        return "List"
    if isinstance(leaf, tuple):
        return "Tuple"
    if isinstance(leaf, Mapping):
        return "Dict"
    return None if hasattr(leaf, "dtype") or not _is_empty(leaf) else "None"


def _key(key: Any) -> str | int:
    """Return an index as an integer, and any other key as text."""
    from jax import tree_util

    match key:
        case tree_util.SequenceKey(idx=location):
            return int(location)
        case tree_util.FlattenedIndexKey(key=location):
            return int(location)
        case tree_util.GetAttrKey(name=name):
            return str(name)
        case _:
            return str(getattr(key, "key", key))


def _is_random_key(leaf: Any) -> bool:
    import jax

    return hasattr(leaf, "dtype") and bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _impl(leaf: Any) -> str:
    """Return the implementation name of a typed PRNG key."""
    import jax

    if isinstance(leaf, jax.Array):
        return str(jax.random.key_impl(leaf))
    return str(leaf.dtype._impl.name)


def _local_array(name: str, leaf: Any) -> LazyArray:
    """Return the lazy array of a leaf that is an array or an abstract array."""
    import jax
    import numpy as np

    if isinstance(leaf, jax.Array):
        refuse_deleted(name, leaf)
    if _is_random_key(leaf):
        return _local_key(name, leaf)
    if isinstance(leaf, jax.Array):
        dtype = _dtype(name, leaf.dtype)
        return InMemoryArray(tuple(leaf.shape), dtype, shards_of(name, leaf, dtype))
    if isinstance(leaf, np.ma.MaskedArray):
        raise UsageError(
            "no format supports masked arrays",
            location=name or None,
            hint="fill it: array.filled(), and save array.mask separately",
        )
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        array = np.asarray(leaf)
        dtype = _dtype(name, array.dtype)
        shard = Shard(Region.whole(array.shape), array)
        version = content_version(array)
        return InMemoryArray(array.shape, dtype, ShardHolder(name, dtype, [shard], version, elements=array))
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not hasattr(leaf, "__array__"):
        return InMemoryArray(tuple(leaf.shape), _dtype(name, np.dtype(leaf.dtype)), Abstract(name))
    raise UsageError(
        "a leaf of the tree is not an array",
        location=name or None,
        got=type(leaf).__name__,
        expected="arrays of JAX or numpy, numbers, strings, None",
        hint="leave it out, or make it an array: numpy.asarray(leaf)",
    )


def _local_key(name: str, leaf: Any) -> LazyArray:
    """Return the data of typed PRNG keys, on the keys' devices."""
    import jax

    if isinstance(leaf, jax.Array):
        data = jax.random.key_data(leaf)
        dtype = _dtype(name, data.dtype)
        return InMemoryArray(tuple(data.shape), dtype, shards_of(name, data, dtype, leaf))
    shape = jax.eval_shape(jax.random.key_data, leaf)
    return InMemoryArray(tuple(shape.shape), _dtype(name, shape.dtype), Abstract(name))


def _dtype(name: str, dtype: Any) -> DType:
    result = DTYPES.get(str(getattr(dtype, "name", dtype)))
    if result is None:
        raise UnknownNameError(
            "no format supports arrays of this dtype",
            location=name or None,
            got=dtype,
            expected=", ".join(DTYPES),
            hint="leave it out, or cast it",
        )
    return result
