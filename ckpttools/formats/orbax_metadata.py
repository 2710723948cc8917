"""Orbax's own JSON files beside the arrays, read and written as orbax-checkpoint 0.12 has them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from ckpttools.errors import FormatError, StorageError
from ckpttools.ir.tree import Empty, Leaf, Path, Text, Tree

TREE_FILE = "_METADATA"
CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
COMMIT_FILE = "commit_success.txt"
STRINGS_FILE = "_strings.json"
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"

_SEQUENCE, _DICT = 1, 2


def tree_document(tree: Tree) -> dict[str, Any]:
    """The content of `_METADATA`: every leaf with its keys and the kind of its value."""
    entries = {str(_text_keys(path)): _entry(path, leaf, tree) for path, leaf in tree.items()}
    return {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _text_keys(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))


def _entry(path: Path, leaf: Leaf, tree: Tree) -> dict[str, Any]:
    keys = [{"key": str(key), "key_type": _SEQUENCE if isinstance(key, int) else _DICT} for key in path]
    kind = _value_type(path, leaf, tree)
    value = {"value_type": kind, "skip_deserialize": isinstance(leaf, Empty)}
    return {"key_metadata": keys, "value_metadata": value}


def _value_type(path: Path, leaf: Leaf, tree: Tree) -> str:
    """Arrays are said to be numpy's: that restores on any devices, with and without a target."""
    if isinstance(leaf, Empty):
        return leaf.kind
    if isinstance(leaf, Text):
        return "string"
    return "scalar" if path in tree.metadata.scalars else "np.ndarray"


def checkpoint_document(item: str | None, custom: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `_CHECKPOINT_METADATA`.

    Args:
        item: name of the item below the step directory; None for the copy inside an item, where MaxText
            looks when it is given the path of the item.
        custom: the user's metadata.
    """
    now = time.time_ns()
    return {
        "item_handlers": {item: HANDLER} if item else HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": dict(custom),
    }


def strings_document(tree: Tree) -> dict[str, str]:
    """The content of `_strings.json`: array name -> text."""
    return {".".join(_text_keys(p)): leaf.value for p, leaf in tree.items() if isinstance(leaf, Text)}


@dataclass(frozen=True, slots=True)
class SavedLeaf:
    """One entry of `_METADATA`.

    Attributes:
        path: its keys; those of sequences as numbers.
        value_type: "np.ndarray", "jax.Array", "scalar", "string", or what an empty leaf is.
        is_empty: whether there is no data.
    """

    path: Path
    value_type: str
    is_empty: bool


def parse_tree(document: Mapping[str, Any], place: str) -> list[SavedLeaf]:
    """The leaves that a `_METADATA` lists, in order.

    Raises:
        FormatError: it is not such a document.
    """
    try:
        return [_saved_leaf(entry) for entry in document["tree_metadata"].values()]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(
            "not the tree metadata of an Orbax checkpoint",
            place=place,
            got=f"{type(error).__name__}: {error}",
            wanted="an object with tree_metadata, key_metadata and value_metadata",
        ) from error


def _saved_leaf(entry: Mapping[str, Any]) -> SavedLeaf:
    path = tuple(
        int(key["key"]) if key["key_type"] == _SEQUENCE else str(key["key"]) for key in entry["key_metadata"]
    )
    value = entry["value_metadata"]
    return SavedLeaf(path, value["value_type"], bool(value.get("skip_deserialize", False)))


def read_json(path: FilePath) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        StorageError: the file cannot be read.
        FormatError: it holds no JSON object.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"cannot read {path}", got=error.strerror) from error
    except ValueError as error:
        raise FormatError("not a JSON file", place=path, got=error) from error
    if not isinstance(document, dict):
        raise FormatError("not a JSON object", place=path, got=type(document).__name__)
    return document
