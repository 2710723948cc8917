"""What holds the elements of one array that is saved: the shards that devices have of it, or numpy.

Each distinct shard is read once, by the process that has its first replica, a piece at a time: no array is
whole on the host, however it is cut. Elements come as unsigned carriers, so that no bit of a NaN is lost.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from ckpttools.array.read_blocks import subview
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import SourceChangedError, UsageError
from ckpttools.core.region import Region, Shape, split_evenly
from ckpttools.sharding.processes import is_spread

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax
    import numpy as np


# What tells arrays in memory apart, so that a save that failed goes on with the same arrays and no others.
#
# Arrays of JAX never change: an object is the same elements as long as it lives. Those of numpy do, so their
# elements are looked at where they are few, and else taken for others each time.

_MOST_HASHED = 1 << 20
_lock = threading.Lock()
_known: dict[int, tuple[weakref.ref[Any], str]] = {}


def version_of(array: Any) -> str:
    """The same text for the same object, as long as it lives; another one for any other."""
    with _lock:
        result = _known.get(id(array))
        if result is not None and result[0]() is array:
            return result[1]
        built = secrets.token_hex(16)
        with suppress(TypeError):
            _known[id(array)] = weakref.ref(array, _forgetting(id(array), built)), built
        return built


def _forgetting(key: int, built: str) -> Any:
    def forget(gone: object) -> None:
        # Without the lock, which this thread may have: another array may have the number already.
        result = _known.get(key)
        if result is not None and result[1] == built:
            _known.pop(key, None)

    return forget


def version_of_elements(array: np.ndarray) -> str:
    """The same text for few elements that are the same; another one at each call for many."""
    if array.nbytes > _MOST_HASHED:
        return secrets.token_hex(16)
    return hashlib.sha256(array.tobytes()).hexdigest()


# What comes from a device at once. It is there three times for a moment: on the device, in what the runtime
# brings, and where it is copied to.
PIECE_BYTES = 16 << 20
ALONE = (
    "save the arrays as they are, as orbax; then one process converts what is there, with ckpttools.convert, "
    "maxtext_to_hf or hf_to_maxtext"
)
"""What to do where arrays that several processes have are to become others."""


@dataclass(slots=True)
class Shard:
    """A box of an array, where it is.

    Attributes:
        region: the box.
        data: its elements: an array of numpy of any strides, or one of JAX on one device.
    """

    region: Region
    data: Any

    @property
    def is_on_host(self) -> bool:
        """Whether numpy can look at the elements where they are."""
        import numpy as np

        if isinstance(self.data, np.ndarray):
            return True
        # JAX copies elements of less than a byte, and keeps the copy as long as the array.
        (device,) = self.data.devices()
        is_of_host = device.platform == "cpu" or "host" in str(self.data.sharding.memory_kind)
        return is_of_host and _bits(self.data.dtype) >= 8

    def copied(self) -> np.ndarray:
        """All elements, in memory that nobody else has."""
        import numpy as np

        if self.is_on_host:
            return np.array(self.data)
        import jax

        # Another array of the same memory: an array of JAX keeps what was copied as long as it lives.
        fresh = jax.make_array_from_single_device_arrays(self.data.shape, self.data.sharding, [self.data])
        brought = np.asarray(fresh)
        return brought.copy() if _may_alias(self.data) else brought

    def read_into(self, inside: Region, out: np.ndarray, dtype: DType) -> None:
        """Writes a part of the box, in its own coordinates, into `out`, as carriers."""
        import numpy as np

        if self.is_on_host:
            index: tuple[Any, ...] = (*inside.slices, ...)
            part = np.asarray(self.data)[index]
            out[...] = (part if part.dtype.isnative else part.byteswap()).view(dtype.carrier)
            return
        for piece in split_evenly(inside, max(1, PIECE_BYTES // dtype.itemsize)):
            fetched = np.asarray(_cutter()(self.data, piece.start, piece.shape))
            subview(out, piece.relative_to(inside))[...] = fetched.view(dtype.carrier)


class ShardHolder:
    """Holds one array in shards: see `ckpttools.array.nodes.Holder`."""

    def __init__(
        self,
        name: str,
        dtype: DType,
        shards: Sequence[Shard],
        version: str,
        owners: Sequence[tuple[int, Region]] = (),
        sharding: jax.sharding.Sharding | None = None,
        elements: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            name: of the array, for messages.
            dtype: of its elements.
            shards: tile the array, or what this process is to save of it.
            version: see `Holder.version`.
            owners: the processes that save the array, each with a box; none if one process has all of it.
            sharding: of the array, where it is one of JAX.
            elements: all of them, where they may change and `version` is theirs.
        """
        self._name, self._dtype, self._shards = name, dtype, tuple(shards)
        self.version, self.owners, self.sharding = version, tuple(owners), sharding
        self._elements = elements
        self._is_let_go = False

    @property
    def regions(self) -> tuple[Region, ...]:
        """The boxes that are held."""
        return tuple(shard.region for shard in self._shards)

    @property
    def is_spread(self) -> bool:
        """Whether several processes have parts or copies of the array."""
        return self.sharding is not None and is_spread(self.sharding)

    @property
    def has_parts_elsewhere(self) -> bool:
        """Whether there are elements that process 0 has not."""
        return any(process for process, _ in self.owners)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that are held."""
        return sum(region.size for region in self.regions) * self._dtype.itemsize

    @property
    def scratch_bytes(self) -> int:
        """Two copies of a piece, where elements come from a device."""
        far = (shard.region.size for shard in self._shards if not shard.is_on_host)
        return 2 * min(PIECE_BYTES, max(far, default=0) * self._dtype.itemsize)

    def pieces(self, region: Region) -> int:
        return sum(1 for shard in self._shards if region.intersect(shard.region) is not None)

    def check(self) -> None:
        """Raises what keeps the elements from being read.

        Raises:
            SourceChangedError: they are not there any more, as of `refuse_deleted`.
            UsageError: another process has all of them.
        """
        import numpy as np

        if self.owners and not self._shards and not self.is_spread:
            raise UsageError(
                "an array is on devices of another process alone",
                location=self._name,
                got=f"process {self.owners[0][0]}",
                expected="arrays on devices of this process, or of several",
                hint="save it there, in a call of its own; or put it on a mesh of several processes",
            )

        if self._is_let_go:
            raise SourceChangedError(
                "the copy of the array was given back when its save had ended",
                location=self._name,
                hint="save the array again, with ckpttools.save or ckpttools.save_async",
            )
        for shard in self._shards:
            if not isinstance(shard.data, np.ndarray):
                refuse_deleted(self._name, shard.data)

    def look_again(self) -> None:
        """Has `version` tell what the elements are now; numpy's may have changed since it was made."""
        if self._elements is not None:
            self.version = version_of_elements(self._elements)

    def read_into(self, region: Region, out: np.ndarray) -> None:
        """Writes the elements of a region into `out`, as carriers.

        Raises:
            SourceChangedError: as `check`.
            UsageError: other processes have some of the elements.
        """
        self.check()
        count = 0
        for shard in self._shards:
            part = region.intersect(shard.region)
            if part is not None:
                shard.read_into(
                    part.relative_to(shard.region), subview(out, part.relative_to(region)), self._dtype
                )
                count += part.size
        if count != region.size:
            raise UsageError(
                "other processes have elements of the array that are to be read here",
                location=self._name,
                got=f"{count:,} of the {region.size:,} elements of {region}",
                hint=ALONE,
            )

    def again(self) -> ShardHolder:
        """Another holder of the same elements, which can be copied and let go without this one."""
        shards, known = self._shards, (self.owners, self.sharding, self._elements)
        return ShardHolder(self._name, self._dtype, shards, self.version, *known)

    def copy_to_host(self) -> None:
        """Copies what is held to memory of this process, and lets go of what had it."""
        self.check()
        self._shards = tuple(Shard(shard.region, shard.copied()) for shard in self._shards)
        self._elements = None

    def let_go(self) -> None:
        """Gives up what is held: it cannot be read any more."""
        self._shards, self._is_let_go = (), True


