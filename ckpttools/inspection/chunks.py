"""The files of a checkpoint, the chunks and codecs of its arrays, and the reads of loading it.

mesh   8                     one axis, named 0
       4x2                   two axes, named 0 and 1
       data=4,fsdp=2         two axes with names
spec   axis0                 the array's first axis over the whole mesh; axis-1 is the last
       axis0=0,axis1=1       the first axis over the mesh axis 0, the second over 1
       layer                 the axis on which layers are stacked, over the whole mesh
       replicated            all of every array on every device
       P('fsdp', None)       as in JAX; quotes may be omitted, and P(('data', 'fsdp')) joins axes
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from operator import attrgetter

from ckpttools.array.patterns import filter_items
from ckpttools.array.storage import Storage, StoredArray, StoredFile
from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError, listing
from ckpttools.core.region import Region, Shape, ceil_div, count_runs
from ckpttools.core.tabular import Tabular
from ckpttools.maxtext.view import view_of
from ckpttools.sharding.load_prediction import ProcessLoading
from ckpttools.sharding.mesh import MeshShape, Spec, shard_counts, spec_text
from ckpttools.sharding.mesh import parse_spec as parse_call


@dataclass(frozen=True, slots=True)
class FileChunks:
    """A file; see `ckpttools.array.storage.StoredFile` for the fields."""

    name: str
    kind: str
    nbytes: int
    referenced_nbytes: int
    index_nbytes: int
    unreferenced_nbytes: int
    arrays: int
    chunks: int
    links: int
    missing_nbytes: int


@dataclass(frozen=True, slots=True)
class ArrayChunks:
    """An array.

    Attributes:
        path, shape, dtype: Path, shape and dtype of the array.
        nbytes: Size in memory, in bytes.
        stored_nbytes: Size on disk, in bytes.
        ratio: `nbytes / stored_nbytes`; None if nothing is stored.
        chunk_shape: Shape of a chunk; the array's shape if it is not divided.
        min_read_shape: Shape of the smallest part that can be fetched: a chunk, or an inner chunk of a shard;
            None if any range can be fetched.
        min_read_nbytes: Size of such a part in memory, in bytes.
        codecs: Codecs of these parts; empty for plain C order.
        is_compressed, is_transposed: Whether a codec compresses the data or changes the order of axes.
        num_chunks, missing_chunks: Number of chunks in the grid, and of those that are not stored.
        reads: Reads by devices; None without a mesh.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    stored_nbytes: int
    ratio: float | None
    chunk_shape: tuple[int, ...]
    min_read_shape: tuple[int, ...] | None
    min_read_nbytes: int
    codecs: tuple[str, ...]
    is_compressed: bool
    is_transposed: bool
    num_chunks: int
    missing_chunks: int
    reads: PredictedReads | None = None


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The reads of one device and of all devices, over all arrays of the report.

    Attributes:
        mesh: Number of devices along each mesh axis.
        spec: The spec as the user wrote it.
        reads, needed, fetched: Reads, needed bytes and fetched bytes of the device with the most of each.
        total_needed, total_fetched, over_read: See `ckpttools.inspection.chunks.PredictedReads`.
        has_no_effect: Whether the spec partitions axes that no array has.
    """

    mesh: dict[str, int]
    spec: str
    reads: int
    needed: int
    fetched: int
    total_needed: int
    total_fetched: int
    over_read: float
    has_no_effect: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """A possible improvement.

    Attributes:
        subject: One or two words.
        paths: The affected arrays; empty if the advice is about all.
        text: The problem and its cost.
        command: Command that fixes the problem; None if no action is needed.
    """

    subject: str
    paths: tuple[str, ...]
    text: str
    command: str | None


@dataclass(frozen=True, slots=True, repr=False)
class ChunksReport(Tabular):
    """A checkpoint on disk.

    Attributes:
        path: Location of the opened item.
        format: Name of the format.
        indexes: Current OCDBT manifests; several if the processes of a save were not merged.
        num_arrays, num_chunks, missing_chunks, nbytes, stored_nbytes: Totals of `arrays`.
        unreferenced_nbytes: Unused bytes of all files.
        loading: Reads of the given mesh; None without a mesh.
        processes: Reads of processes that load together with `ckpttools.load`, if requested.
        arrays: Arrays that match the pattern.
        files: All files.
        advice: Possible improvements, costliest problem first.
    """

    path: str
    format: str | None
    indexes: tuple[str, ...]
    num_arrays: int
    num_chunks: int
    missing_chunks: int
    nbytes: int
    stored_nbytes: int
    unreferenced_nbytes: int
    loading: LoadCost | None
    arrays: tuple[ArrayChunks, ...]
    files: tuple[FileChunks, ...]
    advice: tuple[Advice, ...] = ()
    processes: ProcessLoading | None = None

    def __repr__(self) -> str:
        """Return sizes, counts and advice as text."""
        text = f"{self.num_arrays:,} arrays, {self.num_chunks:,} chunks, {len(self.files):,} files"
        lines = [item.subject for item in self.advice]
        return f"<ChunksReport of {self.path}: {text}, {self.stored_nbytes:,} bytes{listing(lines)}>"


def inspect_chunks(
    tree: Tree,
    storage: Storage,
    pattern: str = "*",
    mesh: MeshShape | None = None,
    spec: Specs | None = None,
) -> ChunksReport:
    """Describe how a tree is stored.

    Args:
        tree: The checkpoint.
        storage: The files, as described by the format.
        pattern: Shell pattern of the paths to report.
        mesh, spec: Devices that would load the checkpoint, and how they share each array; both or neither.

    Raises:
        UsageError: No array matches the pattern.
    """
    arrays = tuple(
        _array(item, mesh, None if spec is None else spec.of(item.path), layer_axis(tree, item.path))
        for item in filter_items(storage.arrays, attrgetter("path"), pattern)
    )
    return ChunksReport(
        path=tree.metadata.location,
        format=tree.metadata.format,
        indexes=storage.indexes,
        num_arrays=len(arrays),
        num_chunks=sum(array.num_chunks for array in arrays),
        missing_chunks=sum(array.missing_chunks for array in arrays),
        nbytes=sum(array.nbytes for array in arrays),
        stored_nbytes=sum(array.stored_nbytes for array in arrays),
        unreferenced_nbytes=sum(file.unreferenced_nbytes for file in storage.files),
        loading=_predict_load(arrays, mesh, spec),
        arrays=arrays,
        files=tuple(map(_file, storage.files)),
    )


def layer_axis(tree: Tree, path: str) -> int | None:
    """Return the axis on which an array's layers are stacked; None if they are not stacked."""
    return view_of(tree).scan_axis if _is_stacked(path) else None


