"""Create adapters with random configurations and their base model, reproducible on every machine.

PEFT's results are in `fixtures/peft/choices.json`, written by `fixtures/make_peft_choices.py`.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LAYERS, HIDDEN, INNER, VOCABULARY, HEADS = 3, 16, 24, 40, 2
PREFIX = "base_model.model."
BASE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}
_ATTENTION = {f"self_attn.{kind}_proj": (HIDDEN, HIDDEN) for kind in "qkvo"}
_MLP = {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
# Module -> shape of its weight.
MODULES = {
    **{
        f"model.layers.{layer}.{module}": shape
        for layer in range(LAYERS)
        for module, shape in (_ATTENTION | _MLP).items()
    },
    EMBEDDING: (VOCABULARY, HIDDEN),
    HEAD: (VOCABULARY, HIDDEN),
}
NORMS = [
    *(
        f"model.layers.{layer}.{norm}"
        for layer in range(LAYERS)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ),
    "model.norm",
]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PATHS = (
    *("self_attn.q_proj", "mlp.up_proj", "layers.1.mlp.down_proj"),
    *("model.layers.2.self_attn.v_proj", "proj"),
)
REGEXES = (
    r".*\.(q|v)_proj",
    r"model\.layers\.[02]\..*proj",
    r".*[jds]",
    r".*self_attn\..*",
    "q_proj",
    r"(.*\.)?(up|down)_proj|lm_head",
    "all-linear",
    "all-linear",
    "ALL-LINEAR",
)
EXCLUDED = (
    [],
    ["down_proj"],
    ["layers.1.self_attn.q_proj"],
    ["proj", "k_proj"],
    r".*\.0\..*",
    r".*mlp",
    "q_proj",
)
LAYERS = (None, None, 0, 2, [0], [1, 2], [], [7])
LAYER_PATTERNS = (None, None, "layers", ["layers"], ["h", "layers"], "h", [], "lay.*s", "model")
PATTERNS = (
    "q_proj",
    "layers.1.mlp.up_proj",
    ".*down.*",
    r"^model\.layers\.0\..*",
    "v",
    "proj",
    r"self_attn\.(k|o)_proj",
    "lm_head",
)
SAVED = (
    None,
    None,
    None,
    ["lm_head"],
    ["embed_tokens"],
    ["down_proj"],
    ["layers.1.mlp.up_proj"],
    ["norm"],
    ["mlp"],
)


def noise(name: str, *shape: int) -> np.ndarray:
    """Return random values that depend only on the name."""
    return np.random.default_rng(zlib.crc32(name.encode())).normal(0, 1, shape).astype(np.float32)


def base_arrays() -> dict[str, np.ndarray]:
    """Return the weights of the model."""
    arrays = {f"{module}.weight": noise(module, *shape) for module, shape in MODULES.items()}
    return arrays | {f"{norm}.weight": 1 + noise(norm, HIDDEN) / 8 for norm in NORMS}


def write_base(directory: Path) -> None:
    """Write the model."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(BASE_CONFIG))
    save_file(base_arrays(), directory / "model.safetensors", metadata={"format": "pt"})


def write_adapter(
    directory: Path,
    config: Mapping[str, Any],
    ranks: Mapping[str, int],
    whole: Sequence[str] = (),
    *,
    is_dora: bool = False,
) -> None:
    """Write an adapter.

    Args:
        directory: of the adapter.
        config: content of its `adapter_config.json`, without the fields that all have.
        ranks: module -> rank of its stored factors.
        whole: names of complete arrays, as PEFT calls them.
        is_dora: whether the factors of linear layers have magnitudes.
    """
    arrays = {f"{PREFIX}{name}": noise(f"whole {name}", *_shape(name)) for name in whole}
    for module, rank in ranks.items():
        outputs, inputs = MODULES[module]
        name = f"{PREFIX}{module}"
        a, b = noise(f"A {module}", rank, inputs) / 4, noise(f"B {module}", outputs, rank) / 4
        if module == EMBEDDING:
            arrays[f"{name}.lora_embedding_A"] = noise(f"A {module}", rank, VOCABULARY) / 4
            arrays[f"{name}.lora_embedding_B"] = noise(f"B {module}", HIDDEN, rank) / 4
            continue
        arrays |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        if is_dora:
            arrays[f"{name}.lora_magnitude_vector"] = 4 + noise(f"magnitude {module}", outputs) / 8
    directory.mkdir(parents=True)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 3} | config
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    save_file(arrays, directory / "adapter_model.safetensors")