def refuse_deleted(name: str, array: jax.Array) -> None:
    """Raises SourceChangedError if JAX has deleted an array, by giving its memory to another, say."""
    if array.is_deleted():
        raise SourceChangedError(
            "the array was deleted before it was saved",
            location=name,
            hint="save it before it is donated to a jitted function, or use ckpttools.save_async",
        )


@dataclass(frozen=True, slots=True)
class Abstract:
    """Holds the place of an array that has a shape and no elements, such as a `jax.ShapeDtypeStruct`.

    Attributes:
        name: of the array, for messages.
    """

    name: str
    version: str = "no elements"
    scratch_bytes: int = 0

    def pieces(self, region: Region) -> int:
        return 1

    def check(self) -> None:
        """Raises UsageError: there is nothing to save."""
        raise UsageError(
            "the array has a shape and no elements",
            location=self.name,
            expected="an array of JAX or numpy",
            hint="ckpttools.save.plan takes it; save takes the tree of arrays",
        )

    def read_into(self, region: Region, out: np.ndarray) -> None:
        self.check()


def shards_of(name: str, array: jax.Array, dtype: DType, known_by: Any = None) -> ShardHolder:
    """What this process saves of an array of JAX: the first replica of each shard that it has.

    Args:
        name: for messages.
        array: of any sharding.
        dtype: of its elements.
        known_by: what the user calls the array, where that is another object; None for `array`.
    """
    version = version_of(array if known_by is None else known_by)
    owners = () if array.is_fully_addressable else _owners(array.sharding, array.shape)
    return ShardHolder(name, dtype, tuple(_first_replicas(array)), version, owners, array.sharding)


