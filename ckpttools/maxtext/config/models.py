"""The settings of MaxText's named models, except for the sizes in `ckpttools.maxtext.loading.model_sizes`.

The values are from configs/base.yml and configs/models/*.yml of MaxText 0.2.5, without variants that are not
released models. They cover everything that affects a model's computation and that a family's rules state.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ckpttools.mapping.documents import pairs
from ckpttools.maxtext.loading.model_sizes import MODELS
from ckpttools.maxtext.loading.settings import SIZES

# Tower settings of MaxText's named models, for `ckpttools.maxtext.config.models`; values from 0.2.5.
#
# Sizes of the vision and audio towers, and whether they are built by default.
#
# Defaults of models that do not set a value.
TOWER_DEFAULTS = """
    conv_chunksize_for_audio=500 conv_stride_for_vit=14 d_model_for_audio=256
    deepstack_visual_indexes_for_vit=[] downsample_hidden_size_for_audio=256
    encoder_attention_heads_for_audio=4 encoder_ffn_dim_for_audio=512 encoder_layers_for_audio=2
    hidden_size_for_vit=1408 image_size_for_vit=896 intermediate_size_for_vit=5632
    max_source_positions_for_audio=1500 n_window_for_audio=50 n_window_infer_for_audio=800
    num_attention_heads_for_vit=16 num_channels_for_vit=3 num_hidden_layers_for_vit=34
    num_mel_bins_for_audio=128 num_position_embeddings_for_vit=1024 out_hidden_size_for_vit=512
    output_dim_for_audio=512 patch_size_for_vit=14 pixel_shuffle_ratio_for_vit=0.5
    position_id_per_seconds=25 projector_input_dim_for_vit=4096 projector_output_dim_for_vit=4096
    rope_theta_for_vit=10000 spatial_merge_size_for_vit=2 temporal_patch_size_for_vit=2
    tile_size_for_vit=336 vision_output_dim_for_vit=4096 vision_output_length=-1
    use_audio=false use_multimodal=false vision_encoder_block="none"
"""
# Models, followed by the settings in which they differ.
TOWER_MODELS = """
gemma3-4b gemma3-12b gemma3-27b
    hidden_size_for_vit=1152 intermediate_size_for_vit=4304 num_hidden_layers_for_vit=27
    vision_encoder_block="gemma3"
gemma4-26b gemma4-31b
    conv_stride_for_vit=16 hidden_size_for_vit=1152 image_size_for_vit=[672,960]
    intermediate_size_for_vit=4304 num_hidden_layers_for_vit=27
    num_position_embeddings_for_vit=10240 patch_size_for_vit=16 rope_theta_for_vit=100
    vision_encoder_block="gemma4" vision_output_length=280
llama4-17b-16e llama4-17b-128e
    image_size_for_vit=336 vision_encoder_block="llama4"
qwen3-omni-30b-a3b
    d_model_for_audio=1280 deepstack_visual_indexes_for_vit=[8,16,24]
    downsample_hidden_size_for_audio=480 encoder_attention_heads_for_audio=20
    encoder_ffn_dim_for_audio=5120 encoder_layers_for_audio=32 hidden_size_for_vit=1152
    image_size_for_vit=768 intermediate_size_for_vit=4304 n_window_infer_for_audio=400
    num_hidden_layers_for_vit=27 num_position_embeddings_for_vit=2304 out_hidden_size_for_vit=2048
    output_dim_for_audio=2048 patch_size_for_vit=16 position_id_per_seconds=13
    use_audio=true use_multimodal=true vision_encoder_block="qwen3_omni"
qwen3-vl-2b
    deepstack_visual_indexes_for_vit=[5,11,17] hidden_size_for_vit=1024 image_size_for_vit=768
    intermediate_size_for_vit=4096 num_hidden_layers_for_vit=24 num_position_embeddings_for_vit=2304
    out_hidden_size_for_vit=2048 patch_size_for_vit=16 vision_encoder_block="qwen3_vl"
    use_multimodal=true
qwen3-vl-4b
    deepstack_visual_indexes_for_vit=[5,11,17] hidden_size_for_vit=1024 image_size_for_vit=768
    intermediate_size_for_vit=4096 num_hidden_layers_for_vit=24 num_position_embeddings_for_vit=2304
    out_hidden_size_for_vit=2560 patch_size_for_vit=16 vision_encoder_block="qwen3_vl"
    use_multimodal=true
