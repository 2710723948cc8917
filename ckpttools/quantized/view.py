"""The quantized weights of a tree, their faults, and the tree of their values.

Every command uses the same `QuantizedView` of a tree. Schemes and decoders are imported only for trees with
quantized weights or settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Dequantized, distinct_arrays
from ckpttools.array.tree import Path, Tree, by_name, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count
from ckpttools.quantized.config import (
    DEFAULT_DTYPE,
    DEQUANTIZE_MODES,
    RESULTS,
    Like,
    declared_quantization,
    scheme,
)
from ckpttools.quantized.scales import split_name
from ckpttools.quantized.weights import QuantizedWeight, Weights, can_be_scaled, find_weights, last_keys

if TYPE_CHECKING:
    from ckpttools.quantized.schemes.base import Weight


@dataclass(frozen=True, slots=True)
class DequantizedTree:
    """A tree with dequantized weights.

    Attributes:
        tree: The tree without scales, whose configuration does not mention quantization.
        notes: The effects of dequantization on values.
        weights: The dequantized weights by their paths in `tree`.
        declared: Description of the former quantization settings; empty if nothing was dequantized.
        dtype, like: The dtype of the values, and how products are rounded.
        of_scales: Remarks about the values of scales.
    """

    tree: Tree
    notes: Notes
    weights: Mapping[Path, Weight]
    declared: str = ""
    dtype: DType = DEFAULT_DTYPE
    like: Like = "float32"
    of_scales: tuple[str, ...] = ()

    def notes_without(self, names: Collection[str]) -> Notes:
        """Return the notes without those about arrays that are left out later."""
        if not self.weights:
            return self.notes
        from ckpttools.quantized.dequantized_tree import value_notes

        result = [item for path, item in self.weights.items() if dotted(path) not in names]
        return value_notes(result, self.dtype, self.like) + Notes(remarks=self.notes.remarks)


class NumericTree(NamedTuple):
    """A tree, and a remark about its dequantization, which is empty if nothing was dequantized."""

    tree: Tree
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Describes how the weights of a checkpoint are quantized.

    Attributes:
        method: The `quant_method` of the configuration; None if it does not mention quantization.
        scheme: The description in the configuration or, without one, the stored dtypes and scales.
        num_modules: Number of modules with quantized weights.
        num_weights: Number of quantized weights; a module may have several, such as experts.
        num_without_scales: Number of weights whose scales are missing.
    """

    method: str | None
    scheme: str
    num_modules: int
    num_weights: int
    num_without_scales: int


@dataclass(frozen=True, slots=True)
class ValueFaults:
    """Faulty scale values of quantized weights, one line for each weight.

    Attributes:
        damaged: Scales that give non-finite values.
        not_positive: Scales that are negative, or zero for nonzero codes, so that numbers change signs or
            vanish.
    """

    damaged: tuple[str, ...] = ()
    not_positive: tuple[str, ...] = ()


