"""Select, by name, the weights of a Hugging Face model to quantize.

The selection follows published models, which quantize the matrices that tokens are multiplied by. Embeddings,
norms, output heads, routers and towers are left unchanged; loaders find them in a list in `config.json`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import take, window
from ckpttools.core.text import sort_naturally
from ckpttools.quantized.scales import ArrayLike, is_plain, split_name, words_of_key

WEIGHT, _HEAD = "weight", "lm_head"
# Last keys of modules whose matrices are small or sensitive.
_LEFT = frozenset(
    (
        *(_HEAD, "head", "score", "wte", "wpe", "eh_proj"),
        # GPT-2's modules, whose matrices are transposed.
        *("c_attn", "c_proj", "c_fc"),
        *("gate", "router", "shared_expert_gate", "weights_proj"),
        *("in_proj_a", "in_proj_b", "in_proj_ba", "conv1d"),
    )
)
_ROUTER = "router"
_LEFT_WORDS = frozenset(("embed", "embedding", "embeddings", "norm", "layernorm"))
_TOWERS = (
    "visual",
    "vision",
    "audio",
    "multi_modal",
    "multimodal",
    "mm_",
    "image",
    "patch",
)
EXPERTS, MLP_EXPERTS = ".experts.", ".mlp.experts."
SEPARATE_EXPERTS = frozenset(
    (
        *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe"),
    )
)
"""Models whose fused experts, (expert, out, in), transformers 5.23 also loads from single experts.

Its dequantization supports only scales of single experts, and treats fused codes as plain numbers.
"""
_FUSED_IN, _FUSED_OUT = "gate_up_proj", "down_proj"
# Modules that vLLM fuses (`packed_modules_mapping`), for each of their members.
_FUSED_MODULES = {
    key: keys
    for keys in (
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("in_proj_qkv", "in_proj_z"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
    )
    for key in keys
}


def is_linear(name: str, array: ArrayLike) -> bool:
    """Return whether an array is the matrix of a linear layer that published models quantize."""
    module, key, index = split_name(name)
    if key != WEIGHT or index or len(array.shape) != 2 or not is_plain(array.dtype):
        return False
    keys = module.split(".")
    return (
        keys[-1] not in _LEFT
        and _ROUTER not in keys
        and _LEFT_WORDS.isdisjoint(words_of_key(keys[-1]))
        and not any(item.startswith(_TOWERS) for item in keys)
    )


def is_fused(name: str, array: ArrayLike) -> bool:
    """Return whether an array contains the matrices of all experts of a layer."""
    last = name.rpartition(".")[2]
    is_one = EXPERTS in name and last in (_FUSED_IN, _FUSED_OUT)
    return is_one and len(array.shape) == 3 and is_plain(array.dtype)


def single_matrices(name: str, array: LazyArray) -> Iterator[tuple[str, LazyArray]]:
    """Yield the matrices of linear layers in an array by name; fused experts give one matrix each."""
    if array.ndim == 2:
        yield name, array
        return
    above, _, last = name.rpartition(".")
    for expert in range(array.shape[0]):
        both, rows = take(array, 0, expert), array.shape[1] // 2
        if last == _FUSED_OUT:
            yield f"{above}.{expert}.{_FUSED_OUT}.{WEIGHT}", both
            continue
        for number, key in enumerate(("gate_proj", "up_proj")):
            matrix = window(both, (number * rows, 0), (rows, both.shape[1]))
            yield f"{above}.{expert}.{key}.{WEIGHT}", matrix


def is_out_first(name: str, array: ArrayLike, hidden: int | None) -> bool | None:
    """Return whether fused matrices are (expert, out, in), as in linear layers; None if unknown.

    Args:
        name, array: Name and array of the fused matrices.
        hidden: Hidden size of the model.
    """
    first, second = array.shape[-2:]
    if first == second or hidden not in (first, second):
        return None
    return (second == hidden) == name.endswith(_FUSED_IN)


def half_quantized_experts(quantized: Iterable[str], plain: Iterable[str]) -> list[str]:
    """Return the quantized matrices that vLLM fuses with unquantized ones.

    Fused matrices are q, k and v; gate and up; and all experts of a layer. vLLM refuses models that quantize
    only some of them (`is_layer_skipped`), or takes codes for numbers.
    """
    others = set(map(_quantized_together, plain))
    return [name for name in quantized if _quantized_together(name) in others]


def _quantized_together(name: str) -> tuple[str, ...]:
    """Return patterns of the matrices that are fused with a given one."""
    above, experts, _ = name.partition(EXPERTS)
    if experts:
        return above, experts
    above, _, last = split_name(name)[0].rpartition(".")
    return above, *_FUSED_MODULES.get(last, (last,))


def unquantized_modules(arrays: Mapping[str, ArrayLike], quantized: Collection[str]) -> list[str]:
    """Return the full names of modules with unquantized matrices.

    The result includes a tied output head, which is not stored as an array, because loaders create a module
    for it. Names must be complete: vLLM compares full names of linear layers, and transformers before 5
    matches parts of names, so that `model.layers.1` would also match `model.layers.10`.

    Args:
        arrays: Arrays by name.
        quantized: Names of the quantized arrays.
    """
    others = set(_modules_above(quantized))
    matrices = (name for name, array in arrays.items() if name not in quantized and len(array.shape) > 1)
    modules = dict.fromkeys((_HEAD, *(name.rpartition(".")[0] for name in matrices)))
    return sort_naturally(module for module in modules if module and module not in others)


def _modules_above(names: Iterable[str]) -> Iterator[str]:
    """Yield the modules that contain arrays, outermost first."""
    for name in names:
        keys = name.split(".")[:-1]
        yield from (".".join(keys[:stop]) for stop in range(1, len(keys) + 1))