qwen3-vl-30b-a3b
    deepstack_visual_indexes_for_vit=[8,16,24] hidden_size_for_vit=1152 image_size_for_vit=768
    intermediate_size_for_vit=4304 num_hidden_layers_for_vit=27 num_position_embeddings_for_vit=2304
    out_hidden_size_for_vit=2048 patch_size_for_vit=16 vision_encoder_block="qwen3_vl"
    use_multimodal=true
qwen3.5-35b-a3b
    hidden_size_for_vit=1152 image_size_for_vit=768 intermediate_size_for_vit=4304
    num_hidden_layers_for_vit=27 num_position_embeddings_for_vit=2304 out_hidden_size_for_vit=2048
    patch_size_for_vit=16 vision_encoder_block="qwen3_5"
qwen3.5-397b-a17b
    hidden_size_for_vit=1152 image_size_for_vit=768 intermediate_size_for_vit=4304
    num_hidden_layers_for_vit=27 num_position_embeddings_for_vit=2304 out_hidden_size_for_vit=4096
    patch_size_for_vit=16 vision_encoder_block="qwen3_5"
"""


# Defaults of models that do not set a value.
_DEFAULTS = """
    attention_bias=false attention_sink=false attention_type="global" attn_logits_soft_cap=0
    base_moe_mlp_dim=-1 beta_fast=32 beta_slow=1 chunk_attn_window_size=0 compress_ratios=[]
    compressed_rope_max_timescale=160000 decoder_block="llama2" final_logits_soft_cap=0
    first_num_dense_layers=0 first_num_hash_layers=0 gdn_conv_kernel_dim=4 gdn_key_head_dim=128
    gdn_num_key_heads=16 gdn_num_value_heads=32 gdn_value_head_dim=128 global_head_dim=0
    global_num_kv_heads=0 global_rope_max_timescale=-1 global_rope_proportion=0.25
    hidden_size_per_layer_input=0 indexer_head_dim=128 indexer_n_heads=64 indexer_topk=2048
    inhomogeneous_layer_cycle_interval=1 interleave_moe_layer_step=1 kv_lora_rank=512
    local_rope_max_timescale=-1 local_rope_proportion=1 logits_via_embedding=false
    max_position_embeddings=163840 mhc_expansion_rate=1 mlp_activations=["silu","linear"]
    mlp_activations_limit=-1 mlp_bias=false mrope_section=[24,20,20] mscale=1 n_routing_groups=-1
    nope_layer_interval=-1 norm_topk_prob=false normalization_layer_epsilon=1e-05
    normalize_embedding_logits=true num_experts_per_tok=1 num_kv_shared_layers=0 o_groups=0
    o_lora_rank=0 original_max_position_embeddings=4096 partial_rotary_factor=1 q_lora_rank=0
    qk_nope_head_dim=128 qk_rope_head_dim=64 rope_attention_scaling=false rope_factor=40
    rope_interleave=true rope_linear_scaling_factor=1 rope_max_timescale=10000 rope_truncate=true
    rope_type="default" rope_use_scale=true routed_bias=false routed_scaling_factor=1
    routed_score_func="" share_kv_projections=false shared_experts=0 sinkhorn_iterations=20
    sliding_window_size=0 temperature_tuning=false topk_routing_group=-1
    use_double_wide_mlp=false use_indexer=false use_mrope=false use_post_attn_norm=false
    use_post_ffw_norm=false use_qk_norm=false v_head_dim=128 v_norm_with_scale=true
    vocab_size_per_layer_input=0
"""
# Models, followed by the settings in which they differ. The rotary embedding of llama3.1 models has that
# name.
_MODELS = """
deepseek2-16b
    attention_type="mla" base_moe_mlp_dim=1408 decoder_block="deepseek" first_num_dense_layers=1
    mscale=0.707 normalization_layer_epsilon=1e-06 num_experts_per_tok=6 rope_type="yarn"
    routed_score_func="softmax" shared_experts=2
deepseek2-236b
    attention_type="mla" base_moe_mlp_dim=1536 decoder_block="deepseek" first_num_dense_layers=1
    mscale=0.707 normalization_layer_epsilon=1e-06 num_experts_per_tok=6 q_lora_rank=1536
    rope_type="yarn" routed_scaling_factor=16 routed_score_func="softmax" shared_experts=2
