"""Predict the reads of the processes of a job from the shape of their mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cache, partial

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.region import Region, Shape, grid_index
from ckpttools.sharding.fetch_plan import FetchPlan, Homes, Way, choose_read_mode, sample_processes
from ckpttools.sharding.mesh import MeshShape, Spec, shard_counts, shard_shape

# This is also the default of `ckpttools.load`.
MAX_OVER_READ = 1.5


@dataclass(frozen=True, slots=True)
class ProcessLoading:
    """The average reads of one process.

    Attributes:
        processes: Number of processes.
        devices: Number of devices of each process.
        needed: Stored bytes that the devices of a process need, counting each part once.
        fetched: Bytes read if each process reads what its devices need.
        over_read: `fetched / needed`.
        max_over_read: Over-read of an array above which processes exchange what they have read.
        num_exchanged: Number of arrays that processes exchange.
        fetched_with_exchange: Bytes that a process reads if arrays are exchanged.
        num_broadcast: Number of arrays that several processes need and that one process reads with
            `single_replica=True`.
        fetched_single_replica: Bytes read by a process that reads for others.
    """

    processes: int
    devices: int
    needed: int
    fetched: int
    over_read: float
    max_over_read: float
    num_exchanged: int
    fetched_with_exchange: int
    num_broadcast: int = 0
    fetched_single_replica: int = 0


def process_loading(
    arrays: Mapping[str, LazyArray],
    specs: Mapping[str, Spec],
    mesh: MeshShape,
    processes: int,
) -> ProcessLoading:
    """Predict what processes read. They own the devices in the order of the mesh.

    Args:
        arrays: The arrays to load.
        specs: Partition spec of each array; axes that cannot be divided evenly are not sharded.
        mesh: All devices.
        processes: Number of processes, which must divide the number of devices.

    Raises:
        UsageError: The number of processes does not divide the number of devices.
    """
    if processes < 1 or mesh.size % processes:
        raise UsageError(
            "the devices cannot be shared evenly",
            got=f"{mesh.size} devices, {option('processes', processes)}",
            expected=f"a divisor of {mesh.size}",
        )
    devices = mesh.size // processes
    result = _ReadTotals(mesh, processes)
    for path, array in arrays.items():
        result.add(array, specs.get(path, ()))
    return ProcessLoading(
        processes=processes,
        devices=devices,
        needed=result.alone.needed,
        fetched=result.alone.fetched,
        over_read=result.alone.over_read,
        max_over_read=MAX_OVER_READ,
        num_exchanged=result.exchanged,
        fetched_with_exchange=result.together.fetched,
        num_broadcast=result.broadcast,
        fetched_single_replica=result.single.fetched,
    )


@dataclass
class _ReadTotals:
    """Running totals of bytes read, for each way of reading."""

    mesh: MeshShape
    processes: int
    alone: FetchPlan = field(default_factory=FetchPlan)
    together: FetchPlan = field(default_factory=FetchPlan)
    single: FetchPlan = field(default_factory=FetchPlan)
    exchanged: int = 0
    broadcast: int = 0

    def __post_init__(self) -> None:
        # A model has few distinct shapes, and each shape needs a region for every device of the mesh.
        self._homes = cache(partial(regions_on_mesh, mesh=self.mesh, processes=self.processes))

    def add(self, array: LazyArray, spec: Spec) -> None:
        """Add the reads of an array."""
        regions = self._homes(array.shape, spec)
        sample = {process: regions[process] for process in sample_processes(range(self.processes))}
        mode, result = self._way(array, sample, float("inf"))
        self.alone += result
        if result.over_read > MAX_OVER_READ:
            mode, result = self._way(array, sample, MAX_OVER_READ)
        self.together += result
        self.exchanged += mode == "exchange"
        mode, result = self._way(array, regions, MAX_OVER_READ, single_replica=True)
        self.single += result
        self.broadcast += mode == "broadcast"

    def _way(
        self, array: LazyArray, regions: Homes, limit: float, *, single_replica: bool = False
    ) -> tuple[Way, FetchPlan]:
        mode, _, result = choose_read_mode(
            array,
            regions,
            processes=self.processes,
            devices=self.mesh.size // self.processes,
            max_over_read=limit,
            single_replica=single_replica,
        )
        return mode, result


def regions_on_mesh(shape: Shape, spec: Spec, mesh: MeshShape, processes: int) -> Homes:
    """Return the regions of an array on the devices of each process."""
    even_spec = drop_uneven_axes(shape, spec, mesh)
    part = shard_shape(shape, even_spec, mesh)
    devices = mesh.size // processes
    return {
        process: [_box(part, even_spec, mesh, process * devices + device) for device in range(devices)]
        for process in range(processes)
    }


def drop_uneven_axes(shape: Shape, spec: Spec, mesh: MeshShape) -> Spec:
    """Return the spec without the axes that cannot be divided evenly."""
    counts = shard_counts(len(spec), spec, mesh)
    short = zip(spec, counts, shape, strict=False)
    return tuple(entry if length % count == 0 else () for entry, count, length in short)


def _box(part: Shape, spec: Spec, mesh: MeshShape, device: int) -> Region:
    at = dict(zip(mesh.axes, grid_index(tuple(mesh.axes.values()), device), strict=True))
    cell = [0] * len(part)
    for axis, entry in enumerate(spec):
        for name in entry:
            cell[axis] = cell[axis] * mesh.axes[name] + at[name]
    start = tuple(k * n for k, n in zip(cell, part, strict=True))
    return Region(start, tuple(a + n for a, n in zip(start, part, strict=True)))
