"""Golden training checkpoints, and training trees of every layout for hypothesis.

`CKPTTOOLS_GOLDEN` may name a directory with all golden checkpoints; without it the fixtures have to do.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ckpttools import DTYPES, Empty, Metadata, Tree
from ckpttools.array.tree import Leaf
from ckpttools.array.tree import Path as TreePath
from ckpttools.maxtext.view import LINEN, NNX, PLAIN, Flavor
from ckpttools.testing.strategies import noise
from support.locations import TRAIN
from support.trees import lazy

ALL = Path(os.environ["CKPTTOOLS_GOLDEN"]) if "CKPTTOOLS_GOLDEN" in os.environ else None

# Longer than any other axis, so that norms tell on which axis layers are stacked.
EMBED = 13

FLAVORS = (
    LINEN,
    Flavor("linen", ("params",)),
    NNX,
    Flavor("nnx", ("model",), ("value",)),
    Flavor("nnx-rl", ("base",)),
    Flavor("nnx-rl", ("base",), ("value",)),
    PLAIN,
)


def golden_leaves(name: str) -> dict[str, Any]:
    """What MaxText wrote: path -> shape, dtype and digest, or the name of an empty leaf."""
    return json.loads((TRAIN / f"leaves_{name}.json").read_bytes())


@dataclass(frozen=True)
class Layers:
    """Two trees of one state, and what turns one into the other.

    Attributes:
        single, stacked: layers one by one, and stacked by numpy.
        axis, cycle, names: as `ckpttools.maxtext.stacking.StackLayers`.
        told: whether the cycle can be told from what layers hold.
        flavor: of both.
        trained: whether there is an optimizer.
    """

    single: Tree
    stacked: Tree
    axis: int
    cycle: int
    names: str
    told: bool
    flavor: Flavor
    trained: bool


Arrays = dict[TreePath, np.ndarray]


@st.composite
def layered(draw: st.DrawFn, flavors: tuple[Flavor, ...] = FLAVORS) -> Layers:
    """A decoder of any layout and flavor, alone or in a training state."""
    names = draw(st.sampled_from(("plain", "layers", "layer", "local-global")))
    cycle = 1 if names == "plain" else draw(st.integers(2, 4))
    repeats = draw(st.integers(1, 3))
    left = draw(st.integers(0, cycle - 1)) if names in ("layers", "local-global") else 0
    axis, flavor = draw(st.integers(0, 1)), draw(st.sampled_from(flavors))
    alike = draw(st.booleans())
    shapes = [draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)) for _ in range(cycle)]
    if names == "local-global":
        shapes[:-1] = [shapes[0]] * (cycle - 1)
    if alike and names != "local-global":
        shapes = [shapes[0]] * cycle
    seeds = iter(range(10_000))

    def layers(name: str, dtype: str, count: int) -> list[Arrays]:
        return [
            {
                ("mlp", "kernel"): random(shapes[k % cycle], dtype, seeds),
                ("norm",): random([EMBED], dtype, seeds),
            }
            for k in range(count)
        ]

    groups = ("dense_layers", "moe_layers") if names == "plain" and draw(st.booleans()) else ("layers",)
    count = repeats * cycle + left

    def decoder(dtype: str) -> tuple[Arrays, Arrays]:
        single: Arrays = {("decoder", "decoder_norm", "scale"): random([EMBED], dtype, seeds)}
        stacked = dict(single)
        for group in groups:
            built = layers(group, dtype, count)
            single |= {
                ("decoder", f"{group}_{k}", *path): a
                for k, layer in enumerate(built)
                for path, a in layer.items()
            }
            stacked |= {
                ("decoder", *path): a
                for path, a in stack_by_numpy(group, built, names, cycle, repeats, axis).items()
            }
        return single, stacked

    sides: tuple[dict[TreePath, Leaf], dict[TreePath, Leaf]] = ({}, {})
    for side, arrays in zip(sides, decoder("float32"), strict=True):
        side.update({flavor.wrapped(path): lazy(a) for path, a in arrays.items()})
    trained = draw(st.booleans())
    if trained:
        chain = draw(st.booleans())
        head: TreePath = ("opt_state", 0) if chain else ("opt_state",)
        inner: TreePath = ("params",) if flavor.name == "linen" else ()
        for moment in ("mu", "nu"):
            for side, arrays in zip(sides, decoder("bfloat16"), strict=True):
                side.update({(*head, moment, *inner, *path): lazy(a) for path, a in arrays.items()})
        states = [random([4], "uint32", seeds) for _ in range(count)]
        aux: TreePath = ("nnx_aux", "model", "decoder")
        rest: TreePath = ("rngs", "key")
        for group in groups:
            built = [{rest: state} for state in states]
            sides[0].update({(*aux, f"{group}_{k}", *rest): lazy(s) for k, s in enumerate(states)})
            stacked = stack_by_numpy(group, built, names, cycle, repeats, 0)
            sides[1].update({(*aux, *path): lazy(a) for path, a in stacked.items()})
        for side in sides:
            side[(*head, "count")] = lazy(np.array(7, np.int32))
            side["step",] = lazy(np.array(9, np.int32))
            if chain:
                side["opt_state", 1] = Empty("None")
    single, stacked_tree = (
        Tree(side, Metadata(step=9, custom={"scan_layers": scan}))
        for side, scan in zip(sides, (False, True), strict=True)
    )
    told = cycle == 1 or (repeats > 1 and minimal(shapes) and names == "layers")
    return Layers(single, stacked_tree, axis, cycle, names, told, flavor, trained)


def minimal(shapes: list[list[int]]) -> bool:
    """Whether no shorter cycle has these shapes."""
    n = len(shapes)
    longer = shapes * 2
    return all(longer[k : k + n] != shapes for k in range(1, n))


def random(shape: list[int], dtype: str, seeds: Any) -> np.ndarray:
    kind = DTYPES[dtype]
    return noise(tuple(shape), kind, next(seeds)).view(kind.numpy)


def stack_by_numpy(
    group: str, layers: list[Arrays], names: str, cycle: int, repeats: int, axis: int
) -> Arrays:
    """What MaxText's scanned model holds, spelled out for each of its layouts."""

    def together(chosen: list[Arrays]) -> Arrays:
        return {path: np.stack([item[path] for item in chosen], axis) for path in chosen[0]}

    def below(key: TreePath, arrays: Arrays) -> Arrays:
        return {(*key, *path): a for path, a in arrays.items()}

    whole, rest = layers[: repeats * cycle], layers[repeats * cycle :]
    blocks = [whole[k * cycle : (k + 1) * cycle] for k in range(repeats)]
    if names == "plain":
        return below((group,), together(layers))
    if names == "local-global":
        local = together([together(block[:-1]) for block in blocks])
        built = below(("scanned_blocks", "local_layers"), local)
        built |= below(("scanned_blocks", "global_layer"), together([block[-1] for block in blocks]))
        return built | (below(("layers_remainder", "local_layers"), together(rest)) if rest else {})
    built = {}
    for k in range(cycle):
        built |= below((group, f"{names}_{k}"), together([block[k] for block in blocks]))
    for k, layer in enumerate(rest):
        built |= below(("layers_remainder", f"layers_{k}"), layer)
    return built
