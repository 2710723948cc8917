"""Read plain zarr v3 hierarchies, written by ckpttools or any other library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpttools.array.storage import Storage
from ckpttools.array.tree import Leaf, Metadata, Path, Tree
from ckpttools.codecs.registry import COMPRESSION
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.memory_limit import check_memory
from ckpttools.core.options import Option
from ckpttools.formats import flat
from ckpttools.formats.base import NOT_A_DIRECTORY, ReadOptions, Target, Writer
from ckpttools.formats.json_file import DEEPEST, read_json
from ckpttools.formats.orbax.arrays import Arrays
from ckpttools.formats.orbax.entries import Files
from ckpttools.formats.orbax.metadata import TREE_FILE
from ckpttools.formats.zarr.chunking import CHUNKS
from ckpttools.formats.zarr.chunks import FollowedLinks, Way
from ckpttools.formats.zarr.zarr3 import DOCUMENT
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

HELP = """Write any checkpoint as zarr v3: groups and arrays named by the keys of the tree, for any model.

SRC may be a file, an item, a step or a run directory. DST is the root group, which zarr.open_group of
zarr-python opens. Arrays of dtypes that zarr-python lacks, such as bfloat16, are read by tensorstore;
zarr-python opens their neighbors by name, but cannot list the group.

Content that zarr cannot express (keys of lists, empty nodes, strings, custom metadata, the step) is stored in
the attributes of the root, and is restored when the checkpoint is converted or inspected.

Examples:
  $ ckpt convert to-zarr3 ~/maxtext/llama ~/zarr/llama --dtype float32
  $ ckpt convert to-zarr3 ~/maxtext/llama ~/zarr/llama --compression zstd
"""


@dataclass(frozen=True)
class Zarr3:
    """The `zarr3` format: a directory with the `zarr.json` of a group or an array."""

    name: str = "zarr3"
    options: tuple[Option, ...] = (COMPRESSION, CHUNKS)
    help: str = HELP

    def mismatch_reason(self, path: Location) -> str | None:
        if not path.is_dir():
            return NOT_A_DIRECTORY
        if (path / TREE_FILE).is_file():
            return f"{TREE_FILE} identifies it as Orbax"
        return None if (path / DOCUMENT).is_file() else f"no {DOCUMENT} here"

    def open(self, path: Location, options: ReadOptions) -> Tree:
        root = _node(path)
        attributes = root.get("attributes", {})
        described = attributes.get(flat.ENTRY)
        arrays = Arrays(path, Files(path), True, may_be_left_out=may_omit_chunks(root))
        names = list(_arrays_below(path, root, FollowedLinks()))
        check_memory(len(names), 0, path)
        metadata = Metadata(format=self.name, custom=attributes, location=str(path))
        # In the search for arrays, a name is a single key; the root has no key.
        keys: list[Path] = [(_join_name(name),) if name else () for name in names]
        result: dict[Path, Leaf] = dict(
            zip(names, map_concurrently(path.store, arrays.array, keys), strict=True)
        )
        if described is None:
            return Tree(result, metadata)
        named = Tree({(_join_name(name),): array for name, array in result.items()}, metadata)
        return flat.restore(named, json.dumps(described))

    def storage(self, tree: Tree, options: ReadOptions) -> Storage:
        from ckpttools.formats.survey import zarr_storage

        return zarr_storage(tree, options.max_index_bytes)

    def owns(self, name: str) -> bool:
        from ckpttools.formats.zarr.owned_files import owns

        return owns(name)

    def unowned_files(self, directory: Location, tree: Tree) -> Iterable[str]:
        from ckpttools.formats.zarr.owned_files import unowned_files

        return unowned_files(directory, tree)

    def writer(self, target: Target, /, **options: Any) -> Writer:
        from ckpttools.formats.zarr.write import ZarrWriter

        return ZarrWriter(**options)


FORMAT = Zarr3()


def may_omit_chunks(root: Mapping[str, Any]) -> bool:
    """Return whether a hierarchy with this `zarr.json` may omit chunks of only the fill value.

    zarr libraries omit such chunks; ckpttools writes all chunks.
    """
    attributes = root.get("attributes")
    return not (isinstance(attributes, dict) and attributes.get(flat.ENTRY) is not None)


def _join_name(name: Path) -> str:
    return flat.flat_name(name, "/")


def _arrays_below(
    directory: Location, node: Mapping[str, Any], links: FollowedLinks, name: Path = (), followed: Way = ()
) -> Iterator[Path]:
    """Yield the path of every array of a hierarchy, sorted by name in each group.

    Raises:
        FormatError: Groups are nested too deep, links form a cycle, or links give a group too many names.
        StorageError: A directory cannot be listed.
    """
    if node["node_type"] == "array":
        yield name
        return
    if len(name) == DEEPEST:
        raise FormatError(
            "groups are nested too deep",
            location=directory,
            expected=f"at most {DEEPEST} levels of zarr groups",
        )
    for element in (entry for entry in directory.entries() if entry.is_dir):
        below = directory / element.name
        if (below / DOCUMENT).is_file():
            further = links.into(directory, element, followed)
            yield from _arrays_below(below, _node(below), links, (*name, below.name), further)
        elif not below.name.startswith(".") and any(
            item.endswith(f"/{DOCUMENT}") for item, _ in below.below()
        ):
            hint = "copy it again, with all files"
            raise FormatError(f"a group of arrays has no {DOCUMENT}", location=below, hint=hint)


def _node(directory: Location) -> Mapping[str, Any]:
    """Return the metadata of a group or an array.

    Raises:
        FormatError: The directory is neither a group nor an array.
        StorageError: The metadata cannot be read.
    """
    document = read_json(directory / DOCUMENT)
    got = f"zarr_format {document.get('zarr_format')}, node_type {document.get('node_type')!r}"
    if document.get("zarr_format") != 3 or document.get("node_type") not in ("group", "array"):
        raise FormatError(
            "not the metadata of a zarr v3 node",
            location=directory / DOCUMENT,
            got=got,
            expected="zarr_format 3, and a group or an array",
        )
    if not isinstance(document.get("attributes", {}), dict):
        raise FormatError("the attributes are not a JSON object", location=directory / DOCUMENT)
    return document
