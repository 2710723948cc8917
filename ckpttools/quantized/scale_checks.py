"""Check scales for values that are not finite or not positive.

All scales are checked when they are used. Scales on local disks are checked before any other byte is read.
They are 1/17 of the bytes of MXFP4, and a negligible part with blocks of 128 x 128.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ckpttools.array.dequantized import Dequantized
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import ElementOp, Elementwise, distinct_arrays
from ckpttools.array.relayout import reshape_array
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import CheckpointError, DamagedScalesError, listing
from ckpttools.core.notes import Notes
from ckpttools.core.region import Region, split_evenly
from ckpttools.core.text import first_names, plural
from ckpttools.quantized.config import FIELD, Like, scheme
from ckpttools.quantized.decoding import REFETCH_HINT, Decode, decode_of, unscaled_array
from ckpttools.quantized.schemes.base import Scales, Weight
from ckpttools.quantized.view import ValueFaults

if TYPE_CHECKING:
    import numpy as np


# Number of scales that are checked together, in 256 KiB of float32.
_CHECK_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class ScaleCheck:
    """An op for `elementwise` that passes scales through if they give finite bfloat16 numbers.

    Attributes:
        decode: The decoder of the weight.
        then: A later op on the scales, whose results must also give finite numbers.
    """

    decode: Decode
    then: ElementOp | None = None

    def result(self, dtype: DType) -> DType:
        return dtype

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        """Copy scales, as carriers.

        Raises:
            DamagedScalesError: A scale gives a number that is not finite.
        """
        scales = source.reshape(-1)
        for at in range(0, scales.size, _CHECK_ELEMENTS):
            for factors in self.factors([scales[at : at + _CHECK_ELEMENTS]]):
                self.decode.check(factors)
        target[...] = source

    def factors(self, scales: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Compute the factors of numbers from carriers of scales, both before and after `then`."""
        import numpy as np

        yield self.decode.factors(scales)
        if self.then is not None:
            (source,), (dtype,) = scales, self.decode.scales
            result = np.empty_like(source)
            self.then.apply(source, result, dtype)
            yield self.decode.factors([result])


def scale_check_of(scales: LazyArray, codes: DType, name: str, location: str = "") -> ScaleCheck:
    """Return the check for the scales of a float8 weight.

    Args:
        scales: The scales as stored.
        codes: Stored dtype of the weight.
        name, location: Name of the scales and location of their checkpoint, for messages.
    """
    return ScaleCheck(
        Decode(codes.name, (scales.dtype,), (False,), DTYPES["bfloat16"], name, location=location)
    )


# List all damaged scales of a failed run. Decoding checks the scales that it uses and stops at the first
# damaged one. This costs a successful run almost nothing but does not find the others, so they are searched
# after the failure. This many elements are read at a time: a few MiB in addition to the buffers of running
# workers.
_SCAN_ELEMENTS = 1 << 18
# Maximum number of weights that are checked if each takes a request to a remote store: about 30 s.
_MAX_REMOTE_CHECKS = 1000


def damaged_error(
    lines: Iterable[str], *, location: str | None = None, got: str | None = None, hint: str = REFETCH_HINT
) -> DamagedScalesError:
    """Return the error for damaged scales.

    Args:
        lines: One line for each quantized weight with damaged scales.
        location: Location of the checkpoint.
        got: How the weights are quantized.
        hint: The hint of the error.
    """
    return DamagedScalesError(
        "these quantized weights have scales that give values that are not finite:" + listing(list(lines)),
        location=location,
        got=got,
        hint=hint,
    )


def damage_text(decode: Decode) -> str:
    """Return the end of a line about a damaged scale, which follows its value."""
    return f"which gives {decode.result} values that are not finite"


def are_local(scales: Iterable[LazyArray]) -> bool:
    """Return whether all scales are stored locally, so that reading them does not take network requests."""
    return all(getattr(source, "price", 1) == 1 for scale in scales for source in scale.sources())


