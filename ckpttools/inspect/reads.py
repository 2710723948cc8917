"""What devices must read to load their shards: predicted from the chunk grid, nothing is read for it.

A piece, the smallest part encoded by itself (a chunk, or an inner chunk of a zarr shard), is fetched whole,
as tensorstore and Orbax do: a device shard that needs a tenth of a chunk fetches and decodes all of it. For
inner chunks the index of each zarr shard is one more read. Plain ranges, such as tensors of safetensors, are
read by contiguous runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ckpttools.array.storage import StoredArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape, ceil_div, count_runs
from ckpttools.inspect.meshes import PartitionSpec
from ckpttools.sharding.mesh import MeshShape


@dataclass(frozen=True, slots=True)
class PredictedReads:
    """Of one array, or of several together.

    Attributes:
        cut: devices along each axis of the array; all 1 if every device needs all of it.
        uneven: an axis does not divide into so many equal shards, as JAX requires, and was left whole.
        reads: of the device that has most.
        needed: bytes in memory of one device's shard.
        fetched: bytes out of files for the device that has most.
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
    """What loading one array takes.

    Args:
        array: on disk.
        mesh, spec: how its readers share it.
        layer_axis: on which its layers are stacked; None if they are not.
    """
    wanted = spec.pieces(len(array.shape), layer_axis, mesh)
    cut = tuple(k if n % k == 0 else 1 for n, k in zip(array.shape, wanted, strict=True))
    shard = tuple(n // k for n, k in zip(array.shape, cut, strict=True))
    needed = prod(shard) * array.dtype.itemsize
    if array.piece is None:
        region = Region((0,) * len(shard), shard)
        runs, total = count_runs(array.shape, region), needed * mesh.size
        fetched = array.nbytes * prod(shard) // max(1, prod(array.shape))
        return PredictedReads(cut, cut != wanted, runs, needed, fetched, total, total)
    return _by_pieces(array, array.piece, mesh.size, cut, wanted, shard)


def _by_pieces(
    array: StoredArray, piece: Shape, devices: int, cut: Shape, wanted: Shape, shard: Shape
) -> PredictedReads:
    itemsize = array.dtype.itemsize
    piece_bytes = prod(piece) * itemsize
    axes = list(zip(shard, cut, piece, strict=True))
    met = [[_cells(k * length, (k + 1) * length, size) for k in range(count)] for length, count, size in axes]
    most, everywhere = prod(map(max, met)), prod(map(sum, met))
    in_all = prod(ceil_div(n, size) for n, size in zip(array.shape, piece, strict=True))
    # The size of a piece on disk, averaged over those that are stored.
    there = max(1, in_all * (array.chunks - array.missing) // max(1, array.chunks))
    copies = devices // prod(cut)
    needed = prod(shard) * itemsize
    return PredictedReads(
        cut=cut,
        uneven=cut != wanted,
        reads=most + _index_reads(array, piece, shard, cut),
        needed=needed,
        fetched=most * array.nbytes // there,
        total_needed=needed * devices,
        total_fetched=everywhere * copies * piece_bytes,
    )


def _cells(start: int, stop: int, size: int) -> int:
    """How many cells of a size a range of an axis overlaps."""
    return ceil_div(stop, size) - start // size


def _index_reads(array: StoredArray, piece: Shape, shard: Shape, cut: Shape) -> int:
    """Indexes of shards that a device reads; one piece alone in its shard is read together with it."""
    if piece == array.chunk:
        return 0
    axes = zip(shard, cut, array.chunk, strict=True)
    return prod(max(_cells(k * n, (k + 1) * n, size) for k in range(count)) for n, count, size in axes)


def together(parts: Sequence[PredictedReads]) -> PredictedReads:
    """The same for several arrays; `cut` is empty, since each has its own."""
    return PredictedReads(
        (),
        any(part.uneven for part in parts),
        *(sum(getattr(part, name) for part in parts) for name in ("reads", "needed", "fetched")),
        *(sum(getattr(part, name) for part in parts) for name in ("total_needed", "total_fetched")),
    )