class QuantizedView:
    """The quantized weights of a tree, with cached results; `quantized_view` returns it.

    Properties raise FormatError if two arrays of a quantized tree have the same name (keys joined by dots).
    Only `shaped` and the checks of scales read data.
    """

    __slots__ = ("__dict__", "tree")

    tree: Tree
    _built: dict[tuple[int, DType | None, Like], DequantizedTree]
    _scale_faults: dict[tuple[DType | None, Like, bool], ValueFaults]

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        # All views of a tree share their results, which do not refer to the tree: in a cycle, files would
        # stay open until the next garbage collection, and deleted files would take up disk space.
        self.__dict__ = tree.once(_empty_results)

    @cached_property
    def declared(self) -> Mapping[str, Any] | None:
        """The quantization settings of the configuration, or None."""
        return declared_quantization(self.tree.metadata.config)

    @property
    def scheme(self) -> str:
        """The description of the quantization settings; empty if there are none."""
        return scheme(self.declared)

    @cached_property
    def paths(self) -> Mapping[str, Path]:
        """The paths of all arrays by their dotted names."""
        return {dotted(path): path for path in self.tree.arrays}

    @cached_property
    def candidates(self) -> Mapping[str, QuantizedWeight]:
        """The weights, and narrow values that may be the weights themselves, by name."""
        # The step is an integer but not a weight.
        arrays = ((p, array) for p, array in self.tree.arrays.items() if array.shape or array.dtype.is_float)
        if not any(can_be_scaled(".".join(map(str, path[-2:])), array.dtype) for path, array in arrays):
            return {}
        named = {name: self.tree.arrays[path] for name, path in self.paths.items()}
        result = find_weights(named, self.tree.metadata.config)
        return result if not result or by_name(self.tree.arrays) else {}

    @cached_property
    def weights(self) -> Mapping[str, QuantizedWeight]:
        """The weights whose values need scales, including those with missing scales, by name."""
        is_scaled = self.declared or any(item.scales for item in self.candidates.values())
        return self.candidates if is_scaled else {}

    @property
    def unclear(self) -> Mapping[str, QuantizedWeight]:
        """Narrow values in a tree without any scales or settings, which may be the weights themselves."""
        if self.weights:
            return {}
        return {name: item for name, item in self.candidates.items() if item.dtype.is_float}

    @cached_property
    def members(self) -> Mapping[str, QuantizedWeight]:
        """The arrays that must stay together: each weight and its auxiliary tensors, mapped to the weight."""
        return {name: item for item in self.weights.values() for name in (item.name, *item.sides)}

    @cached_property
    def weights_from_headers(self) -> Weights:
        """The weights as supported schemes interpret them, without reading data.

        If arrays store the shapes of weights, rows may be shorter than stated here; `shaped` reads those
        arrays.
        """
        if not (self.weights or self.declared):
            return Weights({})
        from ckpttools.quantized.dequantized_tree import interpret_weights

        return interpret_weights(by_name(self.tree.arrays), self.weights, self.declared)

    @cached_property
    def shaped(self) -> Weights:
        """Like `weights_from_headers`, with stored shapes; raises StorageError if they cannot be read."""
        if not self.readable:
            return self.weights_from_headers
        from ckpttools.quantized.dequantized_tree import interpret_weights, read_shapes

        arrays = by_name(self.tree.arrays)
        shapes = read_shapes(self.readable.values(), arrays)
        if shapes is None:
            return self.weights_from_headers
        return interpret_weights(arrays, self.weights, self.declared, shapes)

    @property
    def readable(self) -> Mapping[str, Weight]:
        """The weights that can be dequantized, by the names of their arrays of quantized values."""
        return self.weights_from_headers.readable

    @property
    def faults(self) -> tuple[str, ...]:
        """One line for each other weight, and for each scale without a weight."""
        return self.weights_from_headers.faults

    @cached_property
    def is_described(self) -> bool:
        """Whether a configuration or MaxText's names describe quantized weights.

        Scales of only activations and caches also count, because the configuration describes them, too.
        """
        if self.declared:
            return bool(self.weights or self.weights_from_headers.left_out)
        return bool(self.weights and self.readable)

    @property
    def is_supported(self) -> bool:
        """Whether quantized weights are described, with a supported method if the configuration names one."""
        return self.is_described and (not self.declared or self.has_supported_method)

    @property
    def has_supported_method(self) -> bool:
        """Whether the configuration names a method of a supported scheme."""
        if not self.declared:
            return False
        from ckpttools.quantized.schemes.registry import read_methods

        return self.declared.get("quant_method") in read_methods()

    @property
    def is_half_quantized(self) -> bool:
        """Whether only some of the weights that vLLM fuses are quantized."""
        if not self.weights:
            return False
        from ckpttools.quantized.config import half_quantized_experts, is_fused, is_linear

        others = ((name, self.tree.arrays[path]) for name, path in self.paths.items())
        matrices = (name for name, item in others if is_linear(name, item) or is_fused(name, item))
        plain = (name for name in matrices if name not in self.weights)
        return bool(half_quantized_experts(self.weights, plain))

    @property
    def summary(self) -> Quantization | None:
        """How the weights are quantized; None if none are and the configuration does not mention it."""
        declared, weights = self.declared or {}, list(self.weights.values())
        if not (declared or weights):
            return None
        method = declared.get("quant_method") or declared.get("quant_algo")
        # For example `int32 with scales, qzeros, g_idx`, which is the same for many weights.
        kinds = (f"{w.dtype} with {last_keys(w.sides)}" if w.sides else str(w.dtype) for w in weights)
        return Quantization(
            method=str(method) if method else None,
            scheme=self.scheme or "; ".join(dict.fromkeys(kinds)),
            num_modules=len({split_name(weight.name)[0] for weight in weights}),
            num_weights=len(weights),
            num_without_scales=sum(weight.is_bare for weight in weights),
        )

    def dequantized(self, dtype: DType | None = None, like: Like = "float32") -> DequantizedTree:
        """Replace quantized weights by their dequantized values; reads only stored shapes.

        Args:
            dtype: The dtype of the values: float32, bfloat16 or float16; other dtypes give float32. None
                means bfloat16.
            like: How products are rounded.

        Raises:
            FormatError: Weights use an unsupported scheme, have no scales, or have scales that do not fit, or
                scales have no weight. The message lists all of them.
        """
        return self._build(self.shaped, dtype, like)

    def shown(self) -> DequantizedTree:
        """Return the tree for reports: dequantized if all weights can be, else as stored.

        Stored shapes are read only if the headers leave the lengths of rows open.
        """
        weights = self.weights_from_headers
        if weights.readable:
            from ckpttools.quantized.dequantized_tree import has_doubtful_shapes

            weights = self.shaped if has_doubtful_shapes(weights) else weights
        if weights.faults or not weights.readable:
            return DequantizedTree(self.tree, Notes(), {})
        return self._build(weights, None, "float32")

    def plain(
        self, dtype: DType | None = None, like: Like = "float32", *, is_read: bool = True
    ) -> DequantizedTree:
        """Dequantize the tree, or return it unchanged if no configuration describes its quantization.

        Args:
            dtype, like: As for `dequantized`.
            is_read: Whether values will be read, so that scales are checked first.

        Raises:
            UsageError: The dtype has too few bits, or `like` is unknown.
            FormatError: As for `dequantized`, or scales are not finite. The message lists all of them.
        """
        if like not in DEQUANTIZE_MODES:
            raise UsageError(
                f"unknown {option('dequantize_like', like)}", expected=" or ".join(DEQUANTIZE_MODES)
            )
        if not self.is_described:
            return DequantizedTree(self.tree, Notes(), {})
        from ckpttools.quantized.unsupported_errors import refuse_few_bits

        refuse_few_bits(dtype, self.tree.metadata.location)
        result = self.dequantized(dtype, like)
        if not is_read:
            return result
        declared = self.check_scales(dtype, like)
        return replace(result, notes=result.notes + declared, of_scales=declared.remarks)

    def plain_where_possible(self, dtype: DType | None = None, *, is_read: bool = False) -> NumericTree:
        """Dequantize the tree, or return it unchanged if some quantized weights cannot be dequantized.

        Args:
            dtype: The dtype of the values; None means bfloat16.
            is_read: Whether all values will be read, so that scales are checked first and the remark mentions
                weights that are left unchanged.

        Raises:
            FormatError: Checked scales give non-finite values. The message lists all of them.
        """
        weights = self.shaped
        if weights.faults or not weights.readable:
            return NumericTree(self.tree, _damage(weights.faults) if is_read else "")
        if is_read:
            self.check_scales(dtype)
        result = self.dequantized(dtype)
        schemes = ", ".join(dict.fromkeys(weight.scheme for weight in result.weights.values()))
        to = next(result.tree.arrays[path].dtype for path in result.weights)
        return NumericTree(result.tree, f"{array_count(result.weights)} dequantized from {schemes} to {to}")

    def as_stored(self, *, is_read: bool) -> NumericTree:
        """Return the tree unchanged, with a remark on weights that cannot be dequantized if it is read."""
        faults = (*self.faults, *self.scale_faults(signs=False).damaged) if is_read else ()
        return NumericTree(self.tree, _damage(faults))

    def _build(self, weights: Weights, dtype: DType | None, like: Like) -> DequantizedTree:
        if not (weights.readable or weights.faults or weights.left_out):
            return DequantizedTree(self.tree, Notes(), {})
        from ckpttools.quantized.dequantized_tree import dequantize_tree

        # Headers and stored shapes usually give the same object.
        key = id(weights), dtype, like
        if key not in self._built:
            self._built[key] = dequantize_tree(self.tree, weights, self.declared, dtype, like)
        return self._built[key]

    def scale_faults(
        self, dtype: DType | None = None, like: Like = "float32", *, signs: bool = True
    ) -> ValueFaults:
        """Find the scales that `check_scales` refuses, and other suspicious scales; cached.

        Args:
            dtype, like: As for `dequantized`.
            signs: Whether to include scales that are not positive, for which values are read.

        Raises:
            StorageError: The scales cannot be read.
        """
        key = dtype, like, signs
        weights = (self.shaped if signs else self.weights_from_headers).readable.values()
        if not weights:
            return ValueFaults()
        if key not in self._scale_faults:
            from ckpttools.quantized.scale_checks import value_faults

            arrays = by_name(self.tree.arrays)
            self._scale_faults[key] = value_faults(arrays, weights, dtype, like, signs=signs)
        return self._scale_faults[key]

    def check_scales(self, dtype: DType | None = None, like: Like = "float32") -> Notes:
        """Read all local scales, and return notes on those that make values vanish or change signs.

        Raises:
            DamagedScalesError: Scales give non-finite values. The message lists all of them.
            StorageError: The scales cannot be read.
        """
        if not self.shaped.readable:
            return Notes()
        from ckpttools.quantized.scale_checks import refuse_damaged

        result = self.scale_faults(dtype, like)
        return refuse_damaged(result, self.declared, self.tree.metadata.location)


