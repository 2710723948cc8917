"""The parameters of one model in a tree by the names that rows have, and what is learned beside it."""

from __future__ import annotations

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path as TreePath
from ckpttools.array.tree import Tree, by_name, keystr
from ckpttools.core.errors import UsageError, did_you_mean
from ckpttools.maxtext.view import view_of


def named_parameters(tree: Tree, prefix: str | None) -> dict[str, LazyArray]:
    """The model's arrays by dotted names, without optimizer state and wrapping.

    Raises:
        UsageError: nothing lies below the prefix.
        FormatError: several would have one name.
    """
    return by_name({inner: view_of(tree).parameters[path] for path, inner in _below(tree, prefix).items()})


def _below(tree: Tree, prefix: str | None) -> dict[TreePath, TreePath]:
    """The paths of the parameters below a prefix -> what follows that; errors as of `named_parameters`."""
    result = view_of(tree).parameters
    keys: TreePath = tuple(key for key in (prefix or "").replace(".", "/").split("/") if key)
    below = {path: path[len(keys) :] for path in result if path[: len(keys)] == keys}
    if prefix is not None and not below:
        tops = sorted({str(path[0]) for path in result})
        raise UsageError(
            f"nothing lies below {prefix!r}",
            location=tree.metadata.location,
            expected="one of " + ", ".join(tops[:20]),
            hint=did_you_mean(prefix, tops),
        )
    return below


def learned_elsewhere(tree: Tree, prefix: str | None) -> list[str]:
    """What is learned and lies elsewhere than the model: other collections, other models, adapters."""
    view, below = view_of(tree), _below(tree, prefix)
    taken = {home for inner, home in view.homes.items() if inner in below}
    return [keystr(path) for path in view.of_role("parameter") if path in view.arrays and path not in taken]
