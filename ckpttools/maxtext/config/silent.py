"""What transformers takes where a `config.json` is silent: published files state little of some models.

Defaults of the configuration classes of transformers 5.23 (`tests/oracle/silent.py` asks it), of the fields
that rules of families read and whose absence would be refused (Gemma 3), or taken for something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ckpttools.maxtext.config.models import pairs

# Where a rotary embedding is stated, this alone of it counts.
THETA = "rope.theta"
# Values of `model_type`, of the text model or of the whole, then the text model's fields; `rope.NAME` as
# rules call it, `vision_config.NAME` and `audio_config.NAME` of towers.
_DEFAULTS = """
deepseek_v3 deepseek_v32 kimi_k25
    first_k_dense_replace=3 n_group=8 q_lora_rank=1536 routed_scaling_factor=2.5 topk_group=4
deepseek_v4
    num_key_value_heads=1
gemma
    head_dim=256 num_key_value_heads=16 rms_norm_eps=1e-06
gemma2
    attn_logit_softcapping=50 final_logit_softcapping=30 head_dim=256 hidden_activation="gelu_pytorch_tanh"
    num_key_value_heads=4 query_pre_attn_scalar=256 rms_norm_eps=1e-06 sliding_window=4096
gemma3 gemma3_text
    head_dim=256 hidden_activation="gelu_pytorch_tanh" num_attention_heads=8 num_key_value_heads=4
    query_pre_attn_scalar=256 rms_norm_eps=1e-06 rope.theta=1000000 sliding_window=4096 vocab_size=262208
    vision_config.image_size=224
gpt_oss
    head_dim=64 num_key_value_heads=8 rope.beta_fast=32 rope.beta_slow=1 rope.factor=32
    rope.original_max_position_embeddings=4096 rope.theta=150000 rope.truncate=false rope.type="yarn"
llama4 llama4_text
    head_dim=128 num_key_value_heads=8 rope.theta=500000
mistral
    num_key_value_heads=8 sliding_window=4096
mixtral
    num_key_value_heads=8 rope.theta=1000000
olmo3
    rope.theta=500000 sliding_window=4096
qwen2
    num_key_value_heads=32
qwen3
    head_dim=128 num_key_value_heads=32
qwen3_5_moe qwen3_5_moe_text qwen3_next
    head_dim=256 num_key_value_heads=2
qwen3_moe
    norm_topk_prob=false num_key_value_heads=4
qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker
    audio_config.activation_function="gelu" audio_config.n_window=50 audio_config.n_window_infer=800
    audio_config.output_dim=3584 num_key_value_heads=4 rope.theta=1000000
    vision_config.deepstack_visual_indexes=[8,16,24] vision_config.out_hidden_size=3584
qwen3_vl qwen3_vl_text
    head_dim=128 num_key_value_heads=32 rope.theta=500000
    vision_config.deepstack_visual_indexes=[8,16,24] vision_config.out_hidden_size=3584
qwen3_vl_moe qwen3_vl_moe_text
    num_key_value_heads=16 rope.theta=500000
    vision_config.deepstack_visual_indexes=[8,16,24] vision_config.out_hidden_size=3584
"""


def taken(model_type: object) -> Mapping[str, Any]:
    """Field -> what transformers takes where a model of this type says nothing; none of other types."""
    return _by_type().get(model_type, {}) if isinstance(model_type, str) else {}


def completed(text: Mapping[str, Any], silent: Mapping[str, Any]) -> dict[str, Any]:
    """What speaks of a text model, with its own fields that are not there; null is as it was stated."""
    return {**{name: value for name, value in silent.items() if "." not in name}, **text}


@cache
def _by_type() -> Mapping[str, Mapping[str, Any]]:
    return {name: dict(fields) for names, fields in _entries() for name in names}


def _entries() -> Iterator[tuple[list[str], list[tuple[str, Any]]]]:
    names: list[str] = []
    fields: list[tuple[str, Any]] = []
    for line in _DEFAULTS.strip().splitlines():
        if line.startswith(" "):
            fields += pairs(line)
            continue
        yield names, fields
        names, fields = line.split(), []
    yield names, fields
