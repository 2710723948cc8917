"""Holders of the elements of an array to save: shards on devices, or a numpy array.

Each distinct shard is read once, region by region, by the process that has its first replica, so that no full
array is on the host. Elements are read as unsigned carriers, which keep every bit of a NaN.
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


# Versions of arrays in memory let a failed save resume with the same arrays, and only with these.
#
# JAX arrays are immutable, so an object's identity is its version as long as the object lives. Numpy arrays
# are mutable: small ones are hashed, and large ones get a new version each time.

_MAX_HASHED = 1 << 20
_lock = threading.Lock()
_known: dict[int, tuple[weakref.ref[Any], str]] = {}


def object_version(array: Any) -> str:
    """Return a text that is unique to an object and stays the same while it lives."""
    with _lock:
        result = _known.get(id(array))
        if result is not None and result[0]() is array:
            return result[1]
        built = secrets.token_hex(16)
        with suppress(TypeError):
            _known[id(array)] = weakref.ref(array, _forget_callback(id(array), built)), built
        return built


def _forget_callback(key: int, text: str) -> Any:
    def forget(reference: object) -> None:
        # Take no lock, since this thread may already hold it. Another array may have the same id by now.
        result = _known.get(key)
        if result is not None and result[1] == text:
            _known.pop(key, None)

    return forget


def content_version(array: np.ndarray) -> str:
    """Return the hash of a small array, or a new text at each call for a large one."""
    if array.nbytes > _MAX_HASHED:
        return secrets.token_hex(16)
    return hashlib.sha256(array.tobytes()).hexdigest()


# Bytes fetched from a device at once. For a moment there are three copies: on the device, in the runtime's
# buffer, and in the destination.
PIECE_BYTES = 16 << 20
CONVERT_LATER_HINT = (
    "save the arrays as they are, as orbax; then convert that checkpoint in one process, with "
    "ckpttools.convert, "
    "maxtext_to_hf or hf_to_maxtext"
)
"""Hint for transforms of arrays that several processes share."""


@dataclass(slots=True)
class Shard:
    """A region of an array and its elements.

    Attributes:
        region: The region.
        data: Elements of the region: a numpy array of any strides, or a JAX array on one device.
    """

    region: Region
    data: Any

    @property
    def is_on_host(self) -> bool:
        """Whether numpy can access the elements without a copy."""
        import numpy as np

        if isinstance(self.data, np.ndarray):
            return True
        # JAX copies elements smaller than one byte, and keeps the copy as long as the array.
        (device,) = self.data.devices()
        is_of_host = device.platform == "cpu" or "host" in str(self.data.sharding.memory_kind)
        return is_of_host and _bits(self.data.dtype) >= 8

    def copy_elements(self) -> np.ndarray:
        """Return all elements in newly allocated memory."""
        import numpy as np

        if self.is_on_host:
            return np.array(self.data)
        import jax

        # Use a temporary array with the same memory, because a JAX array keeps its host copy as long as it
        # lives.
        fresh = jax.make_array_from_single_device_arrays(self.data.shape, self.data.sharding, [self.data])
        fetched = np.asarray(fresh)
        return fetched.copy() if _may_alias(self.data) else fetched

    def read_into(self, inside: Region, out: np.ndarray, dtype: DType) -> None:
        """Write a subregion, in the shard's own coordinates, into `out` as carriers."""
        import numpy as np

        if self.is_on_host:
            index: tuple[Any, ...] = (*inside.slices, ...)
            part = np.asarray(self.data)[index]
            out[...] = (part if part.dtype.isnative else part.byteswap()).view(dtype.carrier)
            return
        for piece in split_evenly(inside, max(1, PIECE_BYTES // dtype.itemsize)):
            fetched = np.asarray(_slice_function()(self.data, piece.start, piece.shape))
            subview(out, piece.relative_to(inside))[...] = fetched.view(dtype.carrier)


class ShardHolder:
    """Holder of one array in shards; see `ckpttools.array.nodes.ArrayHolder`."""

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
            name: Name of the array, for messages.
            dtype: Dtype of the elements.
            shards: Shards that tile the array, or the part of it that this process saves.
            version: See `ArrayHolder.version`.
            owners: Processes that save the array, each with a region; empty if one process has the complete
                array.
            sharding: Sharding of a JAX array; None for numpy.
            elements: All elements, if they are mutable and determine `version`.
        """
        self._name, self._dtype, self._shards = name, dtype, tuple(shards)
        self.version, self.owners, self.sharding = version, tuple(owners), sharding
        self._elements = elements
        self._is_discarded = False

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the shards."""
        return tuple(shard.region for shard in self._shards)

    @property
    def is_spread(self) -> bool:
        """Whether several processes have parts or copies of the array."""
        return self.sharding is not None and is_spread(self.sharding)

    @property
    def has_remote_parts(self) -> bool:
        """Whether other processes have elements that process 0 lacks."""
        return any(process for process, _ in self.owners)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements in this process."""
        return sum(region.size for region in self.regions) * self._dtype.itemsize

    @property
    def scratch_bytes(self) -> int:
        """Bytes of two copies of a fetched region if elements are fetched from a device."""
        far = (shard.region.size for shard in self._shards if not shard.is_on_host)
        return 2 * min(PIECE_BYTES, max(far, default=0) * self._dtype.itemsize)

    def pieces(self, region: Region) -> int:
        return sum(1 for shard in self._shards if region.intersect(shard.region) is not None)

    def check(self) -> None:
        """Raise an error if the elements cannot be read.

        Raises:
            SourceChangedError: The elements no longer exist; see `refuse_deleted`.
            UsageError: Another process has all elements.
        """
        import numpy as np

        if self.owners and not self._shards and not self.is_spread:
            raise UsageError(
                "an array is only on devices of another process",
                location=self._name,
                got=f"process {self.owners[0][0]}",
                expected="arrays on devices of this process, or of several processes",
                hint="save it in that process, in a separate call; or put it on a mesh of several processes",
            )

        if self._is_discarded:
            raise SourceChangedError(
                "the array's copy was released when its save ended",
                location=self._name,
                hint="save the array again, with ckpttools.save or ckpttools.save_async",
            )
        for shard in self._shards:
            if not isinstance(shard.data, np.ndarray):
                refuse_deleted(self._name, shard.data)

    def refresh_version(self) -> None:
        """Update `version`, because a numpy array may have changed since `version` was computed."""
        if self._elements is not None:
            self.version = content_version(self._elements)

    def read_into(self, region: Region, out: np.ndarray) -> None:
        """Write the elements of a region into `out` as carriers.

        Raises:
            SourceChangedError: See `check`.
            UsageError: Other processes have some of the elements.
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
                "other processes have some elements of the array that must be read here",
                location=self._name,
                got=f"{count:,} of the {region.size:,} elements of {region}",
                hint=CONVERT_LATER_HINT,
            )

    def clone(self) -> ShardHolder:
        """Return another holder of the same elements that can be copied and released independently."""
        shards, known = self._shards, (self.owners, self.sharding, self._elements)
        return ShardHolder(self._name, self._dtype, shards, self.version, *known)

    def copy_to_host(self) -> None:
        """Copy the elements to memory of this process, and drop the references to their source."""
        self.check()
        self._shards = tuple(Shard(shard.region, shard.copy_elements()) for shard in self._shards)
        self._elements = None

    def discard(self) -> None:
        """Release the elements. They can no longer be read."""
        self._shards, self._is_discarded = (), True


def refuse_deleted(name: str, array: jax.Array) -> None:
    """Raise SourceChangedError if JAX has deleted an array, for example by donation."""
    if array.is_deleted():
        raise SourceChangedError(
            "the array was deleted before it was saved",
            location=name,
            hint="save it before it is donated to a jitted function, or use ckpttools.save_async",
        )


@dataclass(frozen=True, slots=True)
class Abstract:
    """Holder of an array without elements, such as a `jax.ShapeDtypeStruct`.

    Attributes:
        name: Name of the array, for messages.
    """

    name: str
    version: str = "no elements"
    scratch_bytes: int = 0

    def pieces(self, region: Region) -> int:
        return 1

    def check(self) -> None:
        """Raise UsageError, because there are no elements to save."""
        raise UsageError(
            "the array has no elements",
            location=self.name,
            expected="an array of JAX or numpy",
            hint="use ckpttools.save.plan, or give arrays with elements",
        )

    def read_into(self, region: Region, out: np.ndarray) -> None:
        self.check()


def shards_of(name: str, array: jax.Array, dtype: DType, identity: Any = None) -> ShardHolder:
    """Return a holder of the shards of a JAX array that this process saves: the first replicas.

    Args:
        name: Name of the array, for messages.
        array: The array, with any sharding.
        dtype: Dtype of the elements.
        identity: The user's object that identifies the array; None for `array`.
    """
    version = object_version(array if identity is None else identity)
    owners = () if array.is_fully_addressable else _owners(array.sharding, array.shape)
    return ShardHolder(name, dtype, tuple(_first_replicas(array)), version, owners, array.sharding)


@lru_cache(maxsize=256)
def _owners(sharding: jax.sharding.Sharding, shape: Shape) -> tuple[tuple[int, Region], ...]:
    """Return the process with the first replica of each shard, and its region."""
    first: dict[Region, int] = {}
    # The devices are in the order in which JAX numbers replicas.
    devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in devices.items():
        first.setdefault(_region(index, shape), device.process_index)
    return tuple((process, region) for region, process in first.items())


def _first_replicas(array: jax.Array) -> Iterable[Shard]:
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield Shard(_region(shard.index, array.shape), shard.data)


def _region(index: tuple[slice, ...], shape: Shape) -> Region:
    """Convert JAX's slices, whose limits may be None, to a region."""
    limits = [item.indices(length) for item, length in zip(index, shape, strict=True)]
    return Region(tuple(start for start, _, _ in limits), tuple(stop for _, stop, _ in limits))


def _may_alias(array: jax.Array) -> bool:
    """Return whether numpy gets the memory of a single-device array instead of a copy."""
    (device,) = array.devices()
    return bool(device.platform == "cpu")


def _bits(dtype: Any) -> int:
    """Return the size of an element on a device, in bits."""
    from ml_dtypes import finfo, iinfo

    if dtype.itemsize > 1 or dtype.kind == "b":
        return 8 * int(dtype.itemsize)
    try:
        return int(iinfo(dtype).bits)  # type: ignore[no-untyped-call]
    except ValueError:
        return int(finfo(dtype).bits)  # type: ignore[no-untyped-call]


@cache
def _slice_function() -> Callable[[jax.Array, Shape, Shape], jax.Array]:
    """Return a jitted function that slices an array on its device, as unsigned integers for small floats."""
    import jax

    def uses_carrier(dtype: Any) -> bool:
        # Accelerators have no native 64-bit floats, and JAX's default mode has no 64-bit carrier for them.
        is_float = jax.numpy.issubdtype(dtype, jax.numpy.floating)
        return bool(is_float) and dtype.itemsize <= 4 and _bits(dtype) >= 8

    @partial(jax.jit, static_argnums=2)
    def cut(array: jax.Array, start: Shape, shape: Shape) -> jax.Array:
        if uses_carrier(array.dtype):
            array = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
        return jax.lax.dynamic_slice(array, start, shape)

    return cut
