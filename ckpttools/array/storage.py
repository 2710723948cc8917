"""The storage of a checkpoint in files: plain facts that formats provide and `ckpttools.inspect` looks at."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Shape


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        name: relative to the checkpoint's root.
        kind: "data" contains bytes of arrays, "index" locates them, "unused" is a data file that nothing
            refers to, "missing" is a file that the index names but that does not exist, "other" is any other
            file, such as metadata.
        nbytes: length of the file.
        live: bytes of arrays in it, each counted once.
        index: bytes of it that are headers, documents or nodes of the index in use.
        arrays: arrays that have bytes in it.
        chunks: chunks, or whole tensors, in it.
        links: names that the file has; with more than one it is shared.
        lost: bytes that the index expects in it but that it does not have.
    """

    name: str
    kind: str
    nbytes: int
    live: int = 0
    index: int = 0
    arrays: int = 0
    chunks: int = 0
    links: int = 1
    lost: int = 0

    @property
    def dead(self) -> int:
        """Bytes that nothing refers to: gaps, and data that later writes replaced."""
        return self.nbytes - self.live - self.index if self.kind != "other" else 0


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A stored array.

    Attributes:
        path: keys joined by "/".
        shape, dtype: of the array.
        chunk: shape of the grid's cells.
        piece: the smallest unit that a reader fetches: an inner chunk where chunks are shards, else a chunk.
            None where any part can be fetched by itself, as from a plain C-ordered range.
        codecs: how a piece becomes bytes, first step first; empty for plain C order.
        chunks: cells of the grid.
        missing: number of cells that are not stored.
        nbytes: bytes of the stored cells.
        compressed, transposed: whether a codec makes the data smaller, or puts axes into another order.
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
    """A checkpoint on disk.

    Attributes:
        root: directory that the names of files are relative to.
        indexes: OCDBT manifests in use; several where the processes of a save were not merged.
        files: all files below the root that belong to it, by name.
        arrays: in the checkpoint's order.
    """

    root: str
    indexes: tuple[str, ...]
    files: tuple[StoredFile, ...]
    arrays: tuple[StoredArray, ...]


# A whole array as one chunk is read at a third of the speed at which it is read cut by 16 (1.6 GB of bfloat16
# onto 8 devices), and every host holds all of it for its part; below this size neither matters.
GIANT = 256 << 20
# A chunk costs its reader a request and a task. 64 MiB under OCDBT take tensorstore as long to read in chunks
# of 256 KiB as in those of 4 MiB, 1.25 times as long in those of 64 KiB, twice as long in those of 16 KiB.
FINE, MANY = 64 << 10, 1024


def has_giant_chunks(chunks: int, chunk_nbytes: int) -> bool:
    """Return whether an array is one large chunk, which is read completely for any part of it.

    Args:
        chunks: of the array.
        chunk_nbytes: bytes of each in memory.
    """
    return chunks == 1 and chunk_nbytes >= GIANT


def has_tiny_chunks(chunks: int, chunk_nbytes: int) -> bool:
    """Return whether chunks are so small that requests take longer than bytes; arguments as above."""
    return chunks >= MANY and chunk_nbytes < FINE


@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharding of an array when it was saved.

    Attributes:
        kind: JAX's name of the sharding, such as "NamedSharding".
        mesh: name and length of each axis of the device mesh; empty where there was none.
        spec: for each axis of the array the mesh axes that it is cut along; later axes are whole.
        device: the one device of a `SingleDeviceSharding`.
        devices: numbers of the devices of the mesh, in C order; None for those there are, in JAX's order.
        write_shape: shape of the pieces in which it was written, where that was noted.
    """

    kind: str
    mesh: tuple[tuple[str, int], ...] = ()
    spec: tuple[tuple[str, ...], ...] = ()
    device: str | None = None
    devices: tuple[int, ...] | None = None
    write_shape: Shape | None = None
