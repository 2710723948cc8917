"""What lies beside a model's weights where a trainer saved them: patterns that leave it out."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckpttools.array.tree import Tree, dotted
from ckpttools.core.text import matches_any
from ckpttools.maxtext.view import view_of
from ckpttools.transforms.strip_wrappers import patterns_of_others


def patterns_beside(tree: Tree, drop: Collection[str] = ()) -> list[str]:
    """As `patterns_of_others`, and state of a trainer's whose names lie among those of weights.

    Args:
        tree: of a checkpoint of PyTorch.
        drop: patterns of dotted names of arrays that are to be left out anyway.
    """
    result = patterns_of_others(tree, drop)
    view, known, numbers = view_of(tree), (*result, *drop), tree.metadata.scalars
    leaves = (*view.of_role("optimizer"), *view.of_role("other"))
    names = (dotted(path) for path in leaves if path not in numbers)
    state = [name for name in names if not matches_any(name, known)]
    if not state:
        return result
    own = {head for path in view.of_role("parameter") for head in _heads(dotted(path))}
    return list(dict.fromkeys((*result, *(_pattern(name, own) for name in state))))


def _heads(name: str) -> Iterator[str]:
    """`a`, `a.b` and so on, short of the whole name."""
    return (name[:at] for at, sign in enumerate(name) if sign == ".")


def _pattern(name: str, own: Collection[str]) -> str:
    """What names an array and all beside it that is not the model's own."""
    return next((f"{head}.*" for head in _heads(name) if head not in own), name)
