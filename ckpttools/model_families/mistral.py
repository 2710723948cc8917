"""Mistral 7B and the dense models that share its layout."""

from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import (
    EMBEDDINGS,
    HEADS,
    LLAMA_LAYERS,
    LLAMA_SETTINGS,
    NEVER,
    NO_WINDOW,
    ROTARY_BUFFERS,
    SIZES,
    TIED,
    UNBIASED,
)
from ckpttools.model_families.family import Family

FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    models=("Mistral 7B v0.1 to v0.3", "Mistral Nemo"),
    rows=EMBEDDINGS,
    layers=(LLAMA_LAYERS,),
    sizes=SIZES,
    constants={"half": 2},
    derived={**HEADS, "pair": "head_dim // half"},
    flags={"tied": TIED, "interleaved": NEVER},
    dropped=ROTARY_BUFFERS,
    settings=SettingRules(
        """
    decoder_block: "mistral"
    """
        + LLAMA_SETTINGS
        + NO_WINDOW
        + UNBIASED
    ),
)
