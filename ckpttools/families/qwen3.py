"""Qwen 3, dense: norms on query and key, no biases, no scale in the query."""

from ckpttools.families.decoder import DECODER, KEY, QUERY, SIZES, TIED
from ckpttools.families.family import Family
from ckpttools.mapping.row import row

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    models=("Qwen3 0.6B to 32B",),
    rows=(
        *DECODER,
        QUERY,
        KEY,
        row(
            "decoder.layers_{layer}.self_attention.query_norm.scale",
            "head_dim",
            "model.layers.{layer}.self_attn.q_norm.weight",
            "head_dim",
        ),
        row(
            "decoder.layers_{layer}.self_attention.key_norm.scale",
            "head_dim",
            "model.layers.{layer}.self_attn.k_norm.weight",
            "head_dim",
        ),
    ),
    sizes=SIZES,
    flags={"tied": TIED},
)
