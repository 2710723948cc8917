"""Kimi K2.5: the text part is Kimi K2 under other names; MaxText does not support the tower."""

from dataclasses import replace

from ckpttools.model_families.decoder import FUSED, TIED
from ckpttools.model_families.deepseek import CORRECTED
from ckpttools.model_families.deepseek import FAMILY as DEEPSEEK
from ckpttools.model_families.family import FlagRule, Spelling, UnsupportedPart, nested_sizes

HUB = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
# transformers 5.23 gives text layers the name that tower layers have on the Hub.
RESAVED = Spelling({"model.layers.": "language_model.model.blocks.", **HUB}, name="transformers")
# The names of its modules in transformers.
NESTED = Spelling({"model.": "model.language_model."}, name="nested")

FAMILY = replace(
    DEEPSEEK,
    name="kimi-k2.5",
    model_types=("kimi_k25",),
    models=("Kimi-K2.5",),
    sizes=nested_sizes(DEEPSEEK.sizes, "text_config."),
    flags={
        "tied": TIED,
        "fused": FUSED,
        "query_latent": FlagRule(("text_config.q_lora_rank",)),
        "indexer": FlagRule(("text_config.index_n_heads",)),
        "score_correction": FlagRule(("text_config.topk_method", "text_config.model_type"), CORRECTED),
    },
    left_out=(
        "language_model.model.layers.{prediction+#layers}.*",
        "language_model.model.blocks.{prediction+#layers}.*",
        "model.language_model.layers.{prediction+#layers}.*",
    ),
    parts={
        "vision": UnsupportedPart(
            ("vision_tower.*", "mm_projector.*", "model.vision_tower.*", "model.mm_projector.*")
        ),
    },
    spellings=(Spelling(HUB), RESAVED, NESTED),
)
