"""Qwen3-VL with experts: Qwen 3 with experts, fused into two arrays per layer."""

from dataclasses import replace

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import ATTENTION, EMBEDDINGS, HEAD_NORMS, HEADS, NORMS, TIED
from ckpttools.model_families.family import Family, FlagRule, decoder_layers, nested_sizes
from ckpttools.model_families.qwen3_moe import FAMILY as QWEN3_MOE
from ckpttools.model_families.qwen3_moe import TEXT
from ckpttools.model_families.qwen3_vl import HUB, TOWER
from ckpttools.model_families.qwen_tower import CONSTANTS, DEEP_SIZES, DEEPSTACK, DERIVED, VISION
from ckpttools.model_families.qwen_tower import SETTINGS as TOWER_SETTINGS

# In published files, the input axis of the experts comes first, unlike in all other fused experts.
# transformers transposes these arrays when it loads them, writes its own order for models that it created,
# and loads both. The separate text model is Qwen 3 with experts.
EXPERTS = rows("""
    below moe_block <-> mlp
    gate.kernel: embed expert <-> gate.weight: expert embed

    below moe_block <-> mlp, unless apart
    wi_{part}: expert embed mlp <-> experts.gate_up_proj: expert embed (part mlp), unless turned
    wo:        expert mlp embed <-> experts.down_proj:    expert mlp embed, unless turned
    wi_{part}: expert embed mlp <-> experts.gate_up_proj: expert (part mlp) embed, when turned
    wo:        expert mlp embed <-> experts.down_proj:    expert embed mlp, when turned

    below moe_block <-> mlp, when apart
    wi_0: expert embed mlp <-> experts.{expert}.gate_proj.weight: mlp embed
    wi_1: expert embed mlp <-> experts.{expert}.up_proj.weight:   mlp embed
    wo:   expert mlp embed <-> experts.{expert}.down_proj.weight: embed mlp
""")
TRANSPOSED_EXPERTS = FlagRule((), by_arrays=True)
SEPARATE_EXPERTS_FLAG = FlagRule(("model_type",), TEXT.model_types)

FAMILY = Family(
    name="qwen3-vl-moe",
    model_types=("qwen3_vl_moe",),
    models=("Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B"),
    rows=EMBEDDINGS,
    layers=(
        decoder_layers("layer", "layers", ("layer",), (*NORMS, *ATTENTION, *HEAD_NORMS, *EXPERTS)),
        *TOWER,
    ),
    sizes={**nested_sizes(QWEN3_MOE.sizes, "text_config.", ""), **nested_sizes(DEEP_SIZES, "vision_config.")},
    constants={**CONSTANTS, "part": 2},
    derived={**DERIVED, **HEADS},
    flags={"tied": TIED, "turned": TRANSPOSED_EXPERTS, "apart": SEPARATE_EXPERTS_FLAG, "vision": VISION},
    towers=("vision",),
    unscanned_with_towers=DEEPSTACK,
    # This model always normalizes.
    spellings=(HUB, replace(TEXT, without=(*TEXT.without, "norm_topk_prob"))),
    settings=SettingRules(
        """
    model_name:           "qwen3-vl-30b-a3b", if flag.vision
    vision_encoder_block: "qwen3_vl", if flag.vision
    """
        + TOWER_SETTINGS
    )
    + QWEN3_MOE.settings,
)
