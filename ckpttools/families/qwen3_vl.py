"""Qwen3-VL, dense: the text part is Qwen 3 under another name, beside it Qwen's tower."""

from ckpttools.families.decoder import SIZES, TIED
from ckpttools.families.family import Family, Spelling, within
from ckpttools.families.qwen3 import FAMILY as QWEN3
from ckpttools.families.qwen_tower import CONSTANTS, DERIVED, QwenTower
from ckpttools.families.tower import VISION

# As published and as transformers writes it; `lm_head` stays where it is.
HUB = Spelling({"visual.": "model.visual.", "model.": "model.language_model."})
TOWER = QwenTower("Qwen3VL", deep="deepstack_merger_list")

FAMILY = Family(
    name="qwen3-vl",
    model_types=("qwen3_vl",),
    models=("Qwen3-VL 2B to 32B",),
    rows=(*QWEN3.rows, *TOWER.rows),
    layers=(*QWEN3.layers, *TOWER.layers),
    sizes={**within(SIZES, "text_config."), **TOWER.sizes("vision_config.")},
    constants=CONSTANTS,
    derived=DERIVED,
    flags={"tied": TIED, "vision": VISION},
    towers=("vision",),
    spellings=(HUB,),
)
