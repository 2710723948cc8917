"""Gemma 3, text models and the text part of multimodal ones: cycles of six layers, and what remains."""

from ckpttools.families.decoder import ATTENTION, MLP
from ckpttools.families.family import Family, Spelling, decoder_layers
from ckpttools.families.gemma import (
    FINAL_NORM,
    HEAD,
    INTERNAL,
    MULTIMODAL,
    TEXT_SIZES,
    TIED_BY_DEFAULT,
)
from ckpttools.mapping.row import row, rows

# Here MaxText rounds sqrt(hidden_size) to bfloat16 before it multiplies.
EMBEDDING = row(
    "token_embedder.embedding: vocab embed "
    "<-> model.embed_tokens.weight: vocab embed, scale embed 0.5 bfloat16"
)
NORMS = rows("""
    pre_self_attention_norm.scale:   embed    <-> input_layernorm.weight:            embed, shift 1
    post_self_attention_norm.scale:  embed    <-> post_attention_layernorm.weight:   embed, shift 1
    pre_ffw_norm.scale:              embed    <-> pre_feedforward_layernorm.weight:  embed, shift 1
    post_ffw_norm.scale:             embed    <-> post_feedforward_layernorm.weight: embed, shift 1
    self_attention.query_norm.scale: head_dim <-> self_attn.q_norm.weight:           head_dim, shift 1
    self_attention.key_norm.scale:   head_dim <-> self_attn.k_norm.weight:           head_dim, shift 1
""")
ROWS = (*ATTENTION, *MLP, *NORMS)

FAMILY = Family(
    name="gemma3",
    model_types=("gemma3", "gemma3_text"),
    models=("Gemma 3 270M and 1B (text)", "Gemma 3 4B", "Gemma 3 12B", "Gemma 3 27B"),
    rows=(EMBEDDING, FINAL_NORM, HEAD),
    layers=(
        decoder_layers("6*block+position", "layers.layers_{position}", ("block",), ROWS),
        decoder_layers("rest+#cycled", "layers_remainder.layers_{rest}", (), ROWS),
    ),
    sizes=TEXT_SIZES,
    constants={"position": 6},
    derived={"block": "layers // 6", "rest": "layers % 6", "cycled": "6 * block"},
    flags={"tied": TIED_BY_DEFAULT},
    left_out=(
        "vision_tower.*",
        "model.vision_tower.*",
        "multi_modal_projector.*",
        "model.multi_modal_projector.*",
    ),
    spellings=(
        MULTIMODAL,
        INTERNAL,
        Spelling(model_types=("gemma3_text",), name="text"),
    ),
    maxtext_vocab={262208: 262144},
)