deepseek3-671b
    attention_type="mla" base_moe_mlp_dim=2048 decoder_block="deepseek" first_num_dense_layers=3
    normalization_layer_epsilon=1e-06 num_experts_per_tok=8 q_lora_rank=1536 rope_type="yarn"
    routed_bias=true routed_scaling_factor=2.5 routed_score_func="sigmoid" shared_experts=1
deepseek3.2-671b
    attention_type="mla" base_moe_mlp_dim=2048 decoder_block="deepseek" first_num_dense_layers=3
    normalization_layer_epsilon=1e-06 num_experts_per_tok=8 q_lora_rank=1536 rope_type="yarn"
    routed_bias=true routed_scaling_factor=2.5 routed_score_func="sigmoid" shared_experts=1
    use_indexer=true
deepseek4-284b
    attention_type="compressed" base_moe_mlp_dim=2048
    compress_ratios=[0,0,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4]
    decoder_block="deepseek4" first_num_hash_layers=3 indexer_topk=512
    max_position_embeddings=1048576 mhc_expansion_rate=4 mlp_activations_limit=10
    norm_topk_prob=true normalization_layer_epsilon=1e-06 num_experts_per_tok=6 o_groups=8
    o_lora_rank=1024 original_max_position_embeddings=65536 q_lora_rank=1024 routed_bias=true
    routed_scaling_factor=1.5 routed_score_func="sqrtsoftplus" shared_experts=1
    sliding_window_size=128 use_indexer=true
gemma-2b gemma-7b
    decoder_block="gemma" logits_via_embedding=true mlp_activations=["gelu","linear"]
    normalization_layer_epsilon=1e-06
gemma2-27b gemma2-2b gemma2-9b
    attn_logits_soft_cap=50 decoder_block="gemma2" final_logits_soft_cap=30
    logits_via_embedding=true mlp_activations=["gelu","linear"] normalization_layer_epsilon=1e-06
    sliding_window_size=4096 use_post_attn_norm=true use_post_ffw_norm=true
gemma3-12b gemma3-27b gemma3-4b
    decoder_block="gemma3" local_rope_max_timescale=10000 logits_via_embedding=true
    mlp_activations=["gelu","linear"] normalization_layer_epsilon=1e-06 rope_linear_scaling_factor=8
    rope_max_timescale=1000000 sliding_window_size=1024 use_post_attn_norm=true
    use_post_ffw_norm=true
gemma4-26b
    base_moe_mlp_dim=704 decoder_block="gemma4" final_logits_soft_cap=30 global_head_dim=512
    global_num_kv_heads=2 global_rope_max_timescale=1000000 local_rope_max_timescale=10000
    logits_via_embedding=true mlp_activations=["gelu","linear"] norm_topk_prob=true
    normalization_layer_epsilon=1e-06 num_experts_per_tok=8 rope_max_timescale=1000000
    share_kv_projections=true shared_experts=1 sliding_window_size=1024 use_post_attn_norm=true
    use_post_ffw_norm=true v_norm_with_scale=false
gemma4-31b
    decoder_block="gemma4" final_logits_soft_cap=30 global_head_dim=512 global_num_kv_heads=4
    global_rope_max_timescale=1000000 local_rope_max_timescale=10000 logits_via_embedding=true
    mlp_activations=["gelu","linear"] normalization_layer_epsilon=1e-06 rope_max_timescale=1000000
    share_kv_projections=true sliding_window_size=1024 use_post_attn_norm=true
    use_post_ffw_norm=true v_norm_with_scale=false
gemma4-e2b
    decoder_block="gemma4_small" final_logits_soft_cap=30 global_head_dim=512
    global_rope_max_timescale=1000000 hidden_size_per_layer_input=256 local_rope_max_timescale=10000
    logits_via_embedding=true mlp_activations=["gelu","linear"] normalization_layer_epsilon=1e-06
    num_kv_shared_layers=20 rope_max_timescale=1000000 sliding_window_size=512
    use_double_wide_mlp=true use_post_attn_norm=true use_post_ffw_norm=true v_norm_with_scale=false
    vocab_size_per_layer_input=262144
