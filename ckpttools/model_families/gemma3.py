"""Gemma 3: cycles of six layers, the remaining layers, and the vision tower of multimodal models."""

from ckpttools.mapping.row import row, rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import ATTENTION, DECODER_SETTINGS, MLP
from ckpttools.model_families.family import Family, Spelling, UnsupportedPart, decoder_layers, tower_blocks
from ckpttools.model_families.gemma import (
    FINAL_NORM,
    HEAD,
    INTERNAL,
    NESTED,
    SETTINGS,
    TEXT_SIZES,
    TIED_BY_DEFAULT,
)
from ckpttools.model_families.qwen_tower import HEAD_DIM, VISION, VISION_SIZES

# Here MaxText rounds sqrt(hidden_size) to bfloat16 before multiplying.
EMBEDDING = row(
    "token_embedder.embedding: vocab embed "
    "<-> model.embed_tokens.weight: vocab embed, scale embed 0.5 bfloat16"
)
NORMS = rows("""
    pre_self_attention_norm.scale:   embed    <-> input_layernorm.weight:            embed, shift 1
    post_self_attention_norm.scale:  embed    <-> post_attention_layernorm.weight:   embed, shift 1
    pre_ffw_norm.scale:              embed    <-> pre_feedforward_layernorm.weight:  embed, shift 1
    post_ffw_norm.scale:             embed    <-> post_feedforward_layernorm.weight: embed, shift 1
    self_attention.query_norm.scale: head_dim <-> self_attn.q_norm.weight:           head_dim, shift 1
    self_attention.key_norm.scale:   head_dim <-> self_attn.k_norm.weight:           head_dim, shift 1
""")
ROWS = (*ATTENTION, *MLP, *NORMS)

VISION_ROWS = rows("""
    below vision_encoder.Gemma3VisionEncoderLayer_0 <-> vision_tower, when vision
    embedding.kernel: patch_height patch_width channel vision_embed
        <-> embeddings.patch_embedding.weight: vision_embed channel patch_height patch_width
    embedding.bias: vision_embed <-> embeddings.patch_embedding.bias: vision_embed
    pos_embedding: one vision_position vision_embed
        <-> embeddings.position_embedding.weight: (one vision_position) vision_embed
    Transformer.encoder_norm.scale: vision_embed <-> post_layernorm.weight: vision_embed
    Transformer.encoder_norm.bias:  vision_embed <-> post_layernorm.bias:   vision_embed

    below vision_encoder.VisionEmbedder_0 <-> multi_modal_projector, when vision
    mm_input_projection.w: vision_embed embed   <-> mm_input_projection_weight: vision_embed embed
    mm_soft_embedding_norm.scale:  vision_embed <-> mm_soft_emb_norm.weight:    vision_embed, shift 1
""")
VISION_BLOCK = rows("""
    LayerNorm_{norm}.scale: vision_embed <-> layer_norm{norm+1}.weight: vision_embed
    LayerNorm_{norm}.bias:  vision_embed <-> layer_norm{norm+1}.bias:   vision_embed

    below MultiHeadDotProductAttention_0 <-> self_attn
    {part:query,key,value}.kernel: vision_embed vision_heads vision_head_dim
        <-> {part:q,k,v}_proj.weight: (vision_heads vision_head_dim) vision_embed
    {part:query,key,value}.bias: vision_heads vision_head_dim
        <-> {part:q,k,v}_proj.bias: (vision_heads vision_head_dim)
    out.kernel: vision_heads vision_head_dim vision_embed
        <-> out_proj.weight: vision_embed (vision_heads vision_head_dim)
    out.bias: vision_embed <-> out_proj.bias: vision_embed

    below MlpBlockViT_0 <-> mlp
    Dense_0.kernel: vision_embed vision_mlp <-> fc1.weight: vision_mlp vision_embed
    Dense_0.bias:   vision_mlp              <-> fc1.bias:   vision_mlp
    Dense_1.kernel: vision_mlp vision_embed <-> fc2.weight: vision_embed vision_mlp
    Dense_1.bias:   vision_embed            <-> fc2.bias:   vision_embed
""")
VISION_BLOCKS = tower_blocks(
    "vision_tower.encoder.layers.{vision_layer}",
    "vision_encoder.Gemma3VisionEncoderLayer_0.Transformer.encoderblock_{vision_layer}",
    VISION_BLOCK,
)
# Before transformers 5, the tower was nested one level deeper.
MODEL_IN_MODEL = {"vision_tower.": "vision_tower.vision_model."}
NESTED_PREFIXES = {
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}