def _is_stacked(path: str) -> bool:
    """Return whether an array is below a key for all layers of a group: `layers`, not `layers_3`."""
    ends = {key.rpartition("_")[2] for key in path.split("/") if "layers" in key}
    return any(not end.isdigit() and end != "remainder" for end in ends)


def _file(file: StoredFile) -> FileChunks:
    return FileChunks(*(getattr(file, field.name) for field in fields(FileChunks)))


def _array(
    array: StoredArray, mesh: MeshShape | None, spec: PartitionSpec | None, axis: int | None
) -> ArrayChunks:
    nbytes = prod(array.shape) * array.dtype.itemsize
    piece = array.shape if array.piece is None else array.piece
    return ArrayChunks(
        path=array.path,
        shape=array.shape,
        dtype=array.dtype.name,
        nbytes=nbytes,
        stored_nbytes=array.nbytes,
        ratio=nbytes / array.nbytes if array.nbytes else None,
        chunk_shape=array.chunk,
        min_read_shape=array.piece,
        min_read_nbytes=prod(piece) * array.dtype.itemsize,
        codecs=array.codecs,
        is_compressed=array.compressed,
        is_transposed=array.transposed,
        num_chunks=array.chunks,
        missing_chunks=array.missing,
        reads=predict(array, mesh, spec, axis) if mesh and spec else None,
    )


def _predict_load(
    arrays: Sequence[ArrayChunks], mesh: MeshShape | None, spec: Specs | None
) -> LoadCost | None:
    if mesh is None or spec is None:
        return None
    reads = [array.reads for array in arrays if array.reads is not None]
    total = total_reads(reads)
    has_spec = mesh.size > 1 and bool(spec.cuts and reads)
    return LoadCost(
        mesh=dict(mesh.axes),
        spec=spec.text,
        reads=total.reads,
        needed=total.needed,
        fetched=total.fetched,
        total_needed=total.total_needed,
        total_fetched=total.total_fetched,
        over_read=total.over_read,
        has_no_effect=has_spec
        and not any(read.is_uneven or prod(read.shards_per_axis) > 1 for read in reads),
    )


