"""Llama 2, 3, 3.1 and 3.2 and models fine-tuned from them, of any size, with tied embeddings or not."""

from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import (
    EMBEDDINGS,
    EVERY_LAYER,
    HEADS,
    LLAMA3_ROPE,
    LLAMA_LAYERS,
    LLAMA_SETTINGS,
    ROTARY_BUFFERS,
    SIZES,
    TIED,
    UNBIASED,
)
from ckpttools.model_families.family import Family

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    models=("Llama 2", "Llama 3", "Llama 3.1", "Llama 3.2 (text)", "Llama 3.3"),
    rows=EMBEDDINGS,
    layers=(LLAMA_LAYERS,),
    sizes=SIZES,
    constants={"half": 2},
    derived={**HEADS, "pair": "head_dim // half"},
    flags={"tied": TIED, "interleaved": LLAMA3_ROPE},
    dropped=ROTARY_BUFFERS,
    settings=SettingRules(
        """
    decoder_block: "llama2"
    must config.mlp_bias is false -- MaxText's block has no MLP biases
    """
        + LLAMA_SETTINGS
        + UNBIASED
        + EVERY_LAYER
    ),
)
