"""Qwen3-VL, dense: Qwen 3 under other names, with Qwen's vision tower."""

from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import SIZES, TIED
from ckpttools.model_families.family import Family, Spelling, nested_sizes, tower_blocks
from ckpttools.model_families.qwen3 import FAMILY as QWEN3
from ckpttools.model_families.qwen3 import TEXT
from ckpttools.model_families.qwen_tower import (
    BLOCK,
    CONSTANTS,
    DEEP_MERGER,
    DEEP_SIZES,
    DEEPSTACK,
    DERIVED,
    LAST_MERGER,
    PATCHES,
    VISION,
)
from ckpttools.model_families.qwen_tower import SETTINGS as TOWER_SETTINGS

# The names in published files and in transformers' files; `lm_head` is the same in both.
HUB = Spelling({"visual.": "model.visual.", "model.": "model.language_model."})
ENCODER = "vision_encoder.Qwen3VLVisionEncoder_0"
TOWER = (
    tower_blocks("visual", ENCODER, PATCHES),
    tower_blocks("visual.blocks.{vision_layer}", ENCODER + ".blocks_{vision_layer}", BLOCK),
    tower_blocks("visual.deepstack_merger_list.{deep}", ENCODER + ".merger_{deep}", DEEP_MERGER),
    tower_blocks("visual.merger", "vision_encoder.Qwen3VLVisionProjector_0.merger", LAST_MERGER),
)

FAMILY = Family(
    name="qwen3-vl",
    model_types=("qwen3_vl",),
    models=("Qwen3-VL 2B to 32B",),
    rows=QWEN3.rows,
    layers=(*QWEN3.layers, *TOWER),
    sizes={**nested_sizes(SIZES, "text_config.", ""), **nested_sizes(DEEP_SIZES, "vision_config.")},
    constants=CONSTANTS,
    derived=DERIVED,
    flags={"tied": TIED, "vision": VISION},
    towers=("vision",),
    unscanned_with_towers=DEEPSTACK,
    spellings=(HUB, TEXT),
    settings=SettingRules(
        """
    model_name:           "qwen3-vl-2b", if flag.vision
    vision_encoder_block: "qwen3_vl", if flag.vision
    """
        + TOWER_SETTINGS
    )
    + QWEN3.settings,
)
