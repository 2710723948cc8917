"""Trees of every kind of leaf, with the values that each dtype really has, and how tests write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ckpttools import DTYPES, DType, Empty, Metadata, Receipt, Text, Tree
from ckpttools.array.nodes import Stored
from ckpttools.array.tree import Leaf
from ckpttools.array.tree import Path as TreePath
from ckpttools.formats.base import Writer
from ckpttools.plan.plan import build
from ckpttools.run.executor import execute
from ckpttools.testing.strategies import noise, stored

ZARR3 = {name: dtype for name, dtype in DTYPES.items() if dtype.zarr3}
STEP = 3


def array(name: str, *shape: int, seed: int = 0) -> Stored:
    """Noise of a dtype; of those that have fewer values than their byte could tell, only values."""
    dtype = DTYPES[name]
    return stored(values(shape, dtype, seed), dtype, f"{name}{shape}{seed}")


# Bits that an element of these may have.
_MASKS = {"bool": 1, "int2": 3, "int4": 15}


def values(shape: tuple[int, ...], dtype: DType, seed: int = 0) -> np.ndarray:
    raw = noise(shape, dtype, seed)
    return raw & raw.dtype.type(_MASKS[dtype.name]) if dtype.name in _MASKS else raw


def arrays() -> dict[TreePath, Leaf]:
    """Every dtype, every rank, grids with cut edges."""
    return {
        **{("dtypes", name): array(name, 5, 3) for name in ZARR3},
        ("ranks", 0): array("int32"),
        ("ranks", 1): array("bfloat16", 4096, seed=1),
        ("ranks", 2, "kernel"): array("float32", 37, 5, 23),
        ("ranks", 3): array("uint16", 8, 3, 130, 2),
        ("sharded",): array("bfloat16", 16, 24, 40),
    }


ARRAYS = Tree(arrays(), Metadata(step=STEP))
EVERYTHING = Tree(
    {
        **arrays(),
        ("empty", "none"): Empty("None"),
        ("empty", "dict"): Empty("Dict"),
        ("empty", "list"): Empty("List"),
        ("list", 0): Empty("None"),
        ("list", 1, "text"): Text('é / "quoted"\n'),
        ("number",): stored(np.array(1.5).view(np.uint64), DTYPES["float64"]),
        ("yes",): stored(np.array(1, np.uint8), DTYPES["bool"]),
        ("rng", "key"): array("uint32", 2),
        ("rng", "keys"): array("uint32", 3, 2),
    },
    Metadata(
        step=STEP,
        custom={"a": {"b": [1, None, "é"]}},
        scalars=frozenset({("number",), ("yes",)}),
        key_impls={("rng", "key"): "threefry2x32", ("rng", "keys"): "threefry2x32"},
    ),
)


def write(tree: Tree, writer: Writer, destination: Path, memory: int = 1 << 30, jobs: int = 2) -> Receipt:
    return execute(build(tree, writer, memory=memory, jobs=jobs), writer, destination)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but those that say when they were written."""
    files = (file for file in directory.rglob("*") if file.is_file() and file.name != "_CHECKPOINT_METADATA")
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}
