"""Qwen 3 with experts in every layer."""

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import (
    ATTENTION,
    EMBEDDINGS,
    EXPERT_SETTINGS,
    EXPERTS_EVERYWHERE,
    FUSED,
    HEAD_NORMS,
    HEADS,
    LLAMA_SETTINGS,
    NO_SWITCHED_WINDOW,
    NORMS,
    SIZES,
    TIED,
    UNBIASED,
)
from ckpttools.model_families.family import Family, Spelling, decoder_layers
from ckpttools.model_families.qwen3 import POSITIONS

EXPERTS = rows("""
    below moe_block <-> mlp
    gate.kernel: embed expert     <-> gate.weight:                       expert embed
    wi_0:        expert embed mlp <-> experts.{expert}.gate_proj.weight: mlp embed, unless fused
    wi_1:        expert embed mlp <-> experts.{expert}.up_proj.weight:   mlp embed, unless fused
    wo:          expert mlp embed <-> experts.{expert}.down_proj.weight: embed mlp, unless fused
    wi_{part}:   expert embed mlp <-> experts.gate_up_proj:              expert (part mlp) embed, when fused
    wo:          expert mlp embed <-> experts.down_proj:                 expert embed mlp, when fused
""")

# Multimodal types normalize by default.
TEXT = Spelling(
    model_types=("qwen3_moe",),
    name="text",
    architecture="Qwen3MoeForCausalLM",
    without=POSITIONS,
    defaults={"norm_topk_prob": True},
)

FAMILY = Family(
    name="qwen3-moe",
    model_types=("qwen3_moe",),
    models=("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder-480B-A35B"),
    rows=EMBEDDINGS,
    layers=(decoder_layers("layer", "layers", ("layer",), (*NORMS, *ATTENTION, *HEAD_NORMS, *EXPERTS)),),
    sizes={
        **SIZES,
        "mlp": ("moe_intermediate_size",),
        # The field is `num_local_experts` since transformers 5.
        "expert": ("num_experts", "num_local_experts"),
    },
    constants={"part": 2},
    derived=HEADS,
    flags={"tied": TIED, "fused": FUSED},
    settings=SettingRules(
        """
    decoder_block:  "qwen3_moe"
    use_qk_norm:    true
    norm_topk_prob: true
    """
        + EXPERT_SETTINGS
        + EXPERTS_EVERYWHERE
        + LLAMA_SETTINGS
        + NO_SWITCHED_WINDOW
        + UNBIASED
    ),
)
