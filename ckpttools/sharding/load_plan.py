"""The plan of a load, made before any read: which process reads each array, and the required memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import field, fields

import jax

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import INNER, Stack, Take, source_arrays, stack
from ckpttools.core.dataclass import dataclass
from ckpttools.core.memory_limit import baseline_bytes, memory_error
from ckpttools.core.notes import Notes
from ckpttools.core.region import Region, Shape
from ckpttools.core.text import array_count
from ckpttools.plan.pieces import PIECE_BYTES, fit_pieces
from ckpttools.sharding.assignments import ArrayTarget, Assignment
from ckpttools.sharding.exchange import (
    devices_per_process,
    first_replicas,
    is_movable,
    regions_of,
    stretch_target,
)
from ckpttools.sharding.fetch_plan import Way, choose_read_mode, projected_cost
from ckpttools.sharding.load_request import Request
from ckpttools.sharding.scatter import Parts
from ckpttools.sharding.shards import LocalParts, Shards


@dataclass(frozen=True, slots=True)
class LoadedArray:
    """An array of a load plan.

    Attributes:
        path: Path in the caller's tree.
        shape, dtype: Shape and dtype of the array.
        sharding: Sharding over devices, as JAX prints it.
        shard: Shape of each device's part.
        way: "direct" if each process reads what its devices need, "exchange" if each process reads a stretch
            of the array, or "broadcast" if one process reads for several.
    """

    path: str
    shape: Shape
    dtype: str
    sharding: str
    shard: Shape
    way: Way


@dataclass(frozen=True)
class Route:
    """The way of one array to its devices.

    Attributes:
        leaf: The array and its placement.
        way: See `LoadedArray`.
        local: Parts that this process reads.
        needed: Parts that the devices of this process need.
        read: Placement after reading and before the exchange; None without an exchange.
    """

    leaf: Assignment
    way: Way
    local: LocalParts
    needed: LocalParts
    read: ArrayTarget | None = None

    @property
    def array(self) -> LazyArray:
        return self.leaf.array

    @property
    def is_in_place(self) -> bool:
        """Whether the array keeps the memory into which it was read."""
        return self.way == "direct" and self.leaf.target.is_aliased


@dataclass(frozen=True, slots=True)
class ReadSharing:
    """Options for sharing reads among processes.

    Attributes:
        max_over_read: Ratio of read to needed bytes above which processes exchange what they read.
        single_replica: Whether one process reads for all processes that need the same part.
    """

    max_over_read: float = 1.5
    single_replica: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class LoadPlan:
    """The work of a load in this process.

    Attributes:
        arrays: Number of arrays.
        processes: Number of processes that load together.
        bytes_needed: Stored bytes that the devices of this process need, counting each part once.
        bytes_read: Bytes that this process will fetch.
        bytes_read_alone: Bytes that this process would fetch if it read exactly what its devices need.
        reads: Number of reads.
        bytes_in_memory: Decoded bytes of the parts that are read.
        bytes_on_devices: Bytes on the devices of this process, counting each copy.
        bytes_exchanged: Bytes that the devices of this process receive from other processes.
        staging: Bytes of host memory, in addition to the result, for parts on their way to devices.
        memory: Limit of host memory in bytes, in addition to the result.
        notes: Changes to values, and other notes for the user.
        array_list: All arrays except Python numbers.
        routes: The same arrays, with the details needed for execution.
    """

    arrays: int
    processes: int
    bytes_needed: int
    bytes_read: int
    bytes_read_alone: int
    reads: int
    bytes_in_memory: int
    bytes_on_devices: int
    bytes_exchanged: int
    staging: int
    memory: int
    notes: Notes = field(default_factory=Notes)
    array_list: tuple[LoadedArray, ...] = ()
    routes: tuple[Route, ...] = field(default=(), compare=False)

    @property
    def over_read(self) -> float:
        """Bytes read per byte needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    def __repr__(self) -> str:
        return (
            f"LoadPlan({array_count(range(self.arrays))}, {self.bytes_on_devices:,} bytes on devices, "
            f"{self.bytes_read:,} bytes read, {self.over_read:.2f} times those needed)"
        )


