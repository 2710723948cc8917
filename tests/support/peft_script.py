"""Adapters as PEFT writes them, on tiny models, and what PEFT merges them to.

Needs torch, transformers and peft:

python tests/support/peft_script.py fixtures/peft
"""

from __future__ import annotations

import json
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": LlamaConfig(
        **SIZES,
        intermediate_size=12,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    # As wide as its experts, like gpt-oss-20b: shapes do not tell inputs and outputs of `down_proj` apart.
    "gpt-oss": GptOssConfig(
        **SIZES,
        intermediate_size=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
EXPERTS = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
CASES = {
    "plain": ("llama", "float32", {"r": 2, "lora_alpha": 6, "target_modules": LINEAR}),
    "bfloat16": ("llama", "bfloat16", {"r": 4, "lora_alpha": 8, "target_modules": LINEAR}),
    "patterns": (
        "llama",
        "float32",
        {
            "r": 2,
            "lora_alpha": 6,
            "use_rslora": True,
            "target_modules": [*ATTENTION, "down_proj"],
            "rank_pattern": {"q_proj": 3, r"layers\.0\.mlp\.down_proj": 1},
            "alpha_pattern": {"^model.layers.1.self_attn.v_proj": 5},
        },
    ),
    "one-layer": (
        "llama",
        "float32",
        {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [1]},
    ),
    "dora": ("llama", "float32", {"r": 2, "lora_alpha": 6, "use_dora": True, "target_modules": LINEAR}),
    "embeddings": (
        "llama",
        "float32",
        {
            "r": 2,
            "lora_alpha": 6,
            "target_modules": ["embed_tokens", "q_proj"],
            "modules_to_save": ["lm_head"],
        },
    ),
    "bin": ("llama", "float32", {"r": 2, "lora_alpha": 6, "target_modules": ATTENTION}),
    "experts": (
        "gpt-oss",
        "float32",
        {"r": 2, "lora_alpha": 6, "target_modules": ATTENTION, "target_parameters": EXPERTS},
    ),
}


def base_model(name: str, dtype: str) -> torch.nn.Module:
    """The same weights at each call."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(deepcopy(MODELS[name]), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.1)
    return model.to(getattr(torch, dtype))


def write(root: Path, case: str) -> None:
    name, dtype, declared = CASES[case]
    model = base_model(name, dtype)
    base = root / "bases" / f"{name}-{dtype}"
    model.save_pretrained(base)
    (base / "generation_config.json").unlink(missing_ok=True)
    torch.manual_seed(2)
    tuned = get_peft_model(model, LoraConfig(**declared, task_type="CAUSAL_LM"))
    for parameter_name, parameter in tuned.named_parameters():
        if "lora_" in parameter_name or "modules_to_save" in parameter_name:
            noise = torch.randn_like(parameter.data) * 0.2
            # Magnitudes of DoRA are lengths of rows.
            parameter.data = parameter.data * 1.5 if "magnitude" in parameter_name else noise
    location = root / case
    tuned.save_pretrained(location)
    # PEFT 0.19 and later write safetensors alone; these are the bytes that torch.save made before.
    if case == "bin":
        from safetensors.torch import load_file

        torch.save(load_file(location / "adapter_model.safetensors"), location / "adapter_model.bin")
        (location / "adapter_model.safetensors").unlink()
    (location / "README.md").unlink(missing_ok=True)
    config = json.loads((location / "adapter_config.json").read_bytes())
    config["base_model_name_or_path"] = f"tiny/{name}"
    (location / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    with torch.no_grad():
        logits = tuned(torch.arange(8)[None]).logits
        merged = tuned.merge_and_unload()
    weights = {key: value.contiguous() for key, value in merged.state_dict().items()}
    (root / "merged").mkdir(exist_ok=True)
    save_file({**weights, "logits": logits.contiguous()}, root / "merged" / f"{case}.safetensors")


if __name__ == "__main__":
    destination = Path(sys.argv[1])
    shutil.rmtree(destination, ignore_errors=True)
    for item in CASES:
        write(destination, item)
