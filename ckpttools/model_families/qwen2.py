"""Qwen 2 and 2.5, dense: biases on query, key and value, no scale in the query."""

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import (
    ATTENTION,
    EMBEDDINGS,
    HEADS,
    LLAMA_SETTINGS,
    MLP,
    NO_SWITCHED_WINDOW,
    NORMS,
    SIZES,
    TIED,
)
from ckpttools.model_families.family import Family, decoder_layers

BIASES = rows("""
    self_attention.query.bias: heads head_dim    <-> self_attn.q_proj.bias: (heads head_dim)
    self_attention.key.bias:   kv_heads head_dim <-> self_attn.k_proj.bias: (kv_heads head_dim)
    self_attention.value.bias: kv_heads head_dim <-> self_attn.v_proj.bias: (kv_heads head_dim)
""")

FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    models=("Qwen2", "Qwen2.5", "Qwen2.5-Coder", "Qwen2.5-Math"),
    rows=EMBEDDINGS,
    layers=(decoder_layers("layer", "layers", ("layer",), (*NORMS, *MLP, *ATTENTION, *BIASES)),),
    sizes=SIZES,
    derived=HEADS,
    flags={"tied": TIED},
    settings=SettingRules(
        """
    decoder_block:              "qwen2"
    attention_bias:             true
    normalize_embedding_logits: false
    idle attention_bias -- Qwen 2 always has these biases
    """
        + LLAMA_SETTINGS
        + NO_SWITCHED_WINDOW
    ),
)