# Predict what devices must read to load their shards, from the chunk grid and without reading data.
#
# A piece, the smallest separately encoded unit (a chunk, or an inner chunk of a zarr shard), is read in full,
# as by tensorstore and Orbax: a device shard that needs a tenth of a chunk fetches and decodes all of it.
# Inner chunks also need the index of each zarr shard. Plain ranges, such as tensors of safetensors, are read
# in contiguous runs.


@dataclass(frozen=True, slots=True)
class PredictedReads:
    """Predicted reads of one or more arrays.

    Attributes:
        shards_per_axis: Number of parts along each axis of the array; all 1 if every device needs the full
            array.
        is_uneven: Whether an axis cannot be divided into equal shards, as JAX requires, and is therefore not
            partitioned.
        reads: Number of reads of the device that makes the most.
        needed: Bytes in memory of one device's shard.
        fetched: Bytes that the device with the most reads fetches from files.
        total_needed, total_fetched: Bytes in memory for all devices together, so that their quotient is the
            over-read.
    """

    shards_per_axis: Shape
    is_uneven: bool
    reads: int
    needed: int
    fetched: int
    total_needed: int
    total_fetched: int

    @property
    def over_read(self) -> float:
        """Bytes that are fetched and decoded per byte needed."""
        return self.total_fetched / self.total_needed if self.total_needed else 1.0


