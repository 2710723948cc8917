"""PyTorch distributed checkpoints (DCP): `.metadata` and a few files per process.

The metadata list the tensors, their parts, and the file of each part; parts may be cut along any axes.
torch is not needed, and nothing is executed.

Each tensor is a complete `torch.save` file embedded in another file. Its bytes are located only when it
is read, so a checkpoint of 100,000 tensors on many ranks can be listed and planned from its metadata.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property, partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import Decoded, Stored, relayout
from ckpttools.array.tree import Leaf, Metadata, Tree
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.memory_limit import check_memory
from ckpttools.core.region import Region, Shape
from ckpttools.formats.base import NOT_A_DIRECTORY, ReadOptions
from ckpttools.formats.json_file import DEEPEST
from ckpttools.formats.pieced import Piece, assemble_boxes
from ckpttools.formats.read_only import ReadOnlyFormat, left_out
from ckpttools.formats.safetensors.header import parse_header
from ckpttools.formats.sidecar_files import sidecar_config
from ckpttools.formats.torch import archive
from ckpttools.formats.torch.pickled import Record, is_of_training
from ckpttools.formats.torch.replica_check import ProcessFile, refuse_copies
from ckpttools.formats.torch.state import state_of
from ckpttools.formats.torch.tensors import (
    NotReadableError,
    StorageRange,
    dtype_named,
    lazy_tensor,
    torch_lengths,
)
from ckpttools.formats.torch.unpickling import unpickle
from ckpttools.stores.base import File
from ckpttools.stores.checksums import ChecksummedRange
from ckpttools.stores.location import Location, suppress_file_errors

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

    from ckpttools.array.scratch import Scratch


METADATA, SUFFIX = ".metadata", ".distcp"
# Objects other than tensors are read when the checkpoint is opened, up to this many bytes.
_LARGEST_OBJECT = 64 << 20
# Number of files to compare: opening a file in a bucket takes as long as a small read.
_MAX_COMPARED = 64
# Number of tensors to compare in each file.
_TENSORS = 3
_HINT = "copy the checkpoint again, with the files of all processes"


@dataclass(frozen=True)
class DistributedFormat(ReadOnlyFormat):
    """The `torch-distributed` format; implements `ckpttools.formats.base.Format`."""

    name: str = "torch-distributed"
    fault_summary: str = "PyTorch distributed checkpoints that are damaged or lack files of a process"

    def mismatch_reason(self, path: Location) -> str | None:
        if not path.is_dir():
            return NOT_A_DIRECTORY
        if (path / METADATA).is_file():
            return None
        if any(path.glob(f"*{SUFFIX}")):
            return f"{SUFFIX} files without {METADATA}, which is written last: the save is unfinished"
        return f"no {METADATA} in it"

    def open(self, path: Location, options: ReadOptions) -> Tree:
        return _open(path, options)

    def checksums(self, path: Location, options: ReadOptions) -> Iterable[ChecksummedRange]:
        """See `ckpttools.formats.base.SupportsChecksums.checksums`."""
        entries = _list_entries(path, options)
        files = _files(path, entries)
        for (name, _), entry in entries.entries.items():
            with suppress_file_errors(path):
                yield from checksums_of(files[entry.file], entry.offset, entry.nbytes, name)


@dataclass(frozen=True, slots=True)
class _DcpItem:
    """The entry of a part of a tensor, or of an object, in a file.

    Attributes:
        file: Name of the file.
        offset, nbytes: Byte range of the entry.
    """

    file: str
    offset: int
    nbytes: int


@dataclass
class _DcpEntries:
    """The parsed metadata of a checkpoint.

    Attributes:
        arrays: Name -> shape, dtype and the saved boxes.
        objects: Names of objects that are not tensors.
        entries: Location of each box by name; objects have no box.
        paths: Name -> path in the saved tree.
        faults: Parts of the metadata that cannot be interpreted, one line each.
    """

    arrays: dict[str, tuple[Shape, Any, list[Region]]] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    entries: dict[tuple[str, Shape | None], _DcpItem] = field(default_factory=dict)
    paths: dict[str, TreePath] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def _open(path: Location, options: ReadOptions) -> Tree:
    entries = _list_entries(path, options)
    files = _files(path, entries)
    problems = [*entries.faults, *_missing_parts(entries), *_colliding_names(entries)]
    leaves: dict[TreePath, Leaf] = {}
    for name, (shape, dtype, boxes) in entries.arrays.items():
        result = [(box, entries.entries.get((name, box.start))) for box in boxes]
        pieces = [_piece(box, dtype, entry, files) for box, entry in result if entry is not None]
        if len(pieces) == len(boxes):
            try:
                leaves[entries.paths.get(name, (name,))] = assemble_boxes(shape, dtype, pieces)
            except ValueError as error:
                problems.append(f"{name}: {error}")
    if problems:
        raise FormatError(
            "the metadata do not locate all parts of the checkpoint:" + listing(problems),
            location=path / METADATA,
            expected="complete parts of each tensor, each in a file",
            hint=_HINT,
        )
    refuse_copies(_side_by_side(entries, files), path, _HINT)
    scalars, others = _objects(path, entries, files, leaves)
    return Tree(
        leaves,
        Metadata(
            FORMAT.name,
            config=sidecar_config(path),
            scalars=scalars,
            location=str(path),
            notes=left_out(others),
        ),
    )


def _piece(box: Region, dtype: Any, entry: _DcpItem, files: Mapping[str, File]) -> Piece:
    saved = SavedTensor(files[entry.file], entry.offset, entry.nbytes, box.shape, dtype)
    return Piece(box, Decoded(box.shape, dtype, saved))


def _side_by_side(listed: _DcpEntries, files: Mapping[str, File]) -> dict[str, ProcessFile]:
    """Return the parts of a few large tensors in several files, which must have different parts."""
    result: dict[str, dict[str, LazyArray]] = {name: {} for name in islice(files, _MAX_COMPARED)}
    for name in _sort_by_shape(listed):
        _, dtype, boxes = listed.arrays[name]
        entries = {(entry := listed.entries[name, box.start]).file: (box, entry) for box in boxes if box.size}
        for file, (box, entry) in entries.items() if len(entries) > 1 else ():
            if file in result and len(result[file]) < _TENSORS:
                result[file][name] = _piece(box, dtype, entry, files).array
        if all(len(item) == _TENSORS for item in result.values()):
            break
    return {
        file: ProcessFile(parts, files[file], partial(_spans, listed, file))
        for file, parts in result.items()
        if parts
    }


def _spans(entries: _DcpEntries, file: str) -> set[tuple[int, int]]:
    return {(entry.offset, entry.nbytes) for entry in entries.entries.values() if entry.file == file}


def _sort_by_shape(entries: _DcpEntries) -> list[str]:
    """Return the names of the tensors: the largest of each shape first, then the others."""
    nth: Counter[Shape] = Counter()
    locations: dict[str, int] = {}
    for name, (shape, _, _) in sorted(entries.arrays.items(), key=lambda array: -prod(array[1][0])):
        locations[name] = nth[shape]
        nth[shape] += 1
    return sorted(locations, key=locations.__getitem__)


def _list_entries(path: Location, options: ReadOptions) -> _DcpEntries:
    """Parse `.metadata`."""
    location = path / METADATA
    with location.open() as file:
        if file.size > options.max_header_bytes:
            raise FormatError(
                "the metadata are larger than torch ever writes",
                location=location,
                got=f"{file.size:,} bytes",
            )
        check_memory(0, 12 * file.size, location)
        data = file.read(0, file.size)
    content = unpickle(data, is_of_training, str(location))
    state = content.attribute("state_dict_metadata") if isinstance(content, Record) else None
    where = content.attribute("storage_data") if isinstance(content, Record) else None
    if not isinstance(state, dict) or not isinstance(where, dict):
        raise FormatError(
            "this is not the metadata of a PyTorch distributed checkpoint", location=location, hint=_HINT
        )
    entries = _DcpEntries()
    for name, item in state.items():
        if type(name) is not str:
            entries.faults.append(f"a {type(name).__name__} used as a name")
            continue
        _list(entries, name, item)
    for index, info in where.items():
        _locate(entries, index, info)
    plan = content.attribute("planner_data")
    for name, keys in plan.items() if isinstance(plan, dict) else ():
        if isinstance(keys, tuple) and 0 < len(keys) < DEEPEST and {*map(type, keys)} <= {str, int}:
            entries.paths[name] = keys
    return entries


def _list(entries: _DcpEntries, name: str, value: Any) -> None:
    if isinstance(value, Record) and value.name == "BytesStorageMetadata":
        entries.objects.append(name)
        return
    properties = value.attribute("properties") if isinstance(value, Record) else None
    state = properties.state if isinstance(properties, Record) else None
    dtype = dtype_named(state[0] if isinstance(state, tuple) and state else None)
    shape = torch_lengths(value.attribute("size")) if isinstance(value, Record) else None
    chunks = value.attribute("chunks") if isinstance(value, Record) else None
    boxes = [_box(chunk) for chunk in chunks] if isinstance(chunks, list) else []
    known = [box for box in boxes if box is not None and shape is not None and box.rank == len(shape)]
    if dtype is None or shape is None or len(known) < len(boxes):
        entries.faults.append(f"{name}: unknown kind or dtype")
    else:
        entries.arrays[name] = shape, dtype, known


def _box(value: Any) -> Region | None:
    if not isinstance(value, Record):
        return None
    start, lengths = torch_lengths(value.attribute("offsets")), torch_lengths(value.attribute("sizes"))
    if start is None or lengths is None or len(start) != len(lengths):
        return None
    return Region(start, tuple(a + n for a, n in zip(start, lengths, strict=True)))


def _locate(entries: _DcpEntries, index: Any, info: Any) -> None:
    if not (isinstance(index, Record) and isinstance(info, Record)):
        entries.faults.append("an entry without name and location")
        return
    name, offset = index.attribute("fqn"), torch_lengths(index.attribute("offset"))
    file, at, nbytes = (info.attribute(item) for item in ("relative_path", "offset", "length"))
    if type(name) is not str:
        entries.faults.append(f"an entry whose name is a {type(name).__name__}")
    elif info.attribute("transform_descriptors"):
        entries.faults.append(f"{name}: stored with transform_descriptors, which are not supported")
    elif type(file) is str and type(at) is int and type(nbytes) is int and at >= 0 and nbytes >= 0:
        entries.entries[name, offset] = _DcpItem(file, at, nbytes)
    else:
        entries.faults.append(f"{name}: its location is damaged")


def _missing_parts(entries: _DcpEntries) -> Iterator[str]:
    for name, (_, _, boxes) in entries.arrays.items():
        missing = [box for box in boxes if (name, box.start) not in entries.entries]
        if missing:
            yield f"{name}: no file for the part from {list(missing[0].start)} to {list(missing[0].stop)}"
    yield from (f"{name}: no file" for name in entries.objects if (name, None) not in entries.entries)


def _colliding_names(entries: _DcpEntries) -> Iterator[str]:
    """Yield names that the metadata map to the same path of the saved tree, so that one would be lost."""
    first: dict[TreePath, str] = {}
    for name in (*entries.arrays, *entries.objects):
        other = first.setdefault(entries.paths.get(name, (name,)), name)
        if other != name:
            yield f"{other} and {name}: both have the same path in the saved tree"


def _files(path: Location, entries: _DcpEntries) -> dict[str, File]:
    """Open the files of all entries, checking that each is long enough."""
    ends: dict[str, int] = defaultdict(int)
    for entry in entries.entries.values():
        ends[entry.file] = max(ends[entry.file], entry.offset + entry.nbytes)
    there = {item.name: item for item in path.entries() if not item.is_dir}
    missing = [name for name in ends if name not in there]
    files = {name: (path / name).open() for name in ends if name in there}
    sizes = {name: file.size for name, file in files.items()}
    short = [f"{name}: {size:,} bytes of {ends[name]:,}" for name, size in sizes.items() if size < ends[name]]
    for file in files.values():
        file.close()
    if missing or short:
        raise FormatError(
            f"files of some processes are missing or truncated:{listing([*sorted(missing), *short])}",
            location=path,
            expected=f"the {len(ends)} files that {METADATA} names",
            hint=_HINT,
        )
    return files


def _objects(
    path: Location, entries: _DcpEntries, files: Mapping[str, File], leaves: dict[TreePath, Leaf]
) -> tuple[frozenset[TreePath], dict[TreePath, str]]:
    """Add numbers and texts to the leaves; return the paths of numbers, and the other objects."""
    scalars: set[TreePath] = set()
    others: dict[TreePath, str] = {}
    for name in entries.objects:
        at, entry = entries.paths.get(name, (name,)), entries.entries[name, None]
        if entry.nbytes > _LARGEST_OBJECT:
            others[at] = f"an object of {entry.nbytes:,} bytes"
            continue
        file = files[entry.file]
        value, storages = saved_value(FilePart(file, entry.offset, entry.nbytes), file, entry.offset)
        state = state_of(value, entry.nbytes, partial(_tensor, storages=storages), f"{path}: {name}")
        leaves |= {(*at, *inner): leaf for inner, leaf in state.leaves.items()}
        scalars |= {(*at, *inner) for inner in state.scalars}
        others |= {(*at, *inner): kind for inner, kind in state.others.items()}
    return frozenset(scalars), others


def _tensor(record: Record, storages: Any) -> LazyArray:
    return lazy_tensor(record, storages)


# torch writes about a kilobyte in addition to the tensor.
_MAX_PICKLE = 1 << 20

# Opening an archive takes about 15 reads, so small archives are first read completely.
_SMALL = 32 << 10


class FilePart(File):
    """A byte range of a file that can be read like a file."""

    __slots__ = ("_held", "_offset", "_whole", "path", "size", "version")

    def __init__(self, source: ByteSource, offset: int, size: int) -> None:
        self._whole, self._offset, self._held = source, offset, b""
        self.path, self.size, self.version = source.path, size, source.version

    def read_into(self, offset: int, out: Buffer) -> None:
        view = memoryview(out).cast("B")
        if self.size > _SMALL or offset + len(view) > self.size:
            self._whole.read_into(self._offset + offset, out)
            return
        if not self._held:
            buffer = bytearray(self.size)
            self._whole.read_into(self._offset, buffer)
            self._held = bytes(buffer)
        view[:] = self._held[offset : offset + len(view)]


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A separately saved tensor, decoded by `ckpttools.array.stored.Decoded`.

    Attributes:
        source: The file.
        offset, nbytes: Byte range in the file.
        shape, dtype: Shape and dtype of the tensor according to the checkpoint's metadata.
    """

    source: ByteSource
    offset: int
    nbytes: int
    shape: Shape
    dtype: DType

    @property
    def code(self) -> str:
        return f"{self.nbytes} bytes of torch.save: {self.dtype}{list(self.shape)}"

    @property
    def _location(self) -> str:
        return f"{self.source.path}, byte {self.offset:,}"

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory for any order of axes, because torch keeps a tensor's order in memory."""
        stored = Stored(self.shape, self.dtype, self.source, 0)
        rank = len(self.shape)
        if rank < 2:
            return stored.scratch_bytes
        reordered = relayout(stored, [(n,) for n in self.shape], range(rank)[::-1], [1] * rank)
        return reordered.scratch_bytes

    def fetched(self, region: Region) -> int:
        return region.size * self.dtype.itemsize

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        self._array.read_into(region, out, scratch)

    @cached_property
    def _array(self) -> LazyArray:
        """The tensor as stored in the file.

        Raises:
            FormatError: The file contains another tensor, or none.
        """
        result = self._found()
        if (result.shape, result.dtype) != (self.shape, self.dtype):
            raise FormatError(
                "a tensor does not match the checkpoint's metadata",
                location=self._location,
                got=f"{result.dtype}{list(result.shape)}",
                expected=f"{self.dtype}{list(self.shape)}",
                hint="the files are from another save: fetch the checkpoint again",
            )
        if result.scratch_bytes > self.scratch_bytes:
            raise FormatError(
                "the elements of a tensor are not contiguous, as torch always saves them here",
                location=self._location,
                hint="save each tensor again as tensor.contiguous()",
            )
        return result

    def _found(self) -> LazyArray:
        part = FilePart(self.source, self.offset, self.nbytes)
        if part.read(0, min(4, part.size)) != archive.MAGIC:
            return self._load_safetensors(part)
        value, storages = saved_value(part, self.source, self.offset)
        try:
            if isinstance(value, Record):
                return lazy_tensor(value, storages)
            reason = "not a tensor"
        except NotReadableError as error:
            reason = str(error)
        raise FormatError(f"a tensor cannot be read: {reason}", location=self._location)

    def _load_safetensors(self, part: FilePart) -> LazyArray:
        """Return the tensor of a safetensors entry (torch's `SerializationFormat.SAFETENSORS`)."""
        header = parse_header(part)
        if len(header.entries) != 1:
            raise FormatError("not exactly one tensor", location=self._location)
        (entry,) = header.entries
        start = self.offset + header.data_start + entry.begin
        return Stored(entry.shape, entry.dtype, self.source, start)


