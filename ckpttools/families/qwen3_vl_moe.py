"""Qwen3-VL with experts: Qwen 3 with experts, but the experts of a layer are fused into two arrays."""

from ckpttools.families.decoder import ATTENTION, EMBEDDINGS, HEAD_NORMS, NORMS, TIED
from ckpttools.families.family import Family, FlagRule, decoder_layers, within
from ckpttools.families.qwen3_moe import FAMILY as QWEN3_MOE
from ckpttools.families.qwen3_vl import HUB, TOWER
from ckpttools.families.qwen_tower import CONSTANTS, DEEP_SIZES, DEEPSTACK, DERIVED
from ckpttools.families.tower import VISION
from ckpttools.mapping.row import rows

# As published, what goes into an expert comes first, unlike in all other fused experts; transformers turns
# that around when it loads, and writes a model that it made itself as it has it. It loads either.
EXPERTS = rows("""
    below moe_block <-> mlp
    gate.kernel: embed expert     <-> gate.weight:          expert embed
    wi_{part}:   expert embed mlp <-> experts.gate_up_proj: expert embed (part mlp), unless turned
    wo:          expert mlp embed <-> experts.down_proj:    expert mlp embed, unless turned
    wi_{part}:   expert embed mlp <-> experts.gate_up_proj: expert (part mlp) embed, when turned
    wo:          expert mlp embed <-> experts.down_proj:    expert embed mlp, when turned
""")
TURNED = FlagRule((), by_arrays=True)

FAMILY = Family(
    name="qwen3-vl-moe",
    model_types=("qwen3_vl_moe",),
    models=("Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B"),
    rows=EMBEDDINGS,
    layers=(
        decoder_layers("layer", "layers", ("layer",), (*NORMS, *ATTENTION, *HEAD_NORMS, *EXPERTS)),
        *TOWER,
    ),
    sizes={**within(QWEN3_MOE.sizes, "text_config."), **within(DEEP_SIZES, "vision_config.")},
    constants={**CONSTANTS, "part": 2},
    derived=DERIVED,
    flags={"tied": TIED, "turned": TURNED, "vision": VISION},
    towers=("vision",),
    unscanned_with_towers=DEEPSTACK,
    spellings=(HUB,),
    settings=QWEN3_MOE.settings,
)
