"""The files of a checkpoint, the chunks and codecs of arrays, and the reads of loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import prod
from operator import attrgetter

from ckpttools.array.storage import Storage, StoredArray, StoredFile
from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import listing
from ckpttools.core.region import Region, Shape, ceil_div, count_runs
from ckpttools.inspection.filtering import filtered
from ckpttools.inspection.meshes import PartitionSpec, Specs
from ckpttools.maxtext.view import view_of
from ckpttools.sharding.load_prediction import ProcessLoading
from ckpttools.sharding.mesh import MeshShape


@dataclass(frozen=True, slots=True)
class FileChunks:
    """One file; see `ckpttools.array.storage.StoredFile` for the fields."""

    name: str
    kind: str
    nbytes: int
    live: int
    index: int
    dead: int
    arrays: int
    chunks: int
    links: int
    lost: int


@dataclass(frozen=True, slots=True)
class ArrayChunks:
    """One array.

    Attributes:
        path, shape, dtype: of the array.
        nbytes: in memory.
        stored_nbytes: on disk.
        ratio: nbytes / stored_nbytes; None if nothing is stored.
        chunk_shape: cells of the grid; the array's shape if it is not divided.
        piece_shape: the smallest part that can be fetched: a chunk, or an inner chunk of a shard; None if any
            range can be.
        piece_nbytes: bytes of such a part in memory.
        codecs: how these parts are encoded; empty for plain C order.
        compressed, transposed: whether a codec compresses the data, or changes the order of axes.
        num_chunks, missing_chunks: cells of the grid, and those that are not stored.
        reads: reads by devices; None without a mesh.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    stored_nbytes: int
    ratio: float | None
    chunk_shape: tuple[int, ...]
    piece_shape: tuple[int, ...] | None
    piece_nbytes: int
    codecs: tuple[str, ...]
    compressed: bool
    transposed: bool
    num_chunks: int
    missing_chunks: int
    reads: PredictedReads | None = None


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The reads of one device and of all devices, over all arrays of the report.

    Attributes:
        mesh: axis name -> devices.
        spec: as the user wrote it.
        reads, needed, fetched: of the device that has most; numbers of reads, and bytes.
        total_needed, total_fetched, over_read: as in `ckpttools.inspection.chunks.PredictedReads`.
        cuts_nothing: the spec partitions axes, and no array has such an axis.
    """

    mesh: dict[str, int]
    spec: str
    reads: int
    needed: int
    fetched: int
    total_needed: int
    total_fetched: int
    over_read: float
    cuts_nothing: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that could be better.

    Attributes:
        subject: a word or two.
        paths: the arrays in question; empty if it is about all.
        text: the problem and its cost.
        command: command that fixes it; None if no action is needed.
    """

    subject: str
    paths: tuple[str, ...]
    text: str
    command: str | None


@dataclass(frozen=True, slots=True, repr=False)
class ChunksReport:
    """A checkpoint on disk.

    Attributes:
        path: location of the opened item.
        format: name of the format.
        indexes: OCDBT manifests in use; several if the processes of a save were not merged.
        num_arrays, num_chunks, missing_chunks, nbytes, stored_nbytes: of `arrays`.
        dead_nbytes: of all files.
        loading: for the mesh that was given.
        processes: the same for processes that load together with `ckpttools.load`, if requested.
        arrays: those that match the pattern.
        files: all of them.
        advice: possible improvements, most expensive problem first.
    """

    path: str
    format: str | None
    indexes: tuple[str, ...]
    num_arrays: int
    num_chunks: int
    missing_chunks: int
    nbytes: int
    stored_nbytes: int
    dead_nbytes: int
    loading: LoadCost | None
    arrays: tuple[ArrayChunks, ...]
    files: tuple[FileChunks, ...]
    advice: tuple[Advice, ...] = ()
    processes: ProcessLoading | None = None

    def __repr__(self) -> str:
        """Format sizes, counts and advice."""
        held = f"{self.num_arrays:,} arrays, {self.num_chunks:,} chunks, {len(self.files):,} files"
        lines = [item.subject for item in self.advice]
        return f"<ChunksReport of {self.path}: {held}, {self.stored_nbytes:,} bytes{listing(lines)}>"


def inspect_chunks(
    tree: Tree,
    storage: Storage,
    pattern: str = "*",
    mesh: MeshShape | None = None,
    spec: Specs | None = None,
) -> ChunksReport:
    """Describe how a tree is stored.

    Args:
        tree: the checkpoint.
        storage: its files, as its format describes them.
        pattern: shell pattern of the paths to report.
        mesh, spec: devices that would load it, and how they share each array; both or neither.

    Raises:
        UsageError: there are arrays, and none matches the pattern.
    """
    arrays = tuple(
        _array(item, mesh, None if spec is None else spec.of(item.path), layer_axis(tree, item.path))
        for item in filtered(storage.arrays, attrgetter("path"), pattern)
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
        dead_nbytes=sum(file.dead for file in storage.files),
        loading=_loading(arrays, mesh, spec),
        arrays=arrays,
        files=tuple(map(_file, storage.files)),
    )


