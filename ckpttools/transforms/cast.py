"""Cast arrays to another dtype, rounded to nearest even; NaN stays NaN, and infinity stays infinity.

The counts, in the receipt of a run and in its `--json`:

    overflowed     became infinite, or NaN in a dtype without infinity
    saturated      became the largest or smallest value of a dtype without infinity and NaN
    underflowed    were not zero and became zero
    nan_lost       were NaN and became a number in a dtype without NaN
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import field
from functools import cache
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray, require_booleans
from ckpttools.array.nodes import elementwise
from ckpttools.array.patterns import first_match
from ckpttools.array.rounding import as_float32, reusable_buffer, round_to
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.argument_checks import validate_fields
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType, parse_dtype
from ckpttools.core.errors import MappingError, listing
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count
from ckpttools.mapping.values import Cast, blockwise, round_constant
from ckpttools.quantized.config import FIELD, Like
from ckpttools.quantized.scales import is_plain
from ckpttools.quantized.view import DequantizedTree, quantized_view
from ckpttools.transforms.base import Transformed

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Dequantize:
    """A transform that dequantizes weights and leaves other arrays unchanged.

    Reads the shapes that some schemes store as arrays, and scales on local disks.

    Attributes:
        dtype: Dtype of the dequantized values, or its name; None for bfloat16.
        like: "float32" rounds products once; "maxtext" rounds the scales to bfloat16 first.
    """

    dtype: DType | str | None = None
    like: Like = "float32"

    def __call__(self, tree: Tree) -> Transformed:
        """Return the dequantized tree; its configuration no longer mentions quantization.

        Raises:
            FormatError: Weights use an unsupported scheme, lack their scales, or have scales that do not fit
                or are not finite; lists all.
        """
        dtype = None if self.dtype is None else parse_dtype(self.dtype)
        return with_notes(quantized_view(tree).plain(dtype, self.like), tree)


def with_notes(built: DequantizedTree, tree: Tree) -> Transformed:
    """Return a dequantized tree with notes for the user."""
    if built.tree is tree:
        return Transformed(tree)
    declared = (
        f"{FIELD} is left out of config.json, as no weight is quantized any more; it was {built.declared}"
    )
    # Extra data in a checkpoint with MaxText's names is left unchanged.
    is_written = built.declared and all(len(path) == 1 for path in built.weights)
    return Transformed(built.tree, built.notes + Notes(remarks=(declared,) if is_written else ()))


@validate_fields
@dataclass(frozen=True)
class CastTo:
    """A cast of all floating-point arrays, except tables of integers, to `dtype`.

    Attributes:
        dtype: The dtype, or its name.
        force: Cast also to an integer or exponent dtype.
    """

    dtype: DType | str
    force: bool = False

    def __call__(self, tree: Tree) -> Transformed:
        """Return the tree with cast values; raises the errors of `CastMap`."""
        return CastMap({}, self.dtype, self.force)(tree)


@validate_fields
@dataclass(frozen=True)
class CastMap:
    """A cast of arrays to the dtypes of the patterns; the first matching pattern counts.

    Attributes:
        dtypes: Dtype or dtype name for each pattern (see `Select`); also applies to integer arrays.
        dtype: Dtype of unmatched floating-point arrays, except tables of integers; None to leave them
            unchanged.
        force: Whether to cast even if integers can be lost (they are rounded, and clipped to the dtype's
            range), if signs and zeros can be lost in float8_e8m0fnu, or if float8 values may have lost their
            scales.
        dequantize_like: Rounding of the products of quantized weights and their scales; see `Dequantize`.
    """

    dtypes: Mapping[str, DType | str] = field(default_factory=dict)
    dtype: DType | str | None = None
    force: bool = False
    dequantize_like: Like = "float32"

    def __call__(self, tree: Tree) -> Transformed:
        """Return the tree with cast values.

        Quantized weights are dequantized if `dtype` is a type for plain numbers.

        Otherwise, and for unsupported schemes, quantized weights and their auxiliary tensors are left
        unchanged.

        Raises:
            UsageError: A pattern matches no array.
            UnknownNameError: A dtype name is unknown.
            MappingError: Integers or signs can be lost without `force`, or an array cannot be cast at all.
            FormatError: A quantized weight with scales is to be cast, a pattern names one of its auxiliary
                tensors, or values may have lost their scales and `force` is not set.
        """
        plain = self._dequantize(tree)
        tree = plain.tree
        named: Collection[Path] = ()
        if self.dtypes:
            from ckpttools.transforms.select import require_matches

            require_matches(self.dtypes, tree.arrays, tree.metadata.location)
            named = {path for path in tree.arrays if first_match(path, self.dtypes)}
        expected, declared = self._spare_quantized(tree, dict(self._changed_arrays(tree)), named)
        self._check(tree, expected)
        leaves = {
            path: _convert_array(leaf, expected[path], path)
            if isinstance(leaf, LazyArray) and path in expected
            else leaf
            for path, leaf in tree.items()
        }
        notes = _notes([(tree.arrays[path].dtype, dtype) for path, dtype in expected.items()])
        declared = plain.notes + declared + Notes(tuple(notes), remarks=tuple(self._table_remarks(tree)))
        return Transformed(Tree(leaves, tree.metadata), declared)

    def _spare_quantized(
        self, tree: Tree, expected: dict[Path, DType], named: Collection[Path]
    ) -> tuple[dict[Path, DType], Notes]:
        """Drop casts that quantized weights rule out; see `spare_quantized`."""
        view = quantized_view(tree)
        if not (view.candidates or view.declared):
            return expected, Notes()
        from ckpttools.quantized.protection import spare_quantized

        return spare_quantized(tree, expected, named, force=self.force)

    def _table_remarks(self, tree: Tree) -> Iterator[str]:
        """Describe the tables that are left unchanged."""
        floats = (path for path, array in tree.arrays.items() if array.dtype.is_float and is_table(path))
        kept = [path for path in floats if not first_match(path, self.dtypes)]
        if kept and self.dtype is not None:
            yield f"{array_count(kept)} keep their dtype, because they hold expert indices: {keystr(kept[0])}"

    def _dequantize(self, tree: Tree) -> Transformed:
        """Dequantize the tree.

        The tree is left unchanged if no plain numbers are requested or the scheme is unsupported.
        """
        dtype = None if self.dtype is None else parse_dtype(self.dtype)
        if dtype is None or not (is_plain(dtype) and quantized_view(tree).is_supported):
            return Transformed(tree)
        return Dequantize(dtype, self.dequantize_like)(tree)

    def _changed_arrays(self, tree: Tree) -> Iterator[tuple[Path, DType]]:
        """Yield the arrays that change, with their new dtypes."""
        dtypes = {pattern: parse_dtype(item) for pattern, item in self.dtypes.items()}
        default = None if self.dtype is None else parse_dtype(self.dtype)
        for path, array in tree.arrays.items():
            pattern = first_match(path, dtypes)
            usual = default if array.dtype.is_float and not is_table(path) else None
            dtype = usual if pattern is None else dtypes[pattern]
            if dtype is not None and dtype != array.dtype:
                yield path, dtype

    def _check(self, tree: Tree, expected: Mapping[Path, DType]) -> None:
        casts = {path: (tree.arrays[path].dtype, dtype) for path, dtype in expected.items()}
        keys = tree.metadata.key_impls
        never = [path for path, pair in casts.items() if path in keys or not _can_cast(*pair)]
        if never:
            raise MappingError(
                f"these arrays cannot be cast:{_list_casts(never, casts)}",
                location=tree.metadata.location or None,
                expected="integers or floating-point numbers, not PRNG keys",
                hint=f"use narrower patterns in {option('dtype_map')}",
            )
        lossy = [path for path, pair in casts.items() if not _keeps_values(*pair)]
        if lossy and not self.force:
            loss, instead = _loss_and_remedy([casts[path] for path in lossy])
            raise MappingError(
                f"casting these arrays can lose {loss}:{_list_casts(lossy, casts)}",
                location=tree.metadata.location or None,
                hint=f"{instead}, or use {option('force', True)}",
            )


def can_cast(dtype: DType, to: DType) -> bool:
    """Return whether `CastMap` casts from one dtype to another without `force`."""
    return _can_cast(dtype, to) and _keeps_values(dtype, to)


def cast(array: LazyArray, dtype: DType) -> LazyArray:
    """Cast `array` to `dtype`.

    Arrays that have this dtype or are not floating-point are returned unchanged.
    """
    return _convert_array(array, dtype) if array.dtype.is_float and array.dtype != dtype else array


def _is_lossless(dtype: DType, to: DType) -> bool:
    # Casts of integers are rare.
    return is_lossless(dtype, to)


def _convert_array(array: LazyArray, dtype: DType, path: Path = ()) -> LazyArray:
    if array.dtype.is_float and Cast(dtype).exactness(array.dtype).exact:
        return elementwise(array, Cast(dtype, array.dtype))
    return elementwise(array, Convert(dtype, keystr(path)) if array.dtype.kind == "bool" else Convert(dtype))


def cast_notes(arrays: Mapping[str, LazyArray], dtype: DType) -> list[Note]:
    """Describe the losses of casting floating-point arrays to `dtype`, one note per reason."""
    return _notes([(array.dtype, dtype) for array in arrays.values() if array.dtype.is_float])


def _notes(casts: list[tuple[DType, DType]]) -> list[Note]:
    reasons = Counter(_reason(dtype, to) for dtype, to in casts if not _is_exact(dtype, to))
    return [Note.of_arrays(count, reason) for reason, count in reasons.items()]


def _reason(dtype: DType, to: DType) -> str:
    reason = f"cast from {dtype} to {to}: rounded"
    if not to.is_float:
        return f"{reason}, clipped to the range of {to}" + (", NaN becomes 0" if dtype.is_float else "")
    if not to.has_nan:
        return f"{reason}, clipped to the range of {to}, NaN becomes 0"
    return reason if to.has_infinity else f"{reason}, infinity and values that are too large become NaN"


def _is_exact(dtype: DType, to: DType) -> bool:
    return Cast(to).exactness(dtype).exact if dtype.is_float else _is_lossless(dtype, to)


def _keeps_values(dtype: DType, to: DType) -> bool:
    """Return whether a cast is between signed floating-point dtypes with zero, or is lossless."""
    return (dtype.is_float and to.is_of_weights) or _is_lossless(dtype, to)


def _loss_and_remedy(casts: Collection[tuple[DType, DType]]) -> tuple[str, str]:
    """Describe the loss of casts to or from other dtypes, and the alternative."""
    if all(to.is_float and not to.is_of_weights for _, to in casts):
        return (
            "signs and zeros",
            "this dtype holds only powers of two, for scales: use another dtype, such as bfloat16",
        )
    return "integers", f"leave them as they are ({option('dtype')} takes floating-point arrays only)"


def _can_cast(dtype: DType, to: DType) -> bool:
    return "complex" not in (dtype.kind, to.kind) and to.kind != "bool"


def _list_casts(paths: list[Path], casts: Mapping[Path, tuple[DType, DType]]) -> str:
    return listing([f"{keystr(path)}: {casts[path][0]} to {casts[path][1]}" for path in paths])


# Names of the expert tables in DeepSeek V4 and in MaxText, which trains with them in float32.
_TABLES = frozenset(("tid2eid",))


def is_table(path: Path) -> bool:
    """Return whether an array is a table of integers.

    In bfloat16, expert 257 would silently become expert 256.
    """
    return not _TABLES.isdisjoint(key for item in path for key in str(item).split("."))


# Number of bits of an int64 that a float64 cannot represent.
_SURPLUS_BITS = 11
# Number of elements rounded at a time: 1 MiB of float32.
_ROUNDED = 1 << 18


@dataclass(frozen=True, slots=True)
class Convert:
    """A conversion to another dtype, rounding to nearest even, including integers to floats and back.

    Out-of-range values become the nearest integer in range; NaN becomes 0.

    Attributes:
        to: The new dtype.
        name: The name of the array, for the message about bytes that are not booleans.
    """

    to: DType
    name: str = ""

    def result(self, dtype: DType) -> DType:
        return self.to

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> Mapping[str, int]:
        require_booleans(source.view(dtype.carrier), dtype, self.name)
        counts: Counter[str] = Counter()
        if dtype.name == "float32" and self.to.name == "bfloat16" and _are_flat(source, target):
            self._round(source.reshape(-1), target.reshape(-1), dtype, counts)
            return counts

        def convert(block: np.ndarray) -> np.ndarray:
            converted = self._convert(block, dtype)
            counts.update(self._count_losses(block, converted, dtype))
            return converted

        blockwise(source, target, dtype, self.to, convert)
        return counts

    def _round(self, source: np.ndarray, target: np.ndarray, dtype: DType, counts: Counter[str]) -> None:
        """Round values. This is the fast path for most means and merges."""
        import numpy as np

        for start in range(0, source.size, _ROUNDED):
            block = source[start : start + _ROUNDED].view(np.float32)
            rounded = target[start : start + _ROUNDED]
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                round_to(self.to, block, rounded)
            counts.update(self._count_losses(block, rounded.view(self.to.numpy), dtype))

    def _convert(self, block: np.ndarray, dtype: DType) -> np.ndarray:
        if self.to.is_float:
            is_integer_cast = not dtype.is_float and self.to.bits < 64
            return round_constant(_as_float64(block, dtype) if is_integer_cast else block, self.to)
        return _to_integers(block, dtype, self.to)

    def _count_losses(self, block: np.ndarray, converted: np.ndarray, dtype: DType) -> dict[str, int]:
        return (_count_float_losses if self.to.is_float else _count_integer_losses)(
            block, converted, dtype, self.to
        )


def is_lossless(dtype: DType, to: DType) -> bool:
    """Return whether `to` represents every value of an integer dtype."""
    if not dtype.is_whole:
        return dtype == to
    least, limit = dtype.limits
    if to.kind in ("int", "uint"):
        return to.limits[0] <= least and limit <= to.limits[1]
    # Some smaller dtypes have enough digits but not enough range.
    return dtype == to or (to.bits >= 16 and limit.bit_length() <= to.digits)


def _as_float64(block: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert integers to float64 so that rounding to a smaller dtype is correct to the last bit."""
    import numpy as np

    if dtype.bits < 64:
        return block.astype(np.float64)
    # Rounded to odd: float64's last bit records whether bits were cut off, which later decides ties.
    cut = block & block.dtype.type((1 << _SURPLUS_BITS) - 1) != 0
    rounded_to_odd = (block >> _SURPLUS_BITS | cut.astype(block.dtype)) << _SURPLUS_BITS
    limit = 1 << 53
    fits = (block <= limit) & (block >= -limit) if dtype.kind == "int" else block <= limit
    return np.where(fits, block, rounded_to_odd).astype(np.float64)