gemma4-e4b
    decoder_block="gemma4_small" final_logits_soft_cap=30 global_head_dim=512
    global_rope_max_timescale=1000000 hidden_size_per_layer_input=256 local_rope_max_timescale=10000
    logits_via_embedding=true mlp_activations=["gelu","linear"] normalization_layer_epsilon=1e-06
    num_kv_shared_layers=18 rope_max_timescale=1000000 sliding_window_size=512
    use_post_attn_norm=true use_post_ffw_norm=true v_norm_with_scale=false
    vocab_size_per_layer_input=262144
gpt-oss-120b gpt-oss-20b
    attention_bias=true attention_sink=true base_moe_mlp_dim=2880 decoder_block="gpt_oss"
    inhomogeneous_layer_cycle_interval=2 max_position_embeddings=131072
    mlp_activations=["sigmoid","linear"] mlp_activations_limit=7 mlp_bias=true num_experts_per_tok=4
    rope_attention_scaling=true rope_factor=32 rope_interleave=false rope_max_timescale=150000
    rope_truncate=false rope_type="yarn" routed_bias=true sliding_window_size=128
kimi-k2-1t
    attention_type="mla" base_moe_mlp_dim=2048 beta_fast=1 decoder_block="deepseek"
    first_num_dense_layers=1 max_position_embeddings=131072 normalization_layer_epsilon=1e-06
    num_experts_per_tok=8 q_lora_rank=1536 rope_factor=32 rope_max_timescale=50000 rope_type="yarn"
    routed_bias=true routed_scaling_factor=2.827 routed_score_func="sigmoid" shared_experts=1
llama2-13b llama2-70b llama2-7b
   
llama3-70b llama3-8b llama3.3-70b
    rope_max_timescale=500000
llama3.1-405b llama3.1-70b llama3.1-8b
    rope_max_timescale=500000 rope_type="llama3.1"
llama4-17b-128e
    base_moe_mlp_dim=8192 chunk_attn_window_size=8192 decoder_block="llama4"
    inhomogeneous_layer_cycle_interval=4 interleave_moe_layer_step=2 nope_layer_interval=4
    rope_max_timescale=500000 rope_type="llama3.1" rope_use_scale=false shared_experts=1
    temperature_tuning=true
llama4-17b-16e
    base_moe_mlp_dim=8192 chunk_attn_window_size=8192 decoder_block="llama4"
    inhomogeneous_layer_cycle_interval=4 nope_layer_interval=4 rope_max_timescale=500000
    rope_type="llama3.1" shared_experts=1 temperature_tuning=true use_qk_norm=true
mistral-7b
    decoder_block="mistral" rope_max_timescale=1000000
mixtral-8x22b
    base_moe_mlp_dim=16384 decoder_block="mixtral" num_experts_per_tok=2 rope_max_timescale=1000000
mixtral-8x7b
    base_moe_mlp_dim=14336 decoder_block="mixtral" num_experts_per_tok=2 rope_max_timescale=1000000
olmo3-32b olmo3-7b
    decoder_block="olmo3" inhomogeneous_layer_cycle_interval=4 max_position_embeddings=65536
    normalization_layer_epsilon=1e-06 normalize_embedding_logits=false
    original_max_position_embeddings=8192 rope_attention_scaling=true rope_factor=8
    rope_interleave=false rope_max_timescale=500000 rope_type="yarn" sliding_window_size=4096
    use_qk_norm=true
olmo3-7b-pt
    decoder_block="olmo3" inhomogeneous_layer_cycle_interval=4 max_position_embeddings=8192
    normalization_layer_epsilon=1e-06 normalize_embedding_logits=false rope_attention_scaling=true
    rope_interleave=false rope_max_timescale=500000 rope_truncate=false sliding_window_size=4096
    use_qk_norm=true
qwen2.5-1.5b
    attention_bias=true decoder_block="qwen2" logits_via_embedding=true
    normalization_layer_epsilon=1e-06 normalize_embedding_logits=false rope_max_timescale=1000000
qwen2.5-14b qwen2.5-7b
    attention_bias=true decoder_block="qwen2" normalization_layer_epsilon=1e-06
    normalize_embedding_logits=false rope_max_timescale=1000000
qwen3-0.6b qwen3-1.7b-base qwen3-1.7b qwen3-4b-base qwen3-4b
    decoder_block="qwen3" logits_via_embedding=true normalization_layer_epsilon=1e-06
    normalize_embedding_logits=false rope_max_timescale=1000000 use_qk_norm=true
