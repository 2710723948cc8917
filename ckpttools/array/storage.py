"""How a checkpoint is stored in files: plain facts from formats, for `ckpttools.inspection`."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Shape


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        name: Name relative to the checkpoint's root.
        kind: "data" contains bytes of arrays, "index" locates them, "unused" is a data file that is not
            referenced, "missing" is a file that the index names but that does not exist, "other" is any other
            file, such as metadata.
        nbytes: Size of the file.
        referenced_nbytes: Bytes that hold array data, each counted once.
        index_nbytes: Bytes that hold headers, documents or nodes of the index in use.
        arrays: Number of arrays with data in the file.
        chunks: Number of chunks, or complete tensors, in the file.
        links: Number of hard links; a file with more than one is shared.
        missing_nbytes: Bytes that the index expects but the file does not have.
    """

    name: str
    kind: str
    nbytes: int
    referenced_nbytes: int = 0
    index_nbytes: int = 0
    arrays: int = 0
    chunks: int = 0
    links: int = 1
    missing_nbytes: int = 0

    @property
    def unreferenced_nbytes(self) -> int:
        """Bytes that are not referenced: gaps, and data that later writes replaced."""
        return self.nbytes - self.referenced_nbytes - self.index_nbytes if self.kind != "other" else 0


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A stored array.

    Attributes:
        path: The keys joined by "/".
        shape, dtype: Shape and dtype of the array.
        chunk: Shape of a chunk.
        piece: Shape of the smallest unit that a reader fetches: an inner chunk if chunks are shards, else a
            chunk. None if any part can be fetched separately, as from a plain C-ordered range.
        codecs: The codecs that encode a piece, in order; empty for plain C order.
        chunks: Number of chunks in the grid.
        missing: Number of chunks that are not stored.
        nbytes: Total size of the stored chunks, in bytes.
        compressed, transposed: Whether a codec compresses the data, or reorders the axes.
    """

    path: str
    shape: Shape
    dtype: DType
    chunk: Shape
    piece: Shape | None
    codecs: tuple[str, ...]
    chunks: int
    missing: int
    nbytes: int
    compressed: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """The files and arrays of a checkpoint on disk.

    Attributes:
        root: Directory that file names are relative to.
        indexes: OCDBT manifests in use; there are several if the processes of a save were not merged.
        files: All files of the checkpoint below the root, by name.
        arrays: The arrays, in the checkpoint's order.
    """

    root: str
    indexes: tuple[str, ...]
    files: tuple[StoredFile, ...]
    arrays: tuple[StoredArray, ...]


# An array stored as one chunk is read at a third of the speed of an array in 16 chunks (1.6 GB of bfloat16 to
# 8 devices), and every host holds all of it to read its part. Below this size, neither matters.
GIANT = 256 << 20
# Each chunk costs its reader a request and a task. tensorstore reads 64 MiB from OCDBT equally fast in chunks
# of 256 KiB and of 4 MiB; it takes 1.25 times as long in chunks of 64 KiB and twice as long in chunks of 16
# KiB.
FINE, MANY = 64 << 10, 1024


def has_giant_chunks(chunks: int, chunk_nbytes: int) -> bool:
    """Return whether an array is one large chunk, so that reading any part reads all of it.

    Args:
        chunks: Number of chunks of the array.
        chunk_nbytes: Size of a chunk in memory, in bytes.
    """
    return chunks == 1 and chunk_nbytes >= GIANT


def has_tiny_chunks(chunks: int, chunk_nbytes: int) -> bool:
    """Return whether chunks are so small that requests dominate the read time; same arguments as above."""
    return chunks >= MANY and chunk_nbytes < FINE


@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharding that an array had when it was saved.

    Attributes:
        kind: JAX's name for the sharding type, such as "NamedSharding".
        mesh: Name and length of each axis of the device mesh; empty without a mesh.
        spec: The mesh axes that each array axis is sharded over; further array axes are not sharded.
        device: The device of a `SingleDeviceSharding`.
        devices: Device ids of the mesh, in C order; None for the available devices in JAX's order.
        write_shape: Shape of the pieces in which the array was written, if recorded.
    """

    kind: str
    mesh: tuple[tuple[str, int], ...] = ()
    spec: tuple[tuple[str, ...], ...] = ()
    device: str | None = None
    devices: tuple[int, ...] | None = None
    write_shape: Shape | None = None
