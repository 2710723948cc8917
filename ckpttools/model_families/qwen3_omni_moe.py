"""Qwen3-Omni: the thinker, which is Qwen 3 with experts, with Qwen's vision tower and an audio tower."""

from dataclasses import replace

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import FUSED, HEADS, TIED
from ckpttools.model_families.family import (
    Family,
    FlagRule,
    Spelling,
    UnsupportedPart,
    nested_sizes,
    tower_blocks,
)
from ckpttools.model_families.qwen3_moe import FAMILY as QWEN3_MOE
from ckpttools.model_families.qwen3_moe import TEXT
from ckpttools.model_families.qwen_tower import (
    AUDIO,
    BLOCK,
    CONSTANTS,
    DEEP_SIZES,
    DEEPSTACK,
    DERIVED,
    PATCHES,
    VISION,
)
from ckpttools.model_families.qwen_tower import SETTINGS as TOWER_SETTINGS

# The tower is the one in Qwen3-VL, except for the names of the patch merger.
MERGE = rows("""
    mlp_0.kernel: patches merged <-> mlp.0.weight: merged patches
    mlp_0.bias:   merged         <-> mlp.0.bias:   merged
    mlp_2.kernel: merged embed   <-> mlp.2.weight: embed merged
    mlp_2.bias:   embed          <-> mlp.2.bias:   embed
""")
LAST_MERGER = (
    *rows("""
        ln_q.scale: vision_embed <-> ln_q.weight: vision_embed
        ln_q.bias:  vision_embed <-> ln_q.bias:   vision_embed
    """),
    *MERGE,
)
DEEP_MERGER = (
    *rows("""
        ln_q.scale: patches <-> ln_q.weight: patches
        ln_q.bias:  patches <-> ln_q.bias:   patches
    """),
    *MERGE,
)
ENCODER = "vision_encoder.Qwen3OmniMoeVisionEncoder_0"
TOWER = (
    tower_blocks("visual", ENCODER, PATCHES),
    tower_blocks("visual.blocks.{vision_layer}", ENCODER + ".blocks_{vision_layer}", BLOCK),
    tower_blocks("visual.merger_list.{deep}", ENCODER + ".merger_{deep}", DEEP_MERGER),
    tower_blocks("visual.merger", "vision_encoder.Qwen3OmniMoeVisionProjector_0.merger", LAST_MERGER),
)

AUDIO_ROWS = rows("""
    below audio_encoder.Qwen3OmniAudioEncoder_0 <-> audio_tower, when audio
    conv2d1.kernel: kernel_height kernel_width one sound
        <-> conv2d1.weight: sound one kernel_height kernel_width
    conv2d1.bias: sound <-> conv2d1.bias: sound
    conv2d{conv+2}.kernel: kernel_height kernel_width sound_in sound
        <-> conv2d{conv+2}.weight: sound sound_in kernel_height kernel_width
    conv2d{conv+2}.bias:  sound                   <-> conv2d{conv+2}.bias: sound
    conv_out.kernel:      convolved audio_embed   <-> conv_out.weight:     audio_embed convolved
    layernorm_post.scale: audio_embed             <-> ln_post.weight:      audio_embed
    layernorm_post.bias:  audio_embed             <-> ln_post.bias:        audio_embed

    below audio_encoder.Qwen3OmniAudioProjector_0 <-> audio_tower, when audio
    proj1.kernel: audio_embed projected <-> proj1.weight: projected audio_embed
    proj1.bias:   projected             <-> proj1.bias:   projected
    proj2.kernel: projected embed       <-> proj2.weight: embed projected
    proj2.bias:   embed                 <-> proj2.bias:   embed
""")
AUDIO_BLOCK = rows("""
    input_layer_norm.scale:          audio_embed <-> self_attn_layer_norm.weight: audio_embed
    input_layer_norm.bias:           audio_embed <-> self_attn_layer_norm.bias:   audio_embed
    post_attention_layer_norm.scale: audio_embed <-> final_layer_norm.weight:     audio_embed
    post_attention_layer_norm.bias:  audio_embed <-> final_layer_norm.bias:       audio_embed

    below self_attention_audio <-> self_attn
    {qkv:query,key,value}.kernel: audio_embed audio_heads audio_head_dim
        <-> {qkv:q,k,v}_proj.weight: (audio_heads audio_head_dim) audio_embed
    {qkv:query,key,value}.bias: audio_heads audio_head_dim
        <-> {qkv:q,k,v}_proj.bias: (audio_heads audio_head_dim)
    out.kernel: audio_heads audio_head_dim audio_embed
        <-> out_proj.weight: audio_embed (audio_heads audio_head_dim)
    out.bias: audio_embed <-> out_proj.bias: audio_embed

    below AudioMLP <->
    wi.kernel: audio_embed audio_mlp <-> fc1.weight: audio_mlp audio_embed
    wi.bias:   audio_mlp             <-> fc1.bias:   audio_mlp
    wo.kernel: audio_mlp audio_embed <-> fc2.weight: audio_embed audio_mlp
    wo.bias:   audio_embed           <-> fc2.bias:   audio_embed
""")
AUDIO_BLOCKS = tower_blocks(
    "audio_tower.layers.{audio_layer}",
    "audio_encoder.Qwen3OmniAudioEncoder_0.layers_{audio_layer}",
    AUDIO_BLOCK,
    "audio",
)
AUDIO_SIZES = {
    "audio_layer": ("encoder_layers",),
    "audio_embed": ("d_model",),
    "audio_heads": ("encoder_attention_heads",),
    "audio_mlp": ("encoder_ffn_dim",),
    "sound": ("downsample_hidden_size",),
}