def plan_load(expected: Request, sharing: ReadSharing, *, memory: int, notes: Notes) -> LoadPlan:
    """Plan how this process loads the requested arrays.

    Args:
        expected: The arrays and their placements.
        sharing: Options for sharing reads among processes.
        memory: Bytes of host memory, in addition to the result.
        notes: Notes for the user, in addition to those of the request.

    Raises:
        MemoryBudgetError: There is not enough memory for one worker, or for an array that must be staged on
            its way to devices.
    """
    room = _staging_room(memory)
    routes = tuple(_route(leaf, sharing, room) for leaf in expected.arrays if leaf.number is None)
    local = [read.local for read in join_reads(routes)]
    cost, staged = projected_cost(local, PIECE_BYTES), _staging(routes, room, memory)
    shared = any(route.way != "direct" for route in routes)
    alone = projected_cost([route.needed for route in routes], PIECE_BYTES) if shared else cost
    fit_pieces([(item.array,) for item in local], memory=memory, jobs=1, scratch=0, reserved=staged)
    return LoadPlan(
        arrays=len(expected.arrays),
        processes=jax.process_count(),
        bytes_needed=sum(route.needed.stored_bytes for route in routes),
        bytes_read=cost.nbytes,
        bytes_read_alone=alone.nbytes,
        reads=cost.reads,
        bytes_in_memory=sum(item.nbytes for item in local),
        bytes_on_devices=sum(route.leaf.target.nbytes for route in routes),
        bytes_exchanged=sum(route.needed.nbytes for route in routes if route.way != "direct"),
        staging=staged,
        memory=memory,
        notes=notes + expected.notes,
        array_list=tuple(map(_describe_route, routes)),
        routes=routes,
    )