# A head on top of the tower that no Gemma model uses.
POOLING = UnsupportedPart(
    (
        "vision_tower.head.*",
        "vision_tower.vision_model.head.*",
        "model.vision_tower.head.*",
        "model.vision_tower.vision_model.head.*",
    ),
    ("vision_config.vision_use_head", "vision_config"),
    idle=True,
)

FAMILY = Family(
    name="gemma3",
    model_types=("gemma3", "gemma3_text"),
    models=("Gemma 3 270M and 1B (text)", "Gemma 3 4B", "Gemma 3 12B", "Gemma 3 27B"),
    rows=(EMBEDDING, FINAL_NORM, HEAD, *VISION_ROWS),
    layers=(
        decoder_layers("6*block+position", "layers.layers_{position}", ("block",), ROWS),
        decoder_layers("rest+#cycled", "layers_remainder.layers_{rest}", (), ROWS),
        VISION_BLOCKS,
    ),
    sizes={
        **TEXT_SIZES,
        **VISION_SIZES,
        "channel": ("vision_config.num_channels",),
        "patch_height": ("vision_config.patch_size",),
        "patch_width": ("vision_config.patch_size",),
    },
    constants={"position": 6, "one": 1, "norm": 2},
    derived={**HEAD_DIM, "block": "layers // 6", "rest": "layers % 6", "cycled": "6 * block"},
    flags={"tied": TIED_BY_DEFAULT, "vision": VISION},
    parts={"pooling": POOLING},
    towers=("vision",),
    spellings=(
        Spelling({**MODEL_IN_MODEL, **NESTED}),
        Spelling(
            {**NESTED_PREFIXES, "vision_tower.": "model.vision_tower.vision_model.", **INTERNAL},
            name="transformers",
        ),
        # The names that transformers 5 saves, and the names of its modules.
        Spelling(NESTED, name="hub-5"),
        Spelling({**NESTED_PREFIXES, **INTERNAL}, name="transformers-5"),
        Spelling(model_types=("gemma3_text",), name="text"),
    ),
    maxtext_vocab={262208: 262144},
    # MaxText derives the scale of queries from the model name.
    settings=SettingRules(
        """
    model_name:                 "gemma3-4b", if config.query_pre_attn_scalar is head_dim
    model_name:                 "gemma3-27b"
    decoder_block:              "gemma3"
    use_multimodal:              true, if flag.vision
    vision_encoder_block:        "gemma3", if flag.vision
    image_size_for_vit:          config.vision_config.image_size | 896, if flag.vision
    num_channels_for_vit:        channel | 3, if flag.vision
    patch_size_for_vit:          patch_height, if flag.vision
    conv_stride_for_vit:         patch_height, if flag.vision
    hidden_size_for_vit:         vision_embed, if flag.vision
    intermediate_size_for_vit:   vision_mlp, if flag.vision
    num_hidden_layers_for_vit:   vision_layer, if flag.vision
    num_attention_heads_for_vit: vision_heads, if flag.vision
    must config.vision_config.layer_norm_eps is config.rms_norm_eps, if flag.vision
        -- MaxText's tower uses the epsilon of the text model
    must config.vision_config.hidden_act is "gelu_pytorch_tanh", if flag.vision
        -- MaxText's tower has no other activation
    must config.mm_tokens_per_image is 256, if flag.vision -- MaxText's tower produces 256 tokens per image
    idle vision_config.vision_use_head -- no Gemma model uses this head
    must config._sliding_window_pattern is 6
        -- only every sixth MaxText layer uses full attention
    local_rope_max_timescale:   rope.local_theta | 10000
    rope_linear_scaling_factor: rope.factor, if rope.type is "linear"
    rope_linear_scaling_factor: 1
    must config.query_pre_attn_scalar is embed // heads, if config.query_pre_attn_scalar is not head_dim
        -- MaxText divides queries by the square root of head_dim or of this value
    must rope.type in ["default", "linear"] -- MaxText's block supports no other RoPE type
    must layer_types.full_every_6 -- only every sixth MaxText layer uses full attention
    must config.sliding_window_pattern is 6 -- only every sixth MaxText layer uses full attention
    must config.use_bidirectional_attention in [null, false] -- MaxText's layers are causal
    must config.attn_logit_softcapping in [null, 0] -- MaxText's block does not cap attention logits
    """
        + SETTINGS
        + DECODER_SETTINGS
    ),
)
