"""Qwen3-VL, dense: the text part is Qwen 3 under another name."""

from ckpttools.families.decoder import SIZES, TIED
from ckpttools.families.family import Family, Spelling, within
from ckpttools.families.qwen3 import FAMILY as QWEN3

# As published and as transformers writes it; `lm_head` stays where it is.
HUB = Spelling({"model.": "model.language_model."})
VISION = ("model.visual.*", "visual.*")

FAMILY = Family(
    name="qwen3-vl",
    model_types=("qwen3_vl",),
    models=("Qwen3-VL 2B to 32B",),
    rows=QWEN3.rows,
    layers=QWEN3.layers,
    sizes=within(SIZES, "text_config."),
    flags={"tied": TIED},
    left_out=VISION,
    spellings=(HUB,),
)
