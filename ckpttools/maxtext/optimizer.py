"""Whose optimizer's state a tree holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Leaf, Path, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.maxtext.flavours import Flavour
from ckpttools.maxtext.layout import PARAMS, VALUE

OptimizerName = Literal["adamw", "adam_pax", "sgd", "unknown"]
_ADAM = {"count", "mu", "nu"}
_SGD = {"count", "trace"}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer whose state a tree holds.

    Attributes:
        name: of optax's chain "adamw", of Pax's flat state "adam_pax".
        moments: where parameters are mirrored, such as "opt_state/0/mu".
        mirrored: whether all of them have the parameters' shapes.
    """

    name: OptimizerName
    moments: tuple[str, ...] = ()
    mirrored: bool = True


def optimizer_of(
    state: Mapping[Path, Leaf],
    inner: Collection[Path],
    parameters: Mapping[Path, LazyArray],
    flavour: Flavour,
) -> Optimizer | None:
    """Whose state it is; None for none, and for the empty node that stands for none.

    Args:
        state: all leaves of an optimizer.
        inner: their paths within its state.
        parameters: of the model, under their paths in it.
        flavour: of the tree.
    """
    inner = [path for path in inner if path]
    if not inner:
        return None
    # A chain has a place for each of its parts; the first is the one that scales gradients.
    chained = {str(path[1]) for path in inner if len(path) > 1 and str(path[0]) == "0"}
    named = {str(key) for path in inner for key in path[:2] if not str(key).isdecimal()}
    heads = _moments(state, parameters, flavour)
    name: OptimizerName = "unknown"
    if chained >= _ADAM:
        name = "adamw"
    elif {str(path[0]) for path in inner} >= _ADAM:
        name = "adam_pax"
    elif named <= _SGD | {"step", VALUE}:
        name = "sgd"
    return Optimizer(name, tuple(heads), all(heads.values()))


def _moments(
    state: Mapping[Path, Leaf], parameters: Mapping[Path, LazyArray], flavour: Flavour
) -> dict[str, bool]:
    """Where the optimizer's state mirrors the parameters, and whether all shapes there are theirs."""
    same: dict[str, bool] = {}
    for path, array in state.items():
        if not isinstance(array, LazyArray):
            continue
        if flavour.suffix and path[-1:] == flavour.suffix:
            path = path[: -len(flavour.suffix)]
        tail = next((k for k in range(1, len(path)) if path[k:] in parameters), None)
        if tail is not None:
            head = keystr(path[: tail - (path[tail - 1] == PARAMS)])
            same[head] = same.get(head, True) and array.shape == parameters[path[tail:]].shape
    return same
