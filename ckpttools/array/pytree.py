"""Trees as JAX pytrees, for `jax.tree.map` and the like; only where jax is loaded anyway."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpttools.array.tree import Tree


def register_where_jax_is_loaded(kind: type[Tree]) -> None:
    """Makes trees pytrees of lazy arrays, and of strings where there are any; costs nothing where jax is not
    loaded."""
    if "jax" in sys.modules and kind not in _registered:
        with _lock:
            if kind not in _registered:
                _register(kind)
                _registered.add(kind)


_lock = threading.Lock()
_registered: set[type] = set()


def _register(kind: type[Tree]) -> None:
    from jax import tree_util

    def flatten_with_keys(tree: Tree) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        nested = tree.nested()
        if isinstance(nested, dict):
            return [(tree_util.DictKey(key), item) for key, item in nested.items()], tuple(nested)
        return [(tree_util.SequenceKey(0), nested)], ()

    def unflatten(keys: tuple[Any, ...], children: Any) -> Any:
        """What was made of the arrays need not be lazy arrays, so it is a dictionary and no tree."""
        built = list(children)
        return dict(zip(keys, built, strict=True)) if keys or not built else built[0]

    tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten)
