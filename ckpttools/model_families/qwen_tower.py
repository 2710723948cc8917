"""The vision tower of Qwen3-VL, Qwen3-Omni and Qwen3.5: one tower, with three names in MaxText."""

from ckpttools.mapping.row import rows
from ckpttools.model_families.family import FlagRule

# A configuration without a tower has none of these fields; some files state fewer fields than others.
VISION = FlagRule(
    ("vision_config.hidden_size", "vision_config.model_type"), remedy="{text_only} leaves the towers out"
)
AUDIO = FlagRule(
    ("thinker_config.audio_config.d_model", "audio_config.d_model", "thinker_config.audio_config.model_type"),
    remedy=VISION.remedy,
)
HEAD_DIM = {"vision_head_dim": "vision_embed / vision_heads"}
VISION_SIZES = {
    "vision_layer": ("vision_config.num_hidden_layers",),
    "vision_embed": ("vision_config.hidden_size",),
    "vision_heads": ("vision_config.num_attention_heads",),
    "vision_mlp": ("vision_config.intermediate_size",),
}


PATCHES = rows("""
    patch_embed.proj.kernel: frame patch_height patch_width channel vision_embed
        <-> patch_embed.proj.weight: vision_embed channel frame patch_height patch_width
    patch_embed.proj.bias: vision_embed <-> patch_embed.proj.bias: vision_embed
    pos_embed_interpolate.pos_embed: vision_position vision_embed
        <-> pos_embed.weight: vision_position vision_embed
""")
BLOCK = rows("""
    ln{norm+1}.scale: vision_embed <-> norm{norm+1}.weight: vision_embed
    ln{norm+1}.bias:  vision_embed <-> norm{norm+1}.bias:   vision_embed

    below attn.attn <-> attn
    {qkv:query,key,value}.kernel: vision_embed vision_heads vision_head_dim
        <-> qkv.weight: (qkv vision_heads vision_head_dim) vision_embed
    {qkv:query,key,value}.bias: vision_heads vision_head_dim <-> qkv.bias: (qkv vision_heads vision_head_dim)
    out.kernel: vision_heads vision_head_dim vision_embed
        <-> proj.weight: vision_embed (vision_heads vision_head_dim)
    out.bias: vision_embed <-> proj.bias: vision_embed

    below <-> mlp
    mlp.kernel:     vision_embed vision_mlp <-> linear_fc1.weight: vision_mlp vision_embed
    mlp.bias:       vision_mlp              <-> linear_fc1.bias:   vision_mlp
    mlp_out.kernel: vision_mlp vision_embed <-> linear_fc2.weight: vision_embed vision_mlp
    mlp_out.bias:   vision_embed            <-> linear_fc2.bias:   vision_embed
""")
# Patch mergers: the last one normalizes each patch; those within the tower normalize all patches together.
MERGE = rows("""
    mlp_0.kernel: patches merged <-> linear_fc1.weight: merged patches
    mlp_0.bias:   merged         <-> linear_fc1.bias:   merged
    mlp_2.kernel: merged embed   <-> linear_fc2.weight: embed merged
    mlp_2.bias:   embed          <-> linear_fc2.bias:   embed
""")
LAST_MERGER = (
    *rows("""
        ln_q.scale: vision_embed <-> norm.weight: vision_embed
        ln_q.bias:  vision_embed <-> norm.bias:   vision_embed
    """),
    *MERGE,
)
DEEP_MERGER = (
    *rows("""
        ln_q.scale: patches <-> norm.weight: patches
        ln_q.bias:  patches <-> norm.bias:   patches
    """),
    *MERGE,
)

DEEPSTACK = "its first layers use the outputs of the tower's inner blocks"

SIZES = {
    "vision_layer": ("depth",),
    "vision_embed": ("hidden_size",),
    "vision_heads": ("num_heads",),
    "vision_mlp": ("intermediate_size",),
    "vision_position": ("num_position_embeddings",),
    "channel": ("in_channels",),
    "frame": ("temporal_patch_size",),
    "patch_height": ("patch_size",),
    "patch_width": ("patch_size",),
    "merge": ("spatial_merge_size",),
}
DEEP_SIZES = {**SIZES, "deep": ("deepstack_visual_indexes.#",)}
CONSTANTS = {"norm": 2}
# MaxText settings of the tower; each family adds the model and the encoder.
SETTINGS = """
    use_multimodal:                   true, if flag.vision
    use_mrope:                        true, if flag.vision
    mrope_section:                    rope.mrope_section | [24, 20, 20], if flag.vision
    hidden_size_for_vit:              vision_embed, if flag.vision
    intermediate_size_for_vit:        vision_mlp, if flag.vision
    num_hidden_layers_for_vit:        vision_layer, if flag.vision
    num_attention_heads_for_vit:      vision_heads, if flag.vision
    num_channels_for_vit:             channel | 3, if flag.vision
    patch_size_for_vit:               patch_height, if flag.vision
    temporal_patch_size_for_vit:      frame | 2, if flag.vision
    spatial_merge_size_for_vit:       merge | 2, if flag.vision
    num_position_embeddings_for_vit:  vision_position, if flag.vision
    out_hidden_size_for_vit:          embed, if flag.vision
    deepstack_visual_indexes_for_vit: config.vision_config.deepstack_visual_indexes | [], if flag.vision
    rope_theta_for_vit:               config.vision_config.rope_parameters.rope_theta | 10000, if flag.vision
    must config.vision_config.out_hidden_size is embed, if flag.vision
        -- the output of MaxText's tower is as wide as the text model
    must config.vision_config.hidden_act is "gelu_pytorch_tanh", if flag.vision
        -- MaxText's tower has no other activation
    must config.vision_config.rope_parameters.rope_type in ["axial", "default"], if flag.vision
        -- MaxText's tower supports no other RoPE type
    must config.rms_norm_eps is 1e-06, if flag.vision -- MaxText's tower uses it, and was trained with 1e-06
    must rope.mrope_interleaved is true, if flag.vision -- MaxText interleaves the MRoPE sections
    idle rope_parameters.mrope_*, rope_scaling.mrope_* -- the three positions of a text token are equal
"""
DERIVED = {
    **HEAD_DIM,
    "patches": "vision_embed * merge * merge",
    "merged": "vision_embed * merge * merge",
}
