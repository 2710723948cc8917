"""Gemma 2: a local and a global layer of Hugging Face's are one of MaxText's."""

from ckpttools.families.family import Family
from ckpttools.families.gemma import FINAL_NORM, HEAD, PLUS_ONE, TIED_BY_DEFAULT
from ckpttools.mapping.layers import Layers
from ckpttools.mapping.row import row
from ckpttools.mapping.values import Scale

EMBEDDING = row(
    "token_embedder.embedding",
    "vocab embed",
    "model.embed_tokens.weight",
    "vocab embed",
    op=Scale("embed", 0.5),
)

# Which of the two layers it is stands in MaxText's names of its parts, in Hugging Face's number of the layer.
ATTENTION = (
    row(
        "self_attention_{kind:local,global}.query.kernel",
        "embed heads head_dim",
        "self_attn.q_proj.weight",
        "(heads head_dim) embed",
        op=Scale("head_dim", -0.5),
        above="kind",
    ),
    row(
        "self_attention_{kind:local,global}.key.kernel",
        "embed kv_heads head_dim",
        "self_attn.k_proj.weight",
        "(kv_heads head_dim) embed",
        above="kind",
    ),
    row(
        "self_attention_{kind:local,global}.value.kernel",
        "embed kv_heads head_dim",
        "self_attn.v_proj.weight",
        "(kv_heads head_dim) embed",
        above="kind",
    ),
    row(
        "self_attention_{kind:local,global}.out.kernel",
        "heads head_dim embed",
        "self_attn.o_proj.weight",
        "embed (heads head_dim)",
        above="kind",
    ),
)
MLP = (
    row(
        "mlp_{kind:local,global}.wi_0.kernel", "embed mlp", "mlp.gate_proj.weight", "mlp embed", above="kind"
    ),
    row("mlp_{kind:local,global}.wi_1.kernel", "embed mlp", "mlp.up_proj.weight", "mlp embed", above="kind"),
    row("mlp_{kind:local,global}.wo.kernel", "mlp embed", "mlp.down_proj.weight", "embed mlp", above="kind"),
)
NORMS = (
    row(
        "pre_self_attention_norm_{kind:local,global}.scale",
        "embed",
        "input_layernorm.weight",
        "embed",
        op=PLUS_ONE,
        above="kind",
    ),
    row(
        "post_self_attention_norm_{kind:local,global}.scale",
        "embed",
        "post_attention_layernorm.weight",
        "embed",
        op=PLUS_ONE,
        above="kind",
    ),
    row(
        "pre_ffw_norm_{kind:local,global}.scale",
        "embed",
        "pre_feedforward_layernorm.weight",
        "embed",
        op=PLUS_ONE,
        above="kind",
    ),
    row(
        "post_ffw_norm_{kind:local,global}.scale",
        "embed",
        "post_feedforward_layernorm.weight",
        "embed",
        op=PLUS_ONE,
        above="kind",
    ),
)

FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
    models=("Gemma 2 2B", "Gemma 2 9B", "Gemma 2 27B"),
    rows=(EMBEDDING, FINAL_NORM, HEAD),
    layers=(
        Layers(
            "model.layers.{2*pair+kind}",
            "decoder.layers_{pair}",
            "decoder.layers",
            ("pair",),
            (*ATTENTION, *MLP, *NORMS),
        ),
    ),
    sizes={
        "layers": ("num_hidden_layers",),
        "embed": ("hidden_size",),
        "vocab": ("vocab_size",),
        "mlp": ("intermediate_size",),
        "heads": ("num_attention_heads",),
        "kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim",),
    },
    derived={"pair": "layers / 2"},
    flags={"tied": TIED_BY_DEFAULT},
    maxtext_vocab={256000: 256128},
)
