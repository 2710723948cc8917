"""The sizes of a tiny model as MaxText's settings, and the model of MaxText whose other settings it has.

One function for each `model_type`, from its config.json; of models with towers, the text part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oracle.worker import StepError

Config = Mapping[str, Any]
Sizes = dict[str, Any]


def sizes(config: Config) -> Sizes:
    """What MaxText must be told, `model_name` among it.

    Raises:
        StepError: nothing here knows this model.
    """
    if config["model_type"] not in BY_TYPE:
        raise StepError(f"MaxText's settings for model_type {config['model_type']!r} are not known here")
    text = config.get("text_config", config)
    return {"use_multimodal": False, **BY_TYPE[config["model_type"]](text)}


def _rope(config: Config) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or {}
    return found if isinstance(found, Mapping) else {}


def _theta(config: Config) -> Sizes:
    return {"rope_max_timescale": int(_rope(config).get("rope_theta", 10000))}


def _common(config: Config) -> Sizes:
    heads = config["num_attention_heads"]
    found = {
        "base_emb_dim": config["hidden_size"],
        "base_num_decoder_layers": config["num_hidden_layers"],
        "base_num_query_heads": heads,
        "base_num_kv_heads": config.get("num_key_value_heads", heads),
        "vocab_size": config["vocab_size"],
        "normalization_layer_epsilon": config["rms_norm_eps"],
    }
    if mlp := config.get("intermediate_size"):
        found["base_mlp_dim"] = mlp
    return found


def _dense(config: Config) -> Sizes:
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {**_common(config), "head_dim": width}


def _experts(config: Config, number: str, mlp: str) -> Sizes:
    return {
        "num_experts": config[number],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "base_moe_mlp_dim": config[mlp],
    }


def llama(config: Config) -> Sizes:
    scaled = _rope(config).get("rope_type") == "llama3"
    name = {"model_name": "llama3.1-8b", "rope_type": "llama3.1"} if scaled else {"model_name": "llama3-8b"}
    tied = {"logits_via_embedding": True, "normalize_embedding_logits": False}
    return {**_dense(config), **_theta(config), **name, **(tied if config["tie_word_embeddings"] else {})}


def mistral(config: Config) -> Sizes:
    return {**_dense(config), **_theta(config), "model_name": "mistral-7b"}


def mixtral(config: Config) -> Sizes:
    experts = _experts(config, "num_local_experts", "intermediate_size")
    return {**_dense(config), **_theta(config), **experts, "model_name": "mixtral-8x7b"}


def qwen2(config: Config) -> Sizes:
    name = "qwen2.5-1.5b" if config["tie_word_embeddings"] else "qwen2.5-7b"
    return {**_dense(config), **_theta(config), "model_name": name}


def qwen3(config: Config) -> Sizes:
    name = "qwen3-0.6b" if config["tie_word_embeddings"] else "qwen3-8b"
    return {**_dense(config), **_theta(config), "model_name": name}


def qwen3_moe(config: Config) -> Sizes:
    number = "num_local_experts" if "num_local_experts" in config else "num_experts"
    experts = _experts(config, number, "moe_intermediate_size")
    mlp = {"base_mlp_dim": config["moe_intermediate_size"]}
    return {**_dense(config), **_theta(config), **experts, **mlp, "model_name": "qwen3-30b-a3b"}


def qwen3_next(config: Config) -> Sizes:
    return {
        **_dense(config),
        **_theta(config),
        **_experts(config, "num_experts", "moe_intermediate_size"),
        "model_name": "qwen3-next-80b-a3b",
        "base_mlp_dim": config["moe_intermediate_size"],
        "shared_experts": 1,
        "gdn_conv_kernel_dim": config["linear_conv_kernel_dim"],
        "gdn_key_head_dim": config["linear_key_head_dim"],
        "gdn_value_head_dim": config["linear_value_head_dim"],
        "gdn_num_key_heads": config["linear_num_key_heads"],
        "gdn_num_value_heads": config["linear_num_value_heads"],
        "gdn_chunk_size": 16,
        "partial_rotary_factor": _rope(config)["partial_rotary_factor"],
    }


def gemma2(config: Config) -> Sizes:
    # It counts pairs of a local and a global layer.
    layers = {"base_num_decoder_layers": config["num_hidden_layers"] // 2}
    window = {"sliding_window_size": config["sliding_window"]}
    return {**_dense(config), **layers, **window, "model_name": "gemma2-2b"}


def gemma3(config: Config) -> Sizes:
    window = {"sliding_window_size": config["sliding_window"], "rope_linear_scaling_factor": 1.0}
    return {**_dense(config), **window, "model_name": "gemma3-4b"}


def gemma4(config: Config) -> Sizes:
    full = next(iter((config.get("per_layer_config") or {}).values()), {})
    sizes = {
        **_dense(config),
        "sliding_window_size": config["sliding_window"],
        "global_head_dim": full.get("head_dim", config["head_dim"]),
        "global_num_kv_heads": full.get("num_key_value_heads", config["num_key_value_heads"]),
    }
    if not config["enable_moe_block"]:
        return {**sizes, "model_name": "gemma4-31b"}
    experts = _experts(
        {**config, "num_experts_per_tok": config["top_k_experts"]}, "num_experts", "moe_intermediate_size"
    )
    return {**sizes, **experts, "model_name": "gemma4-26b"}


def _latent(config: Config) -> Sizes:
    """DeepSeek's attention, and its experts."""
    found = {
        **_common(config),
        **_theta(config),
        **_experts(config, "n_routed_experts", "moe_intermediate_size"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_nope_head_dim": config["qk_nope_head_dim"],
        "qk_rope_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "first_num_dense_layers": config["first_k_dense_replace"],
        "shared_experts": config["n_shared_experts"],
        "routed_scaling_factor": config["routed_scaling_factor"],
    }
    if rank := config.get("q_lora_rank"):
        found["q_lora_rank"] = rank
    if (config.get("n_group") or 1) > 1:
        found |= {"n_routing_groups": config["n_group"], "topk_routing_group": config["topk_group"]}
    return {**found, **_yarn(config)}


def _yarn(config: Config) -> Sizes:
    """MaxText rotates interleaved pairs with yarn only, which with factor 1 is no scaling at all."""
    rope = _rope(config)
    longest = config["max_position_embeddings"]
    return {
        "rope_factor": rope.get("factor", 1.0),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", longest),
        "max_position_embeddings": longest,
    }


def deepseek_v2(config: Config) -> Sizes:
    return {**_latent(config), "model_name": "deepseek2-16b"}


def deepseek_v3(config: Config) -> Sizes:
    return {**_latent(config), "model_name": "deepseek3-671b"}


def gpt_oss(config: Config) -> Sizes:
    experts = _experts(config, "num_local_experts", "intermediate_size")
    window = {"sliding_window_size": config["sliding_window"]}
    return {**_dense(config), **experts, **window, "model_name": "gpt-oss-20b"}


def llama4(config: Config) -> Sizes:
    experts = _experts(config, "num_local_experts", "intermediate_size")
    every = config["interleave_moe_layer_step"] == 1
    mlp = {"base_mlp_dim": config["intermediate_size" if every else "intermediate_size_mlp"]}
    name = "llama4-17b-16e" if every else "llama4-17b-128e"
    scaled = _rope(config).get("rope_type") == "llama3"
    return {**_dense(config), **experts, **mlp, "rope_use_scale": scaled, "model_name": name}


BY_TYPE: Mapping[str, Callable[[Config], Sizes]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "llama4": llama4,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}
