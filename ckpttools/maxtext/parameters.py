"""The parameters of a model, wherever in a tree they are: path in the model -> path in the tree.

Variables that the model learns in another way lie in `nnx_aux` or in a collection of their class. They are
parameters under their paths in the model, and have their layers on axis 0 whatever the scan axis.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.relayout import transposed
from ckpttools.array.tree import Path
from ckpttools.maxtext.flavours import NNX, Flavour
from ckpttools.maxtext.layers import below_decoder, key_of_layers, scan_axis, stacked_keys, stacked_lengths
from ckpttools.maxtext.layout import AUXILIARY, COLLECTION, PARAMS


def homes_of(parameters: Collection[Path], flavour: Flavour) -> dict[Path, Path]:
    """Where the arrays of a model are: path in the model -> path in the tree.

    Args:
        parameters: paths of all leaves of a tree with this role.
        flavour: of the tree.
    """
    if flavour.name is None:
        found = {path: path for path in parameters}
    else:
        found = {flavour.unwrapped(path): path for path in parameters if flavour.holds(path)}
    for path in parameters:
        inner = None if flavour.name and flavour.holds(path) else _beside(path, flavour)
        if inner is not None and found.get(inner, path) == path:
            found.pop(path, None)
            found[inner] = path
    return found


def _beside(path: Path, flavour: Flavour) -> Path | None:
    """The path in the model of a variable that is kept outside of the parameters; None for others."""
    core = path[:-1] if path[-1:] == NNX.suffix else path
    if path[:2] == AUXILIARY:
        return core[2:] or None
    above = len(flavour.prefix) - 1
    collection = str(path[above]) if 0 <= above < len(path) - 1 else ""
    if flavour.prefix[above:] == (PARAMS,) and path[:above] == flavour.prefix[:above] != ():
        return core[above + 1 :] if collection.endswith(COLLECTION) else None
    return None


def on_the_scan_axis(
    arrays: Mapping[Path, LazyArray], odd: Collection[Path], noted: int | None = None
) -> Iterator[tuple[Path, LazyArray]]:
    """The arrays whose layers are on axis 0 though those of the others are not, with their layers there.

    Args:
        arrays: all of the model.
        odd: those of which this is known; of others it follows from the number of layers.
        noted: the scan axis that is known, as of `ckpttools.maxtext.layers.scan_axis`.
    """
    decoder = below_decoder({path: each for path, each in arrays.items() if path not in odd})
    axis = scan_axis(decoder, noted)
    if not axis:
        return
    stacks = {
        key: (n, stacked_lengths(decoder, key, axis, n)) for key, n in stacked_keys(decoder).items() if n
    }
    for path, array in arrays.items():
        place = key_of_layers(path, stacks)
        n, lengths = stacks[path[place]] if place else (0, ())
        first = array.shape[:n] == lengths != ()
        if first and (path in odd or array.shape[axis : axis + n] != lengths):
            yield path, _moved(array, n, axis)


def _moved(array: LazyArray, count: int, axis: int) -> LazyArray:
    """An array with its first axes at `axis`, or last where it has fewer others."""
    rest = list(range(count, len(array.shape)))
    order = (*rest[:axis], *range(count), *rest[axis:])
    return transposed(array, order)
