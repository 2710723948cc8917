"""What loading will do, decided before any read: who reads what of each array, and what memory that takes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import field, fields

import jax

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import INNER, Stack, Take, source_arrays, stack
from ckpttools.core.budget import baseline_bytes, memory_error
from ckpttools.core.dataclass import dataclass
from ckpttools.core.notes import Notes
from ckpttools.core.region import Region, Shape
from ckpttools.core.text import array_count
from ckpttools.plan.pieces import PIECE_BYTES, fitted_pieces
from ckpttools.sharding.array_targets import ArrayTarget
from ckpttools.sharding.assignments import Assigned
from ckpttools.sharding.exchange import devices_each, homes_of, is_movable, own_shards, stretch_target
from ckpttools.sharding.fetch_plan import Way, way_of
from ckpttools.sharding.load_request import Request
from ckpttools.sharding.read_regions import projected
from ckpttools.sharding.scatter import Parts
from ckpttools.sharding.shards import HeldParts, Shards


@dataclass(frozen=True, slots=True)
class LoadedArray:
    """One array as it will be.

    Attributes:
        path: in the caller's tree.
        shape, dtype: of the array.
        sharding: over devices, as JAX prints it.
        shard: the shape of each device's part.
        way: "direct" where each process reads what its devices need, "exchange" where each reads a stretch
            of it, "broadcast" where one reads for several.
    """

    path: str
    shape: Shape
    dtype: str
    sharding: str
    shard: Shape
    way: Way


@dataclass(frozen=True)
class Route:
    """How one array comes to its devices.

    Attributes:
        leaf: the array, and where it goes.
        way: as of `LoadedArray`.
        held: what this process reads.
        needed: what its devices need.
        read: where it is when it has been read and before it is exchanged.
    """

    leaf: Assigned
    way: Way
    held: HeldParts
    needed: HeldParts
    read: ArrayTarget | None = None

    @property
    def array(self) -> LazyArray:
        return self.leaf.array

    @property
    def stays(self) -> bool:
        """Whether the array is where it was read to."""
        return self.way == "direct" and self.leaf.target.is_aliased


@dataclass(frozen=True, slots=True)
class Sharing:
    """How processes share reading.

    Attributes:
        max_over_read: bytes read for each byte that is needed, from which on they exchange what they read.
        single_replica: whether what several need is read by one.
    """

    max_over_read: float = 1.5
    single_replica: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class LoadPlan:
    """What loading will do, in this process.

    Attributes:
        arrays: how many.
        processes: that load together.
        bytes_needed: that the devices of this process need, each part once, as they are stored.
        bytes_read: that will be fetched by this process.
        bytes_read_alone: that would be, if it read all that its devices need and nothing else.
        reads: in how many reads.
        bytes_in_memory: of what is read.
        bytes_on_devices: of this process, each copy counted.
        bytes_exchanged: that its devices get of what it or another process has read for all.
        staging: bytes of host memory beside the result that hold parts on their way to devices.
        memory: bytes of host memory allowed beside the result.
        notes: what happens to values, and what else the user should know.
        array_list: each of them but numbers.
        routes: the same for whoever carries it out.
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
        """Bytes that are read for each byte that is needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    def __repr__(self) -> str:
        return (
            f"LoadPlan({array_count(range(self.arrays))}, {self.bytes_on_devices:,} bytes on devices, "
            f"{self.bytes_read:,} bytes read, {self.over_read:.2f} times those needed)"
        )


def plan_load(expected: Request, sharing: Sharing, *, memory: int, notes: Notes) -> LoadPlan:
    """What loading takes.

    Args:
        expected: what goes where.
        sharing: how processes share reading.
        memory: bytes of host memory beside the result.
        notes: what the user should know beside what the request says.

    Raises:
        MemoryBudgetError: one worker, or an array that must be staged on its way to devices, does not fit.
    """
    room = _room(memory)
    routes = tuple(_route(leaf, sharing, room) for leaf in expected.arrays if leaf.number is None)
    held = [read.held for read in joined_reads(routes)]
    cost, staged = projected(held, PIECE_BYTES), _staging(routes, room, memory)
    shared = any(route.way != "direct" for route in routes)
    alone = projected([route.needed for route in routes], PIECE_BYTES) if shared else cost
    fitted_pieces([(item.array,) for item in held], memory=memory, jobs=1, scratch=0, reserved=staged)
    return LoadPlan(
        arrays=len(expected.arrays),
        processes=jax.process_count(),
        bytes_needed=sum(route.needed.stored_bytes for route in routes),
        bytes_read=cost.nbytes,
        bytes_read_alone=alone.nbytes,
        reads=cost.reads,
        bytes_in_memory=sum(item.nbytes for item in held),
        bytes_on_devices=sum(route.leaf.target.nbytes for route in routes),
        bytes_exchanged=sum(route.needed.nbytes for route in routes if route.way != "direct"),
        staging=staged,
        memory=memory,
        notes=notes + expected.notes,
        array_list=tuple(map(_described, routes)),
        routes=routes,
    )


def _described(route: Route) -> LoadedArray:
    target = route.leaf.target
    sharding = target.sharding
    text = str(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else str(sharding)
    return LoadedArray(route.leaf.name, target.shape, target.dtype.name, text, target.part, route.way)


def _route(leaf: Assigned, sharing: Sharing, room: int) -> Route:
    """How an array is read; the same in all processes."""
    target = leaf.target
    direct = HeldParts(leaf.array, target.shards, leaf.name)
    homes = homes_of(target) if jax.process_count() > 1 and is_movable(target) else {}
    # What some processes have no part of, they cannot move together.
    if len(homes) < max(2, jax.process_count()):
        return Route(leaf, "direct", direct, direct)
    devices = devices_each(target)
    way, cut, _ = way_of(
        leaf.array,
        homes,
        processes=jax.process_count(),
        max_over_read=sharing.max_over_read,
        single_replica=sharing.single_replica,
        devices=devices,
    )
    if way == "broadcast":
        return Route(leaf, way, HeldParts(leaf.array, own_shards(target), leaf.name), direct)
    if way == "exchange" and cut is not None and devices is not None:
        read = stretch_target(target, cut, devices)
        held = HeldParts(leaf.array, read.shards, leaf.name)
        # What cannot be held beside the result is read in pieces instead, too much of it or not.
        if held.nbytes <= room:
            return Route(leaf, way, held, direct, read)
    return Route(leaf, "direct", direct, direct)


def _room(memory: int) -> int:
    """Bytes of parts on their way to devices that may be held; as many again are sent meanwhile."""
    return (memory - baseline_bytes() - 4 * PIECE_BYTES) // 2


def _staging(routes: Sequence[Route], room: int, memory: int) -> int:
    """Bytes of parts that are on their way at once: nothing where they stay where they are.

    Raises:
        MemoryBudgetError: the largest array does not fit.
    """
    sizes = [route.held.nbytes for route in routes if not route.stays]
    if not sizes:
        return 0
    if max(sizes) > room:
        needed = baseline_bytes() + 4 * PIECE_BYTES + 2 * max(sizes)
        raise memory_error("the parts of one array do not fit into the memory allowed", memory, needed)
    return 2 * min(room, sum(sizes))


def groups(routes: Sequence[Route], room: int) -> Iterator[list[Route]]:
    """Arrays that are read together: first all that need no room.

    Those of which processes exchange what they have read come last and as they were asked for, which is the
    order in all processes; the others in that of their files.
    """
    ordered = in_location_order(routes)
    yield [route for route in ordered if route.stays]
    rest = [route for route in ordered if not route.stays and route.way == "direct"]
    group: list[Route] = []
    taken = 0
    for route in (*rest, *(route for route in routes if route.way != "direct")):
        nbytes = route.held.nbytes
        if group and taken + nbytes > room:
            yield group
            group, taken = [], 0
        group.append(route)
        taken += nbytes
    yield group


def joined_reads(routes: Sequence[Route]) -> list[Joint]:
    """What is read together. What processes exchange stays in its order, each by itself."""
    own = [number for number, route in enumerate(routes) if route.way == "direct"]
    built = joints([routes[number].held for number in own])
    direct = [Joint(item.held, tuple(own[member] for member in item.members)) for item in built]
    others = [Joint(route.held, (number,)) for number, route in enumerate(routes) if route.way != "direct"]
    return [*direct, *others]


def in_location_order(routes: Iterable[Route]) -> list[Route]:
    """The same in the order in which they lie in their files."""

    def first(route: Route) -> tuple[str, int]:
        return route.array.first_byte(Region.whole(route.array.shape)) if route.array.size else ("", 0)

    return sorted(routes, key=first)


@dataclass(frozen=True)
class Joint:
    """What is read in one go: an array, or several along a new first axis.

    Attributes:
        held: what is read.
        members: the numbers of the arrays; of several, in the order of that axis.
    """

    held: HeldParts
    members: tuple[int, ...]

    def split(self, parts: Parts) -> Iterator[tuple[int, Parts]]:
        """The parts of each array."""
        if len(self.members) == 1:
            yield self.members[0], parts
            return
        for location, number in enumerate(self.members):
            yield number, {cell[1:]: part[location] for cell, part in parts.items()}


def joints(held: Sequence[HeldParts]) -> list[Joint]:
    """All arrays, those together that read the same bytes; each in the place of its first."""
    result: dict[Hashable, list[tuple[int, int]]] = {}
    sources: dict[Hashable, LazyArray] = {}
    known: dict[int, tuple[LazyArray, Hashable]] = {}
    for number, item in enumerate(held):
        whole = _untaken(item.array) if item.shards.size else None
        if whole is None:
            result[number] = [(0, number)]
            continue
        source, index = whole
        # Layers are mostly coordinates of one and the same array: it is described once, and kept meanwhile.
        known.setdefault(id(source), (source, _sub_split_text(source)))
        key = known[id(source)][1], item.shards.part, item.shards.held
        result.setdefault(key, []).append((index, number))
        sources.setdefault(key, source)
    return [
        built for key, members in result.items() for built in _made(held, sources.get(key), sorted(members))
    ]


def _made(
    held: Sequence[HeldParts], source: LazyArray | None, members: Sequence[tuple[int, int]]
) -> Iterator[Joint]:
    numbers = tuple(number for _, number in members)
    alone = [held[number] for number in numbers]
    if source is not None and [index for index, _ in members] == list(range(source.shape[0])) != [0]:
        together = _together(alone, source)
        if projected([together], PIECE_BYTES).nbytes < projected(alone, PIECE_BYTES).nbytes:
            yield Joint(together, numbers)
            return
    yield from (Joint(item, (number,)) for item, number in zip(alone, numbers, strict=True))


def _together(alone: Sequence[HeldParts], source: LazyArray) -> HeldParts:
    count, shards = len(alone), alone[0].shards
    held = tuple((0, *cell) for cell in shards.held)
    above = Shards((count, *shards.shape), (count, *shards.part), held)
    return HeldParts(source, above, " and ".join(item.name for item in alone))


def _untaken(array: LazyArray) -> tuple[LazyArray, int] | None:
    """The array of which this is one coordinate of the first axis, and which."""
    if isinstance(array, Take) and array.axis == 0:
        return array.source, array.index
    if not isinstance(array, Stack):
        return None
    result = [whole for part in array.parts if (whole := _untaken(part)) is not None]
    indices = {index for _, index in result}
    if len(result) < len(array.parts) or len(indices) > 1:
        return None
    return stack([source for source, _ in result], array.axis + 1), indices.pop()


def _sub_split_text(array: LazyArray) -> Hashable:
    """Equal for arrays that are made alike of the same stored ones."""
    parts = source_arrays(array)
    if not parts:
        return id(array)
    own = (repr(getattr(array, field.name)) for field in fields(array) if field.name not in INNER)
    return (type(array), *own, *map(_sub_split_text, parts))
