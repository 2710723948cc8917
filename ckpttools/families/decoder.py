"""The rows, sizes and flags that the dense decoders of the Llama line share.

MaxText on the left, Hugging Face on the right. Every row was compared with what MaxText's own converter
writes (commit e591f30), bit by bit: tests/test_golden.py.
"""

from ckpttools.families.family import FlagRule
from ckpttools.mapping.row import row
from ckpttools.mapping.values import Scale

EMBEDDINGS = (
    row("token_embedder.embedding", "vocab embed", "model.embed_tokens.weight", "vocab embed"),
    row("decoder.decoder_norm.scale", "embed", "model.norm.weight", "embed"),
    row("decoder.logits_dense.kernel", "embed vocab", "lm_head.weight", "vocab embed", unless="tied"),
)

NORMS = (
    row(
        "decoder.layers_{layer}.pre_self_attention_layer_norm.scale",
        "embed",
        "model.layers.{layer}.input_layernorm.weight",
        "embed",
    ),
    row(
        "decoder.layers_{layer}.post_self_attention_layer_norm.scale",
        "embed",
        "model.layers.{layer}.post_attention_layernorm.weight",
        "embed",
    ),
)

MLP = (
    row(
        "decoder.layers_{layer}.mlp.wi_0.kernel",
        "embed mlp",
        "model.layers.{layer}.mlp.gate_proj.weight",
        "mlp embed",
    ),
    row(
        "decoder.layers_{layer}.mlp.wi_1.kernel",
        "embed mlp",
        "model.layers.{layer}.mlp.up_proj.weight",
        "mlp embed",
    ),
    row(
        "decoder.layers_{layer}.mlp.wo.kernel",
        "mlp embed",
        "model.layers.{layer}.mlp.down_proj.weight",
        "embed mlp",
    ),
)

VALUE_AND_OUT = (
    row(
        "decoder.layers_{layer}.self_attention.value.kernel",
        "embed kv_heads head_dim",
        "model.layers.{layer}.self_attn.v_proj.weight",
        "(kv_heads head_dim) embed",
    ),
    row(
        "decoder.layers_{layer}.self_attention.out.kernel",
        "heads head_dim embed",
        "model.layers.{layer}.self_attn.o_proj.weight",
        "embed (heads head_dim)",
    ),
)

QUERY = row(
    "decoder.layers_{layer}.self_attention.query.kernel",
    "embed heads head_dim",
    "model.layers.{layer}.self_attn.q_proj.weight",
    "(heads head_dim) embed",
)
KEY = row(
    "decoder.layers_{layer}.self_attention.key.kernel",
    "embed kv_heads head_dim",
    "model.layers.{layer}.self_attn.k_proj.weight",
    "(kv_heads head_dim) embed",
)

# MaxText's models of these families do not scale in attention: 1/sqrt(head_dim) is in the query's weights.
# RoPE has two layouts. Hugging Face rotates (x[i], x[i + head_dim/2]); MaxText's `llama3.1` rope rotates
# neighbours, so there head_dim is stored as (pair half), not (half pair). Its default rope keeps halves.
SCALED_ROTARY = (
    row(
        "decoder.layers_{layer}.self_attention.query.kernel",
        "embed heads head_dim",
        "model.layers.{layer}.self_attn.q_proj.weight",
        "(heads head_dim) embed",
        op=Scale("head_dim", -0.5),
        unless="interleaved",
    ),
    row(
        "decoder.layers_{layer}.self_attention.query.kernel",
        "embed heads (pair half)",
        "model.layers.{layer}.self_attn.q_proj.weight",
        "(heads half pair) embed",
        op=Scale("head_dim", -0.5),
        when="interleaved",
    ),
    row(
        "decoder.layers_{layer}.self_attention.key.kernel",
        "embed kv_heads head_dim",
        "model.layers.{layer}.self_attn.k_proj.weight",
        "(kv_heads head_dim) embed",
        unless="interleaved",
    ),
    row(
        "decoder.layers_{layer}.self_attention.key.kernel",
        "embed kv_heads (pair half)",
        "model.layers.{layer}.self_attn.k_proj.weight",
        "(kv_heads half pair) embed",
        when="interleaved",
    ),
)

DECODER = (*EMBEDDINGS, *NORMS, *MLP, *VALUE_AND_OUT)

SIZES = {
    "layer": ("num_hidden_layers",),
    "embed": ("hidden_size",),
    "vocab": ("vocab_size",),
    "mlp": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim",),
}

TIED = FlagRule(("tie_word_embeddings",), (True,))
# `rope_scaling` until transformers 4, `rope_parameters` from 5 on; `type` is the older name of `rope_type`.
LLAMA3_ROPE = FlagRule(
    (
        "rope_parameters.rope_type",
        "rope_scaling.rope_type",
        "rope_parameters.type",
        "rope_scaling.type",
    ),
    ("llama3",),
)
# A flag that no configuration sets, only the user.
NEVER = FlagRule((), ())
# Buffers that transformers before 4.32 saved with the weights; recomputed from the configuration.
ROTARY_BUFFERS = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
