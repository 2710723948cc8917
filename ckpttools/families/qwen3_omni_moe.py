"""Qwen3-Omni: the thinker, Qwen 3 with experts beside Qwen's tower and one that hears."""

from dataclasses import replace

from ckpttools.families.decoder import TIED
from ckpttools.families.family import Family, FlagRule, Spelling, within
from ckpttools.families.qwen3_moe import FAMILY as QWEN3_MOE
from ckpttools.families.qwen_tower import CONSTANTS, DERIVED, QwenTower
from ckpttools.families.tower import AUDIO, VISION, tower_blocks
from ckpttools.mapping.row import rows

TOWER = QwenTower("Qwen3OmniMoe", deep="merger_list", merger=("ln_q", "mlp.0", "mlp.2"))

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


def of_thinker(part: str) -> tuple[str, str]:
    """Where a part of the thinker's configuration may be: in the whole model's, or the thinker's own."""
    return f"thinker_config.{part}.", f"{part}."


FAMILY = Family(
    name="qwen3-omni",
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    models=("Qwen3-Omni-30B-A3B (thinker)",),
    rows=(*QWEN3_MOE.rows, *TOWER.rows, *AUDIO_ROWS),
    layers=(*QWEN3_MOE.layers, *TOWER.layers, AUDIO_BLOCKS),
    sizes={
        **within({**QWEN3_MOE.sizes, "kv_heads": ("num_key_value_heads",)}, *of_thinker("text_config")),
        **TOWER.sizes(*of_thinker("vision_config")),
        **within(AUDIO_SIZES, *of_thinker("audio_config")),
    },
    constants={**CONSTANTS, "conv": 2, "one": 1},
    derived={**DERIVED, "sound_in": "sound", "audio_head_dim": "audio_embed / audio_heads"},
    flags={
        "tied": FlagRule(
            ("thinker_config.text_config.tie_word_embeddings", *TIED.field[::-1]), remedy=TIED.remedy
        ),
        "vision": replace(
            VISION, field=tuple(f"thinker_config.{name}" for name in VISION.field) + VISION.field
        ),
        "audio": AUDIO,
    },
    towers=("vision", "audio"),
    left_out=("talker.*", "code2wav.*"),
    spellings=(
        Spelling({f"{part}.": f"thinker.{part}." for part in ("model", "lm_head", "visual", "audio_tower")}),
        Spelling(model_types=("qwen3_omni_moe_thinker",), name="thinker"),
    ),
)
