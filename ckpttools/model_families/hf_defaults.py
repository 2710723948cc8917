"""transformers' defaults for fields that a `config.json` does not state.

The table is of transformers 5.23 and checked by `tests/oracle/silent.py`. It has fields that give sizes
or set flags, and fields whose absence would make setting rules fail or choose a wrong value. Values that
transformers derives from other fields, such as `head_dim` of Llama, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ckpttools.mapping.documents import pairs
from ckpttools.mapping.sizes import nested_value, states_field

# If a rotary embedding is stated, only its base has a default here.
THETA = "rope.theta"
_DEFAULT_THETA = 10000.0
# Fields of multimodal configurations that contain the text model.
TEXT_PARTS = ("thinker_config.text_config", "text_config")
# Fields that transformers reads from the top level of a configuration, not from its text part.
_TOP_LEVEL_FIELDS = ("tie_word_embeddings",)
# Model types whose text model has the output head, and therefore the field for it.
_HEAD_IN_TEXT = ("llama4",)
_THINKER = "thinker_config"
# Fields that have an older name.
_OLDER = {"num_local_experts": "num_experts"}
_THETA = "rope_theta"
_ROPES = ("rope_parameters", "rope_scaling")
# Names of activation functions in transformers -> another name of the same function.
_ACTIVATIONS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}
_ByType = Mapping[str, Mapping[str, Any]]
_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function")


def resolve_alias(name: str, value: Any) -> Any:
    """Return the value of a field, with activation functions under one canonical name.

    Args:
        name: Name of the field, with or without its parent parts.
        value: Value in the configuration.
    """
    is_activation = name.rpartition(".")[2] in _ACTIVATION_FIELDS and isinstance(value, str)
    return _ACTIVATIONS.get(value, value) if is_activation else value


def default_theta(config: Mapping[str, Any]) -> float | None:
    """Return the base of the rotary embedding that transformers uses by default; None for unknown types.

    Returns:
        The base; None if the model type is unknown.
    """
    defaults = default_values(config)
    return float(defaults.get(THETA, _DEFAULT_THETA)) if defaults else None


def default_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Map fields to transformers' defaults for this model type; empty for unknown types.

    The fields are those of the text model, and those of towers below `vision_config` and `audio_config`.
    """
    return _values(config, _defaults_by_type())


def _values(config: Mapping[str, Any], by_type: _ByType) -> Mapping[str, Any]:
    defaults = _defaults_of_type(config.get("model_type"), by_type)
    part = _text_part(config)
    text = _defaults_of_type(nested_value(config, f"{part}.model_type"), by_type) if part else {}
    return {
        **defaults,
        **text,
        **{name: defaults[name] for name in _top_level_values(config) if name in defaults},
    }


def _top_level_values(config: Mapping[str, Any]) -> tuple[str, ...]:
    return () if config.get("model_type") in _HEAD_IN_TEXT else _TOP_LEVEL_FIELDS


def default_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' defaults for unstated fields, nested as in a configuration.

    A null field counts as stated. A tower without any stated field gets no defaults.
    """
    return _fill_defaults(config, default_values(config))


def compared_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `default_fields` and the known defaults of all other fields that may affect the computation."""
    return _fill_defaults(config, _values(config, _compared_defaults()))


def defaults_by_type() -> Mapping[str, Mapping[str, Any]]:
    """Return all known defaults by `model_type`; `layer_types` is the type of all layers without windows."""
    return _compared_defaults()


def compared_names() -> frozenset[str]:
    """Return the names of fields with a known default, without their parent parts."""
    return frozenset(name.rpartition(".")[2] for fields in _compared_defaults().values() for name in fields)


