"""Qwen3.5 with experts: Qwen3-Next in MaxText; Hugging Face splits the inputs of linear attention."""

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import EMBEDDINGS, TIED
from ckpttools.model_families.family import (
    Family,
    FlagRule,
    Spelling,
    decoder_layers,
    nested_sizes,
    tower_blocks,
)
from ckpttools.model_families.qwen3_next import FAMILY as QWEN3_NEXT
from ckpttools.model_families.qwen3_next import FULL, LINEAR, NORMS, SETTINGS, SHARED_EXPERT
from ckpttools.model_families.qwen3_vl import HUB
from ckpttools.model_families.qwen_tower import BLOCK, CONSTANTS, DERIVED, LAST_MERGER, PATCHES, VISION
from ckpttools.model_families.qwen_tower import SETTINGS as TOWER_SETTINGS
from ckpttools.model_families.qwen_tower import SIZES as TOWER_SIZES

# Hugging Face stores all queries, all keys, then all values. MaxText stores the key heads one after the
# other, each with its query, its key, and the values and gates (`z`) of the heads that share it.
INPUTS = rows("""
    below attention <-> linear_attn
    in_proj_qkvz.kernel: embed (key_heads +key_dim)    <-> in_proj_qkv.weight: +(key_heads key_dim) embed
    in_proj_qkvz.kernel: embed (key_heads +key_dim)    <-> in_proj_qkv.weight: +(key_heads key_dim) embed
    in_proj_qkvz.kernel: embed (key_heads +key_values) <-> in_proj_qkv.weight: +(key_heads key_values) embed
    in_proj_qkvz.kernel: embed (key_heads +key_values) <-> in_proj_z.weight:   (key_heads key_values) embed
    in_proj_ba.kernel: embed (key_heads input ratio)
        <-> in_proj_{input:b,a}.weight: (key_heads ratio) embed
""")
# Published files have fused experts; quantized files and files from transformers have one array per expert.
EXPERTS = rows("""
    below mlp.routed_experts <-> mlp
    gate.kernel: embed expert     <-> gate.weight:                       expert embed
    wi_{part}:   expert embed mlp <-> experts.gate_up_proj:              expert (part mlp) embed, unless apart
    wo:          expert mlp embed <-> experts.down_proj:                 expert embed mlp, unless apart
    wi_0:        expert embed mlp <-> experts.{expert}.gate_proj.weight: mlp embed, when apart
    wi_1:        expert embed mlp <-> experts.{expert}.up_proj.weight:   mlp embed, when apart
    wo:          expert mlp embed <-> experts.{expert}.down_proj.weight: embed mlp, when apart
""")
SEPARATE_EXPERTS_FLAG = FlagRule(
    ("quantization_config.quant_method", "model_type"),
    ("fp8", "compressed-tensors", "awq", "gptq", "qwen3_5_moe_text"),
    by_arrays=True,
)
COMMON = (*NORMS, *EXPERTS, *SHARED_EXPERT)

ENCODER = "vision_encoder.Qwen3_5MoeVisionEncoder_0"
TOWER = (
    tower_blocks("visual", ENCODER, PATCHES),
    tower_blocks("visual.blocks.{vision_layer}", ENCODER + ".blocks_{vision_layer}", BLOCK),
    tower_blocks("visual.merger", "vision_encoder.Qwen3_5MoeVisionProjector_0.merger", LAST_MERGER),
)

FAMILY = Family(
    name="qwen3.5-moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    models=("Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B"),
    rows=EMBEDDINGS,
    layers=(
        decoder_layers("4*block+linear", "layers.layer_{linear}", ("block",), (*COMMON, *INPUTS, *LINEAR)),
        decoder_layers("4*block+3", "layers.layer_3", ("block",), (*COMMON, *FULL)),
        decoder_layers("rest+#cycled", "", (), (*COMMON, *INPUTS, *LINEAR)),
        *TOWER,
    ),
    sizes={
        **nested_sizes(QWEN3_NEXT.sizes, "text_config.", ""),
        **nested_sizes(TOWER_SIZES, "vision_config."),
    },
    constants={**CONSTANTS, "linear": 3, "one": 1, "part": 2},
    derived={
        **DERIVED,
        **QWEN3_NEXT.derived,
        "ratio": "value_heads / key_heads",
        "key_values": "ratio * value_dim",
    },
    flags={"tied": TIED, "apart": SEPARATE_EXPERTS_FLAG, "vision": VISION},
    left_out=("mtp.*",),
    towers=("vision",),
    spellings=(HUB, Spelling(model_types=("qwen3_5_moe_text",), name="text")),
    settings=SettingRules(
        """
    model_name:           "qwen3.5-35b-a3b", if flag.vision
    vision_encoder_block: "qwen3_5", if flag.vision
    mrope_section:        rope.mrope_section | [11, 11, 10], if flag.vision
    decoder_block:        "qwen3_5"
    """
        + TOWER_SETTINGS
        + SETTINGS
    ),
)
