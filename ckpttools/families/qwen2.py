"""Qwen 2 and 2.5, dense: biases on query, key and value, no scale in the query."""

from ckpttools.families.decoder import DECODER, KEY, QUERY, SIZES, TIED
from ckpttools.families.family import Family
from ckpttools.mapping.row import row

FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    models=("Qwen2", "Qwen2.5", "Qwen2.5-Coder", "Qwen2.5-Math"),
    rows=(
        *DECODER,
        QUERY,
        KEY,
        row(
            "decoder.layers_{layer}.self_attention.query.bias",
            "heads head_dim",
            "model.layers.{layer}.self_attn.q_proj.bias",
            "(heads head_dim)",
        ),
        row(
            "decoder.layers_{layer}.self_attention.key.bias",
            "kv_heads head_dim",
            "model.layers.{layer}.self_attn.k_proj.bias",
            "(kv_heads head_dim)",
        ),
        row(
            "decoder.layers_{layer}.self_attention.value.bias",
            "kv_heads head_dim",
            "model.layers.{layer}.self_attn.v_proj.bias",
            "(kv_heads head_dim)",
        ),
    ),
    sizes=SIZES,
    flags={"tied": TIED},
)
