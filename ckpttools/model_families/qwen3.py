"""Qwen 3, dense: norms on query and key, no biases, no scale in the query."""

from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import (
    ATTENTION,
    EMBEDDINGS,
    HEAD_NORMS,
    LLAMA_SETTINGS,
    MLP,
    NO_SWITCHED_WINDOW,
    NORMS,
    SIZES,
    TIED,
    UNBIASED,
)
from ckpttools.model_families.family import Family, Spelling, decoder_layers

# Text models of multimodal types compute the same, because the three positions of a text token are equal.
POSITIONS = (
    "rope_parameters.mrope_section",
    "rope_parameters.mrope_interleaved",
    "rope_scaling.mrope_section",
    "rope_scaling.mrope_interleaved",
)
TEXT = Spelling(model_types=("qwen3",), name="text", architecture="Qwen3ForCausalLM", without=POSITIONS)

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    models=("Qwen3 0.6B to 32B",),
    rows=EMBEDDINGS,
    layers=(decoder_layers("layer", "layers", ("layer",), (*NORMS, *MLP, *ATTENTION, *HEAD_NORMS)),),
    sizes=SIZES,
    flags={"tied": TIED},
    settings=SettingRules(
        """
    decoder_block:              "qwen3"
    use_qk_norm:                true
    normalize_embedding_logits: false
    """
        + LLAMA_SETTINGS
        + NO_SWITCHED_WINDOW
        + UNBIASED
    ),
)