def _to_integers(block: np.ndarray, dtype: DType, to: DType) -> np.ndarray:
    import numpy as np

    least, limit = to.limits
    if not dtype.is_float:
        source = dtype.limits
        clipped: np.ndarray = np.clip(_plain(block, dtype), max(least, source[0]), min(limit, source[1]))
        return clipped.astype(to.numpy)
    wide = np.rint(block.astype(np.float64))
    inside: np.ndarray = np.where((wide > least) & (wide < limit), wide, 0).astype(_plain_dtype(to))
    inside[wide <= least] = least
    inside[wide >= limit] = limit
    return inside.astype(to.numpy)


def _plain(block: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert integers to a native numpy dtype."""
    return block.astype(_plain_dtype(dtype), copy=False)


def _plain_dtype(dtype: DType) -> np.dtype[np.generic]:
    return (DTYPES["int8"] if dtype.value_bits else dtype).numpy


def _count_float_losses(block: np.ndarray, converted: np.ndarray, dtype: DType, to: DType) -> dict[str, int]:
    import numpy as np

    if to.bits == 16 and (fewer := _count_underflows(block, converted, dtype)) is not None:
        return {"underflowed": fewer} if fewer else {}
    counts = {"underflowed": _count(_is_zero(converted, to), lambda: _numbers(block, dtype) != 0)}
    if to.has_nan:
        before = np.isinf if to.has_infinity else np.isnan
        counts["overflowed"] = _count(_is_beyond(converted, to), lambda: ~before(_numbers(block, dtype)))
    else:
        source = _numbers(block, dtype)
        counts["saturated"] = _count(np.abs(source) >= _limit(to))
        counts["nan_lost"] = _count(np.isnan(source))
    return {name: count for name, count in counts.items() if count}


def _are_flat(*arrays: np.ndarray) -> bool:
    return all(array.flags.c_contiguous for array in arrays)


def _count_underflows(block: np.ndarray, converted: np.ndarray, dtype: DType) -> int | None:
    """Count 16-bit values that became zero; None if some are infinite or NaN.

    Takes half as many passes as counting all outcomes.
    """
    import numpy as np

    bits = converted.view(np.uint16)
    magnitudes = np.bitwise_and(bits, 0x7FFF, out=reusable_buffer(bits.shape, bits.dtype))
    num_exceeding = np.array(np.inf).astype(converted.dtype).view(np.uint16)
    if not magnitudes.size or magnitudes.max() >= num_exceeding:
        return None
    if magnitudes.min():
        return 0
    zeros = np.flatnonzero(magnitudes == 0)
    return int(np.count_nonzero(_numbers(block.reshape(-1)[zeros], dtype)))


def _count_integer_losses(
    block: np.ndarray, converted: np.ndarray, dtype: DType, to: DType
) -> dict[str, int]:
    import numpy as np

    least, limit = to.limits
    if not dtype.is_float:
        source = _plain(block, dtype)
        num_exceeding = _count((source < least) | (source > limit))
        return {"saturated": num_exceeding} if num_exceeding else {}
    numbers = np.rint(_numbers(block, dtype))
    counts = {
        # `limit` may not be a floating-point number, but this power of two is.
        "saturated": _count((numbers < least) | (numbers >= limit + 1)),
        "underflowed": _count(numbers == 0, lambda: _numbers(block, dtype) != 0),
        "nan_lost": _count(np.isnan(numbers)),
    }
    return {name: count for name, count in counts.items() if count}


def _is_zero(converted: np.ndarray, to: DType) -> np.ndarray:
    import numpy as np

    zero: np.ndarray
    if to.bits <= 8:
        zero = (_values(to) == 0)[converted.view(np.uint8)]
    elif to.bits == 16:
        # ml_dtypes compares one element at a time, and numpy first converts float16 to float32.
        zero = converted.view(np.uint16) << 1 == 0
    else:
        zero = converted == 0
    return zero


def _is_beyond(converted: np.ndarray, to: DType) -> np.ndarray:
    """Mark infinite values, or NaN in a dtype without infinity."""
    import numpy as np

    num_exceeding: np.ndarray
    if to.bits <= 8:
        num_exceeding = (np.isinf if to.has_infinity else np.isnan)(_values(to))[converted.view(np.uint8)]
    elif to.bits == 16:
        num_exceeding = converted.view(np.uint16) & 0x7FFF == np.array(np.inf).astype(to.numpy).view(
            np.uint16
        )
    else:
        num_exceeding = np.isinf(converted)
    return num_exceeding


def _count(mask: np.ndarray, but: Callable[[], np.ndarray] | None = None) -> int:
    """Count the elements where `mask` is true and `but` is false; `but` is computed only if needed."""
    import numpy as np

    count = int(np.count_nonzero(mask))
    return int(np.count_nonzero(mask & but())) if count and but else count


def _numbers(block: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the values as float32, or as float64 for wider ones and integers."""
    import numpy as np

    if dtype.is_float and dtype.bits <= 8:
        # ml_dtypes converts one element at a time, which is 8 times slower than a lookup.
        values: np.ndarray = _values(dtype)[block.view(np.uint8)]
        return values
    is_small = dtype.is_float and dtype.bits <= 32
    return as_float32(block) if is_small else block.astype(np.float64, copy=False)


@cache
def _values(dtype: DType) -> np.ndarray:
    """Return the value of each byte in a dtype of at most 8 bits."""
    import numpy as np

    return np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)


def _limit(dtype: DType) -> float:
    """Return the midpoint between the largest number and the next larger one, which the dtype lacks."""
    import numpy as np

    second, largest = np.unique(np.abs(_values(dtype)[: 1 << dtype.bits]))[-2:]
    return float(largest + (largest - second) / 2)