def list_all_damaged(error: DamagedScalesError, arrays: Iterable[LazyArray]) -> BaseException:
    """Extend an error about damaged scales to list all damaged scales.

    Args:
        error: The error raised while reading the arrays.
        arrays: All arrays of the run. Of remote scales, only the first ones are checked.
    """
    # Names may repeat for weights of averaged models, or for zero points and their weights.
    scaled = [*_scaled_arrays(arrays)]
    far = dict.fromkeys(scale_check.decode.where for scale_check, scales in scaled if not are_local(scales))
    rest = {*[*far][_MAX_REMOTE_CHECKS:]} - {error.location}
    result: dict[Decode, float] = {}
    try:
        for scale_check, scales in scaled:
            if (
                scale_check.decode.where not in rest
                and (damaged := next(_damaged_factors(scale_check, scales), None)) is not None
            ):
                result.setdefault(scale_check.decode, damaged)
    except CheckpointError:
        return error
    if not result:
        return error
    unseen = f"; scales of {len(rest):,} more weights were not checked" if rest else ""
    built = _error_of(result, REFETCH_HINT + unseen)
    built.__cause__ = error
    return built


def _error_of(result: Mapping[Decode, float], hint: str) -> DamagedScalesError:
    """Return the error for damaged scales, with their locations if there are several checkpoints."""
    locations = {decode.location for decode in result}
    named = ((d.name if len(locations) == 1 else d.where, d, value) for d, value in result.items())
    lines = dict.fromkeys(f"{name}: {value:g}, {damage_text(d)}" for name, d, value in named)
    return damaged_error(lines, location=locations.pop() or None if len(locations) == 1 else None, hint=hint)


def _scaled_arrays(arrays: Iterable[LazyArray]) -> Iterator[tuple[ScaleCheck, Sequence[LazyArray]]]:
    """Yield the decoders and scales of all arrays that are derived from quantized weights."""
    for item in distinct_arrays(arrays):
        if isinstance(item, Dequantized) and isinstance(item.decoding, Decode):
            yield ScaleCheck(item.decoding), item.scales[: len(item.decoding.scales)]
        elif isinstance(item, Elementwise) and isinstance(item.op, ScaleCheck):
            yield item.op, (item.source,)


def _damaged_factors(scale_check: ScaleCheck, scales: Sequence[LazyArray]) -> Iterator[float]:
    """Yield the factors that give non-finite numbers."""
    first, *others = scales
    # All arrays except the first have one element.
    ones = [other.read().view(other.dtype.carrier) for other in others]
    for region in split_evenly(Region.whole(first.shape), _SCAN_ELEMENTS):
        values = first.read(region).view(first.dtype.carrier)
        for factors in scale_check.factors([values, *ones]):
            yield from map(float, scale_check.decode.out_of_range_factors(factors))


# Number of scales that are checked together, from many weights or from a part of one. Checking 45,000 weights
# took 3 s one by one, and 0.9 GB all at once.
_READ_ELEMENTS = 1 << 20
# Number of values that are checked for a weight whose scale is zero, because such a scale is valid if all
# values are zero.
_PROBED_ELEMENTS = 1 << 16
# A number with a sparse scale counts as this many others, which are read with it.
_SPARSE_FACTOR = 64


_Part = tuple[Weight, Region]


def refuse_damaged(faults: ValueFaults, settings: Mapping[str, Any] | None, location: str) -> Notes:
    """Refuse damaged scales, and describe scales that are not positive.

    Raises:
        DamagedScalesError: There are damaged scales. The message lists them.
    """
    if faults.damaged:
        raise damaged_error(
            faults.damaged,
            location=location or None,
            got=f"{scheme(settings)} ({FIELD})" if settings else None,
        )
    if not faults.not_positive:
        return Notes()
    count = plural(len(faults.not_positive), "quantized weight")
    remark = (
        f"{count} with scales that are zero or negative, which quantizers do not write: values of their "
        f"blocks become zero or change sign ({first_names(faults.not_positive)})"
    )
    return Notes(remarks=(remark,))


