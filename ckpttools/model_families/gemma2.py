"""Gemma 2: one MaxText layer is a local layer and a global layer in Hugging Face."""

from ckpttools.mapping.row import Layers, row, rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import DECODER_SETTINGS
from ckpttools.model_families.family import Family
from ckpttools.model_families.gemma import FINAL_NORM, HEAD, SETTINGS, TIED_BY_DEFAULT

EMBEDDING = row(
    "token_embedder.embedding: vocab embed <-> model.embed_tokens.weight: vocab embed, scale embed 0.5"
)

# MaxText distinguishes the two layers by the names of their parts, Hugging Face by the layer index.
ROWS = rows("""
    below self_attention_{kind:local,global} <-> self_attn, above kind
    query.kernel: embed heads head_dim    <-> q_proj.weight: (heads head_dim) embed, scale head_dim -0.5
    key.kernel:   embed kv_heads head_dim <-> k_proj.weight: (kv_heads head_dim) embed
    value.kernel: embed kv_heads head_dim <-> v_proj.weight: (kv_heads head_dim) embed
    out.kernel:   heads head_dim embed    <-> o_proj.weight: embed (heads head_dim)

    below mlp_{kind:local,global} <-> mlp, above kind
    wi_0.kernel: embed mlp <-> gate_proj.weight: mlp embed
    wi_1.kernel: embed mlp <-> up_proj.weight:   mlp embed
    wo.kernel:   mlp embed <-> down_proj.weight: embed mlp

    above kind
    pre_self_attention_norm_{kind:local,global}.scale:  embed <-> input_layernorm.weight: embed, shift 1
    post_self_attention_norm_{kind:local,global}.scale: embed
        <-> post_attention_layernorm.weight: embed, shift 1
    pre_ffw_norm_{kind:local,global}.scale:  embed <-> pre_feedforward_layernorm.weight:  embed, shift 1
    post_ffw_norm_{kind:local,global}.scale: embed <-> post_feedforward_layernorm.weight: embed, shift 1
""")

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
            ROWS,
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
    settings=SettingRules(
        """
    decoder_block:           "gemma2"
    base_num_decoder_layers: pair
    attn_logits_soft_cap:    config.attn_logit_softcapping | 0
    must config.query_pre_attn_scalar is head_dim -- MaxText divides queries by the square root of head_dim
    must layer_types.full_every_2 -- only every second MaxText layer uses full attention
    must rope.type is "default" -- MaxText's block supports no other RoPE type
    """
        + SETTINGS
        + DECODER_SETTINGS
    ),
)