qwen3-14b-base qwen3-14b qwen3-32b qwen3-8b-base qwen3-8b
    decoder_block="qwen3" normalization_layer_epsilon=1e-06 normalize_embedding_logits=false
    rope_max_timescale=1000000 use_qk_norm=true
qwen3-235b-a22b
    base_moe_mlp_dim=1536 decoder_block="qwen3_moe" norm_topk_prob=true
    normalization_layer_epsilon=1e-06 num_experts_per_tok=8 rope_max_timescale=5000000
    use_qk_norm=true
qwen3-30b-a3b
    base_moe_mlp_dim=768 decoder_block="qwen3_moe" norm_topk_prob=true
    normalization_layer_epsilon=1e-06 num_experts_per_tok=8 rope_max_timescale=10000000
    use_qk_norm=true
qwen3-30b-a3b-base
    base_moe_mlp_dim=768 decoder_block="qwen3_moe" norm_topk_prob=true
    normalization_layer_epsilon=1e-06 num_experts_per_tok=8 rope_max_timescale=1000000
    use_qk_norm=true
qwen3-480b-a35b
    base_moe_mlp_dim=2560 decoder_block="qwen3_moe" norm_topk_prob=true
    normalization_layer_epsilon=1e-06 num_experts_per_tok=8 rope_max_timescale=10000000
    use_qk_norm=true
qwen3-4b-thinking-2507
    decoder_block="qwen3" logits_via_embedding=true normalization_layer_epsilon=1e-06
    normalize_embedding_logits=false rope_max_timescale=5000000 use_qk_norm=true
qwen3-next-80b-a3b
    base_moe_mlp_dim=512 decoder_block="qwen3_next" inhomogeneous_layer_cycle_interval=4
    norm_topk_prob=true normalization_layer_epsilon=1e-06 num_experts_per_tok=10
    partial_rotary_factor=0.25 rope_max_timescale=10000000 shared_experts=1
qwen3-omni-30b-a3b
    base_moe_mlp_dim=768 decoder_block="qwen3_moe" max_position_embeddings=65536 norm_topk_prob=true
    normalization_layer_epsilon=1e-06 num_experts_per_tok=8 rope_max_timescale=1000000
    use_mrope=true use_qk_norm=true
qwen3-vl-2b qwen3-vl-4b
    decoder_block="qwen3" logits_via_embedding=true normalization_layer_epsilon=1e-06
    normalize_embedding_logits=false rope_max_timescale=5000000 use_mrope=true use_qk_norm=true
qwen3-vl-30b-a3b
    base_moe_mlp_dim=768 decoder_block="qwen3_moe" norm_topk_prob=true
    normalization_layer_epsilon=1e-06 num_experts_per_tok=8 rope_max_timescale=5000000
    use_mrope=true use_qk_norm=true
qwen3.5-35b-a3b
    base_moe_mlp_dim=512 decoder_block="qwen3_5" inhomogeneous_layer_cycle_interval=4
    mrope_section=[11,11,10] norm_topk_prob=true normalization_layer_epsilon=1e-06
    num_experts_per_tok=8 partial_rotary_factor=0.25 rope_max_timescale=10000000 shared_experts=1
    use_mrope=true
qwen3.5-397b-a17b
    base_moe_mlp_dim=1024 decoder_block="qwen3_5" gdn_num_value_heads=64
    inhomogeneous_layer_cycle_interval=4 mrope_section=[11,11,10] norm_topk_prob=true
    normalization_layer_epsilon=1e-06 num_experts_per_tok=10 partial_rotary_factor=0.25
    rope_max_timescale=10000000 shared_experts=1 use_mrope=true
"""


@cache
def defaults() -> Mapping[str, Any]:
    """Return the settings in MaxText's base configuration."""
    return {**dict(pairs(_DEFAULTS)), **SIZES}


@cache
def tower_defaults() -> Mapping[str, Any]:
    """Return the default tower settings."""
    return dict(pairs(TOWER_DEFAULTS))


@cache
def named_models() -> Mapping[str, Mapping[str, Any]]:
    """Map each named model to the settings that differ from the defaults."""
    result: dict[str, dict[str, Any]] = {}
    for text in (_MODELS, TOWER_MODELS):
        names: list[str] = []
        for line in text.strip().splitlines():
            if line.startswith(" "):
                for name in names:
                    result[name].update(pairs(line))
            else:
                names = line.split()
                result = {**{name: dict(MODELS[name]) for name in names}, **result}
    return result
