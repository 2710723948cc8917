"""Cast arrays to another dtype, rounded to nearest even; NaN stays NaN, and infinity stays infinity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import elementwise
from ckpttools.array.patterns import first_match
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.argument_checks import validate_fields
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType, parse_dtype
from ckpttools.core.errors import MappingError, listing
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count
from ckpttools.mapping.values import Cast
from ckpttools.quantized.config import FIELD, Like
from ckpttools.quantized.scales import is_plain
from ckpttools.quantized.view import DequantizedTree, quantized_view
from ckpttools.transforms.base import Transformed


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
        expected, declared = self._spare_quantized(tree, dict(self._expected(tree)), named)
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

    def _expected(self, tree: Tree) -> Iterator[tuple[Path, DType]]:
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
        lossy = [path for path, pair in casts.items() if not _keeps_numbers(*pair)]
        if lossy and not self.force:
            what, instead = _loss_and_remedy([casts[path] for path in lossy])
            raise MappingError(
                f"casting these arrays can lose {what}:{_list_casts(lossy, casts)}",
                location=tree.metadata.location or None,
                hint=f"{instead}, or use {option('force', True)}",
            )


def can_cast(dtype: DType, to: DType) -> bool:
    """Return whether `CastMap` casts from one dtype to another without `force`."""
    return _can_cast(dtype, to) and _keeps_numbers(dtype, to)


def cast(array: LazyArray, dtype: DType) -> LazyArray:
    """Cast `array` to `dtype`.

    Arrays that have this dtype or are not floating-point are returned unchanged.
    """
    return _convert_array(array, dtype) if array.dtype.is_float and array.dtype != dtype else array


def _is_lossless(dtype: DType, to: DType) -> bool:
    # Casts of integers are rare.
    from ckpttools.transforms.conversion import is_lossless

    return is_lossless(dtype, to)


def _convert_array(array: LazyArray, dtype: DType, path: Path = ()) -> LazyArray:
    if array.dtype.is_float and Cast(dtype).exactness(array.dtype).exact:
        return elementwise(array, Cast(dtype, array.dtype))
    from ckpttools.transforms.conversion import Convert

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


def _keeps_numbers(dtype: DType, to: DType) -> bool:
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