def predict(
    array: StoredArray, mesh: MeshShape, spec: PartitionSpec, layer_axis: int | None
) -> PredictedReads:
    """Predict the reads of loading one array.

    Args:
        array: The stored array.
        mesh, spec: How the devices share the array.
        layer_axis: Axis on which the array's layers are stacked; None if they are not stacked.
    """
    expected = spec.pieces(len(array.shape), layer_axis, mesh)
    cut = tuple(k if n % k == 0 else 1 for n, k in zip(array.shape, expected, strict=True))
    shard = tuple(n // k for n, k in zip(array.shape, cut, strict=True))
    needed = prod(shard) * array.dtype.itemsize
    if array.piece is None:
        region = Region((0,) * len(shard), shard)
        runs, total = count_runs(array.shape, region), needed * mesh.size
        fetched = array.nbytes * prod(shard) // max(1, prod(array.shape))
        return PredictedReads(cut, cut != expected, runs, needed, fetched, total, total)
    return _predict_by_pieces(array, array.piece, mesh.size, cut, expected, shard)


def _predict_by_pieces(
    array: StoredArray, piece: Shape, devices: int, cut: Shape, expected: Shape, shard: Shape
) -> PredictedReads:
    itemsize = array.dtype.itemsize
    piece_bytes = prod(piece) * itemsize
    axes = list(zip(shard, cut, piece, strict=True))
    cell_counts = [
        [_cells(k * length, (k + 1) * length, size) for k in range(count)] for length, count, size in axes
    ]
    limit, everywhere = prod(map(max, cell_counts)), prod(map(sum, cell_counts))
    in_all = prod(ceil_div(n, size) for n, size in zip(array.shape, piece, strict=True))
    # Size of a piece on disk, averaged over the stored pieces.
    present_chunks = max(1, in_all * (array.chunks - array.missing) // max(1, array.chunks))
    copies = devices // prod(cut)
    needed = prod(shard) * itemsize
    return PredictedReads(
        shards_per_axis=cut,
        is_uneven=cut != expected,
        reads=limit + _index_reads(array, piece, shard, cut),
        needed=needed,
        fetched=limit * array.nbytes // present_chunks,
        total_needed=needed * devices,
        total_fetched=everywhere * copies * piece_bytes,
    )


def _cells(start: int, stop: int, size: int) -> int:
    """Return the number of cells of a size that a range of an axis overlaps."""
    return ceil_div(stop, size) - start // size


def _index_reads(array: StoredArray, piece: Shape, shard: Shape, cut: Shape) -> int:
    """Return the number of shard indexes that a device reads; 0 if each shard is a single piece."""
    if piece == array.chunk:
        return 0
    axes = zip(shard, cut, array.chunk, strict=True)
    return prod(max(_cells(k * n, (k + 1) * n, size) for k in range(count)) for n, count, size in axes)


def total_reads(parts: Sequence[PredictedReads]) -> PredictedReads:
    """Return the totals of several arrays; `cut` is empty, because each array has its own."""
    return PredictedReads(
        (),
        any(part.is_uneven for part in parts),
        *(sum(getattr(part, name) for part in parts) for name in ("reads", "needed", "fetched")),
        *(sum(getattr(part, name) for part in parts) for name in ("total_needed", "total_fetched")),
    )


_SPEC = "axis0, axis-1, layer, replicated, axis0=0,axis1=1 or P('fsdp', None)"


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """The mesh axes that partition each axis of an array.

    Attributes:
        text: The spec as the user wrote it.
        parts: Pairs of array axis and mesh axes. Negative array axes count from the end; None is the axis of
            layers.
        most_axes: Maximum number of axes; other arrays, which have fewer axes, are not partitioned.
    """

    text: str
    parts: tuple[tuple[int | None, tuple[str, ...]], ...]
    most_axes: int = 0

    @property
    def cuts(self) -> bool:
        """Whether the spec divides any axis."""
        return bool(self.parts)

    def of(self, path: str) -> PartitionSpec:
        """Return the spec of one array, which is the same for all arrays."""
        return self

    def entries(self, rank: int, layer_axis: int | None) -> Spec:
        """Return the spec in JAX's form, for an array of this rank."""
        result: list[tuple[str, ...]] = [()] * rank
        if rank >= self.most_axes:
            for axis, names in self.parts:
                location = layer_axis if axis is None else axis
                if location is not None and -rank <= location < rank:
                    result[location] += names
        return tuple(result)

    def pieces(self, rank: int, layer_axis: int | None, mesh: MeshShape) -> tuple[int, ...]:
        """Return the number of shards along each axis of an array."""
        return shard_counts(rank, self.entries(rank, layer_axis), mesh)


@dataclass(frozen=True, slots=True)
class PathSpecs:
    """A partition spec for each array, from rules.

    Attributes:
        text: The rules as the user wrote them.
        specs: Spec of each array by path.
    """

    text: str
    specs: Mapping[str, Spec]

    @property
    def cuts(self) -> bool:
        """Whether a spec divides any axis of any array."""
        return any(map(any, self.specs.values()))

    def of(self, path: str) -> PartitionSpec:
        """Return the spec of one array."""
        spec = self.specs.get(path, ())
        parts = tuple((axis, names) for axis, names in enumerate(spec) if names)
        return PartitionSpec(spec_text(spec), parts, len(spec))


Specs = PartitionSpec | PathSpecs


def parse_spec(text: str, mesh: MeshShape) -> PartitionSpec:
    """Parse a partition spec over the axes of a mesh.

    Raises:
        UsageError: The text is not a spec, names an axis twice, or names an axis that the mesh lacks.
    """
    stripped = text.strip()
    if stripped == "replicated":
        return PartitionSpec(text, ())
    if stripped.startswith(("P(", "PartitionSpec(")):
        parts = _parse_axes(stripped, text)
        spec = PartitionSpec(
            text, tuple((axis, names) for axis, names in enumerate(parts) if names), len(parts)
        )
    else:
        spec = PartitionSpec(text, tuple(_part(word, mesh, text) for word in stripped.split(",")))
    _check(spec, mesh)
    return spec


def _part(word: str, mesh: MeshShape, text: str) -> tuple[int | None, tuple[str, ...]]:
    left, equals, right = (item.strip() for item in word.partition("="))
    match = re.fullmatch(r"axis(-?[0-9]{1,2})", left)
    if match is None and left != "layer":
        raise UsageError(f"{text!r} is not a partition spec", got=left, expected=_SPEC)
    return int(match[1]) if match else None, tuple(right.split("+")) if equals else tuple(mesh.axes)


def _parse_axes(call: str, text: str) -> Sequence[tuple[str, ...]]:
    try:
        return parse_call(call)
    except UsageError as error:
        if error.raw.expected is None:
            raise
        raise UsageError(f"{text!r} is not a partition spec", expected=_SPEC) from None


def _check(spec: PartitionSpec, mesh: MeshShape) -> None:
    used: Sequence[str] = [name for _, names in spec.parts for name in names]
    unknown = [name for name in used if name not in mesh.axes]
    if unknown:
        axes = ", ".join(mesh.axes)
        raise UsageError(f"the mesh has no axis {unknown[0]!r}", got=spec.text, expected=f"one of {axes}")
    if len(set(used)) != len(used):
        raise UsageError("a mesh axis can shard only one axis of an array", got=spec.text)