def layer_axis(tree: Tree, path: str) -> int | None:
    """Return the axis of an array on which its layers are stacked; None where they are not."""
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
        piece_shape=array.piece,
        piece_nbytes=prod(piece) * array.dtype.itemsize,
        codecs=array.codecs,
        compressed=array.compressed,
        transposed=array.transposed,
        num_chunks=array.chunks,
        missing_chunks=array.missing,
        reads=predict(array, mesh, spec, axis) if mesh and spec else None,
    )


def _loading(arrays: Sequence[ArrayChunks], mesh: MeshShape | None, spec: Specs | None) -> LoadCost | None:
    if mesh is None or spec is None:
        return None
    reads = [array.reads for array in arrays if array.reads is not None]
    total = together(reads)
    meant = mesh.size > 1 and bool(spec.cuts and reads)
    return LoadCost(
        mesh=dict(mesh.axes),
        spec=spec.text,
        reads=total.reads,
        needed=total.needed,
        fetched=total.fetched,
        total_needed=total.total_needed,
        total_fetched=total.total_fetched,
        over_read=total.over_read,
        cuts_nothing=meant and not any(read.uneven or prod(read.cut) > 1 for read in reads),
    )


# What devices must read to load their shards: predicted from the chunk grid, nothing is read for it.
#
# A piece, the smallest separately encoded unit (a chunk, or an inner chunk of a zarr shard), is read whole,
# as tensorstore and Orbax do: a device shard that needs a tenth of a chunk fetches and decodes all of it.
# Inner chunks also need the index of each zarr shard. Plain ranges, such as tensors of safetensors, are read
# by contiguous runs.


@dataclass(frozen=True, slots=True)
class PredictedReads:
    """Predicted reads of one array, or of several together.

    Attributes:
        cut: devices along each axis of the array; all 1 if every device needs all of it.
        uneven: an axis is not divisible into equal shards, as JAX requires, and is not partitioned.
        reads: of the device that has most.
        needed: bytes in memory of one device's shard.
        fetched: bytes read from files by the device that reads most.
        total_needed, total_fetched: for all devices together, in bytes in memory, so that their quotient is
            the over-read.
    """

    cut: Shape
    uneven: bool
    reads: int
    needed: int
    fetched: int
    total_needed: int
    total_fetched: int

    @property
    def over_read(self) -> float:
        """Bytes that are fetched and decoded for each byte that is needed."""
        return self.total_fetched / self.total_needed if self.total_needed else 1.0


def predict(
    array: StoredArray, mesh: MeshShape, spec: PartitionSpec, layer_axis: int | None
) -> PredictedReads:
    """Predict the reads of loading one array.

    Args:
        array: on disk.
        mesh, spec: how its readers share it.
        layer_axis: axis on which its layers are stacked; None if they are not.
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
    return _by_pieces(array, array.piece, mesh.size, cut, expected, shard)


def _by_pieces(
    array: StoredArray, piece: Shape, devices: int, cut: Shape, expected: Shape, shard: Shape
) -> PredictedReads:
    itemsize = array.dtype.itemsize
    piece_bytes = prod(piece) * itemsize
    axes = list(zip(shard, cut, piece, strict=True))
    met = [[_cells(k * length, (k + 1) * length, size) for k in range(count)] for length, count, size in axes]
    limit, everywhere = prod(map(max, met)), prod(map(sum, met))
    in_all = prod(ceil_div(n, size) for n, size in zip(array.shape, piece, strict=True))
    # The size of a piece on disk, averaged over those that are stored.
    there = max(1, in_all * (array.chunks - array.missing) // max(1, array.chunks))
    copies = devices // prod(cut)
    needed = prod(shard) * itemsize
    return PredictedReads(
        cut=cut,
        uneven=cut != expected,
        reads=limit + _index_reads(array, piece, shard, cut),
        needed=needed,
        fetched=limit * array.nbytes // there,
        total_needed=needed * devices,
        total_fetched=everywhere * copies * piece_bytes,
    )


def _cells(start: int, stop: int, size: int) -> int:
    """Return how many cells of a size a range of an axis overlaps."""
    return ceil_div(stop, size) - start // size


def _index_reads(array: StoredArray, piece: Shape, shard: Shape, cut: Shape) -> int:
    """Indexes of shards that a device reads; one piece alone in its shard is read together with it."""
    if piece == array.chunk:
        return 0
    axes = zip(shard, cut, array.chunk, strict=True)
    return prod(max(_cells(k * n, (k + 1) * n, size) for k in range(count)) for n, count, size in axes)


def together(parts: Sequence[PredictedReads]) -> PredictedReads:
    """Return the total of several arrays; `cut` is empty, since each has its own."""
    return PredictedReads(
        (),
        any(part.uneven for part in parts),
        *(sum(getattr(part, name) for part in parts) for name in ("reads", "needed", "fetched")),
        *(sum(getattr(part, name) for part in parts) for name in ("total_needed", "total_fetched")),
    )
