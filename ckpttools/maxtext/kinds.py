"""What kind of MaxText checkpoint a tree is, told from its paths and shapes alone.

Kinds: weights stacked by layer or not, with or without training state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant
from ckpttools.array.tree import Empty, Leaf, Metadata, Path, Tree, spelled
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import CheckpointError
from ckpttools.maxtext.flavours import LINEN, flavour_of, parameters
from ckpttools.maxtext.layers import (
    LayerGroup,
    LayerStack,
    below_decoder,
    layer_groups,
    layer_stacks,
    scan_axis,
    single_layers,
    stacked_keys,
)
from ckpttools.roles.of_tree import roles

_ADAM = {"count", "mu", "nu"}
_SGD = {"count", "trace"}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer whose state a tree holds.

    Attributes:
        name: "adamw" (optax's chain), "adam_pax" (its flat state), "sgd" or "unknown".
        moments: where parameters are mirrored, such as "opt_state/0/mu".
        mirrored: whether all of them have the parameters' shapes.
    """

    name: str
    moments: tuple[str, ...] = ()
    mirrored: bool = True


@dataclass(frozen=True, slots=True)
class KindOfTree:
    """What the tree is, as far as it can be told; None where it cannot.

    Attributes:
        kind: "stacked-training", "stacked-inference", "unstacked-training" or "unstacked-inference".
        flavour: "linen", "nnx" or "nnx-rl".
        scan_axis: axis on which layers are stacked.
        layers: its groups of layers and how each is laid out.
        optimizer: whose state it holds; None where it holds none.
        step: training step of the directory it lies in.
        random_states: number of arrays that are states of random number generators.
        warnings: what contradicts itself.
    """

    kind: str | None = None
    flavour: str | None = None
    scan_axis: int | None = None
    layers: tuple[LayerGroup, ...] = ()
    optimizer: Optimizer | None = None
    step: int | None = None
    random_states: int = 0
    warnings: tuple[str, ...] = ()


def is_maxtext(tree: Tree) -> bool:
    """Whether a tree is one of MaxText's; worked out at the first call."""
    return tree.once(kind_of).kind is not None


def kind_of(tree: Tree) -> KindOfTree:
    """The kind of a MaxText tree; all None for any other tree. Reads nothing."""
    decoder = below_decoder(parameters(tree))
    stacked = bool(stacked_keys(decoder))
    if not stacked and not single_layers(decoder):
        return KindOfTree()
    optimizer, axis, known = optimizer_of(tree), scan_axis(decoder), roles(tree)
    stacks, warnings = _layout(decoder, axis)
    return KindOfTree(
        kind=f"{'stacked' if stacked else 'unstacked'}-{'training' if optimizer else 'inference'}",
        flavour=flavour_of(tree).name,
        scan_axis=axis,
        layers=layer_groups(stacks),
        optimizer=optimizer,
        step=tree.metadata.step,
        random_states=sum(known.of(path) == "other" and "rngs" in path for path in tree.arrays),
        warnings=(*_contradictions(tree.metadata.custom, stacked), *warnings),
    )


def _layout(
    decoder: Mapping[Path, LazyArray], axis: int | None
) -> tuple[tuple[LayerStack, ...], tuple[str, ...]]:
    """The layout, or why there is none."""
    try:
        return layer_stacks(decoder, 0 if axis is None else axis), ()
    except CheckpointError as error:
        place = f" ({error.place})" if error.place else ""
        return (), (" ".join(error.message.split()) + place,)


def _contradictions(custom: Mapping[str, object], stacked: bool) -> Iterator[str]:
    said = custom.get("scan_layers")
    if isinstance(said, bool) and said != stacked:
        are = "stacked" if stacked else "not stacked"
        yield f"custom metadata says scan_layers={str(said).lower()}, but layers are {are}"


def optimizer_of(tree: Tree) -> Optimizer | None:
    """Whose optimizer state a tree holds; None for none, and for the empty node that stands for none."""
    known = roles(tree)
    state = [path for path in tree if known.of(path) == "optimizer"]
    inner = [below for path in state if (below := known.below_optimizer(path))]
    if not inner:
        return None
    # A chain has a place for each of its parts; the first is the one that scales gradients.
    chained = {str(path[1]) for path in inner if len(path) > 1 and str(path[0]) == "0"}
    named = {str(key) for path in inner for key in path[:2] if not str(key).isdecimal()}
    heads = dict(_moments(tree, state))
    name = "unknown"
    if chained >= _ADAM:
        name = "adamw"
    elif {str(path[0]) for path in inner} >= _ADAM:
        name = "adam_pax"
    elif named <= _SGD | {"step", "value"}:
        name = "sgd"
    return Optimizer(name, tuple(heads), all(heads.values()))


def _moments(tree: Tree, state: list[Path]) -> Iterator[tuple[str, bool]]:
    """Where the optimizer's state mirrors the parameters, and whether all shapes there are theirs."""
    known, flavour = parameters(tree), flavour_of(tree)
    same: dict[str, bool] = {}
    for path in state:
        array = tree[path]
        if not isinstance(array, LazyArray):
            continue
        if flavour.suffix and path[-1:] == flavour.suffix:
            path = path[: -len(flavour.suffix)]
        tail = next((k for k in range(1, len(path)) if path[k:] in known), None)
        if tail is not None:
            head = spelled(path[: tail - (path[tail - 1] == "params")])
            same[head] = same.get(head, True) and array.shape == known[path[tail:]].shape
    yield from same.items()


def linen_state(parameters: Mapping[Path, LazyArray], step: int, custom: Mapping[str, object]) -> Tree:
    """Parameters in the tree that MaxText's own converter writes: a step, no optimizer state."""
    leaves: dict[Path, Leaf] = {
        ("step",): Constant((), DTYPES["int64"], step.to_bytes(8, "little", signed=True)),
        **{LINEN.wrapped(path): array for path, array in parameters.items()},
        ("opt_state",): Empty("Dict"),
    }
    return Tree(leaves, Metadata(step=step, custom=custom, scalars=frozenset({("step",)})))
