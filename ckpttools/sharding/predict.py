"""What processes would read that load together, from the shape of their mesh alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cache, partial

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.region import Region, Shape, grid_index
from ckpttools.core.wording import option
from ckpttools.sharding.mesh import MeshShape
from ckpttools.sharding.routes import FetchPlan, Homes, Way, some_of, way_of
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
            wanted=f"a divisor of {mesh.size}",
        )
    devices = mesh.size // processes
    found = _Predicted(mesh, processes)
    for path, array in arrays.items():
        found.add(array, specs.get(path, ()))
    return ProcessLoading(
        processes=processes,
        devices=devices,
        needed=found.alone.needed,
        fetched=found.alone.fetched,
        over_read=found.alone.over_read,
        max_over_read=MAX_OVER_READ,
        exchanged=found.exchanged,
        fetched_exchanging=found.together.fetched,
        broadcast=found.broadcast,
        fetched_single_replica=found.single.fetched,
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
        way, found = self._way(array, some, float("inf"))
        self.alone += found
        if found.over_read > MAX_OVER_READ:
            way, found = self._way(array, some, MAX_OVER_READ)
        self.together += found
        self.exchanged += way == "exchange"
        way, found = self._way(array, homes, MAX_OVER_READ, single_replica=True)
        self.single += found
        self.broadcast += way == "broadcast"

    def _way(
        self, array: LazyArray, homes: Homes, most: float, *, single_replica: bool = False
    ) -> tuple[Way, FetchPlan]:
        way, _, found = way_of(
            array,
            homes,
            processes=self.processes,
            devices=self.mesh.size // self.processes,
            max_over_read=most,
            single_replica=single_replica,
        )
        return way, found


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
