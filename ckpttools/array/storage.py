"""How a checkpoint lies in its files, as plain facts that formats tell and `ckpttools.inspect` looks at."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Shape


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file.

    Attributes:
        name: relative to the checkpoint's root.
        kind: "data" has bytes of arrays, "index" says where these are, "unused" is a data file of which
            nothing is in use, "missing" is one that the index names and that is not there, "other" is any
            other, such as metadata.
        nbytes: length of the file.
        live: bytes of arrays in it, each counted once.
        index: bytes of it that are headers, documents or nodes of the index in use.
        arrays: arrays that have bytes in it.
        chunks: chunks, or whole tensors, in it.
        links: names that the file has; with more than one it is shared.
        lost: bytes that the index looks for in it and that it does not have.
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
        """Bytes that nothing refers to: gaps, and what later writes superseded."""
        return self.nbytes - self.live - self.index if self.kind != "other" else 0


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array.

    Attributes:
        path: keys joined by "/".
        shape, dtype: of the array.
        chunk: shape of the grid's cells.
        piece: what a reader fetches at least: an inner chunk where chunks are shards, else a chunk. None
            where any part can be fetched by itself, as from a plain C-ordered range.
        codecs: how a piece becomes bytes, first step first; empty for plain C order.
        chunks: cells of the grid.
        missing: those that are not stored.
        nbytes: bytes that the others take.
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
