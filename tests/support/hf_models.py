"""Tiny Hugging Face checkpoints with random weights, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def write_llama(
    directory: Path, *, shards: int = 1, dtype: str = "bfloat16", seed: int = 0, **config_overrides: Any
) -> dict[str, np.ndarray]:
    """Writes a model of the Llama line and returns its tensors.

    Args:
        directory: made where it is not there.
        shards: safetensors files; more than one come with an index.
        dtype: "bfloat16", "float16" or "float32".
        seed: of the random weights.
        config_overrides: fields of `config.json` that differ from `LLAMA_CONFIG`; None leaves one out.
    """
    config = LLAMA_CONFIG | {"torch_dtype": dtype} | config_overrides
    config.setdefault("architectures", [ARCHITECTURES.get(config["model_type"], "LlamaForCausalLM")])
    random = np.random.default_rng(seed)
    tensors = {
        name: random.standard_normal(shape, np.float32).astype(_DTYPES[dtype])
        for name, shape in llama_shapes(config).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    stated = {name: value for name, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(stated, indent=2))
    _write_weights(directory, tensors, shards)
    return tensors


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model by its name in Hugging Face checkpoints."""
    embed, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, embed)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (embed,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, embed)
    return shapes


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, mlp = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config["head_dim"] or embed // heads
    query, value = heads * head_dim, (config["num_key_value_heads"] or heads) * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (embed,),
        "post_attention_layernorm.weight": (embed,),
        "mlp.gate_proj.weight": (mlp, embed),
        "mlp.up_proj.weight": (mlp, embed),
        "mlp.down_proj.weight": (embed, mlp),
        "self_attn.q_proj.weight": (query, embed),
        "self_attn.k_proj.weight": (value, embed),
        "self_attn.v_proj.weight": (value, embed),
        "self_attn.o_proj.weight": (embed, query),
    }
    if config["model_type"] == "qwen2":
        biases = {"q": query, "k": value, "v": value}
        shapes |= {f"self_attn.{name}_proj.bias": (length,) for name, length in biases.items()}
    if config["model_type"] == "qwen3":
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in ("q", "k")}
    return shapes


def _write_weights(directory: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[len(names) * number // shards : len(names) * (number + 1) // shards]
        save_file({name: tensors[name] for name in part}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
