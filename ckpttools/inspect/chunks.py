"""What the files of a checkpoint hold, how arrays are chunked and encoded, and what loading would read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import prod
from operator import attrgetter

from ckpttools.array.storage import Storage, StoredArray, StoredFile
from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import listing
from ckpttools.inspect.filtering import filtered
from ckpttools.inspect.meshes import PartitionSpec, Specs
from ckpttools.inspect.reads import PredictedReads, predict, together
from ckpttools.maxtext.view import view_of
from ckpttools.sharding.mesh import MeshShape
from ckpttools.sharding.predict import ProcessLoading


@dataclass(frozen=True, slots=True)
class FileChunks:
    """One file; fields as those of `ckpttools.array.storage.StoredFile`."""

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
        reads: what devices must read; None without a mesh.
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
    """What one device and all of them read, over all arrays of the report.

    Attributes:
        mesh: axis name -> devices.
        spec: as the user wrote it.
        reads, needed, fetched: of the device that has most; numbers of reads, and bytes.
        total_needed, total_fetched, over_read: as in `ckpttools.inspect.reads.PredictedReads`.
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
        text: what it costs.
        command: what would change it; None if nothing need be done.
    """

    subject: str
    paths: tuple[str, ...]
    text: str
    command: str | None


@dataclass(frozen=True, slots=True, repr=False)
class ChunksReport:
    """A checkpoint on disk.

    Attributes:
        path: what was opened, down to the item.
        format: name of the format.
        indexes: OCDBT manifests in use; several if the processes of a save were not merged.
        num_arrays, num_chunks, missing_chunks, nbytes, stored_nbytes: of `arrays`.
        dead_nbytes: of all files.
        loading: for the mesh that was given.
        processes: the same for processes that load together with `ckpttools.load`, where that was asked for.
        arrays: those that match the pattern.
        files: all of them.
        advice: what could be better, the costliest first.
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
        """Sizes and numbers, and what could be better."""
        held = f"{self.num_arrays:,} arrays, {self.num_chunks:,} chunks, {len(self.files):,} files"
        lines = [each.subject for each in self.advice]
        return f"<ChunksReport of {self.path}: {held}, {self.stored_nbytes:,} bytes{listing(lines)}>"


def inspect_chunks(
    tree: Tree,
    storage: Storage,
    pattern: str = "*",
    mesh: MeshShape | None = None,
    spec: Specs | None = None,
) -> ChunksReport:
    """Describes how a tree is stored.

    Args:
        tree: the checkpoint.
        storage: its files, as its format describes them.
        pattern: shell pattern of the paths to report.
        mesh, spec: devices that would load it, and how they share each array; both or neither.

    Raises:
        UsageError: there are arrays, and none matches the pattern.
    """
    arrays = tuple(
        _array(each, mesh, None if spec is None else spec.of(each.path), layer_axis(tree, each.path))
        for each in filtered(storage.arrays, attrgetter("path"), pattern)
    )
    return ChunksReport(
        path=tree.metadata.place,
        format=tree.metadata.format,
        indexes=storage.indexes,
        num_arrays=len(arrays),
        num_chunks=sum(each.num_chunks for each in arrays),
        missing_chunks=sum(each.missing_chunks for each in arrays),
        nbytes=sum(each.nbytes for each in arrays),
        stored_nbytes=sum(each.stored_nbytes for each in arrays),
        dead_nbytes=sum(each.dead for each in storage.files),
        loading=_loading(arrays, mesh, spec),
        arrays=arrays,
        files=tuple(map(_file, storage.files)),
    )


def layer_axis(tree: Tree, path: str) -> int | None:
    """The axis of an array on which its layers are stacked; None where they are not."""
    return view_of(tree).scan_axis if _is_stacked(path) else None


def _is_stacked(path: str) -> bool:
    """Whether an array is below a key that stands for all layers of a group: `layers`, not `layers_3`."""
    ends = {key.rpartition("_")[2] for key in path.split("/") if "layers" in key}
    return any(not end.isdigit() and end != "remainder" for end in ends)


def _file(file: StoredFile) -> FileChunks:
    return FileChunks(*(getattr(file, each.name) for each in fields(FileChunks)))


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
    reads = [each.reads for each in arrays if each.reads is not None]
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
        cuts_nothing=meant and not any(each.uneven or prod(each.cut) > 1 for each in reads),
    )
