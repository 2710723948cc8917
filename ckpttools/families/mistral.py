"""Mistral 7B and the dense models that share its layout."""

from ckpttools.families.decoder import DECODER, NEVER, ROTARY_BUFFERS, SCALED_ROTARY, SIZES, TIED
from ckpttools.families.family import Family

FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    models=("Mistral 7B v0.1 to v0.3", "Mistral Nemo"),
    rows=(*DECODER, *SCALED_ROTARY),
    sizes=SIZES,
    constants={"half": 2},
    flags={"tied": TIED, "interleaved": NEVER},
    dropped=ROTARY_BUFFERS,
)
