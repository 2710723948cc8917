"""File layouts for arrays that several processes share, in which each process writes its own chunks.

An encoded chunk is written as a unit, and an object in a bucket from first to last byte. In these cases,
chunks are divided within shards, and each process has its own data files. Raw chunks in a directory need
neither: all processes write to the files that a single process would write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import InMemoryArray
from ckpttools.array.storage import Sharding
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.region import Region, Shape, ceil_div
from ckpttools.formats.base import Extents, Layout, Writer
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.formats.placement import DataFile, Placement
from ckpttools.formats.registry import find_unowned_files
from ckpttools.formats.zarr.chunking import GivenChunks, chunk_shape
from ckpttools.sharding.mesh import mesh_chunk, spec_from_entries
from ckpttools.sharding.save_shards import ShardHolder
from ckpttools.stores.costs import Streams
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    import jax


_PAGE, _LINE = 4096, 64


@dataclass(frozen=True, slots=True)
class PlacedChunks(DataFile):
    """Data files in which each chunk has an explicit location.

    Attributes:
        files: Names of the data files.
        locations: File index and first byte of each chunk, in order.
    """

    files: tuple[str, ...] = ()
    locations: tuple[tuple[int, int], ...] = ()

    def location(self, position: int, chunk_nbytes: int) -> tuple[str, int]:
        number, offset = self.locations[position]
        return self.files[number], offset

    def __str__(self) -> str:
        """Return text that is equal for equal locations."""
        return f"placed {hashlib.sha256(repr((self.files, self.locations)).encode()).hexdigest()}"


@dataclass(frozen=True)
class OwnedWriter:
    """A writer whose files are divided so that each process can write its own data.

    Attributes:
        writer: The underlying writer.
        streams: How the store writes files; None if it can write at any offset.
    """

    writer: Writer
    streams: Streams | None = None

    @property
    def name(self) -> str:
        return self.writer.name

    def layout(self, tree: Tree, limit: int) -> Layout:
        """See `Writer.layout`.

        Raises:
            UsageError: The format needs one sequential file, or the shards of an array differ in shape.
        """
        result = self.writer.layout(tree, limit)
        if self.streams is None and not any(placement.codec for placement in result.placements.values()):
            return result
        if self.streams is not None and result.heads:
            raise UsageError(
                f"only one process can write {self.name} to a bucket, and several have parts of the arrays",
                expected="a format in which each process has its own files: orbax, zarr3",
                hint="save as orbax, then convert it; or save to a directory that all processes see",
            )
        placements = {
            path: _fit_chunks_to_shards(path, tree.arrays[path], item, limit)
            for path, item in result.placements.items()
        }
        if self.streams is None:
            return replace(result, placements=placements)
        files = _ProcessFiles(self.streams.file_bytes)
        placements = {
            path: files.place_chunks(tree.arrays[path], item) if isinstance(item.home, DataFile) else item
            for path, item in placements.items()
        }
        return replace(result, placements=placements, files=files.sizes)

    def unowned_files(self, directory: Location, tree: Tree) -> Iterable[str]:
        """See `SupportsUnownedFiles.unowned_files`."""
        return find_unowned_files(directory, tree, self.writer)

    def finish(self, directory: Location, tree: Tree, layout: Layout, extents: Extents) -> None:
        """See `Writer.finish`."""
        self.writer.finish(directory, tree, layout, extents)


def owners_of(array: LazyArray) -> Mapping[Region, int]:
    """Return the owner of each shard. Process 0 owns arrays that every process has in full."""
    holder = array.holder if isinstance(array, InMemoryArray) else None
    owners = holder.owners if isinstance(holder, ShardHolder) else ()
    return {box: process for process, box in owners} or {Region.whole(array.shape): 0}


def owned_chunks(array: LazyArray, placement: Placement) -> Iterator[tuple[int, Shape]]:
    """Yield the owner and index of each chunk, in order. Every chunk must be within one shard."""
    owners = owners_of(array)
    box = next(iter(owners)).shape
    starts = {region.start: process for region, process in owners.items()}
    for index in placement.cells(Region.whole(array.shape)):
        cell = zip(index, placement.chunk, box, strict=True)
        yield starts[tuple(i * chunk // length * length for i, chunk, length in cell)], index


def _fit_chunks_to_shards(path: Path, array: LazyArray, placement: Placement, limit: int) -> Placement:
    """Return the placement with each chunk within one shard."""
    boxes = {region.shape for region in owners_of(array)}
    if len(boxes) > 1:
        raise UsageError(
            "the shards of an array that several processes share differ in shape",
            location=keystr(path),
            got=", ".join(str(list(shape)) for shape in sorted(boxes)),
            hint="put it on a NamedSharding before saving it",
        )
    (box,) = boxes
    if box == array.shape or not array.size:
        return placement
    chunk = chunk_shape(box, placement.itemsize, (), limit if placement.codec else None)
    return replace(placement, chunk=tuple(map(_largest_divisor, box, chunk)))


def _largest_divisor(length: int, limit: int) -> int:
    """Return the largest divisor of a length up to `limit`."""
    pieces = range(ceil_div(length, limit), length + 1)
    return next(length // count for count in pieces if length % count == 0)


@dataclass
class _ProcessFiles:
    """Data files that each belong to one process.

    Attributes:
        limit: Maximum bytes of a file.
        sizes: Bytes of each file.
    """

    limit: int
    sizes: dict[str, int] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)

    def place_chunks(self, array: LazyArray, placement: Placement) -> Placement:
        """Return the placement with chunks in the files of their owners."""
        assert isinstance(placement.home, DataFile)
        directory = placement.home.file.rpartition("/")[0]
        locations: dict[Shape, tuple[str, int]] = {}
        for process, index in owned_chunks(array, placement):
            locations[index] = self._next(f"{directory}/process", process, placement.chunk_nbytes)
        files = tuple(dict.fromkeys(name for name, _ in locations.values()))
        numbers = {name: number for number, name in enumerate(files)}
        numbered = tuple((numbers[name], start) for name, start in locations.values())
        return replace(placement, home=PlacedChunks(placement.home.file, 0, None, files, numbered))

    def _next(self, name: str, process: int, nbytes: int) -> tuple[str, int]:
        number = self._numbers.setdefault(process, 0)
        file = f"{name}-{process:05d}-{number:05d}"
        alignment = _PAGE if nbytes >= _PAGE else _LINE
        start = ceil_div(self.sizes.get(file, 0), alignment) * alignment
        if start and start + nbytes > self.limit:
            self._numbers[process] = number + 1
            return self._next(name, process, nbytes)
        self.sizes[file] = start + nbytes
        return file, start


def keep_shardings(writer: Writer, tree: Tree) -> Writer:
    """Return a writer that records the shardings of arrays. Arrays without a mesh are unchanged.

    Raises:
        UsageError: The format cannot record shardings, or chunks are given.
    """
    if not isinstance(writer, OrbaxWriter):
        raise UsageError("only Orbax records shardings", got=writer.name, hint='format="orbax"')
    if writer.chunks is not None:
        raise UsageError(
            f"{option('chunks')} and {option('keep_sharding')} both determine the chunks",
            hint="leave one of them out",
        )
    chunks: dict[Path, Shape] = {}
    shardings: dict[Path, Sharding] = {}
    for path, array in tree.arrays.items():
        holder = array.holder if isinstance(array, InMemoryArray) else None
        sharding = holder.sharding if isinstance(holder, ShardHolder) and array.size else None
        stored = (
            None if sharding is None or path in tree.metadata.key_impls else _to_stored_sharding(sharding)
        )
        if sharding is not None and stored is not None:
            shard = tuple(sharding.shard_shape(array.shape))
            chunks[path] = mesh_chunk(array.shape, shard, array.dtype.itemsize, ())
            shardings[path] = stored
    return replace(writer, chunks=GivenChunks(exact=chunks), shardings=shardings)


def _to_stored_sharding(sharding: jax.sharding.Sharding) -> Sharding | None:
    """Return the sharding in stored form; None if it has no mesh or an unspecified axis."""
    import jax

    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    try:
        spec = spec_from_entries(sharding.spec, None)
    except UsageError:
        return None
    mesh = tuple((str(name), int(length)) for name, length in sharding.mesh.shape.items())
    ids = tuple(int(device.id) for device in sharding.mesh.devices.flat)
    default_ids = tuple(int(device.id) for device in jax.devices())
    return Sharding("NamedSharding", mesh, spec, devices=None if ids == default_ids else ids)
