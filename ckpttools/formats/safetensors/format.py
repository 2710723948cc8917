"""Read safetensors: one file, shards with an index, or a directory of either.

Importing this module loads neither numpy nor the safetensors package; opening reads only headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ckpttools.array.nodes import Stored
from ckpttools.array.tree import Leaf, Metadata, Tree
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.core.memory_limit import check_memory, parse_size
from ckpttools.core.notes import Notes
from ckpttools.core.options import Option, shared
from ckpttools.core.text import first_names
from ckpttools.formats import flat
from ckpttools.formats.adapters import WEIGHTS_STEM
from ckpttools.formats.base import ReadOptions, Target, Writer
from ckpttools.formats.safetensors.header import SafetensorsHeader, header_length, parse_header
from ckpttools.formats.safetensors.sharded import (
    ShardFile,
    complete_tensors,
    drop_part_entries,
    is_sharded,
    ranks_remark,
)
from ckpttools.formats.sidecar_files import (
    CONFIG,
    WEIGHTS_FIELD,
    is_file,
    is_saved_by_peft,
    sidecar_config,
    sidecar_directory,
)
from ckpttools.formats.weight_files import WeightNames
from ckpttools.formats.weight_index import WeightsLocation
from ckpttools.stores.base import count_occurrences
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location, require_file_error

NAMES = WeightNames(".safetensors", "model.safetensors")
# Files that may be next to a model's weights but contain none of them.
_OTHER_WEIGHT_FILES = ("adapter_model.safetensors", "carried.safetensors")
HELP = """Write any checkpoint as safetensors: the same arrays under the same names, for any model.

SRC may be a file, an item, a step or a run directory. DST is a directory; it gets model.safetensors, or
model-00001-of-00003.safetensors and so on with model.safetensors.index.json.

Content that safetensors cannot express (keys of lists, empty nodes, strings, custom metadata, the step) is
stored in the metadata of the first file, and is restored when that is converted or inspected.

Examples:
  $ ckpt convert to-safetensors ~/maxtext/llama ~/llama --dtype bfloat16
  $ ckpt convert to-safetensors ~/model/pytorch_model.bin ~/model-safetensors
