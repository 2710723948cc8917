"""Read and write Orbax's JSON files in the layout of orbax-checkpoint 0.12."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.storage import Sharding
from ckpttools.array.tree import Empty, Leaf, Path, Text, Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape
from ckpttools.formats.checks import LONGEST_PATH
from ckpttools.formats.json_file import DEEPEST, read_json
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.stores.location import Location

TREE_FILE = "_METADATA"
CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
# Marker of Orbax v1 saves.
V1_FILE = "orbax.checkpoint"
COMMIT_FILE = "commit_success.txt"
COMMIT_TEXT = b"Checkpoint commit was successful"
STRINGS_FILE = "_strings.json"
ARRAYS_DIRECTORY = "array_metadatas"
EMPTY_KINDS = ("None", "Dict", "List", "Tuple")
# Kinds of values that are not in OCDBT: strings are in a file of their own.
_DATALESS_KINDS: frozenset[object] = frozenset((*EMPTY_KINDS, "NamedTuple", "string"))
SHARDING_FILE = "_sharding"
ARRAYS_FILE = f"{ARRAYS_DIRECTORY}/process_0"
# Names of the files that Orbax puts in an item.
OWN_FILES = frozenset(
    (
        TREE_FILE,
        CHECKPOINT_FILE,
        COMMIT_FILE,
        STRINGS_FILE,
        SHARDING_FILE,
        ARRAYS_DIRECTORY,
        MANIFEST,
        "d",
    )
)
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"

_SEQUENCE, _DICT = 1, 2


def tree_document(
    tree: Tree, use_ocdbt: bool = True, use_zarr3: bool = True, sharded: Collection[Path] = ()
) -> dict[str, Any]:
    """Return the content of `_METADATA`: the keys and value type of every leaf.

    Args:
        tree: The tree to write.
        use_ocdbt, use_zarr3: The storage options.
        sharded: The arrays whose sharding is recorded in `_sharding`.
    """
    entries = {str(tuple(map(str, path))): _entry(path, leaf, tree, sharded) for path, leaf in tree.items()}
    return {
        "tree_metadata": entries,
        "use_ocdbt": use_ocdbt,
        "use_zarr3": use_zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _entry(path: Path, leaf: Leaf, tree: Tree, sharded: Collection[Path]) -> dict[str, Any]:
    keys = [{"key": str(key), "key_type": _SEQUENCE if isinstance(key, int) else _DICT} for key in path]
    kind = _value_type(path, leaf, tree, sharded)
    value: dict[str, Any] = {"value_type": kind, "skip_deserialize": isinstance(leaf, Empty)}
    if isinstance(leaf, LazyArray) and kind == "jax.Array":
        value["write_shape"] = list(leaf.shape)
    return {"key_metadata": keys, "value_metadata": value}


def _value_type(path: Path, leaf: Leaf, tree: Tree, sharded: Collection[Path]) -> str:
    """Return the value type of a leaf in `_METADATA`.

    Arrays are recorded as numpy arrays, because Orbax restores those on any devices, with or without a
    target. Typed PRNG keys and arrays with a sharding are recorded as JAX arrays. A Python number stays a
    number even on a mesh: without `jax_enable_x64`, JAX has no 64-bit values, so Orbax would restore a wrong
    value.
    """
    if isinstance(leaf, Empty):
        return leaf.kind
    if isinstance(leaf, Text):
        return "string"
    if path in tree.metadata.scalars:
        return "scalar"
    is_jax = path in tree.metadata.key_impls or path in sharded
    return "jax.Array" if is_jax else "np.ndarray"


def checkpoint_document(
    item: str | None, custom: Mapping[str, Any], others: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the content of `_CHECKPOINT_METADATA`.

    Args:
        item: Name of the item in the step directory; None for the copy inside an item, which MaxText reads
            when it is given the item's path.
        custom: The user's metadata.
        others: Further items of the step: name -> handler.
    """
    now = time.time_ns()
    return {
        "item_handlers": {item: HANDLER, **others} if item else HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": dict(custom),
    }


def strings_document(tree: Tree) -> dict[str, str]:
    """Return the content of `_strings.json`: array name -> text."""
    return {dotted(p): leaf.value for p, leaf in tree.items() if isinstance(leaf, Text)}


def random_key_documents(tree: Tree, chunks: Mapping[Path, Shape]) -> dict[str, dict[str, Any]]:
    """Return file names and contents that mark integer arrays as typed PRNG keys, without shardings.

    Args:
        tree: The tree to write.
        chunks: Chunk shapes of the arrays that are PRNG keys.
    """
    impls = {path: impl for path, impl in tree.metadata.key_impls.items() if path in chunks}
    if not impls:
        return {}
    arrays = [_array_metadata(path, tree.arrays[path].shape, chunks[path], impls[path]) for path in impls]
    return {ARRAYS_FILE: {"array_metadatas": arrays}}


def sharding_document(
    tree: Tree, shardings: Mapping[Path, Sharding], keys: Collection[Path]
) -> dict[str, str]:
    """Return the content of `_sharding`: array names in base64 -> shardings as JSON text.

    Args:
        tree: The tree to write.
        shardings: Shardings by array.
        keys: The typed PRNG keys, which need a sharding; by default, a single device.
    """
    result: dict[str, str] = {}
    texts: dict[Sharding, str] = {}
    for path in tree.arrays:
        sharding = None if path in tree.metadata.scalars else shardings.get(path)
        if sharding is not None and sharding not in texts:
            texts[sharding] = json.dumps(_named_sharding(sharding))
        if sharding is not None or path in keys:
            text = json.dumps(_ANY_ONE_DEVICE) if sharding is None else texts[sharding]
            result[base64.urlsafe_b64encode(dotted(path).encode()).decode()] = text
    return result