def value_faults(
    arrays: Mapping[str, LazyArray],
    weights: Iterable[Weight],
    dtype: DType | None = None,
    like: Like = "float32",
    *,
    signs: bool = True,
) -> ValueFaults:
    """Find damaged scales and other suspicious scales.

    Args:
        arrays: Arrays by name.
        weights: The weights to check; remote weights are skipped.
        dtype: Dtype of the dequantized values; None for bfloat16.
        like: How products are rounded.
        signs: Whether to include scales that are not positive.

    Raises:
        StorageError: The scales cannot be read.
    """
    looked_at = (weight for weight in weights if are_local(arrays[scale.name] for scale in weight.scales))
    damaged: dict[str, str] = {}
    least: dict[str, tuple[float, Weight]] = {}
    decoding = partial(decode_of, dtype=dtype, like=like)
    for parts in _read_batches(looked_at, arrays):
        out_of_range_factors, suspicious = _scale_faults(parts, arrays, decoding, signs)
        damaged |= {name: line for name, line in out_of_range_factors.items() if name not in damaged}
        least |= {
            name: low for name, low in suspicious.items() if name not in least or low[0] < least[name][0]
        }
    faults = (
        f"{item.scale_names}: {low:g}"
        for low, item in least.values()
        if low < 0 or _loses_values(item, decoding(item), arrays)
    )
    return ValueFaults(tuple(damaged.values()), tuple(faults))


