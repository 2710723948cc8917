"""OLMo 2 and 3: norms after attention and MLP, cycles of four layers."""

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import EMBEDDINGS, LLAMA_SETTINGS, MLP, SIZES, TIED, UNBIASED
from ckpttools.model_families.family import Family, decoder_layers

ATTENTION = rows("""
    below attention <-> self_attn
    query.kernel: embed heads head_dim    <-> q_proj.weight: (heads head_dim) embed
    key.kernel:   embed kv_heads head_dim <-> k_proj.weight: (kv_heads head_dim) embed
    value.kernel: embed kv_heads head_dim <-> v_proj.weight: (kv_heads head_dim) embed
    out.kernel:   heads head_dim embed    <-> o_proj.weight: embed (heads head_dim)
    # One norm covers all heads.
    query_norm.scale: (heads head_dim)    <-> q_norm.weight: (heads head_dim)
    key_norm.scale:   (kv_heads head_dim) <-> k_norm.weight: (kv_heads head_dim)
""")
NORMS = rows("""
    post_self_attention_layer_norm.scale: embed <-> post_attention_layernorm.weight:   embed
    post_mlp_layer_norm.scale:            embed <-> post_feedforward_layernorm.weight: embed
""")

FAMILY = Family(
    name="olmo3",
    model_types=("olmo3", "olmo2"),
    models=("OLMo 3 7B", "OLMo 3 32B", "OLMo 2 (as MaxText's olmo3 block)"),
    rows=EMBEDDINGS,
    layers=(
        decoder_layers(
            "4*block+position", "layers.layers_{position}", ("block",), (*ATTENTION, *NORMS, *MLP)
        ),
        decoder_layers("rest+#cycled", "", (), (*ATTENTION, *NORMS, *MLP)),
    ),
    sizes={**SIZES, "layers": ("num_hidden_layers",)},
    constants={"position": 4},
    derived={
        "block": "layers // 4",
        "rest": "layers % 4",
        "cycled": "4 * block",
        "head_dim": "embed / heads",
    },
    flags={"tied": TIED},
    settings=SettingRules(
        """
    model_name:                         "olmo3-7b"
    decoder_block:                      "olmo3"
    use_qk_norm:                        true
    sliding_window_size:                config.sliding_window | config.max_position_embeddings
    inhomogeneous_layer_cycle_interval: position
    normalize_embedding_logits:         false
    # MaxText has one rotary embedding for all layers; three of four layers have the default one.
    rope_type: "default", if config.model_type is "olmo3" and rope.local_type is "default"
    must layer_types.full_every_4 -- only every fourth MaxText layer uses full attention
    """
        + LLAMA_SETTINGS
        + UNBIASED
    ),
)