def _named_sharding(sharding: Sharding) -> dict[str, Any]:
    """Return a sharding as Orbax records it; without device ids, loaders use `jax.devices()` in order."""
    devices = {} if sharding.devices is None else {"device_mesh": {"mesh": _nest_device_ids(sharding)}}
    return {
        "sharding_type": "NamedSharding",
        "shape": [length for _, length in sharding.mesh],
        "axis_names": [name for name, _ in sharding.mesh],
        "axis_types": ["AxisType.Auto"] * len(sharding.mesh),
        "partition_spec": [_entry_of_spec(names) for names in sharding.spec],
        **devices,
    }


def _nest_device_ids(sharding: Sharding) -> Any:
    """Return the device ids of a mesh as Orbax nests them: one list level per axis."""
    result: list[Any] = [{"id": device} for device in sharding.devices or ()]
    for _, length in reversed(sharding.mesh[1:]):
        result = [result[at : at + length] for at in range(0, len(result), length)]
    return result


def _entry_of_spec(names: tuple[str, ...]) -> object:
    return None if not names else names[0] if len(names) == 1 else list(names)


def _array_metadata(path: Path, shape: Shape, chunk: Shape, impl: str) -> dict[str, Any]:
    described = {
        "param_name": dotted(path),
        "write_shape": list(shape),
        "chunk_shape": list(chunk),
        "ext_metadata": {"random_key_impl": impl},
    }
    return {"array_metadata": described}


# Replicated over the first device, which exists wherever JAX runs.
_ANY_ONE_DEVICE = {
    "sharding_type": "NamedSharding",
    "shape": [1],
    "axis_names": ["device"],
    "axis_types": ["AxisType.Auto"],
    "partition_spec": [],
    "device_mesh": {"mesh": [{"id": 0}]},
}


@dataclass(frozen=True, slots=True)
class SavedLeaf:
    """An entry of `_METADATA`.

    Attributes:
        path: The keys of the leaf; sequence indices are integers.
        value_type: "np.ndarray", "jax.Array", "scalar", "string", or the type of an empty leaf.
        is_empty: Whether the leaf has no data.
    """

    path: Path
    value_type: str
    is_empty: bool


def parse_tree(document: Mapping[str, Any], location: str) -> list[SavedLeaf]:
    """Return the leaves that a `_METADATA` document lists, in order.

    Raises:
        FormatError: The document is invalid.
    """
    try:
        return [_saved_leaf(entry) for entry in document["tree_metadata"].values()]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise FormatError(
            "not the tree metadata of an Orbax checkpoint",
            location=location,
            got=f"{type(error).__name__}: {error}",
            expected="an object with tree_metadata, key_metadata and value_metadata",
        ) from error


def _saved_leaf(entry: Mapping[str, Any]) -> SavedLeaf:
    keys = entry["key_metadata"]
    path = tuple([int(key["key"]) if key["key_type"] == _SEQUENCE else str(key["key"]) for key in keys])
    if len(path) > DEEPEST or len(dotted(path)) > LONGEST_PATH:
        raise ValueError(f"a path of {len(path)} keys, {len(dotted(path))} characters")
    value = entry["value_metadata"]
    kind = value["value_type"]
    # An empty named tuple; only its class is recorded. Orbax restores it as None, too.
    kind = "None" if kind == "NamedTuple" else kind
    return SavedLeaf(path, kind, kind in EMPTY_KINDS)


def needs_index(document: Mapping[str, Any]) -> bool:
    """Return whether a `_METADATA` document lists arrays or numbers that are in OCDBT.

    Orbax creates the index with the first array or number: a tree of only strings and empty nodes has no
    index.

    Args:
        document: Content of the file. A damaged document needs an index if it declares OCDBT.
    """
    return document.get("use_ocdbt") is True and holds_data(document)


def holds_data(document: Mapping[str, Any]) -> bool:
    """Return whether a `_METADATA` document lists arrays or numbers, not only strings and empty nodes.

    Args:
        document: Content of the file. A damaged document counts as a tree with arrays.
    """
    return not _value_types(document) <= _DATALESS_KINDS


def holds_arrays(document: Mapping[str, Any]) -> bool:
    """Return whether a `_METADATA` document lists arrays, not only numbers, strings and empty nodes.

    Args:
        document: Content of the file. A damaged document counts as a tree with arrays.
    """
    return not _value_types(document) <= _DATALESS_KINDS | {"scalar"}


def _value_types(document: Mapping[str, Any]) -> set[object]:
    try:
        return {leaf["value_metadata"]["value_type"] for leaf in document["tree_metadata"].values()}
    except (KeyError, TypeError, AttributeError):
        return {None}


def array_metadata(directory: Location) -> dict[str, Mapping[str, Any]]:
    """Return the content of `array_metadatas` by array name; all processes of a save write the same content.

    Raises:
        FormatError: The file is not an `array_metadatas` file.
    """
    path = min(directory.glob(f"{ARRAYS_DIRECTORY}/process_*"), default=None)
    try:
        entries = [] if path is None else read_json(path)["array_metadatas"]
        return {entry["array_metadata"]["param_name"]: entry["array_metadata"] for entry in entries}
    except (KeyError, TypeError) as error:
        raise FormatError(
            "not the metadata of arrays", location=path, got=f"{type(error).__name__}: {error}"
        ) from error


def key_impls(directory: Location) -> dict[str, str]:
    """Return the implementation of each typed PRNG key by name; errors as for `array_metadata`."""
    declared = {name: item.get("ext_metadata") for name, item in array_metadata(directory).items()}
    impls = {name: item.get("random_key_impl") for name, item in declared.items() if isinstance(item, dict)}
    return {name: impl for name, impl in impls.items() if impl}