@lru_cache(maxsize=256)
def _owners(sharding: jax.sharding.Sharding, shape: Shape) -> tuple[tuple[int, Region], ...]:
    """The process that has the first replica of each shard."""
    first: dict[Region, int] = {}
    # In the order in which JAX numbers replicas.
    devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in devices.items():
        first.setdefault(_region(index, shape), device.process_index)
    return tuple((process, region) for region, process in first.items())


def _first_replicas(array: jax.Array) -> Iterable[Shard]:
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield Shard(_region(shard.index, array.shape), shard.data)


def _region(index: tuple[slice, ...], shape: Shape) -> Region:
    """The box that JAX gives as slices, of which the ends may be left out."""
    limits = [item.indices(length) for item, length in zip(index, shape, strict=True)]
    return Region(tuple(start for start, _, _ in limits), tuple(stop for _, stop, _ in limits))


def _may_alias(array: jax.Array) -> bool:
    """Whether numpy is given the memory of an array of one device, and not a copy."""
    (device,) = array.devices()
    return bool(device.platform == "cpu")


def _bits(dtype: Any) -> int:
    """Bits of an element where devices keep it."""
    from ml_dtypes import finfo, iinfo

    if dtype.itemsize > 1 or dtype.kind == "b":
        return 8 * int(dtype.itemsize)
    try:
        return int(iinfo(dtype).bits)  # type: ignore[no-untyped-call]
    except ValueError:
        return int(finfo(dtype).bits)  # type: ignore[no-untyped-call]


@cache
def _cutter() -> Callable[[jax.Array, Shape, Shape], jax.Array]:
    """Cuts a box out of an array on its device, as unsigned numbers where devices might look at floats."""
    import jax

    def is_looked_at(dtype: Any) -> bool:
        # Numbers of 64 bits, which no accelerator has in its units for small ones, have no carrier in JAX's
        # usual mode.
        is_float = jax.numpy.issubdtype(dtype, jax.numpy.floating)
        return bool(is_float) and dtype.itemsize <= 4 and _bits(dtype) >= 8

    @partial(jax.jit, static_argnums=2)
    def cut(array: jax.Array, start: Shape, shape: Shape) -> jax.Array:
        if is_looked_at(array.dtype):
            array = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
        return jax.lax.dynamic_slice(array, start, shape)

    return cut