"""
(MAX_SHARD,) = shared(
    "Layout",
    Option(
        "max_shard_size",
        parse_size,
        # Default of huggingface_hub (MAX_SHARD_SIZE); transformers uses 50 GB since version 5.
        "5GB",
        "Limit of tensor bytes in one file; a larger tensor gets its own file. Files are split as by "
        "huggingface_hub.",
        "SIZE",
    ),
)
SEPARATOR = Option(
    "separator", (".", "/"), ".", "Separator between the keys of a path in the name of a tensor."
)


@dataclass(frozen=True)
class SafetensorsFormat:
    """The `safetensors` format; implements `ckpttools.formats.base.Format`."""

    name: str = "safetensors"
    options: tuple[Option, ...] = (MAX_SHARD, SEPARATOR)
    help: str = HELP
    fault_summary: str = "Git LFS pointers; files with a wrong size or a damaged header"

    def mismatch_reason(self, path: Location) -> str | None:
        return NAMES.mismatch_reason(path)

    def open(self, path: Location, options: ReadOptions) -> Tree:
        result = NAMES.find(path)
        _require_room(result, options)
        files = map_concurrently(
            result.folder.store, lambda name: _open_shard(result.folder, name, options), result.names
        )
        if is_sharded(file.header for file in files):
            return _open_distributed(path, result.folder, files)
        tensors = [(entry.name, file.name) for file in files for entry in file.header.entries]
        disagreeing = result.check_as_loaded(
            tensors,
            lambda name: (e.name for e in _open_shard(result.folder, name, options).header.entries),
        )
        # If a tensor is in several files, the last file wins; the index names that file.
        tree = _build_tree(path, result.folder, files)
        remarks = _note_unread_files(path, result).remarks if path.is_dir() else ()
        remarks = (*remarks, *disagreeing)
        return tree.with_metadata(notes=Notes(remarks=remarks)) if remarks else tree

    def owns(self, name: str) -> bool:
        from ckpttools.formats.safetensors.owned_files import owns

        return owns(name)

    def unowned_files(self, directory: Location, tree: Tree) -> Iterable[str]:
        from ckpttools.formats.safetensors.owned_files import unowned_files

        return unowned_files(directory, NAMES.series_files(directory))

    def faults(self, path: Location, options: ReadOptions) -> Iterable[CheckpointError]:
        return faults(path)

    def sidecars(self, tree: Tree) -> Location:
        return sidecar_directory(tree)

    def writer(self, target: Target, /, *, max_shard_size: int, separator: str) -> Writer:
        from ckpttools.formats.safetensors.write import SafetensorsWriter

        if is_saved_by_peft(target.tree):
            # PEFT loads only one file.
            return SafetensorsWriter(None, separator, stem=WEIGHTS_STEM)
        return SafetensorsWriter(max_shard_size, separator)


def _require_room(result: WeightsLocation, options: ReadOptions) -> None:
    """Reject checkpoints whose tensor entries exceed the memory limit, based on the index."""
    if result.index is not None:
        index = (result.folder / result.index).open()
        check_memory(count_occurrences(b".safetensors", index), 2 * index.size, index.path)
        index.close()
        return

    def sizes(name: str) -> tuple[int, int]:
        with (result.folder / name).open() as source:
            length = header_length(source, options.max_header_bytes)
            return count_occurrences(b'"data_offsets"', source, 8 + length), length

    tensors, nbytes = map(sum, zip(*map_concurrently(result.folder.store, sizes, result.files), strict=True))
    check_memory(tensors, nbytes, result.folder)


def _open_shard(folder: Location, name: str, options: ReadOptions) -> ShardFile:
    source = (folder / name).open()
    try:
        header = parse_header(source, options.max_header_bytes)
        source.remember_head(header.data_start)
        return ShardFile(name, source, header)
    finally:
        source.close()  # A checkpoint can have more shards than the limit on open files.


def _build_tree(path: Location, folder: Location, files: Sequence[ShardFile]) -> Tree:
    leaves = dict(chain.from_iterable(map(_leaves, files)))
    custom = dict(chain.from_iterable(file.header.metadata.items() for file in files))
    described = custom.pop(flat.ENTRY, None)
    for alias, stored in _aliases(custom, leaves):
        leaves[alias,] = leaves[stored,]
        del custom[alias]
    tree = Tree(
        leaves, Metadata(FORMAT.name, custom=custom, config=sidecar_config(folder), location=str(path))
    )
    # A single shard has the metadata of the full tree, so its arrays are opened by name.
    if described is None or NAMES.is_one_of_several(path):
        return tree
    return flat.restore(tree, described)


def _aliases(custom: Mapping[str, str], leaves: Mapping[TreePath, Stored]) -> list[tuple[str, str]]:
    """Return the aliases of tensors in the metadata, each with the name under which the tensor is stored.

    safetensors.torch.save_model stores a tensor with several names once, and maps each removed name to the
    stored one in the metadata.
    """
    return [
        (name, stored) for name, stored in custom.items() if (stored,) in leaves and (name,) not in leaves
    ]


def _note_unread_files(directory: Location, result: WeightsLocation) -> Notes:
    """Return remarks about weight files in a directory that are not read, but that other loaders may read."""
    visible = (entry.name for entry in directory.entries() if not entry.is_dir and entry.name[0] != ".")
    files = (name for name in visible if name.endswith(NAMES.suffix) and name not in result.names)
    others = sorted(name for name in files if name not in (*_OTHER_WEIGHT_FILES, *result.unnamed))
    read = f"the model of {result.index}" if result.index is not None else result.files[0]
    instead = f", not {first_names(others)}" if others else ""
    if result.is_chosen:
        return Notes(remarks=(f"{read} is read, because {WEIGHTS_FIELD} in {CONFIG} selects it{instead}",))
    return Notes(remarks=(f"of the weight files here, {read} is read{instead}",)) if others else Notes()


def _open_distributed(path: Location, folder: Location, files: Sequence[ShardFile]) -> Tree:
    """Build the tree of a distributed checkpoint, in which each tensor is spread over several files."""
    leaves: dict[TreePath, Leaf] = {(name,): array for name, array in complete_tensors(path, files).items()}
    custom = drop_part_entries(dict(chain.from_iterable(file.header.metadata.items() for file in files)))
    notes, config = Notes(remarks=(ranks_remark(files),)), sidecar_config(folder)
    return Tree(leaves, Metadata(FORMAT.name, custom=custom, config=config, location=str(path), notes=notes))


def _leaves(file: ShardFile) -> Iterator[tuple[TreePath, Stored]]:
    start = file.header.data_start
    for entry in file.header.entries:
        yield (entry.name,), Stored(entry.shape, entry.dtype, file.source, start + entry.begin)


def faults(path: Location) -> Iterator[CheckpointError]:
    """Yield the faults of a file or of the files in a directory."""
    for file in sorted(path.glob("[!.]*.safetensors")) if path.is_dir() else [path]:
        result = header_of(file)
        if isinstance(result, CheckpointError):
            yield result


def header_of(path: Location) -> SafetensorsHeader | CheckpointError:
    """Return the header of a file, checked against the file's size, or the error that describes its fault.

    Raises:
        StorageError: A network store did not respond.
    """
    if path.lexists() and not is_file(path):
        return FormatError("not a file", location=path, hint="it is a dangling link or a special file")
    try:
        source = path.open()
        try:
            return parse_header(source)
        finally:
            source.close()
    except CheckpointError as error:
        return require_file_error(error, path)


FORMAT = SafetensorsFormat()