def quantized_view(tree: Tree) -> QuantizedView:
    """Return the view of a tree's quantized weights; all views of a tree share their results."""
    return QuantizedView(tree)


def _empty_results(tree: Tree) -> dict[str, Any]:
    return {"_built": {}, "_scale_faults": {}}


def make_comparable(a: Tree, b: Tree, *, is_read: bool = False) -> tuple[NumericTree, NumericTree]:
    """Make two trees comparable: unchanged if both store their weights the same way, else dequantized.

    If one tree is quantized, its values get the main dtype of the other. If both are, they get float32,
    because rounding could make different products equal. If the quantization of one is not described, the
    stored values of both are compared. `is_read` and errors are as for `QuantizedView.plain_where_possible`.
    """
    view_a, view_b = quantized_view(a), quantized_view(b)
    if _store_equal_forms(view_a, view_b) or _has_only_codes(view_a) or _has_only_codes(view_b):
        return view_a.as_stored(is_read=is_read), view_b.as_stored(is_read=is_read)
    return (
        view_a.plain_where_possible(_main_dtype(view_b), is_read=is_read),
        view_b.plain_where_possible(_main_dtype(view_a), is_read=is_read),
    )


def is_dequantized(array: LazyArray) -> bool:
    """Return whether an array contains dequantized values."""
    return any(isinstance(part, Dequantized) for part in distinct_arrays([array]))


