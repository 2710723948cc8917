"""Dequantization: quantized values times scales, in the expected dtype."""

from __future__ import annotations

from dataclasses import replace

from ckpttools.array.tree import Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType, parse_dtype
from ckpttools.core.errors import FormatError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.quantized.config import FIELD, declared_quantization, scheme
from ckpttools.quantized.decoding import Like as Like
from ckpttools.quantized.dequantizable import weights_in
from ckpttools.quantized.dequantized_tree import DequantizedTree, dequantize_tree
from ckpttools.quantized.modules import half_quantized_experts, is_fused, is_linear
from ckpttools.quantized.scale_checks import check_values
from ckpttools.quantized.scales import is_plain
from ckpttools.quantized.schemes.registry import read_methods
from ckpttools.quantized.weights import quantized_in
from ckpttools.transforms.base import Transformed

LIKES: tuple[Like, ...] = ("float32", "maxtext")


@dataclass(frozen=True)
class Dequantize:
    """A transform that dequantizes weights and leaves other arrays unchanged.

    It reads stored shapes, which some schemes keep as arrays, and scales on local disks.

    Attributes:
        dtype: of the dequantized values, or its name; None for bfloat16.
        like: "float32" rounds products once; "maxtext" rounds the scales to bfloat16 first.
    """

    dtype: DType | str | None = None
    like: Like = "float32"

    def __call__(self, tree: Tree) -> Transformed:
        """Return the dequantized tree; its configuration no longer mentions quantization.

        Raises:
            FormatError: weights use an unsupported scheme, lack their scales, or have scales that do not fit
                or are
                not finite; lists all.
        """
        dtype = None if self.dtype is None else parse_dtype(self.dtype)
        return with_notes(dequantize_with_notes(tree, dtype, self.like), tree)


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


def dequantize_with_notes(
    tree: Tree, dtype: DType | None = None, like: Like = "float32", *, is_read: bool = True
) -> DequantizedTree:
    """Dequantize a tree, or return it unchanged if no configuration describes its quantization.

    Arguments and errors are those of `Dequantize`. Scales are checked if values will be read.
    """
    if like not in LIKES:
        raise UsageError(f"unknown {option('dequantize_like', like)}", expected=" or ".join(LIKES))
    if not declares_quantization(tree):
        return DequantizedTree(tree, Notes(), {})
    refuse_few_bits(dtype, tree.metadata.location)
    built = dequantize_tree(tree, dtype, like=like)
    if not is_read:
        return built
    declared = check_values(tree, built.weights.values(), dtype, like)
    return replace(built, notes=built.notes + declared, of_scales=declared.remarks)


def refuse_few_bits(dtype: DType | None, location: str, hint: str | None = None) -> None:
    """Refuse to store a model with quantized weights in a narrow dtype without scales.

    Args:
        dtype: of the values; None to keep each dtype.
        location: of the model.
        hint: what to do; None suggests how to keep FP8 in a conversion.

    Raises:
        UsageError: `dtype` is that narrow.
    """
    if dtype is not None and not is_plain(dtype):
        raise UsageError(
            f"{dtype} has too few bits for dequantized weights, which are stored without scales",
            location=location or None,
            got=option("dtype", dtype),
            expected="bfloat16, float16 or float32",
            hint=hint
            or f"{option('quantized', 'keep')} alone leaves FP8 as it is, where MaxText has a form of it",
        )


def require_numbers(tree: Tree, why: str) -> None:
    """Refuse quantized weights that could be dequantized.

    Args:
        tree: any checkpoint.
        why: the reason why plain numbers are needed, as a sentence.

    Raises:
        FormatError: the tree has such weights.
    """
    if has_readable_scheme(tree):
        declared, location = declared_quantization(tree.metadata.config), tree.metadata.location or None
        raise FormatError(
            f"{why}, and these weights are quantized",
            location=location,
            got=scheme(declared) or next(map(str, quantized_in(tree).weights.values()), None),
            expected="plain weights",
            hint=f"{option('dtype', 'bfloat16')} dequantizes them on the way, as `ckpt cast` does",
        )


def declares_quantization(tree: Tree) -> bool:
    """Return whether a tree has quantized weights described by a configuration or by MaxText's names.

    Scales of activations and caches alone count as well, because that configuration describes them too.
    """
    weights, declared = quantized_in(tree).weights, declared_quantization(tree.metadata.config)
    if declared:
        return bool(weights or weights_in(tree).left_out)
    return bool(weights and weights_in(tree).readable)


def is_half_quantized(tree: Tree) -> bool:
    """Return whether only some of the weights that vLLM fuses are quantized."""
    quantized, named = quantized_in(tree).weights, {dotted(path): item for path, item in tree.arrays.items()}
    plain = (name for name, item in named.items() if is_linear(name, item) or is_fused(name, item))
    return bool(half_quantized_experts(quantized, (name for name in plain if name not in quantized)))


def has_readable_scheme(tree: Tree) -> bool:
    """Return whether a tree has quantized weights and its configuration names a supported method."""
    declared = declared_quantization(tree.metadata.config)
    return (not declared or declared.get("quant_method") in read_methods()) and declares_quantization(tree)
