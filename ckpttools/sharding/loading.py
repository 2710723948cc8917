"""Loading: the plan of it, and carrying it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ckpttools.core.budget import BASE_BYTES, does_not_fit
from ckpttools.core.notes import Notes
from ckpttools.core.region import Shape
from ckpttools.core.text import array_count
from ckpttools.plan.pieces import PIECE_BYTES
from ckpttools.sharding.cutting import Held, projected
from ckpttools.sharding.placing import Batches
from ckpttools.sharding.request import Leaf, Request, in_place_order
from ckpttools.sharding.scatter import Reading, read_parts


@dataclass(frozen=True, slots=True)
class LoadedArray:
    """One array as it will be.

    Attributes:
        path: in the caller's tree.
        shape, dtype: of the array.
        sharding: over devices, as JAX prints it.
        shard: the shape of each device's part.
    """

    path: str
    shape: Shape
    dtype: str
    sharding: str
    shard: Shape


@dataclass(frozen=True, slots=True, repr=False)
class LoadPlan:
    """What loading will do, in this process.

    Attributes:
        arrays: how many.
        bytes_needed: that the devices of this process need, each part once, as they are stored.
        bytes_read: that will be fetched for them.
        reads: in how many reads.
        bytes_in_memory: of what is needed, once it is read.
        bytes_on_devices: of this process, each copy counted.
        staging: bytes of host memory beside the result that hold parts on their way to devices.
        memory: bytes of host memory allowed beside the result.
        notes: what happens to values, and what else the user should know.
        array_list: each of them.
    """

    arrays: int
    bytes_needed: int
    bytes_read: int
    reads: int
    bytes_in_memory: int
    bytes_on_devices: int
    staging: int
    memory: int
    notes: Notes = field(default_factory=Notes)
    array_list: tuple[LoadedArray, ...] = ()

    @property
    def over_read(self) -> float:
        """Bytes that are read for each byte that is needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    def __repr__(self) -> str:
        return (
            f"LoadPlan({array_count(range(self.arrays))}, {self.bytes_on_devices:,} bytes on devices, "
            f"{self.bytes_read:,} bytes read, {self.over_read:.2f} times those needed)"
        )


def plan_load(wanted: Request, *, memory: int, notes: Notes) -> LoadPlan:
    """What loading takes.

    Raises:
        MemoryBudgetError: an array that must be staged on its way to devices does not fit.
    """
    arrays = _arrays(wanted.leaves)
    held = [held_of(leaf) for leaf in arrays]
    cost = projected(held, PIECE_BYTES)
    return LoadPlan(
        arrays=len(wanted.leaves),
        bytes_needed=sum(each.stored_bytes for each in held),
        bytes_read=cost.nbytes,
        reads=cost.reads,
        bytes_in_memory=sum(each.nbytes for each in held),
        bytes_on_devices=sum(leaf.target.nbytes for leaf in arrays),
        staging=staging(arrays, memory),
        memory=memory,
        notes=notes + wanted.notes,
        array_list=tuple(map(_described, wanted.leaves)),
    )


def _described(leaf: Leaf) -> LoadedArray:
    target = leaf.target
    sharding = target.sharding
    text = str(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else str(sharding)
    return LoadedArray(leaf.name, target.shape, target.dtype.name, text, target.part)


def _arrays(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Those that go to devices."""
    return [leaf for leaf in leaves if leaf.number is None]


def held_of(leaf: Leaf) -> Held:
    """What this process reads of an array."""
    return Held(leaf.array, leaf.target.shards, leaf.name)


def staging(leaves: Sequence[Leaf], memory: int) -> int:
    """Bytes of parts that are on their way to devices at once: nothing where they stay where they are.

    Raises:
        MemoryBudgetError: the largest array does not fit.
    """
    sizes = [held_of(leaf).nbytes for leaf in leaves if not leaf.target.is_aliased]
    if not sizes:
        return 0
    # Half of it, so that one group is on its way while the next is read.
    room = (memory - BASE_BYTES - 4 * PIECE_BYTES) // 2
    if max(sizes) > room:
        needed = BASE_BYTES + 4 * PIECE_BYTES + 2 * max(sizes)
        raise does_not_fit("the parts of one array do not fit into the memory allowed", memory, needed)
    return 2 * min(room, sum(sizes))


def groups(leaves: Sequence[Leaf], room: int) -> Iterator[list[Leaf]]:
    """Leaves that are read together, in the order of their files: first all that need no room."""
    ordered = in_place_order(leaves)
    yield [leaf for leaf in ordered if leaf.target.is_aliased]
    group: list[Leaf] = []
    taken = 0
    for leaf in (leaf for leaf in ordered if not leaf.target.is_aliased):
        nbytes = held_of(leaf).nbytes
        if group and taken + nbytes > room:
            yield group
            group, taken = [], 0
        group.append(leaf)
        taken += nbytes
    yield group


def loaded(wanted: Request, plan: LoadPlan, *, jobs: int | None, observe: Callable[[int], None]) -> Any:
    """Reads all that was asked for.

    Returns:
        What the request makes of it.

    Raises:
        CheckpointError: an array cannot be read.
    """
    values: dict[int, Any] = {}
    reading = Reading(plan.memory, jobs, plan.staging, observe)
    on_the_way: list[jax.Array] = []
    for group in groups(_arrays(wanted.leaves), plan.staging // 2):
        made = list(_read(group, reading))
        # What was staged for the group before this one is free now, or will be before more is staged.
        _wait_for(on_the_way)
        on_the_way = [array for leaf, array in made if not leaf.target.is_aliased]
        values.update({id(leaf): _typed(array, leaf) for leaf, array in made})
    _wait_for(on_the_way)
    for leaf in wanted.leaves:
        if leaf.number is not None:
            values[id(leaf)] = leaf.number(leaf.array.read().reshape(()).item())
    return wanted.filled([values[id(leaf)] for leaf in wanted.leaves])


def _wait_for(arrays: list[jax.Array]) -> None:
    for array in arrays:
        array.block_until_ready()


def _read(leaves: Sequence[Leaf], reading: Reading) -> Iterator[tuple[Leaf, jax.Array]]:
    batches = Batches()
    for number, parts in read_parts([held_of(leaf) for leaf in leaves], reading):
        for done, array in batches.add(number, leaves[number].target, parts):
            yield leaves[done], array
    for done, array in batches.rest():
        yield leaves[done], array


def _typed(array: jax.Array, leaf: Leaf) -> jax.Array:
    """PRNG keys of their data; anything else as it is."""
    return array if leaf.key_impl is None else jax.random.wrap_key_data(array, impl=leaf.key_impl)