def _damage(faults: Sequence[str]) -> str:
    """Return the remark on quantized weights that are left as stored."""
    if not faults:
        return ""
    more = f", and {len(faults) - 1:,} more" if len(faults) > 1 else ""
    return f"quantized values and scales as stored, which cannot be dequantized: {faults[0]}{more}"


def _store_equal_forms(a: QuantizedView, b: QuantizedView) -> bool:
    """Return whether both trees quantize the same weights the same way."""
    weights_a, weights_b = (
        {(weight.name, weight.codes, weight.scheme) for weight in view.readable.values()} for view in (a, b)
    )
    return weights_a == weights_b


def _has_only_codes(view: QuantizedView) -> bool:
    """Return whether the tree has quantized weights that cannot be dequantized."""
    return bool(view.faults and view.weights)


def _main_dtype(view: QuantizedView) -> DType | None:
    """Return the dtype of most elements among the dtypes of products; None if there are none.

    If the elements are products themselves, return the dtype that can represent all of them.
    """
    if view.readable:
        return DTYPES["float32"]
    count: Counter[str] = Counter()
    for array in view.tree.arrays.values():
        count[array.dtype.name] += array.size
    result = [name for name, _ in count.most_common() if name in RESULTS]
    return DTYPES[result[0]] if result else None