def saved_value(part: FilePart, source: ByteSource, offset: int) -> tuple[object, dict[str, StorageRange]]:
    """Return the value of an embedded torch.save file, and the ranges of its storages.

    Args:
        part: The embedded file.
        source, offset: The surrounding file, and the offset of the embedded file.

    Raises:
        FormatError: The embedded file is damaged, or has objects that weights do not have.
    """
    result = archive.open_archive(part, _MAX_PICKLE)
    storages = {}
    for name in result.storages:
        start, nbytes = result.range_of(name)
        storages[name] = StorageRange(source, offset + start, nbytes)
    return unpickle(result.pickled, is_of_training, f"{source.path}, byte {offset:,}"), storages


def checksums_of(source: File, offset: int, nbytes: int, name: str) -> Iterator[ChecksummedRange]:
    """Yield the storages with a checksum in an embedded torch.save file; files of other kinds have none.

    Args:
        source, offset, nbytes: The surrounding file, and the byte range of the embedded file.
        name: Name of the saved object.

    Raises:
        FormatError: As for `saved_value`.
    """
    part = FilePart(source, offset, nbytes)
    if part.read(0, min(4, part.size)) == archive.MAGIC:
        for checksum in archive.open_archive(part, _MAX_PICKLE).checksums():
            yield replace(checksum, file=source, name=name, offset=offset + checksum.offset)


FORMAT = DistributedFormat()