def _shape(name: str) -> tuple[int, ...]:
    module = name.removesuffix(".weight").removesuffix(".base_layer").removesuffix(".modules_to_save")
    return MODULES.get(module, (HIDDEN,))


def result(merged: Mapping[str, np.ndarray]) -> list[Any]:
    """Return which weights a merge changed, as bits in the base's order, and one number for all values."""
    changed, total = 0, 0.0
    for number, (name, before) in enumerate(base_arrays().items()):
        difference = merged[name].astype(np.float64) - before
        if np.abs(difference).max() > 1e-5:
            changed |= 1 << number
            total += float((difference * noise(f"probe {name}", *before.shape)).sum())
    return [f"{changed:x}", round(total, 3)]


def draw_config(draw: random.Random) -> dict[str, Any]:
    """Draw a configuration: the fields that differ from the common configuration."""
    config: dict[str, Any] = {}
    if draw.random() < 0.4:
        config["target_modules"] = draw.choice(REGEXES)
    else:
        names = [*LINEAR, *PATHS, "embed_tokens", "lm_head"]
        config["target_modules"] = draw.sample(names, draw.randint(1, 5))
    if draw.random() < 0.4:
        config["exclude_modules"] = draw.choice(EXCLUDED)
    if draw.random() < (0.5 if isinstance(config["target_modules"], list) else 0.1):
        config["layers_to_transform"] = draw.choice(LAYERS)
        config["layers_pattern"] = draw.choice(LAYER_PATTERNS)
    for field in ("rank_pattern", "alpha_pattern"):
        if draw.random() < 0.4:
            config[field] = {key: draw.randint(1, 4) for key in draw.sample(PATTERNS, draw.randint(1, 3))}
    config["modules_to_save"] = draw.choice(SAVED)
    config["use_rslora"] = draw.random() < 0.25
    config["use_dora"] = draw.random() < 0.15
    return {name: value for name, value in config.items() if value not in (None, False)}


def draw_arrays(draw: random.Random, config: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Draw the ranks of stored factors, which fit the configuration, and the names of complete arrays."""
    patterns = config.get("rank_pattern", {})
    modules = [item for item in MODULES if draw.random() < 0.9]
    if config.get("use_dora"):
        modules = [item for item in modules if item != EMBEDDING]
    ranks = {item: _rank(patterns, item) for item in modules}
    saved = tuple(config.get("modules_to_save", ()))
    whole = []
    for module in (*MODULES, *NORMS):
        above = [part for part in (module, module.rpartition(".")[0]) if saved and part.endswith(saved)]
        if above:
            whole.append(f"{module}.weight")
        elif draw.random() < 0.04:
            middle = draw.choice(("", ".base_layer", ".modules_to_save"))
            whole.append(f"{module}{middle}.weight")
    return ranks, whole


def _rank(patterns: Mapping[str, int], module: str) -> int:
    """Find the key of a pattern as `get_pattern_key` of PEFT does."""
    result = (rank for key, rank in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(result, 2)


def draw_adapter(directory: Path, seed: int) -> dict[str, Any]:
    """Write an adapter with a random configuration and arrays, and return its configuration."""
    draw = random.Random(seed)
    config = draw_config(draw)
    ranks, whole = draw_arrays(draw, config)
    write_adapter(directory, config, ranks, whole, is_dora="use_dora" in config)
    return config