def _fill_defaults(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    part, of_the_whole = _text_part(config), _top_level_values(config)
    around = _THINKER if isinstance(config.get(_THINKER), Mapping) else ""
    filled: dict[str, Any] = {}
    for name, value in values.items():
        location = around if "." in name or name in of_the_whole else part
        full = f"{location}.{name}" if location else name
        parent = full.rpartition(".")[0]
        is_there = not parent or isinstance(nested_value(config, parent), Mapping)
        if is_there and not name.startswith("rope.") and not _is_stated(config, full):
            _set_default(filled, full, value)
    return filled


def contradicted_defaults(text: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a text part that a separate configuration must state explicitly.

    Args:
        text: The text part as a separate model with its own type.
        config: The configuration that contains the text part.

    Returns:
        The unstated fields whose defaults differ between the two model types.
    """
    own_defaults, whole_defaults = default_values(text), default_values(config)
    fields = {
        name: value
        for name, value in whole_defaults.items()
        if "." not in name and name not in _TOP_LEVEL_FIELDS
    }
    differing = {
        name: value
        for name, value in fields.items()
        if not _is_stated(text, name) and own_defaults.get(name, value) != value
    }
    ropes = [text, *(part for name in _ROPES if isinstance(part := text.get(name), Mapping))]
    if whole_defaults.get(THETA) != own_defaults.get(THETA) and not any(_THETA in rope for rope in ropes):
        differing[_THETA] = whole_defaults.get(THETA, _DEFAULT_THETA)
    return differing


def _is_stated(config: Mapping[str, Any], name: str) -> bool:
    """Return whether a configuration states a field under any of its names."""
    parent, dot, last = name.rpartition(".")
    return states_field(config, name) or (
        last in _OLDER and states_field(config, f"{parent}{dot}{_OLDER[last]}")
    )


def _set_default(config: dict[str, Any], name: str, value: Any) -> None:
    first, _, remainder = name.partition(".")
    if remainder:
        _set_default(config.setdefault(first, {}), remainder, value)
    else:
        config[first] = value


def _text_part(config: Mapping[str, Any]) -> str:
    """Return the field that contains the text model, with dots for nested fields; "" for the top level."""
    return next((name for name in TEXT_PARTS if isinstance(nested_value(config, name), Mapping)), "")


def _defaults_of_type(model_type: object, by_type: _ByType) -> Mapping[str, Any]:
    return by_type.get(model_type, {}) if isinstance(model_type, str) else {}


@cache
def _defaults_by_type() -> _ByType:
    return _parse_table(DEFAULTS)


@cache
def _compared_defaults() -> _ByType:
    return _parse_table(DEFAULTS + COMPARED_DEFAULTS)


def _parse_table(table: str) -> _ByType:
    result: dict[str, dict[str, Any]] = {}
    for names, line in _entries(table):
        for name in names:
            result.setdefault(name, {}).update(pairs(line))
    return result


def _entries(table: str) -> Iterator[tuple[list[str], str]]:
    names: list[str] = []
    for line in table.strip().splitlines():
        if line.startswith(" "):
            yield names, line
        else:
            names = line.split()


# Values of `model_type` for the text model or the complete model, followed by fields of the text model:
# `rope.NAME` as in rules, and `vision_config.NAME` and `audio_config.NAME` for towers. A type may occur
# several times.
DEFAULTS = """
deepseek_v2
    first_k_dense_replace=0 hidden_size=4096 intermediate_size=11008 kv_lora_rank=512
    max_position_embeddings=2048 moe_intermediate_size=1407 n_routed_experts=64 n_shared_experts=2
    num_attention_heads=32 num_hidden_layers=32 q_lora_rank=1536 qk_nope_head_dim=128 qk_rope_head_dim=64
    rms_norm_eps=1e-06 tie_word_embeddings=false topk_method="greedy" v_head_dim=128 vocab_size=102400
deepseek_v3 deepseek_v32 kimi_k25
    first_k_dense_replace=3 hidden_size=7168 intermediate_size=18432 kv_lora_rank=512
    moe_intermediate_size=2048 n_group=8 n_routed_experts=256 n_shared_experts=1 num_attention_heads=128
    num_experts_per_tok=8 num_hidden_layers=61 q_lora_rank=1536 qk_nope_head_dim=128 qk_rope_head_dim=64
    rms_norm_eps=1e-06 routed_scaling_factor=2.5 topk_group=4 v_head_dim=128 vocab_size=129280
deepseek_v3
    max_position_embeddings=4096 num_nextn_predict_layers=1 tie_word_embeddings=false
deepseek_v32
    index_head_dim=128 index_n_heads=64 index_topk=2048 max_position_embeddings=163840
    tie_word_embeddings=false
kimi_k25
    max_position_embeddings=4096 num_nextn_predict_layers=1 tie_word_embeddings=true
deepseek_v4
    hc_mult=4 head_dim=512 hidden_size=4096 index_head_dim=128 index_n_heads=64 index_topk=512
    max_position_embeddings=1048576 moe_intermediate_size=2048 n_routed_experts=256 n_shared_experts=1
    num_attention_heads=64 num_experts_per_tok=6 num_hidden_layers=43 num_key_value_heads=1 o_groups=8
    o_lora_rank=1024 q_lora_rank=1024 rms_norm_eps=1e-06 swiglu_limit=10
    tie_word_embeddings=false vocab_size=129280
gemma
    head_dim=256 hidden_size=3072 intermediate_size=24576 num_attention_heads=16 num_hidden_layers=28
    num_key_value_heads=16 rms_norm_eps=1e-06 tie_word_embeddings=true vocab_size=256000
gemma2
    attn_logit_softcapping=50 final_logit_softcapping=30 vocab_size=256000
gemma2 gemma3 gemma3_text
    head_dim=256 hidden_activation="gelu_pytorch_tanh" hidden_size=2304 intermediate_size=9216
    num_attention_heads=8 num_hidden_layers=26 num_key_value_heads=4 query_pre_attn_scalar=256
    rms_norm_eps=1e-06 sliding_window=4096 tie_word_embeddings=true
gemma3 gemma3_text
    rope.theta=1000000 vocab_size=262208 vision_config.hidden_size=768 vision_config.image_size=224
    vision_config.intermediate_size=3072 vision_config.num_attention_heads=12 vision_config.num_channels=3
    vision_config.num_hidden_layers=12 vision_config.patch_size=16
gemma4 gemma4_text
    attention_k_eq_v=false enable_moe_block=false head_dim=256 hidden_activation="gelu_pytorch_tanh"
    hidden_size=2304 hidden_size_per_layer_input=256 intermediate_size=9216 num_attention_heads=8
    num_hidden_layers=30 num_key_value_heads=4 num_kv_shared_layers=0 rms_norm_eps=1e-06 sliding_window=512
    tie_word_embeddings=true use_double_wide_mlp=false vocab_size=262144 vocab_size_per_layer_input=262144
    vision_config.head_dim=64 vision_config.hidden_size=768 vision_config.intermediate_size=3072
    vision_config.num_attention_heads=12 vision_config.num_hidden_layers=16
    vision_config.num_key_value_heads=12 vision_config.position_embedding_size=10240
    vision_config.standardize=false
gpt_oss
    head_dim=64 hidden_size=2880 intermediate_size=2880 num_attention_heads=64 num_experts_per_tok=4
    num_hidden_layers=36 num_key_value_heads=8 num_local_experts=128 rms_norm_eps=1e-05 rope.beta_fast=32
    rope.beta_slow=1 rope.factor=32 rope.original_max_position_embeddings=4096 rope.theta=150000
    rope.truncate=false rope.type="yarn" sliding_window=128 tie_word_embeddings=false vocab_size=201088
llama
    hidden_size=4096 intermediate_size=11008 num_attention_heads=32 num_hidden_layers=32 rms_norm_eps=1e-06
    tie_word_embeddings=false vocab_size=32000
llama4 llama4_text
    attention_chunk_size=8192 head_dim=128 hidden_size=5120 interleave_moe_layer_step=1
    intermediate_size=8192 intermediate_size_mlp=16384 num_attention_heads=40 num_experts_per_tok=1
    num_hidden_layers=48 num_key_value_heads=8 num_local_experts=16 rms_norm_eps=1e-05 rope.theta=500000
    tie_word_embeddings=false vocab_size=202048 vision_config.hidden_size=768
    vision_config.intermediate_size=5632 vision_config.num_attention_heads=16
    vision_config.num_hidden_layers=34
mistral mixtral
    hidden_size=4096 intermediate_size=14336 num_attention_heads=32 num_hidden_layers=32
    num_key_value_heads=8 tie_word_embeddings=false vocab_size=32000
mistral
    rms_norm_eps=1e-06 sliding_window=4096
mixtral
    num_experts_per_tok=2 num_local_experts=8 rms_norm_eps=1e-05 rope.theta=1000000
olmo2 olmo3
    hidden_size=4096 intermediate_size=11008 num_attention_heads=32 num_hidden_layers=32 rms_norm_eps=1e-05
    tie_word_embeddings=false vocab_size=50304
olmo3
    rope.theta=500000 sliding_window=4096
qwen2 qwen3 qwen3_vl qwen3_vl_text
    hidden_size=4096 intermediate_size=22016 num_attention_heads=32 num_hidden_layers=32
    num_key_value_heads=32 rms_norm_eps=1e-06 vocab_size=151936
qwen2 qwen3 qwen3_vl
    tie_word_embeddings=false
qwen3 qwen3_vl qwen3_vl_text
    head_dim=128
qwen3_moe
    hidden_size=2048 moe_intermediate_size=768 norm_topk_prob=false num_attention_heads=32
    num_experts_per_tok=8 num_hidden_layers=24 num_key_value_heads=4 num_local_experts=128 rms_norm_eps=1e-06
    tie_word_embeddings=false vocab_size=151936
qwen3_5_moe qwen3_5_moe_text qwen3_next
    head_dim=256 hidden_size=2048 linear_conv_kernel_dim=4 linear_key_head_dim=128 linear_num_key_heads=16
    linear_num_value_heads=32 linear_value_head_dim=128 moe_intermediate_size=512 num_attention_heads=16
    num_key_value_heads=2 rms_norm_eps=1e-06 shared_expert_intermediate_size=512 tie_word_embeddings=false
qwen3_5_moe qwen3_5_moe_text
    num_experts=256 num_experts_per_tok=8 num_hidden_layers=40 vocab_size=248320
qwen3_next
    num_experts=512 num_experts_per_tok=10 num_hidden_layers=48 vocab_size=151936
qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker
    hidden_size=2048 moe_intermediate_size=768 norm_topk_prob=true num_attention_heads=28
    num_experts_per_tok=8 num_hidden_layers=28 num_key_value_heads=4 num_local_experts=128
    rms_norm_eps=1e-06 rope.theta=1000000 vocab_size=3584
    audio_config.activation_function="gelu" audio_config.d_model=1280
    audio_config.downsample_hidden_size=480 audio_config.encoder_attention_heads=20
    audio_config.encoder_ffn_dim=5120 audio_config.encoder_layers=32 audio_config.n_window=50
    audio_config.n_window_infer=800 audio_config.output_dim=3584
qwen3_omni_moe qwen3_omni_moe_thinker
    tie_word_embeddings=false
qwen3_vl qwen3_vl_text
    rope.theta=500000
qwen3_vl_moe qwen3_vl_moe_text
    hidden_size=2048 moe_intermediate_size=1408 num_attention_heads=16 num_experts_per_tok=4
    num_hidden_layers=24 num_key_value_heads=16 num_local_experts=60 rms_norm_eps=1e-06 rope.theta=500000
    vocab_size=151936
qwen3_vl_moe
    tie_word_embeddings=false
qwen3_vl_moe_text
    tie_word_embeddings=true
qwen3_5_moe qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl qwen3_vl_text qwen3_vl_moe
    vision_config.depth=27 vision_config.hidden_size=1152 vision_config.in_channels=3
    vision_config.intermediate_size=4304 vision_config.num_heads=16
    vision_config.num_position_embeddings=2304 vision_config.patch_size=16
    vision_config.spatial_merge_size=2 vision_config.temporal_patch_size=2
qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl qwen3_vl_text qwen3_vl_moe
    vision_config.deepstack_visual_indexes=[8,16,24] vision_config.out_hidden_size=3584
deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 gpt_oss kimi_k25 llama llama4 llama4_text mistral mixtral
    hidden_act="silu"
olmo2 olmo3 qwen2 qwen3 qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_text
    hidden_act="silu"
qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text
    hidden_act="silu"
gemma
    hidden_act="gelu_pytorch_tanh"
"""

# Defaults that are used only to compare configurations, in the same form, without those in `DEFAULTS`.
# `layer_types` is the type of all layers unless sliding windows are enabled.
COMPARED_DEFAULTS = """
deepseek_v2
    norm_topk_prob=false routed_scaling_factor=1.0
deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text kimi_k25
    attention_bias=false
llama llama4 llama4_text olmo2 olmo3 qwen3 qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe
    attention_bias=false
qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text
    attention_bias=false
deepseek_v2 deepseek_v3 gemma kimi_k25 llama mistral mixtral olmo2 qwen2 qwen3 qwen3_moe qwen3_omni_moe
    layer_types="full_attention"
qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text
    layer_types="full_attention"
deepseek_v2 deepseek_v32 deepseek_v4 llama
    mlp_bias=false
deepseek_v3 deepseek_v32 deepseek_v4 kimi_k25 qwen3_next
    norm_topk_prob=true
deepseek_v3 deepseek_v32 kimi_k25
    num_key_value_heads=128
deepseek_v3 kimi_k25
    rope_interleave=true
deepseek_v32
    head_dim=64
deepseek_v4
    compress_rope_theta=160000.0 hc_eps=1e-06 hc_sinkhorn_iters=20 num_nextn_predict_layers=1
    routed_scaling_factor=1.5 scoring_func="sqrtsoftplus" sliding_window=128
deepseek_v4 llama4 llama4_text mixtral
    router_jitter_noise=0.0
gemma gemma2
    max_position_embeddings=8192
gemma3
    vision_config.layer_norm_eps=1e-06 vision_config.vision_use_head=true
gemma3 gemma3_text
    use_bidirectional_attention=false
gemma3 gemma3_text gemma4 gemma4_text gpt_oss llama4 llama4_text mistral mixtral
    max_position_embeddings=131072
gemma3 kimi_k25 qwen3_5_moe qwen3_omni_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
    vision_config.hidden_act="gelu_pytorch_tanh"
gemma4
    audio_config.attention_chunk_size=12 audio_config.attention_context_left=13
    audio_config.attention_context_right=0 audio_config.attention_invalid_logits_value=-1000000000.0
    audio_config.attention_logit_cap=50.0 audio_config.conv_kernel_size=5
    audio_config.gradient_clipping=10000000000.0 audio_config.hidden_act="silu"
    audio_config.hidden_size=1024 audio_config.num_attention_heads=8 audio_config.num_hidden_layers=12
    audio_config.residual_weight=0.5 audio_config.rms_norm_eps=1e-06
    audio_config.use_clipped_linears=true vision_config.attention_bias=false
    vision_config.hidden_activation="gelu_pytorch_tanh" vision_config.max_position_embeddings=131072
    vision_config.patch_size=16 vision_config.pooling_kernel_size=3 vision_config.rms_norm_eps=1e-06
    vision_config.use_clipped_linears=false
gpt_oss
    attention_bias=true swiglu_alpha=1.702 swiglu_limit=7.0
kimi_k25
    vision_config.hidden_size=1152 vision_config.intermediate_size=4304
    vision_config.num_attention_heads=16 vision_config.num_hidden_layers=27
    vision_config.pos_emb_height=64 vision_config.pos_emb_time=4 vision_config.pos_emb_width=64
kimi_k25 llama4
    vision_config.patch_size=14
llama olmo2 olmo3
    max_position_embeddings=2048
llama4
    vision_config.hidden_act="gelu" vision_config.image_size=448
    vision_config.multi_modal_projector_bias=false vision_config.norm_eps=1e-05
    vision_config.num_channels=3 vision_config.pixel_shuffle_ratio=0.5
    vision_config.projector_input_dim=4096 vision_config.projector_output_dim=4096
    vision_config.vision_feature_select_strategy="default" vision_config.vision_output_dim=7680
llama4 llama4_text
    attn_scale=0.1 attn_temperature_tuning=true floor_scale=8192 no_rope_layer_interval=4
    use_qk_norm=true
qwen2 qwen3
    max_window_layers=28
qwen2 qwen3 qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_text
    max_position_embeddings=32768
qwen3_omni_moe_thinker
    max_position_embeddings=32768
qwen2 qwen3 qwen3_moe
    use_sliding_window=false
qwen3_5_moe
    vision_config.out_hidden_size=3584
qwen3_moe
    intermediate_size=6144
qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl_moe
    decoder_sparse_step=1 mlp_only_layers=[]
qwen3_vl_moe_text
    decoder_sparse_step=1 mlp_only_layers=[]
qwen3_next qwen3_vl_moe qwen3_vl_moe_text
    intermediate_size=5632
qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker
    intermediate_size=18944
qwen3_omni_moe qwen3_omni_moe_thinker
    audio_config.conv_chunksize=500 audio_config.max_source_positions=1500 audio_config.num_mel_bins=128
    audio_config.scale_embedding=false
qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text
    max_position_embeddings=128000
"""
