"""Llama 4: cycles of four layers, with experts in every layer or every second layer, and the vision tower."""

from dataclasses import replace

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import (
    ATTENTION,
    DECODER_SETTINGS,
    EMBEDDINGS,
    HEAD_DIM_SETTING,
    LLAMA3_LIMITS,
    NORMS,
    TIED,
)
from ckpttools.model_families.family import Family, FlagRule, Spelling, decoder_layers, tower_blocks
from ckpttools.model_families.qwen_tower import HEAD_DIM, VISION, VISION_SIZES

DENSE = rows("""
    mlp.wi_0.kernel: embed mlp <-> feed_forward.gate_proj.weight: mlp embed
    mlp.wi_1.kernel: embed mlp <-> feed_forward.up_proj.weight:   mlp embed
    mlp.wo.kernel:   mlp embed <-> feed_forward.down_proj.weight: embed mlp
""")
EXPERTS = rows("""
    below Llama4MoEBlock_0.MoeBlock_0 <-> feed_forward
    gate.kernel: embed expert            <-> router.weight:        expert embed
    wi_{part}:   expert embed expert_mlp <-> experts.gate_up_proj: expert embed (part expert_mlp)
    wo:          expert expert_mlp embed <-> experts.down_proj:    expert expert_mlp embed

    below Llama4MoEBlock_0.shared_experts <-> feed_forward.shared_expert
    wi_0.kernel: embed expert_mlp        <-> gate_proj.weight:     expert_mlp embed
    wi_1.kernel: embed expert_mlp        <-> up_proj.weight:       expert_mlp embed
    wo.kernel:   expert_mlp embed        <-> down_proj.weight:     embed expert_mlp
""")