def _describe_route(route: Route) -> LoadedArray:
    target = route.leaf.target
    sharding = target.sharding
    text = str(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else str(sharding)
    return LoadedArray(route.leaf.name, target.shape, target.dtype.name, text, target.part, route.way)


def _route(leaf: Assignment, sharing: ReadSharing, room: int) -> Route:
    """Decide how an array is read. The result is the same in all processes."""
    target = leaf.target
    direct = LocalParts(leaf.array, target.shards, leaf.name)
    regions = regions_of(target) if jax.process_count() > 1 and is_movable(target) else {}
    # Processes can move an array together only if each of them has a part of it.
    if len(regions) < max(2, jax.process_count()):
        return Route(leaf, "direct", direct, direct)
    devices = devices_per_process(target)
    mode, cut, _ = choose_read_mode(
        leaf.array,
        regions,
        processes=jax.process_count(),
        max_over_read=sharing.max_over_read,
        single_replica=sharing.single_replica,
        devices=devices,
    )
    if mode == "broadcast":
        return Route(leaf, mode, LocalParts(leaf.array, first_replicas(target), leaf.name), direct)
    if mode == "exchange" and cut is not None and devices is not None:
        read = stretch_target(target, cut, devices)
        local = LocalParts(leaf.array, read.shards, leaf.name)
        # A stretch that does not fit next to the result is read directly, in regions, despite over-reading.
        if local.nbytes <= room:
            return Route(leaf, mode, local, direct, read)
    return Route(leaf, "direct", direct, direct)


def _staging_room(memory: int) -> int:
    """Return the bytes available for parts on their way to devices; as much is being sent meanwhile."""
    return (memory - baseline_bytes() - 4 * PIECE_BYTES) // 2


def _staging(routes: Sequence[Route], room: int, memory: int) -> int:
    """Return the number of bytes that are staged at once; 0 if no array needs staging.

    Raises:
        MemoryBudgetError: There is not enough memory for the largest array.
    """
    sizes = [route.local.nbytes for route in routes if not route.is_in_place]
    if not sizes:
        return 0
    if max(sizes) > room:
        needed = baseline_bytes() + 4 * PIECE_BYTES + 2 * max(sizes)
        raise memory_error("the parts of one array do not fit into the memory allowed", memory, needed)
    return 2 * min(room, sum(sizes))


def group_routes(routes: Sequence[Route], room: int) -> Iterator[list[Route]]:
    """Yield groups of arrays that are read together, starting with all arrays that need no staging.

    Arrays that processes exchange come last, in the order of the request, which is the same in all processes.
    The others are in the order of their files.
    """
    ordered = sort_by_location(routes)
    yield [route for route in ordered if route.is_in_place]
    rest = [route for route in ordered if not route.is_in_place and route.way == "direct"]
    group: list[Route] = []
    taken = 0
    for route in (*rest, *(route for route in routes if route.way != "direct")):
        nbytes = route.local.nbytes
        if group and taken + nbytes > room:
            yield group
            group, taken = [], 0
        group.append(route)
        taken += nbytes
    yield group


def join_reads(routes: Sequence[Route]) -> list[JointRead]:
    """Join arrays that read the same bytes. Exchanged arrays keep their order and are not joined."""
    own = [number for number, route in enumerate(routes) if route.way == "direct"]
    result = join_arrays([routes[number].local for number in own])
    direct = [JointRead(item.local, tuple(own[member] for member in item.members)) for item in result]
    others = [
        JointRead(route.local, (number,)) for number, route in enumerate(routes) if route.way != "direct"
    ]
    return [*direct, *others]


def sort_by_location(routes: Iterable[Route]) -> list[Route]:
    """Sort routes by the location of their arrays in the files."""

    def first(route: Route) -> tuple[str, int]:
        return route.array.first_byte(Region.whole(route.array.shape)) if route.array.size else ("", 0)

    return sorted(routes, key=first)


@dataclass(frozen=True)
class JointRead:
    """Arrays that are read together: one, or several along a new first axis.

    Attributes:
        local: The parts to read.
        members: Indices of the arrays; if there are several, in the order of the new axis.
    """

    local: LocalParts
    members: tuple[int, ...]

    def split(self, parts: Parts) -> Iterator[tuple[int, Parts]]:
        """Yield the index and parts of each array."""
        if len(self.members) == 1:
            yield self.members[0], parts
            return
        for location, number in enumerate(self.members):
            yield number, {cell[1:]: part[location] for cell, part in parts.items()}


def join_arrays(local: Sequence[LocalParts]) -> list[JointRead]:
    """Join arrays that read the same bytes. Each joint takes the position of its first array."""
    result: dict[Hashable, list[tuple[int, int]]] = {}
    sources: dict[Hashable, LazyArray] = {}
    known: dict[int, tuple[LazyArray, Hashable]] = {}
    for number, item in enumerate(local):
        joint_source = _taken_source(item.array) if item.shards.size else None
        if joint_source is None:
            result[number] = [(0, number)]
            continue
        source, index = joint_source
        # Layers are mostly coordinates of one array: describe that array once, and keep it alive because its
        # id is the key.
        known.setdefault(id(source), (source, _structure_key(source)))
        key = known[id(source)][1], item.shards.part, item.shards.local
        result.setdefault(key, []).append((index, number))
        sources.setdefault(key, source)
    return [
        built
        for key, members in result.items()
        for built in _joint_reads(local, sources.get(key), sorted(members))
    ]


def _joint_reads(
    local: Sequence[LocalParts], source: LazyArray | None, members: Sequence[tuple[int, int]]
) -> Iterator[JointRead]:
    numbers = tuple(number for _, number in members)
    alone = [local[number] for number in numbers]
    if source is not None and [index for index, _ in members] == list(range(source.shape[0])) != [0]:
        stacked = _stack_parts(alone, source)
        if projected_cost([stacked], PIECE_BYTES).nbytes < projected_cost(alone, PIECE_BYTES).nbytes:
            yield JointRead(stacked, numbers)
            return
    yield from (JointRead(item, (number,)) for item, number in zip(alone, numbers, strict=True))


def _stack_parts(alone: Sequence[LocalParts], source: LazyArray) -> LocalParts:
    count, shards = len(alone), alone[0].shards
    local = tuple((0, *cell) for cell in shards.local)
    above = Shards((count, *shards.shape), (count, *shards.part), local)
    return LocalParts(source, above, " and ".join(item.name for item in alone))


def _taken_source(array: LazyArray) -> tuple[LazyArray, int] | None:
    """Return the array whose first axis this array indexes, and the coordinate; otherwise None."""
    if isinstance(array, Take) and array.axis == 0:
        return array.source, array.index
    if not isinstance(array, Stack):
        return None
    result = [part_source for part in array.parts if (part_source := _taken_source(part)) is not None]
    indices = {index for _, index in result}
    if len(result) < len(array.parts) or len(indices) > 1:
        return None
    return stack([source for source, _ in result], array.axis + 1), indices.pop()


def _structure_key(array: LazyArray) -> Hashable:
    """Return a key that is equal for arrays built in the same way from the same stored arrays."""
    parts = source_arrays(array)
    if not parts:
        return id(array)
    own = (repr(getattr(array, field.name)) for field in fields(array) if field.name not in INNER)
    return (type(array), *own, *map(_structure_key, parts))
