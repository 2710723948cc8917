"""Gemma 4, dense or with experts: blocks of five local layers and a global one, stacked twice; a tower."""

from ckpttools.mapping.row import row, rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import ATTENTION, DECODER_SETTINGS, HEAD_NORMS
from ckpttools.model_families.family import (
    Family,
    FlagRule,
    Spelling,
    UnsupportedPart,
    decoder_layers,
    nested_sizes,
    tower_blocks,
)
from ckpttools.model_families.gemma import HEAD, INTERNAL, NESTED, SETTINGS, TEXT_SIZES, TIED_BY_DEFAULT
from ckpttools.model_families.qwen_tower import VISION, VISION_SIZES

EMBEDDING = row(
    "token_embedder.embedding: vocab embed <-> model.embed_tokens.weight: vocab embed, scale embed 0.5"
)
FINAL_NORM = row("decoder.decoder_norm.scale: embed <-> model.norm.weight: embed")
NORMS = rows("""
    pre_self_attention_norm.scale:  embed <-> input_layernorm.weight:            embed
    post_self_attention_norm.scale: embed <-> post_attention_layernorm.weight:   embed
    pre_ffw_norm.scale:             embed <-> pre_feedforward_layernorm.weight:  embed
    post_ffw_norm.scale:            embed <-> post_feedforward_layernorm.weight: embed
    layer_scalar:                   one   <-> layer_scalar:                      one
""")
MLPS = rows("""
    below mlp <-> mlp, unless experts
    wi_0.kernel: embed mlp <-> gate_proj.weight: mlp embed
    wi_1.kernel: embed mlp <-> up_proj.weight:   mlp embed
    wo.kernel:   mlp embed <-> down_proj.weight: embed mlp

    below mlp <->, when experts
    pre_feedforward_layernorm_2.scale:  embed <-> pre_feedforward_layernorm_2.weight:  embed
    post_feedforward_layernorm_1.scale: embed <-> post_feedforward_layernorm_1.weight: embed
    post_feedforward_layernorm_2.scale: embed <-> post_feedforward_layernorm_2.weight: embed
    pre_forward_scale_2:                embed <-> router.scale:                        embed

    below mlp.moe_block.MoeBlock_0 <->, when experts
    gate.kernel:      embed expert            <-> router.proj.weight:      expert embed
    per_expert_scale: expert                  <-> router.per_expert_scale: expert
    wi_{part}:        expert embed expert_mlp <-> experts.gate_up_proj:    expert (part expert_mlp) embed
    wo:               expert expert_mlp embed <-> experts.down_proj:       expert embed expert_mlp

    below mlp.moe_block.shared_experts <-> mlp, when experts
    wi_0.kernel: embed mlp <-> gate_proj.weight: mlp embed
    wi_1.kernel: embed mlp <-> up_proj.weight:   mlp embed
    wo.kernel:   mlp embed <-> down_proj.weight: embed mlp
""")
LOCAL = (*ATTENTION, *HEAD_NORMS, *NORMS, *MLPS)
# Global layers have a different head size and, in most models, use their keys as values.
GLOBAL_ATTENTION = rows("""
    below self_attention <-> self_attn
    query.kernel: embed heads global_head_dim <-> q_proj.weight: (heads global_head_dim) embed
    key.kernel: embed global_kv_heads global_head_dim
        <-> k_proj.weight: (global_kv_heads global_head_dim) embed
    value.kernel: embed global_kv_heads global_head_dim
        <-> v_proj.weight: (global_kv_heads global_head_dim) embed, unless keys_are_values
    out.kernel:       heads global_head_dim embed <-> o_proj.weight: embed (heads global_head_dim)
    query_norm.scale: global_head_dim             <-> q_norm.weight: global_head_dim
    key_norm.scale:   global_head_dim             <-> k_norm.weight: global_head_dim
""")
GLOBAL = (*GLOBAL_ATTENTION, *NORMS, *MLPS)