VISION_ROWS = rows("""
    below vision_encoder.Llama4VisionModel_0 <-> vision_model, when vision
    class_embedding: vision_embed <-> class_embedding: vision_embed
    positional_embedding_vlm: vision_position vision_embed
        <-> positional_embedding_vlm: vision_position vision_embed
    Llama4UnfoldConvolution_0.vit_unfold_linear.kernel: patch vision_embed
        <-> patch_embedding.linear.weight: vision_embed patch
    layernorm_{side:pre,post}.scale: vision_embed <-> layernorm_{side:pre,post}.weight: vision_embed
    layernorm_{side:pre,post}.bias:  vision_embed <-> layernorm_{side:pre,post}.bias:   vision_embed

    below vision_encoder.Llama4VisionModel_0.Llama4VisionPixelShuffleMLP_0.pixel_shuffle_mlp
        <-> vision_model.vision_adapter.mlp, when vision
    vit_pixel_shuffle_mlp_fc1.kernel: shuffled projector_in       <-> fc1.weight: projector_in shuffled
    vit_pixel_shuffle_mlp_fc2.kernel: projector_in projector_out  <-> fc2.weight: projector_out projector_in

    below vision_encoder.Llama4MultiModalProjector_0 <-> multi_modal_projector, when vision
    vit_multi_modal_projector.kernel: vision_out embed <-> linear_1.weight: embed vision_out
""")
VISION_BLOCK = rows("""
    {place:input,post_attention}_layer_norm.scale: vision_embed
        <-> {place:input,post_attention}_layernorm.weight: vision_embed
    {place:input,post_attention}_layer_norm.bias: vision_embed
        <-> {place:input,post_attention}_layernorm.bias: vision_embed

    below self_attention_vision <-> self_attn
    {qkv:query,key,value}.kernel: vision_embed vision_heads vision_head_dim
        <-> {qkv:q,k,v}_proj.weight: (vision_heads vision_head_dim) vision_embed
    {qkv:query,key,value}.bias: vision_heads vision_head_dim
        <-> {qkv:q,k,v}_proj.bias: (vision_heads vision_head_dim)
    out.kernel: vision_heads vision_head_dim vision_embed
        <-> o_proj.weight: vision_embed (vision_heads vision_head_dim)
    out.bias: vision_embed <-> o_proj.bias: vision_embed

    below Llama4VisionMLP_0 <-> mlp
    vit_encoder_layer_mlp_fc1.kernel: vision_embed vision_mlp <-> fc1.weight: vision_mlp vision_embed
    vit_encoder_layer_mlp_fc1.bias:   vision_mlp              <-> fc1.bias:   vision_mlp
    vit_encoder_layer_mlp_fc2.kernel: vision_mlp vision_embed <-> fc2.weight: vision_embed vision_mlp
    vit_encoder_layer_mlp_fc2.bias:   vision_embed            <-> fc2.bias:   vision_embed
""")
VISION_BLOCKS = tower_blocks(
    "vision_model.model.layers.{vision_layer}",
    "vision_encoder.Llama4VisionModel_0.Llama4VisionEncoder_0.layers_{vision_layer}",
    VISION_BLOCK,
)
NESTED_PREFIXES = {
    "vision_model.": "model.vision_model.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}

FAMILY = Family(
    name="llama4",
    model_types=("llama4", "llama4_text"),
    models=("Llama 4 Scout", "Llama 4 Maverick"),
    rows=(*EMBEDDINGS, *VISION_ROWS),
    layers=(
        decoder_layers(
            "4*block+position",
            "layers.layers_{position}",
            ("block",),
            (*NORMS, *ATTENTION, *EXPERTS),
            unless="interleaved_experts",
        ),
        decoder_layers(
            "4*block+2*half",
            "layers.layers_{2*half}",
            ("block",),
            (*NORMS, *ATTENTION, *DENSE),
            when="interleaved_experts",
        ),
        decoder_layers(
            "4*block+2*half+1",
            "layers.layers_{2*half+1}",
            ("block",),
            (*NORMS, *ATTENTION, *EXPERTS),
            when="interleaved_experts",
        ),
        decoder_layers("rest+#cycled", "", (), (*NORMS, *ATTENTION, *EXPERTS), unless="interleaved_experts"),
        decoder_layers(
            "2*rest_pair+#cycled", "", (), (*NORMS, *ATTENTION, *DENSE), when="interleaved_experts"
        ),
        decoder_layers(
            "2*rest_pair+#cycled+1", "", (), (*NORMS, *ATTENTION, *EXPERTS), when="interleaved_experts"
        ),
        VISION_BLOCKS,
    ),
    sizes={
        **VISION_SIZES,
        "layers": ("text_config.num_hidden_layers", "num_hidden_layers"),
        "embed": ("text_config.hidden_size", "hidden_size"),
        "vocab": ("text_config.vocab_size", "vocab_size"),
        "mlp": ("text_config.intermediate_size_mlp", "intermediate_size_mlp"),
        "expert_mlp": ("text_config.intermediate_size", "intermediate_size"),
        "heads": ("text_config.num_attention_heads", "num_attention_heads"),
        "kv_heads": ("text_config.num_key_value_heads", "num_key_value_heads"),
        "head_dim": ("text_config.head_dim", "head_dim"),
        "expert": ("text_config.num_local_experts", "num_local_experts"),
    },
    constants={"position": 4, "half": 2, "part": 2},
    derived={
        **HEAD_DIM,
        "block": "layers // 4",
        "rest": "layers % 4",
        "cycled": "4 * block",
        "rest_pair": "rest // 2",
    },
    flags={
        # transformers reads this field from the text model, which has the head, and never from the top level.
        "tied": replace(TIED, field=TIED.field[::-1]),
        "interleaved_experts": FlagRule(
            ("text_config.interleave_moe_layer_step", "interleave_moe_layer_step"), (2,)
        ),
        "vision": VISION,
    },
    towers=("vision",),
    spellings=(
        Spelling({"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}),
        Spelling({**NESTED_PREFIXES, "model.": "model.language_model."}, name="transformers"),
        Spelling(model_types=("llama4_text",), name="text"),
    ),
    settings=SettingRules(
        """
    model_name:                         "llama4-17b-128e", if flag.vision and flag.interleaved_experts
    model_name:                         "llama4-17b-16e", if flag.vision
    decoder_block:                      "llama4"
    use_multimodal:                     true, if flag.vision
    vision_encoder_block:               "llama4", if flag.vision
    image_size_for_vit:                 config.vision_config.image_size | 448, if flag.vision
    tile_size_for_vit:                  config.vision_config.image_size | 448, if flag.vision
    num_channels_for_vit:               config.vision_config.num_channels | 3, if flag.vision
    patch_size_for_vit:                 config.vision_config.patch_size | 14, if flag.vision
    hidden_size_for_vit:                vision_embed, if flag.vision
    intermediate_size_for_vit:          vision_mlp, if flag.vision
    num_hidden_layers_for_vit:          vision_layer, if flag.vision
    num_attention_heads_for_vit:        vision_heads, if flag.vision
    rope_theta_for_vit:                 config.vision_config.rope_parameters.rope_theta
                                      | config.vision_config.rope_theta | 10000, if flag.vision
    vision_output_dim_for_vit:          config.vision_config.vision_output_dim | 7680, if flag.vision
    projector_input_dim_for_vit:        config.vision_config.projector_input_dim | 4096, if flag.vision
    projector_output_dim_for_vit:       config.vision_config.projector_output_dim | 4096, if flag.vision
    pixel_shuffle_ratio_for_vit:        config.vision_config.pixel_shuffle_ratio | 0.5, if flag.vision
    must config.vision_config.hidden_act is "gelu", if flag.vision -- MaxText's tower has no other activation
    must config.vision_config.multi_modal_projector_bias is false, if flag.vision
        -- MaxText's projector has no bias
    must config.vision_config.vision_feature_select_strategy is "default", if flag.vision
        -- MaxText's tower drops the class token
    must config.vision_config.rope_parameters.rope_type is "default", if flag.vision
        -- MaxText's tower supports no other RoPE type
    must config.rms_norm_eps is 1e-05, if flag.vision -- MaxText's tower uses it, and was trained with 1e-05
    must config.attention_bias is false -- MaxText's block has no attention biases
    idle vision_config.norm_eps -- transformers takes 1e-05
    idle moe_layers -- interleave_moe_layer_step states it
    idle for_llm_compressor -- a marker of the tool that wrote the files
    base_mlp_dim:                       mlp, if flag.interleaved_experts
    base_mlp_dim:                       expert_mlp
    base_moe_mlp_dim:                   expert_mlp
    num_experts:                        expert
    num_experts_per_tok:                config.num_experts_per_tok
    shared_experts:                     1
    use_qk_norm:                        config.use_qk_norm | true
    nope_layer_interval:                config.no_rope_layer_interval | 4
    interleave_moe_layer_step:          config.interleave_moe_layer_step | 1
    inhomogeneous_layer_cycle_interval: position
    temperature_tuning:                 config.attn_temperature_tuning | true
    chunk_attn_window_size:             config.attention_chunk_size
    rope_max_timescale:                 rope.theta
    rope_type:                          "llama3.1"
    rope_use_scale:                     true, if rope.type is "llama3"
    rope_use_scale:                     false
    must layer_types.full_every_4, if config.no_rope_layer_interval in [null, 4]
        -- only every fourth MaxText layer uses full attention
    must config.attn_scale is 0.1 -- MaxText hardcodes 0.1
    must config.floor_scale is 8192 -- MaxText hardcodes 8192
    must rope.type in ["default", "llama3"] -- MaxText's block supports no other RoPE type
    """
        + LLAMA3_LIMITS
        + HEAD_DIM_SETTING
        + DECODER_SETTINGS
    ),
)
