"""The golden fixtures, and ways to read a checkpoint that share no code with the package."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from ckpttools import Empty, ModelOptions, Resources, Text, ToMaxText, Tree, plan_to_maxtext
from ckpttools.array.tree import keystr
from support.locations import GOLDEN

# One group of layers, nothing in float32, every tensor mapped.
LLAMA_LINE = ("llama3.1", "llama3.2-tied", "mistral-7b", "qwen2.5", "qwen2.5-tied", "qwen3", "qwen3-tied")
FAMILIES = (
    *LLAMA_LINE,
    "deepseek2",
    "deepseek3",
    "gemma2",
    "gemma3",
    "gemma4-moe",
    "gpt-oss",
    "llama4-scout",
    "mixtral-8x7b",
    "qwen3-moe",
    "qwen3-next",
)
# Of these MaxText's converter was told to take the text part alone; test_towers.py is about the rest.
MULTIMODAL = ("gemma3", "gemma4-moe", "llama4-scout")
# Each family's weights in one file, and once in shards.
SOURCES = (*((family, "hf") for family in FAMILIES), ("llama3.1", "hf_sharded"))
# The version of MaxText that wrote them.
GOLDEN_VERSION = "e591f30"
SCAN_NAMES = {True: "scanned", False: "unscanned"}

Leaves = dict[str, Any]
_NUMBERS = count()


def golden_leaves(family: str, scan: bool) -> Leaves:
    """What MaxText's checkpoint holds: path -> shape, dtype and digest, or the name of an empty leaf.

    Of multimodal models the text part: MaxText's script for unscanned Llama 4 converts the rest as well.
    """
    leaves = json.loads((GOLDEN / family / f"leaves_{SCAN_NAMES[scan]}.json").read_bytes())
    return {path: leaf for path, leaf in leaves.items() if "vision_encoder" not in path}


def golden_arrays(family: str, scan: bool) -> Leaves:
    """The leaves of `golden_leaves` that hold data."""
    return {path: leaf for path, leaf in golden_leaves(family, scan).items() if isinstance(leaf, dict)}


def golden_checkpoint(scan: bool) -> Path:
    """The run directory that MaxText itself wrote for llama3.1."""
    return GOLDEN / "llama3.1" / f"maxtext_{SCAN_NAMES[scan]}"


def described(array: np.ndarray) -> dict[str, Any]:
    """One leaf as the golden files spell it."""
    data = np.ascontiguousarray(array).tobytes()
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def all_described(arrays: Mapping[str, np.ndarray]) -> Leaves:
    return {path: described(array) for path, array in arrays.items()}


def convert(
    destination: Path,
    family: str,
    source: str = "hf",
    *,
    memory: int = 1 << 30,
    jobs: int = 2,
    rope_layout: str | None = None,
    **options: Any,
) -> Path:
    """Converts a golden model, or copies what became of it before; returns the directory of the item.

    Of multimodal models the text part, as in `golden_leaves`, if `options` do not say otherwise.
    """
    usual = {"maxtext": GOLDEN_VERSION, "text_only": family in MULTIMODAL}
    options = {**usual, **options, "model": ModelOptions(rope_layout=rope_layout)}
    built = _converted(GOLDEN / family / source, Resources(memory=memory, jobs=jobs), ToMaxText(**options))
    shutil.copytree(built, destination)
    return destination / "0" / "items"


@cache
def _converted(source: Path, resources: Resources, options: ToMaxText) -> Path:
    """Ten times as slow as a copy; the same conversion is the start of tests of many kinds."""
    built = Path(_directory().name) / str(next(_NUMBERS))
    plan_to_maxtext(source, options, resources).run(built)
    return built


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    """Lasts as long as the process."""
    return tempfile.TemporaryDirectory(prefix="golden")


def leaves_by_package(tree: Tree) -> Leaves:
    """Every leaf of a tree, arrays read by the package itself."""
    built: Leaves = {}
    for path, leaf in tree.items():
        assert not isinstance(leaf, Text)
        built[keystr(path)] = leaf.kind if isinstance(leaf, Empty) else described(leaf.read())
    return built


def kvstore(item: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}}


def arrays_by_tensorstore(item: Path) -> dict[str, np.ndarray]:
    """Every zarr v3 array in the item's OCDBT, whatever `_METADATA` says; missing chunks are errors."""
    return {path: array.read().result() for path, array in opened_by_tensorstore(item).items()}


def opened_by_tensorstore(item: Path) -> dict[str, ts.TensorStore]:
    keys = ts.KvStore.open(kvstore(item)).result().list().result()
    names = sorted(key.decode().removesuffix("/zarr.json") for key in keys if key.endswith(b"/zarr.json"))
    return {name.replace(".", "/"): _opened(item, name) for name in names}


def _opened(item: Path, name: str) -> ts.TensorStore:
    spec = {
        "driver": "zarr3",
        "kvstore": kvstore(item) | {"path": f"{name}/"},
        "fill_missing_data_reads": False,
        "recheck_cached_data": False,
    }
    return ts.open(spec, open=True, read=True).result()