# E2B and E4B have the same model type.
PER_LAYER_INPUT = FlagRule(("text_config.hidden_size_per_layer_input", "hidden_size_per_layer_input"))
# MaxText always standardizes the output. If the model does not, these values make that step the identity.
VISION_ROWS = rows("""
    below vision_encoder.Gemma4VisionEncoderLayer_0 <-> vision_tower, when vision
    vision_entry.input_projection.kernel: patch vision_embed
        <-> patch_embedder.input_proj.weight: vision_embed patch
    vision_entry.pos_emb_param: vision_position direction vision_embed
        <-> patch_embedder.position_embedding_table: direction vision_position vision_embed

    below vision_encoder.Gemma4VisionEncoderLayer_0 <-> vision_tower, when vision standardized
    std_scale: vision_embed <-> std_scale: vision_embed
    std_bias:  vision_embed <-> std_bias:  vision_embed

    below vision_encoder.Gemma4VisionEncoderLayer_0 <-> vision_tower, when vision, unless standardized
    std_scale: vision_embed <-> std_scale: vision_embed, fill 1
    std_bias:  vision_embed <-> std_bias:  vision_embed, fill 0

    below vision_encoder.Gemma4VisionProjector_0 <-> embed_vision, when vision
    projection.kernel: vision_embed embed <-> embedding_projection.weight: embed vision_embed
""")
VISION_BLOCK = rows("""
    pre_attention_norm.scale:  vision_embed <-> input_layernorm.weight:            vision_embed
    post_attention_norm.scale: vision_embed <-> post_attention_layernorm.weight:   vision_embed
    pre_ffw_norm.scale:        vision_embed <-> pre_feedforward_layernorm.weight:  vision_embed
    post_ffw_norm.scale:       vision_embed <-> post_feedforward_layernorm.weight: vision_embed

    below attention <-> self_attn
    query.kernel: vision_embed vision_heads vision_head_dim
        <-> q_proj.linear.weight: (vision_heads vision_head_dim) vision_embed
    {kv:key,value}.kernel: vision_embed vision_kv_heads vision_head_dim
        <-> {kv:k,v}_proj.linear.weight: (vision_kv_heads vision_head_dim) vision_embed
    out.kernel: vision_heads vision_head_dim vision_embed
        <-> o_proj.linear.weight: vision_embed (vision_heads vision_head_dim)
    {qk:query,key}_norm.scale: vision_head_dim <-> {qk:q,k}_norm.weight: vision_head_dim

    below mlp <-> mlp
    wi_0.kernel: vision_embed vision_mlp <-> gate_proj.linear.weight: vision_mlp vision_embed
    wi_1.kernel: vision_embed vision_mlp <-> up_proj.linear.weight:   vision_mlp vision_embed
    wo.kernel:   vision_mlp vision_embed <-> down_proj.linear.weight: vision_embed vision_mlp
""")
VISION_BLOCKS = tower_blocks(
    "vision_tower.encoder.layers.{vision_layer}",
    "vision_encoder.Gemma4VisionEncoderLayer_0.layer_{vision_layer}",
    VISION_BLOCK,
)
NESTED_PREFIXES = {"vision_tower.": "model.vision_tower.", "embed_vision.": "model.embed_vision."}

# Layers with full attention have their own sizes. transformers 5.23 writes them per layer, with zero-padded
# indices if some have two digits. Layer 5 is the first such layer.
GLOBAL_SIZES = nested_sizes(
    {
        "global_head_dim": (
            "global_head_dim",
            "per_layer_config.5.head_dim",
            "per_layer_config.05.head_dim",
        ),
        "global_kv_heads": (
            "num_global_key_value_heads",
            "per_layer_config.5.num_key_value_heads",
            "per_layer_config.05.num_key_value_heads",
            "num_key_value_heads",
        ),
    },
    "text_config.",
    "",
)

SETTINGS_4 = (
    """
    v_norm_with_scale:         false
    local_rope_max_timescale:  rope.local_theta | 10000
    global_rope_max_timescale: rope.theta
    global_rope_proportion:    rope.partial_rotary_factor | 0.25
    local_rope_proportion:     1
    must rope.type in ["default", "proportional"] -- MaxText's block supports no other RoPE type
    must rope.type is "proportional", if rope.partial_rotary_factor is not null
        -- MaxText rotates the same part of each head as this type
    idle per_layer_config -- its head sizes are read, and array shapes show the others
    must rope.local_type is "default" -- MaxText's block supports no other RoPE type
    must config.use_bidirectional_attention in [null, false, "vision"] -- MaxText's layers are causal
    must config.attn_logit_softcapping in [null, 0] -- MaxText's block does not cap attention logits
    """
    + SETTINGS
    + DECODER_SETTINGS
)