def _loses_values(weight: Weight, decode: Decode, arrays: Mapping[str, LazyArray]) -> bool:
    """Return whether a zero scale applies to nonzero numbers, checking the first such blocks.

    Blocks are read in large batches: reading blocks of 16 numbers one by one took 1.4 s for a weight.
    """
    scale, *others = weight.scales
    scales, codes = reshape_array(arrays[scale.name], scale.shape), unscaled_array(weight, arrays)
    ones = [arrays[other.name].read().view(other.dtype.carrier) for other in others]
    limit, left = max(1, min(_PROBED_ELEMENTS, _READ_ELEMENTS) // max(1, prod(scale.block))), _PROBED_ELEMENTS
    for region in split_evenly(Region.whole(scale.shape), _READ_ELEMENTS):
        zero = decode.factors([scales.read(region).view(scale.dtype.carrier), *ones]) == 0
        for cells in split_evenly(region, limit):
            zeros = zero[cells.relative_to(region).slices]
            if not zeros.any():
                continue
            for part in split_evenly(_values_region(cells, scale, weight), _READ_ELEMENTS):
                result = codes.read(part) != 0
                # The numbers of a single cell may span several regions; the numbers of several cells form
                # one.
                among = zeros if cells.size == 1 else _expand_to_values(zeros, scale, part)
                if (result & among).any():
                    return True
                left -= max(part.size // _SPARSE_FACTOR, part.size if cells.size == 1 else int(among.sum()))
                if left <= 0:
                    return False
    return False


def _values_region(cells: Region, scale: Scales, weight: Weight) -> Region:
    """Return the region of a weight's numbers whose scales are in a region."""
    start = tuple(at * length for at, length in zip(cells.start, scale.block, strict=True))
    ends = zip(cells.stop, scale.block, weight.shape, strict=True)
    return Region(start, tuple(min(at * length, stop) for at, length, stop in ends))


def _expand_to_values(cells: np.ndarray, scale: Scales, numbers: Region) -> np.ndarray:
    """Repeat values of scales for each of their numbers."""
    for axis, length in enumerate(scale.block):
        cells = cells.repeat(length, axis)
    return cells[tuple(slice(length) for length in numbers.shape)]


def _read_batches(weights: Iterable[Weight], arrays: Mapping[str, LazyArray]) -> Iterator[list[_Part]]:
    """Yield batches of weights and regions of their first scale arrays that fit in memory."""
    parts: list[_Part] = []
    size = 0
    for weight in weights:
        for region in split_evenly(Region.whole(arrays[weight.scales[0].name].shape), _READ_ELEMENTS):
            if parts and size + region.size > _READ_ELEMENTS:
                yield parts
                parts, size = [], 0
            parts.append((weight, region))
            size += region.size
    if parts:
        yield parts


def _scale_faults(
    parts: Sequence[_Part],
    arrays: Mapping[str, LazyArray],
    decode_of: Callable[[Weight], Decode],
    signs: bool,
) -> tuple[dict[str, str], dict[str, tuple[float, Weight]]]:
    """Return weights whose scales give non-finite values, and the smallest nonpositive scales."""
    import numpy as np

    from ckpttools.array.scratch import Scratch

    named = [arrays[scale.name] for item, _ in parts for scale in item.scales]
    scratch = Scratch(max((item.scratch_bytes for item in named), default=0))

    def carriers(name: str, region: Region) -> np.ndarray:
        result = np.empty(region.shape, arrays[name].dtype.carrier)
        arrays[name].read_into(region, result, scratch)
        return result

    groups: defaultdict[Hashable, list[tuple[Weight, list[np.ndarray]]]] = defaultdict(list)
    for item, region in parts:
        first, *others = (scale.name for scale in item.scales)
        # All arrays except the first have one element.
        read = [carriers(first, region), *(carriers(o, Region.whole(arrays[o].shape)) for o in others)]
        of_scales = tuple((scale.dtype.name, scale.divides) for scale in item.scales)
        kind = item.numbers, of_scales, item.zero_points is not None
        groups[kind].append((item, read))
    out_of_range_factors: dict[str, str] = {}
    suspicious: dict[str, tuple[float, Weight]] = {}
    for group in groups.values():
        decode = decode_of(group[0][0])
        for weight, factors in _suspicious_factors(group, decode, signs):
            out_of_range = decode.out_of_range_factors(factors)
            if out_of_range.size:
                out_of_range_factors.setdefault(
                    weight.name, f"{weight.scale_names}: {out_of_range[0]:g}, {damage_text(decode)}"
                )
            if signs and (low := factors[factors <= 0]).size:
                least = float(low.min()), weight
                suspicious[weight.name] = min(suspicious.get(weight.name, least), least, key=itemgetter(0))
    return out_of_range_factors, suspicious


def _suspicious_factors(
    group: Sequence[tuple[Weight, list[np.ndarray]]], decode: Decode, signs: bool
) -> Iterator[tuple[Weight, np.ndarray]]:
    """Yield the suspicious factors of similar weights and their scales; empty if all are valid."""
    import numpy as np

    # Read all scales at once, because tens of thousands of experts have a few each.
    is_one = len(group) == 1 or len(group[0][1]) > 1
    all_values = None if is_one else [np.concatenate([read[0].reshape(-1) for _, read in group])]
    if all_values is None or not _are_in_range(all_values, decode, signs):
        suspicious = ((weight, read) for weight, read in group if not _are_in_range(read, decode, signs))
        yield from ((weight, decode.factors(read)) for weight, read in suspicious)


def _are_in_range(scales: Sequence[np.ndarray], decode: Decode, signs: bool) -> bool:
    """Return whether scales give values that are finite and, if `signs`, positive."""
    first, *others = scales
    factors = decode.factors([_extremes(first.reshape(-1), decode.scales[0]), *others])
    return not (decode.out_of_range_factors(factors).size or (signs and factors.min(initial=1) <= 0))


def _extremes(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the scales of smallest and largest magnitude, and a negative one if there is any.

    MXFP4's exponents take 0.3 ns each including reading; decoding them to numbers takes 1.5 ns.
    """
    import numpy as np

    if dtype.layout is None or not dtype.layout.in_order or not carriers.size:
        return carriers
    magnitude = carriers.dtype.type((1 << (dtype.bits - 1)) - 1)
    magnitudes = carriers & magnitude if dtype.layout.sign else carriers
    return np.array([magnitudes.min(), magnitudes.max(), carriers.max()], carriers.dtype)
