"""How frameworks nest the same parameters, and the parameters without it.

    linen     params/params/decoder/layers/mlp/wi_0/kernel      also below a single `params`
    nnx       decoder/layers/mlp/wi_0/kernel/value              also below `model`
    nnx-rl    base/decoder/layers/mlp/wi_0/kernel/value         with or without `value`; others beside `base`

A flavour is a prefix and a suffix of paths, so taking it off and putting it on are inverse to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from types import MappingProxyType

from ckpttools.array.lazy import LazyArray
from ckpttools.array.relayout import relayout
from ckpttools.array.tree import Leaf, Path, Tree, spelled
from ckpttools.maxtext.layer_notes import layer_notes
from ckpttools.maxtext.layers import DECODER, below_decoder, scan_axis, stacked_keys, stacked_lengths
from ckpttools.roles.names import wraps
from ckpttools.roles.of_tree import roles

# Where MaxText keeps what its NNX model has beside parameters: random states, but also learned variables.
_AUXILIARY: Path = ("nnx_aux", "model")
# An nnx.Variable of a class of its own, such as MoEBiasVar, lies in a collection that is named as the class.
_COLLECTION = "Var"


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


def flavour_of(tree: Tree) -> Flavour:
    """The flavour of a tree; `PLAIN` where parameters are not wrapped in any known way."""
    return tree.once(_flavour_of)


def _flavour_of(tree: Tree) -> Flavour:
    known = roles(tree)
    return _flavour([path for path in tree.arrays if known.of(path) == "parameter"], known.mirrored)


def _flavour(paths: list[Path], mirrored: Path | None) -> Flavour:
    """The flavour of parameters; of several wrapped alike, that of those that an optimizer mirrors."""
    for linen in (LINEN, Flavour("linen", ("params",))):
        if any(map(linen.holds, paths)):
            return linen
    if based := [path for path in paths if path[:1] == ("base",) and len(path) > 1]:
        return Flavour("nnx-rl", ("base",), _suffix(based))
    model = Flavour("nnx", ("model",), NNX.suffix)
    found = next((each for each in (model, NNX) if paths and all(map(each.holds, paths))), PLAIN)
    key = mirrored[0] if mirrored else paths[0][0] if paths and paths[0] else ""
    apart = mirrored or (wraps(key) and all(path[:1] == (key,) for path in paths))
    return _within(paths, key, found) if apart and found != model else found


def _within(paths: list[Path], key: str | int, otherwise: Flavour) -> Flavour:
    """The flavour of what lies below the key of a state or at a place in a tuple, if it has one."""
    below = [path[1:] for path in paths if str(path[0]) == str(key) and len(path) > 1]
    inner = _flavour(below, None) if below else PLAIN
    whole = next(path[:1] for path in paths if str(path[0]) == str(key)) if below else ()
    return Flavour(inner.name, (*whole, *inner.prefix), inner.suffix) if inner.name else otherwise


def _suffix(paths: Iterable[Path]) -> Path:
    return NNX.suffix if all(path[1:] and path[-1:] == NNX.suffix for path in paths) else ()


def parameters(tree: Tree) -> Mapping[Path, LazyArray]:
    """The model's parameters alone, under their paths without the flavour's wrapping, in order.

    Optimizer state, step and random states are left out, and so is what lies beside the model: other
    collections than `params`, other models than `base`. Variables that the model learns in another way, which
    MaxText keeps in `nnx_aux` or in a collection of their class, are parameters under their paths in the
    model, and have their layers on the scan axis like the others; MaxText has them on axis 0.
    """
    return tree.once(_parameters)


def _parameters(tree: Tree) -> Mapping[Path, LazyArray]:
    homes, flavour = tree.once(_homes), flavour_of(tree)
    if all(map(is_, homes, homes.values())) and len(homes) == len(tree.arrays):
        return MappingProxyType(tree.arrays)
    arrays = {inner: tree.arrays[home] for inner, home in homes.items()}
    noted = layer_notes(tree).first_axis
    odd = frozenset(
        inner
        for inner, home in homes.items()
        if home != flavour.wrapped(inner) or (noted and spelled(home) in noted)
    )
    return MappingProxyType(arrays | dict(_on_the_scan_axis(arrays, odd)))


def on_first_axis(tree: Tree) -> list[Path]:
    """Paths of the parameters that have their layers on axis 0 where the others have them elsewhere."""
    arrays = parameters(tree)
    return [home for inner, home in homes(tree).items() if arrays[inner] is not tree[home]]


def homes(tree: Tree) -> Mapping[Path, Path]:
    """Where the arrays of `parameters` are in the tree: path in the model -> path in the tree."""
    return tree.once(_homes)


def _homes(tree: Tree) -> dict[Path, Path]:
    flavour, known = flavour_of(tree), roles(tree)
    mine = [path for path in tree.arrays if known.of(path) == "parameter"]
    found = {flavour.unwrapped(path): path for path in mine if flavour.holds(path)}
    for path in mine:
        inner = None if flavour.holds(path) and flavour.name else _beside(path, flavour)
        if inner is not None and found.get(inner, path) == path:
            found.pop(path, None)
            found[inner] = path
    return found


def _beside(path: Path, flavour: Flavour) -> Path | None:
    """The path in the model of a variable that is kept outside of the parameters; None for others."""
    core = path[:-1] if path[-1:] == NNX.suffix else path
    if path[:2] == _AUXILIARY:
        return core[2:] or None
    above = len(flavour.prefix) - 1
    collection = str(path[above]) if 0 <= above < len(path) - 1 else ""
    if flavour.prefix[above:] == ("params",) and path[:above] == flavour.prefix[:above] != ():
        return core[above + 1 :] if collection.endswith(_COLLECTION) else None
    return None


def _on_the_scan_axis(
    arrays: Mapping[Path, LazyArray], odd: frozenset[Path]
) -> Iterator[tuple[Path, LazyArray]]:
    """The arrays whose layers are on axis 0 though those of the others are not, with their layers there.

    Args:
        arrays: all of the model.
        odd: those of which this is known; of others the number of layers tells.
    """
    decoder = below_decoder({path: each for path, each in arrays.items() if path not in odd})
    axis = scan_axis(decoder)
    if not axis:
        return
    stacks = {
        key: (n, stacked_lengths(decoder, key, axis, n)) for key, n in stacked_keys(decoder).items() if n
    }
    for path, array in arrays.items():
        start = path.index(DECODER) + 1 if DECODER in path else len(path)
        n, lengths = next((stacks[k] for e in (2, 1) if (k := path[start : start + e]) in stacks), (0, ()))
        first = array.shape[:n] == lengths != ()
        if first and (path in odd or array.shape[axis : axis + n] != lengths):
            yield path, _moved(array, n, min(axis, len(array.shape) - n))


def _moved(array: LazyArray, count: int, axis: int) -> LazyArray:
    """An array with its first axes at `axis`."""
    rest = list(range(count, len(array.shape)))
    order = (*rest[:axis], *range(count), *rest[axis:])
    return relayout(array, [(length,) for length in array.shape], order, (1,) * len(order))


def with_parameters(tree: Tree, made: Mapping[Path, LazyArray], flavour: Flavour | None = None) -> Tree:
    """`tree` with `made` in place of its parameters; all other leaves stay.

    With `parameters(tree)` and the tree's own flavour this gives back the tree.

    Args:
        tree: where the rest is taken from.
        made: parameters under their paths without wrapping.
        flavour: how to wrap them; None for as in `tree`.
    """
    own, known, places = flavour_of(tree), parameters(tree), homes(tree)
    wrap = own if flavour is None else flavour
    same = {path for path, array in made.items() if known.get(path) is array and wrap == own}
    new: dict[Path, Leaf] = {
        places[path] if path in same else wrap.wrapped(path): tree[places[path]] if path in same else array
        for path, array in made.items()
    }
    gone = set(places.values())
    order = {path: place for place, path in enumerate(tree)}
    first = min((order[path] for path in gone), default=len(tree))
    rest = {path: leaf for path, leaf in tree.items() if path not in gone}
    before = {path: leaf for path, leaf in rest.items() if order[path] < first}
    return Tree(before | new | rest, tree.metadata)
