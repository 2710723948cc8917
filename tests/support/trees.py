"""Trees of made-up arrays, and of what golden models become."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import numpy as np

import ckpttools
from ckpttools import DTYPES, LazyArray, Metadata, StackLayers, ToMaxText, Tree
from ckpttools.array.nodes import Constant
from ckpttools.array.tree import Path
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.model_families.registry import family_of
from ckpttools.testing.models import shapes_of
from ckpttools.testing.strategies import noise, stored
from support.golden_data import golden_arrays
from support.locations import GOLDEN

Values = dict[str, np.ndarray]


def tree_of(*paths: Path, shape: tuple[int, ...] = (2,), **metadata: object) -> Tree:
    """Float32 noise at each of these paths, each another."""
    dtype = DTYPES["float32"]
    leaves = {path: stored(noise(shape, dtype, k), dtype) for k, path in enumerate(paths)}
    return Tree(leaves, Metadata(**metadata))  # type: ignore[arg-type]


def lazy(values: np.ndarray) -> LazyArray:
    """An array of these numbers."""
    dtype = DTYPES[values.dtype.name]
    return stored(values.copy().view(dtype.carrier), dtype)


def tree_with(values: Mapping[Path, np.ndarray], **metadata: object) -> Tree:
    """These numbers at their paths."""
    return Tree({path: lazy(item) for path, item in values.items()}, Metadata(**metadata))  # type: ignore[arg-type]


@cache
def hugging_face(model: str) -> Tree:
    """A golden model as its family publishes it."""
    return ckpttools.open(GOLDEN / model / "hf")


def values_of(golden: str, **options: object) -> Values:
    """What a golden model becomes, unscanned, as numpy arrays that may be written to."""
    state = to_maxtext(hugging_face(golden), ToMaxText(scan=False, **options)).state  # type: ignore[arg-type]
    paths = [path for path in state.arrays if path[:1] == ("params",)]
    return {"/".join(map(str, path[2:])): state.arrays[path].read() for path in paths}


def parameters_of(values: Values, *, scan: bool = False) -> Tree:
    """MaxText's parameters of these values, unscanned ones; with `scan` stacked."""
    tree = Tree({("params", "params", *name.split("/")): lazy(item) for name, item in values.items()})
    return StackLayers()(tree).tree if scan else tree


def right_one(model: str) -> str:
    """The name of the family of a golden model."""
    config = json.loads((GOLDEN / model / "hf" / "config.json").read_bytes())
    return family_of(config, "config.json").name


def maxtext_tree(model: str, scan: bool) -> Tree:
    """What MaxText made of a golden model, all zeros."""
    leaves = golden_arrays(model, scan)
    return Tree({tuple(name.split("/")): _empty(item) for name, item in leaves.items()})


def _empty(leaf: dict[str, object]) -> Constant:
    dtype = DTYPES[str(leaf["dtype"])]
    return Constant(tuple(leaf["shape"]), dtype, bytes(dtype.itemsize))  # type: ignore[arg-type]


def without(tree: Tree, dropped: Path) -> Tree:
    return Tree({path: leaf for path, leaf in tree.items() if path != dropped}, tree.metadata)


def model(config: dict[str, Any], seed: int) -> Tree:
    """A Hugging Face model of noise around 0.02, as weights are; nothing so small that 1 + x loses it."""
    dtype = DTYPES["bfloat16"]
    random = np.random.default_rng(seed)
    leaves: dict[Path, LazyArray] = {}
    shapes = shapes_of(config)
    # Missing sizes get the large defaults of transformers.
    assert sum(map(prod, shapes.values())) < 50_000_000, "state the missing sizes"
    for name, shape in shapes.items():
        values = random.normal(0, 0.02, shape).astype(dtype.numpy)
        values[np.abs(values) < 2**-16] = 2**-16
        leaves[name,] = stored(values.view(dtype.carrier), dtype, name)
    return Tree(leaves, Metadata(config=config, location="hf"))
