"""What processes would read that load together, from the shape of their mesh alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cache, partial

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.region import Region, Shape, grid_index
from ckpttools.sharding.fetch_plan import FetchPlan, Homes, Way, some_of, way_of
from ckpttools.sharding.mesh import MeshShape
from ckpttools.sharding.specs import Spec, cuts, shard_shape

# As of `ckpttools.load`.
MAX_OVER_READ = 1.5


@dataclass(frozen=True, slots=True)
class ProcessLoading:
    """What one process reads, on average.

    Attributes:
        processes: how many there are.
        devices: of each.
        needed: bytes that its devices need, each part once, as they are stored.
        fetched: bytes that it reads where each reads what its devices need.
        over_read: fetched / needed.
        max_over_read: of an array, from which on processes exchange what they have read.
        exchanged: arrays of which they do.
        fetched_exchanging: bytes that a process then reads.
        broadcast: arrays that several processes need, of which with `single_replica=True` one reads for all.
        fetched_single_replica: bytes that one that reads for others then reads.
    """

    processes: int
    devices: int
    needed: int
    fetched: int
    over_read: float
    max_over_read: float
    exchanged: int
    fetched_exchanging: int
    broadcast: int = 0
    fetched_single_replica: int = 0


def process_loading(
    arrays: Mapping[str, LazyArray],
    specs: Mapping[str, Spec],
    mesh: MeshShape,
    processes: int,
) -> ProcessLoading:
    """What processes read; devices are dealt out to them in the order of the mesh.

    Args:
        arrays: what is loaded.
        specs: how each is cut; what cannot be cut evenly is whole.
        mesh: all devices.
        processes: how many share them evenly.

    Raises:
        UsageError: the devices cannot be shared evenly.
    """
    if processes < 1 or mesh.size % processes:
        raise UsageError(
            "the devices cannot be shared evenly",
            got=f"{mesh.size} devices, {option('processes', processes)}",
            expected=f"a divisor of {mesh.size}",
        )
    devices = mesh.size // processes
    result = _Predicted(mesh, processes)
    for path, array in arrays.items():
        result.add(array, specs.get(path, ()))
    return ProcessLoading(
        processes=processes,
        devices=devices,
        needed=result.alone.needed,
        fetched=result.alone.fetched,
        over_read=result.alone.over_read,
        max_over_read=MAX_OVER_READ,
        exchanged=result.exchanged,
        fetched_exchanging=result.together.fetched,
        broadcast=result.broadcast,
        fetched_single_replica=result.single.fetched,
    )


@dataclass
class _Predicted:
    """What has been found out of some arrays, by the ways in which they may be read."""

    mesh: MeshShape
    processes: int
    alone: FetchPlan = field(default_factory=FetchPlan)
    together: FetchPlan = field(default_factory=FetchPlan)
    single: FetchPlan = field(default_factory=FetchPlan)
    exchanged: int = 0
    broadcast: int = 0

    def __post_init__(self) -> None:
        # Of a model few shapes are different, and each takes a box for every device of the mesh.
        self._homes = cache(partial(homes_on, mesh=self.mesh, processes=self.processes))

    def add(self, array: LazyArray, spec: Spec) -> None:
        """Adds what is read of an array."""
        homes = self._homes(array.shape, spec)
        some = {process: homes[process] for process in some_of(range(self.processes))}
        way, result = self._way(array, some, float("inf"))
        self.alone += result
        if result.over_read > MAX_OVER_READ:
            way, result = self._way(array, some, MAX_OVER_READ)
        self.together += result
        self.exchanged += way == "exchange"
        way, result = self._way(array, homes, MAX_OVER_READ, single_replica=True)
        self.single += result
        self.broadcast += way == "broadcast"

    def _way(
        self, array: LazyArray, homes: Homes, limit: float, *, single_replica: bool = False
    ) -> tuple[Way, FetchPlan]:
        way, _, result = way_of(
            array,
            homes,
            processes=self.processes,
            devices=self.mesh.size // self.processes,
            max_over_read=limit,
            single_replica=single_replica,
        )
        return way, result


def homes_on(shape: Shape, spec: Spec, mesh: MeshShape, processes: int) -> Homes:
    """What the devices of each process hold of an array."""
    whole = even(shape, spec, mesh)
    part = shard_shape(shape, whole, mesh)
    devices = mesh.size // processes
    return {
        process: [_box(part, whole, mesh, process * devices + device) for device in range(devices)]
        for process in range(processes)
    }


def even(shape: Shape, spec: Spec, mesh: MeshShape) -> Spec:
    """The spec without the axes that cannot be divided evenly."""
    counts = cuts(len(spec), spec, mesh)
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
