"""Gemma 1: like Gemma 2, but all layers are the same, and there is no norm after attention and MLP.

MaxText's own script reads Google's files, not Hugging Face's, so the rows were verified by logits: MaxText's
gemma block (0.2.5) and transformers differ by at most 4e-6 on a tiny, randomly initialized model.
"""

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import DECODER_SETTINGS, MLP, SCALED_ATTENTION, SIZES
from ckpttools.model_families.family import Family, decoder_layers
from ckpttools.model_families.gemma import FINAL_NORM, FIRST_SETTINGS, HEAD, TIED_BY_DEFAULT
from ckpttools.model_families.gemma2 import EMBEDDING

NORMS = rows("""
    pre_self_attention_norm.scale: embed <-> input_layernorm.weight:          embed, shift 1
    pre_ffw_norm.scale:            embed <-> post_attention_layernorm.weight: embed, shift 1
""")

FAMILY = Family(
    name="gemma",
    model_types=("gemma",),
    models=("Gemma 2B", "Gemma 7B", "CodeGemma"),
    rows=(EMBEDDING, FINAL_NORM, HEAD),
    layers=(decoder_layers("layer", "layers", ("layer",), (*NORMS, *SCALED_ATTENTION, *MLP)),),
    sizes=SIZES,
    flags={"tied": TIED_BY_DEFAULT},
    maxtext_vocab={256000: 256128},
    settings=SettingRules(
        """
    decoder_block: "gemma"
    must rope.type is "default" -- MaxText's block supports no other RoPE type
    """
        + FIRST_SETTINGS
        + DECODER_SETTINGS
    ),
)
