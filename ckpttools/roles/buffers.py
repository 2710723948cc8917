"""Distinguish computed buffers (tables, masks and positions) from learned arrays."""

from __future__ import annotations

from ckpttools.array.lazy import LazyArray

# Last keys of rotary-position tables, which models compute from their configuration: torchtitan and Meta
# (`freqs_cis`), transformers (`inv_freq`, `cos_cached`) and others.
_ROTARY = frozenset(
    (
        *("freqs_cis", "freqs_cos", "freqs_sin", "inv_freq", "original_inv_freq", "rope_cache"),
        *("cos_cached", "sin_cached", "cos_cache", "sin_cache", "cos_sin_cache"),
    )
)
# Causal masks, such as GPT-2's `attn.bias` next to `attn.masked_bias`, have the shape (1, 1, n, n).
_MASKS = frozenset(("bias", "causal_mask", "attn_mask", "attention_mask", "mask"))
_FILL, _POSITIONS = "masked_bias", "position_ids"
_ATTENTION = ("attn", "attention", "self_attn", "self_attention")


def is_buffer(name: str, array: LazyArray) -> bool:
    """Return whether an array is a buffer that a model computes from its configuration.

    Args:
        name: Dotted name of the array.
        array: The array. If its shape and dtype are possible for a bias or an embedding, it is not a buffer.
    """
    *parents, last = name.split(".")
    module = parents[-1] if parents else ""
    shape, is_float = array.shape, array.dtype.is_float
    if last in _ROTARY:
        return True
    if last == "freqs":
        return module == "rope"  # Meta's name; in other modules, such arrays may be trained.
    if last == "cache" and module in ("rope", "pos_embeddings", "rotary_emb"):
        return True
    if last == _FILL:
        return not shape and module in _ATTENTION
    if last == _POSITIONS:
        return not is_float and len(shape) <= 2
    is_square = len(shape) in (2, 4) and shape[-1] == shape[-2] and all(size == 1 for size in shape[:-2])
    is_in_attention = not parents or module in _ATTENTION or last not in ("bias", "mask")
    return last in _MASKS and is_square and is_in_attention and (len(shape) == 4 or not is_float)