# Prefixes in the complete model, and in a thinker that was saved separately.
TEXT_PARTS = ("thinker_config.text_config.", "text_config.", "")
VISION_PARTS = ("thinker_config.vision_config.", "vision_config.")
AUDIO_PARTS = ("thinker_config.audio_config.", "audio_config.")
# By default, a model has speech output.
SPEECH = ("enable_audio_output", "talker_config")

FAMILY = Family(
    name="qwen3-omni",
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    models=("Qwen3-Omni-30B-A3B (thinker)",),
    rows=(*QWEN3_MOE.rows, *AUDIO_ROWS),
    layers=(*QWEN3_MOE.layers, *TOWER, AUDIO_BLOCKS),
    sizes={
        **nested_sizes({**QWEN3_MOE.sizes, "kv_heads": ("num_key_value_heads",)}, *TEXT_PARTS),
        **nested_sizes(DEEP_SIZES, *VISION_PARTS),
        **nested_sizes(AUDIO_SIZES, *AUDIO_PARTS),
    },
    constants={**CONSTANTS, "conv": 2, "one": 1, "part": 2},
    derived={**DERIVED, **HEADS, "sound_in": "sound", "audio_head_dim": "audio_embed / audio_heads"},
    flags={
        "tied": FlagRule(
            (
                "thinker_config.tie_word_embeddings",
                "thinker_config.text_config.tie_word_embeddings",
                *TIED.field,
            ),
            remedy=TIED.remedy,
        ),
        "fused": FUSED,
        "vision": replace(
            VISION, field=("thinker_config.vision_config.hidden_size", "vision_config.hidden_size")
        ),
        "audio": AUDIO,
    },
    towers=("vision", "audio"),
    unscanned_with_towers=DEEPSTACK,
    parts={
        "talker": UnsupportedPart(("talker.*",), SPEECH),
        "code2wav": UnsupportedPart(("code2wav.*",), SPEECH),
    },
    spellings=(
        Spelling(
            {
                "model.": "thinker.model.",
                "lm_head.": "thinker.lm_head.",
                "visual.": "thinker.visual.",
                "audio_tower.": "thinker.audio_tower.",
            }
        ),
        Spelling(model_types=("qwen3_omni_moe_thinker",), name="thinker"),
        TEXT,
    ),
    settings=SettingRules(
        """
    model_name:                       "qwen3-omni-30b-a3b", if flag.vision
    model_name:                       "qwen3-omni-30b-a3b", if flag.audio
    vision_encoder_block:             "qwen3_omni", if flag.vision
    position_id_per_seconds:          config.position_id_per_seconds | 25, if flag.vision
    use_audio:                        flag.audio, if flag.vision
    use_audio:                        true, if flag.audio
    use_multimodal:                   true, if flag.vision
    use_multimodal:                   false, if flag.audio
    d_model_for_audio:                audio_embed, if flag.audio
    encoder_layers_for_audio:         audio_layer, if flag.audio
    encoder_attention_heads_for_audio: audio_heads, if flag.audio
    encoder_ffn_dim_for_audio:        audio_mlp, if flag.audio
    downsample_hidden_size_for_audio: sound, if flag.audio
    output_dim_for_audio:             config.audio_config.output_dim | embed, if flag.audio
    num_mel_bins_for_audio:           config.audio_config.num_mel_bins | 128, if flag.audio
    max_source_positions_for_audio:   config.audio_config.max_source_positions | 1500, if flag.audio
    n_window_for_audio:               config.audio_config.n_window | 100, if flag.audio
    n_window_infer_for_audio:         config.audio_config.n_window_infer | 400, if flag.audio
    conv_chunksize_for_audio:         config.audio_config.conv_chunksize | 500, if flag.audio
    must config.audio_config.activation_function is "gelu_pytorch_tanh", if flag.audio
        -- MaxText's tower uses the tanh approximation of GELU
    must config.audio_config.output_dim is embed, if flag.audio
        -- the output of MaxText's tower is as wide as the text model
    idle audio_config.scale_embedding -- neither MaxText nor transformers scales
    idle talker_config, code2wav_config -- MaxText has no modules for speech output
    idle tie_word_embeddings -- the text model states it
    idle position_id_per_seconds -- positions of images are not used without a tower
    """
        + TOWER_SETTINGS
    )
    + QWEN3_MOE.settings,
)
