"""What kind of MaxText checkpoint a tree is, told from its paths and shapes alone.

Kinds: weights stacked by layer or not, with or without training state. Flavours: how the framework nests
the same parameters: Linen `params/params/…`, NNX `…/value`, NNX-RL `base/…`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpttools.dtypes import DTYPES
from ckpttools.ir.array import LazyArray
from ckpttools.ir.nodes import Constant
from ckpttools.ir.tree import Empty, Leaf, Metadata, Path, Tree

LINEN_PREFIX: Path = ("params", "params")
_OPTIMIZER_ROOTS = ("opt_state", "optimizer")
_OTHER_ROOTS = ("step", "nnx_aux", "rng", "rngs")


@dataclass(frozen=True, slots=True)
class KindOfTree:
    """What the tree is, as far as it can be told; None where it cannot.

    Attributes:
        kind: "stacked-training", "stacked-inference", "unstacked-training" or "unstacked-inference".
        flavour: "linen", "nnx" or "nnx-rl".
        scan_axis: axis on which layers are stacked.
    """

    kind: str | None = None
    flavour: str | None = None
    scan_axis: int | None = None


def role(path: Path) -> str:
    """ "parameter", "optimizer" or "other", from the root of a path."""
    root = path[0] if path else ""
    if root in _OPTIMIZER_ROOTS:
        return "optimizer"
    return "other" if root in _OTHER_ROOTS else "parameter"


def kind_of(tree: Tree) -> KindOfTree:
    """The kind of a MaxText tree; all None for any other tree."""
    decoder = {
        path[path.index("decoder") + 1 :]: array
        for path, array in tree.arrays.items()
        if role(path) == "parameter" and "decoder" in path
    }
    if not any(_is_layer(path[0]) for path in decoder if path):
        return KindOfTree()
    stacked = any(_is_stack(str(path[0])) for path in decoder if path)
    trained = any(role(path) == "optimizer" for path in tree.arrays)
    kind = f"{'stacked' if stacked else 'unstacked'}-{'training' if trained else 'inference'}"
    return KindOfTree(kind, _flavour(tree), _scan_axis(decoder) if stacked else None)


def _is_layer(key: str | int) -> bool:
    return "layers" in str(key) or str(key) == "scanned_blocks"


def _is_stack(key: str) -> bool:
    """Whether a key below `decoder` holds stacked layers: `layers`, not `layers_3`."""
    return _is_layer(key) and not key.rpartition("_")[2].isdigit() and "remainder" not in key


def _flavour(tree: Tree) -> str | None:
    parameters = [path for path in tree.arrays if role(path) == "parameter"]
    if all(path[:2] == LINEN_PREFIX for path in parameters):
        return "linen"
    if all(path[0] == "base" for path in parameters):
        return "nnx-rl"
    return "nnx" if all(path[-1] == "value" for path in parameters) else None


def _scan_axis(decoder: Mapping[Path, LazyArray]) -> int | None:
    """Where the layer axis stands: a stacked norm has the final norm's axis and one more."""
    final = next((a.shape for path, a in decoder.items() if path[0] == "decoder_norm"), None)
    norms = [
        array.shape
        for path, array in decoder.items()
        if _is_stack(str(path[0]))
        and "norm" in str(path)
        and len(array.shape) == 2
        and final
        and final[0] in array.shape
    ]
    if not norms or final is None:
        return None
    # MaxText's own default, 1, where both axes have the length of the final norm.
    return 1 if norms[0][0] == final[0] else 0


def linen_state(parameters: Mapping[Path, LazyArray], step: int, custom: Mapping[str, object]) -> Tree:
    """Parameters in the tree that MaxText's own converter writes: a step, no optimizer state."""
    leaves: dict[Path, Leaf] = {
        ("step",): Constant((), DTYPES["int64"], step.to_bytes(8, "little", signed=True)),
        **{(*LINEN_PREFIX, *path): array for path, array in parameters.items()},
        ("opt_state",): Empty("Dict"),
    }
    return Tree(leaves, Metadata(step=step, custom=custom, scalars=frozenset({("step",)})))
