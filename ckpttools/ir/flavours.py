"""How frameworks nest the same parameters, and the parameters without it.

    linen     params/params/decoder/layers/mlp/wi_0/kernel      also below a single `params`
    nnx       decoder/layers/mlp/wi_0/kernel/value              also below `model`
    nnx-rl    base/decoder/layers/mlp/wi_0/kernel/value         with or without `value`; others beside `base`

A flavour is a prefix and a suffix of paths, so taking it off and putting it on are inverse to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpttools.ir.array import LazyArray
from ckpttools.ir.tree import Leaf, Path, Tree

_OPTIMIZER_ROOTS = ("opt_state", "optimizer")
_OTHER_ROOTS = ("step", "nnx_aux", "rng", "rngs")
_RANDOM_STATE = "rngs"


@dataclass(frozen=True, slots=True)
class Flavour:
    """What stands before and behind every parameter's path.

    Attributes:
        name: "linen", "nnx", "nnx-rl", or None where parameters are not wrapped.
        prefix: keys before the model's own.
        suffix: keys behind them.
    """

    name: str | None = None
    prefix: Path = ()
    suffix: Path = ()

    def wrapped(self, path: Path) -> Path:
        """The path of a parameter in a tree of this flavour."""
        return (*self.prefix, *path, *self.suffix)

    def holds(self, path: Path) -> bool:
        """Whether a path of a tree is one that this flavour wraps."""
        start, end = len(self.prefix), len(path) - len(self.suffix)
        # A wrapped path has keys of its own; only where nothing is wrapped may there be none.
        return path[:start] == self.prefix and path[end:] == self.suffix and end >= start + bool(self.name)

    def unwrapped(self, path: Path) -> Path:
        """The inverse of `wrapped`, for paths that it `holds`."""
        return path[len(self.prefix) : len(path) - len(self.suffix)]


PLAIN = Flavour()
LINEN = Flavour("linen", ("params", "params"))
NNX = Flavour("nnx", (), ("value",))


def role(path: Path) -> str:
    """ "parameter", "optimizer" or "other", from the keys of a path."""
    root = path[0] if path else ""
    if root in _OPTIMIZER_ROOTS:
        return "optimizer"
    return "other" if root in _OTHER_ROOTS or _RANDOM_STATE in path else "parameter"


def flavour_of(tree: Tree) -> Flavour:
    """The flavour of a tree; `PLAIN` where parameters are not wrapped in any known way."""
    paths = [path for path in tree.arrays if role(path) == "parameter"]
    for linen in (LINEN, Flavour("linen", ("params",))):
        if any(map(linen.holds, paths)):
            return linen
    if based := [path for path in paths if path[:1] == ("base",) and len(path) > 1]:
        return Flavour("nnx-rl", ("base",), _suffix(based))
    model = Flavour("nnx", ("model",), NNX.suffix)
    return next((each for each in (model, NNX) if paths and all(map(each.holds, paths))), PLAIN)


def _suffix(paths: Iterable[Path]) -> Path:
    return NNX.suffix if all(path[1:] and path[-1:] == NNX.suffix for path in paths) else ()


def parameters(tree: Tree) -> dict[Path, LazyArray]:
    """The model's parameters alone, under their paths without the flavour's wrapping, in order.

    Optimizer state, step, `nnx_aux` and random states are left out, and so is what lies beside the model:
    other collections than `params`, other models than `base`.
    """
    flavour = flavour_of(tree)
    return {
        flavour.unwrapped(path): array
        for path, array in tree.arrays.items()
        if role(path) == "parameter" and flavour.holds(path)
    }


def with_parameters(tree: Tree, made: Mapping[Path, LazyArray], flavour: Flavour | None = None) -> Tree:
    """`tree` with `made` in place of its parameters; all other leaves stay.

    With `parameters(tree)` and the tree's own flavour this gives back the tree.

    Args:
        tree: where the rest is taken from.
        made: parameters under their paths without wrapping.
        flavour: how to wrap them; None for as in `tree`.
    """
    own = flavour_of(tree)
    wrap = own if flavour is None else flavour
    new: dict[Path, Leaf] = {wrap.wrapped(path): array for path, array in made.items()}
    replaced = [own.wrapped(path) for path in parameters(tree)]
    gone = set(replaced)
    places = {path: place for place, path in enumerate(tree)}
    first = places[replaced[0]] if replaced else len(tree)
    rest = {path: leaf for path, leaf in tree.items() if path not in gone}
    before = {path: leaf for path, leaf in rest.items() if places[path] < first}
    return Tree(before | new | rest, tree.metadata)
