"""Qwen3-Omni: the thinker's text part is Qwen 3 with experts. MaxText has no talker and no vocoder."""

from ckpttools.families.decoder import TIED
from ckpttools.families.family import Family, FlagRule, Spelling, within
from ckpttools.families.qwen3_moe import FAMILY as QWEN3_MOE

# Of the whole model, and of one whose thinker was saved alone.
PARTS = ("thinker_config.text_config.", "text_config.")

FAMILY = Family(
    name="qwen3-omni",
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    models=("Qwen3-Omni-30B-A3B (thinker)",),
    rows=QWEN3_MOE.rows,
    layers=QWEN3_MOE.layers,
    sizes=within({**QWEN3_MOE.sizes, "kv_heads": ("num_key_value_heads",)}, *PARTS),
    flags={
        "tied": FlagRule(
            ("thinker_config.text_config.tie_word_embeddings", *TIED.field[::-1]), remedy=TIED.remedy
        )
    },
    left_out=(
        "thinker.visual.*",
        "thinker.audio_tower.*",
        "visual.*",
        "audio_tower.*",
        "talker.*",
        "code2wav.*",
    ),
    spellings=(
        Spelling({"model.": "thinker.model.", "lm_head.": "thinker.lm_head."}),
        Spelling(model_types=("qwen3_omni_moe_thinker",), name="thinker"),
    ),
)