FAMILY = Family(
    name="gemma4",
    model_types=("gemma4", "gemma4_text"),
    models=("Gemma 4 26B-A4B", "Gemma 4 31B"),
    rows=(EMBEDDING, FINAL_NORM, HEAD, *VISION_ROWS),
    layers=(
        decoder_layers("6*block+local", "scanned_blocks.local_layers", ("block", "local"), LOCAL),
        decoder_layers("6*block+5", "scanned_blocks.global_layer", ("block",), GLOBAL),
        # There are fewer than six remaining layers, so they never include a global layer.
        decoder_layers("rest+#cycled", "layers_remainder.local_layers", ("rest",), LOCAL),
        VISION_BLOCKS,
    ),
    sizes={
        **TEXT_SIZES,
        **VISION_SIZES,
        "vision_kv_heads": ("vision_config.num_key_value_heads", "vision_config.num_attention_heads"),
        "vision_head_dim": ("vision_config.head_dim",),
        "vision_position": ("vision_config.position_embedding_size",),
        **GLOBAL_SIZES,
        "expert": ("text_config.num_experts", "num_experts"),
        "expert_mlp": ("text_config.moe_intermediate_size", "moe_intermediate_size"),
    },
    constants={"local": 5, "one": 1, "part": 2, "direction": 2},
    derived={"block": "layers // 6", "rest": "layers % 6", "cycled": "6 * block"},
    flags={
        "tied": TIED_BY_DEFAULT,
        "experts": FlagRule(("text_config.enable_moe_block", "enable_moe_block")),
        "keys_are_values": FlagRule(("text_config.attention_k_eq_v", "attention_k_eq_v")),
        "vision": VISION,
        "standardized": FlagRule(("vision_config.standardize",)),
    },
    parts={
        "audio": UnsupportedPart(
            ("model.audio_tower.*", "model.embed_audio.*", "audio_tower.*", "embed_audio.*")
        ),
    },
    towers=("vision",),
    spellings=(
        Spelling({**NESTED_PREFIXES, **INTERNAL}, name="transformers"),
        Spelling(NESTED, name="nested"),
        Spelling(model_types=("gemma4_text",), name="text"),
    ),
    others={"gemma4-small": PER_LAYER_INPUT},
    settings=SettingRules(
        """
    model_name:                "gemma4-26b", if flag.experts
    model_name:                "gemma4-31b"
    decoder_block:             "gemma4"
    use_multimodal:                  true, if flag.vision
    vision_encoder_block:            "gemma4", if flag.vision
    image_size_for_vit:              [672, 960], if flag.vision
    vision_output_length:            config.vision_soft_tokens_per_image
                                   | config.vision_config.default_output_length | 280, if flag.vision
    num_channels_for_vit:            3, if flag.vision
    patch_size_for_vit:              config.vision_config.patch_size | 16, if flag.vision
    conv_stride_for_vit:             config.vision_config.patch_size | 16, if flag.vision
    hidden_size_for_vit:             vision_embed, if flag.vision
    intermediate_size_for_vit:       vision_mlp, if flag.vision
    num_hidden_layers_for_vit:       vision_layer, if flag.vision
    num_attention_heads_for_vit:     vision_heads, if flag.vision
    num_position_embeddings_for_vit: vision_position, if flag.vision
    rope_theta_for_vit:              config.vision_config.rope_parameters.rope_theta
                                   | config.vision_config.rope_theta | 100, if flag.vision
    must vision_kv_heads is vision_heads, if flag.vision -- MaxText's tower has separate keys for each head
    must vision_head_dim is vision_embed // vision_heads, if flag.vision
        -- the heads of MaxText's tower divide its width evenly
    must config.vision_config.rms_norm_eps is config.rms_norm_eps, if flag.vision
        -- MaxText's tower uses the epsilon of the text model
    must config.vision_config.hidden_activation is "gelu_pytorch_tanh", if flag.vision
        -- MaxText's tower has no other activation
    must config.vision_config.pooling_kernel_size is 3, if flag.vision
        -- MaxText's tower pools 3 x 3 patches into one token
    must config.vision_config.use_clipped_linears is false, if flag.vision
        -- MaxText's tower does not clip activations
    must config.vision_config.attention_bias is false, if flag.vision -- its attention has no biases
    must config.vision_config.rope_parameters.rope_type in ["axial", "default"], if flag.vision
        -- MaxText's tower supports no other RoPE type
    idle vision_config.global_head_dim, vision_config.num_global_key_value_heads
        -- the tower has no such layers
    idle vocab_size_per_layer_input -- its layers have no per-layer embeddings
    global_head_dim:           global_head_dim
    global_num_kv_heads:       global_kv_heads
    share_kv_projections:      flag.keys_are_values
    num_experts:               expert, if flag.experts
    num_experts_per_tok:       config.top_k_experts, if flag.experts
    base_moe_mlp_dim:          expert_mlp, if flag.experts
    shared_experts:            1, if flag.experts
    norm_topk_prob:            true, if flag.experts
    must config.hidden_size_per_layer_input is 0 -- MaxText's block has no per-layer embeddings
    must config.num_kv_shared_layers is 0 -- MaxText's layers do not share keys and values
    must config.use_double_wide_mlp is false -- all of MaxText's layers have the same width
    must layer_types.full_every_6 -- only every sixth MaxText layer uses full attention
    """
        + SETTINGS_4
    ),
)
