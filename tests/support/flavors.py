"""A tree with other parameters: the inverse of what `ckpttools.maxtext.view` takes off."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools import LazyArray, Tree
from ckpttools.array.tree import Leaf, Path
from ckpttools.maxtext.view import Flavor, view_of


def with_parameters(tree: Tree, built: Mapping[Path, LazyArray], flavor: Flavor | None = None) -> Tree:
    """`tree` with `built` in place of its parameters; all other leaves stay.

    With the tree's own parameters and flavor this gives back the tree.

    Args:
        tree: where the rest is taken from.
        built: parameters under their paths without wrapping.
        flavor: how to wrap them; None for as in `tree`.
    """
    view = view_of(tree)
    own, known, locations = view.flavor, view.parameters, view.homes
    wrap = own if flavor is None else flavor
    same = {path for path, array in built.items() if known.get(path) is array and wrap == own}
    new: dict[Path, Leaf] = {
        locations[path] if path in same else wrap.wrapped(path): tree[locations[path]]
        if path in same
        else array
        for path, array in built.items()
    }
    gone = set(locations.values())
    order = {path: location for location, path in enumerate(tree)}
    first = min((order[path] for path in gone), default=len(tree))
    rest = {path: leaf for path, leaf in tree.items() if path not in gone}
    before = {path: leaf for path, leaf in rest.items() if order[path] < first}
    return Tree(before | new | rest, tree.metadata)
