"""DeepSeek V4: hyper-connections, compressed attention, and first layers with token-based routing."""

from ckpttools.mapping.row import Layers, rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import DECODER_SETTINGS, TIED
from ckpttools.model_families.family import PLAIN, Family, FlagRule, Spelling

EMBEDDINGS = rows("""
    token_embedder.embedding:    vocab embed  <-> embed.weight:  vocab embed
    decoder.decoder_norm.scale:  embed        <-> norm.weight:   embed
    decoder.logits_dense.kernel: embed vocab  <-> head.weight:   vocab embed, unless tied
    decoder.hc_head.hc_fn:       wide streams <-> hc_head_fn:    streams wide
    decoder.hc_head.hc_base:     streams      <-> hc_head_base:  streams
    decoder.hc_head.hc_scale:    one          <-> hc_head_scale: one
""")
# A hyper-connection mixes the streams before a block, after it, and around it; each of these steps has a part
# of the arrays. MaxText puts a norm with a learned scale before them. In the original model, that scale is
# part of the next array.
HYPER_CONNECTIONS = rows("""
    mhc_attention.mhc_norm.scale:   wide                   <-> hc_attn_fn.norm: wide, factor
    mhc_attention.pre_alpha:        wide streams           <-> hc_attn_fn:    +streams wide
    mhc_attention.post_alpha:       wide streams           <-> hc_attn_fn:    +streams wide
    mhc_attention.res_alpha:        wide (streams targets) <-> hc_attn_fn:    +(streams targets) wide
    mhc_attention.pre_beta:         streams                <-> hc_attn_base:  +streams
    mhc_attention.post_beta:        streams                <-> hc_attn_base:  +streams
    mhc_attention.res_beta:         streams targets        <-> hc_attn_base:  +(streams targets)
    mhc_attention.pre_alpha_scale:  one                    <-> hc_attn_scale: +one
    mhc_attention.post_alpha_scale: one                    <-> hc_attn_scale: +one
    mhc_attention.res_alpha_scale:  one                    <-> hc_attn_scale: +one

    mhc_mlp.mhc_norm.scale:         wide                   <-> hc_ffn_fn.norm: wide, factor
    mhc_mlp.pre_alpha:              wide streams           <-> hc_ffn_fn:    +streams wide
    mhc_mlp.post_alpha:             wide streams           <-> hc_ffn_fn:    +streams wide
    mhc_mlp.res_alpha:              wide (streams targets) <-> hc_ffn_fn:    +(streams targets) wide
    mhc_mlp.pre_beta:               streams                <-> hc_ffn_base:  +streams
    mhc_mlp.post_beta:              streams                <-> hc_ffn_base:  +streams
    mhc_mlp.res_beta:               streams targets        <-> hc_ffn_base:  +(streams targets)
    mhc_mlp.pre_alpha_scale:        one                    <-> hc_ffn_scale: +one
    mhc_mlp.post_alpha_scale:       one                    <-> hc_ffn_scale: +one
    mhc_mlp.res_alpha_scale:        one                    <-> hc_ffn_scale: +one
""")
ATTENTION = rows("""
    pre_self_attention_layer_norm.scale:  embed <-> attn_norm.weight: embed
    post_self_attention_layer_norm.scale: embed <-> ffn_norm.weight:  embed

    below self_attention <-> attn
    q_norm.scale:    q_latent                   <-> q_norm.weight:  q_latent
    kv_norm.scale:   head_dim                   <-> kv_norm.weight: head_dim
    wq_a.kernel:     embed q_latent             <-> wq_a.weight:    q_latent embed
    wq_b.kernel:     q_latent heads head_dim    <-> wq_b.weight:    (heads head_dim) q_latent
    wkv.kernel:      embed kv_heads head_dim    <-> wkv.weight:     (kv_heads head_dim) embed
    sinks:           heads                      <-> attn_sink:      heads
    o_a_proj.kernel: o_group o_heads o_latent   <-> wo_a.weight:    (o_group o_latent) o_heads
    o_b_proj.kernel: (o_group o_latent) embed   <-> wo_b.weight:    embed (o_group o_latent)
""")
EXPERTS = rows("""
    below mlp.shared_experts <-> ffn.shared_experts
    wi_0.kernel: embed shared_mlp <-> w1.weight: shared_mlp embed
    wi_1.kernel: embed shared_mlp <-> w3.weight: shared_mlp embed
    wo.kernel:   shared_mlp embed <-> w2.weight: embed shared_mlp

    below mlp.MoeBlock_0 <-> ffn
    gate.kernel: embed expert            <-> gate.weight:                expert embed
    wi_0:        expert embed expert_mlp <-> experts.{expert}.w1.weight: expert_mlp embed
    wi_1:        expert embed expert_mlp <-> experts.{expert}.w3.weight: expert_mlp embed
    wo:          expert expert_mlp embed <-> experts.{expert}.w2.weight: embed expert_mlp
""")
# The experts of each token, and the correction bias of a router.
TABLE = rows("""
    mlp.MoeBlock_0.tid2eid: vocab chosen <-> ffn.gate.tid2eid: vocab chosen, whole int32 int64
""")
BIAS = rows("""
    mlp.MoeBlock_0.gate.bias: expert <-> ffn.gate.bias: expert
""")
# Heavily compressed attention, and compressed sparse attention with an indexer.
HEAVILY_COMPRESSED = rows("""
    below self_attention.hca_compressor <-> attn.compressor
    gate_proj.kernel: embed head_dim <-> wgate.weight: head_dim embed
    kv_proj.kernel:   embed head_dim <-> wkv.weight:   head_dim embed
    kv_norm.scale:    head_dim       <-> norm.weight:  head_dim
    position_bias:    heavy head_dim <-> ape:          heavy head_dim
""")
SPARSE = rows("""
    below self_attention.csa_compressor <-> attn.compressor
    gate_proj.kernel: embed both_dims  <-> wgate.weight: both_dims embed
    kv_proj.kernel:   embed both_dims  <-> wkv.weight:   both_dims embed
    kv_norm.scale:    head_dim         <-> norm.weight:  head_dim
    position_bias:    sparse both_dims <-> ape:          sparse both_dims

    below self_attention.csa_compressor.indexer <-> attn.indexer
    gate_proj.kernel:    embed both_ix_dims       <-> compressor.wgate.weight: both_ix_dims embed
    kv_proj.kernel:      embed both_ix_dims       <-> compressor.wkv.weight:   both_ix_dims embed
    kv_norm.scale:       ix_dim                   <-> compressor.norm.weight:  ix_dim
    position_bias:       sparse both_ix_dims      <-> compressor.ape:          sparse both_ix_dims
    q_proj.kernel:       q_latent (ix_heads ix_dim) <-> wq_b.weight:           (ix_heads ix_dim) q_latent
    weights_proj.kernel: embed ix_heads           <-> weights_proj.weight:     ix_heads embed
""")
LAYER = (*ATTENTION, *HYPER_CONNECTIONS, *EXPERTS)
# transformers 5.23 writes some names differently from the Hub, and reads both.
RESAVED = Spelling(
    {
        "layers.": "model.layers.",
        "embed.": "model.embed_tokens.",
        "norm.": "model.norm.",
        "hc_head_": "model.hc_head.hc_",
    },
    name="transformers",
    inner={".attn.kv_norm.": ".attn.norm."},
)
# MaxText's compression ratio for each attention type of a layer.
RATIOS = """
    {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""

FAMILY = Family(
    name="deepseek4",
    model_types=("deepseek_v4",),
    models=("DeepSeek-V4-Flash", "DeepSeek-V4-Pro"),
    rows=EMBEDDINGS,
    # Layers with a routing table are never stacked; the layers after them are stacked in pairs.
    layers=(
        Layers("layers.{hashed}", "decoder.layers_{hashed}", "decoder.layers_{hashed}", (), (*LAYER, *TABLE)),
        Layers(
            "layers.{start}",
            "decoder.layers_{start}",
            "decoder.layers_{start}",
            (),
            HEAVILY_COMPRESSED,
            "start_heavy",
        ),
        Layers(
            "layers.{third+#start}",
            "decoder.layers_{third+#start}",
            "decoder.layers_{third+#start}",
            (),
            SPARSE,
        ),
        Layers(
            "layers.{2*pair+#hashed}",
            "decoder.layers_{2*pair+#hashed}",
            "decoder.scanned_blocks.layers_0",
            ("pair",),
            (*LAYER, *BIAS, *HEAVILY_COMPRESSED),
        ),
        Layers(
            "layers.{2*pair+#hashed+1}",
            "decoder.layers_{2*pair+#hashed+1}",
            "decoder.scanned_blocks.layers_1",
            ("pair",),
            (*LAYER, *BIAS, *SPARSE),
        ),
        # MaxText scans only complete pairs.
        Layers(
            "layers.{rest+#paired}",
            "decoder.layers_{rest+#paired}",
            "",
            (),
            (*LAYER, *BIAS, *HEAVILY_COMPRESSED),
        ),
    ),
    sizes={
        "layers": ("num_hidden_layers",),
        # transformers writes the type of each layer, and prefers that field if both exist.
        "hash": ("mlp_layer_types.#hash_moe", "num_hash_layers", 3),
        "embed": ("hidden_size",),
        "vocab": ("vocab_size",),
        "streams": ("hc_mult",),
        "targets": ("hc_mult",),
        "heads": ("num_attention_heads",),
        "kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim",),
        "q_latent": ("q_lora_rank",),
        "o_group": ("o_groups",),
        "o_latent": ("o_lora_rank",),
        "ix_heads": ("index_n_heads",),
        "ix_dim": ("index_head_dim",),
        "expert": ("n_routed_experts",),
        "chosen": ("num_experts_per_tok",),
        "expert_mlp": ("moe_intermediate_size",),
        "shared": ("n_shared_experts",),
    },
    constants={"one": 1, "sparse": 4, "heavy": 128},
    derived={
        # A model may have fewer layers than `num_hash_layers`.
        "hashed": "min(hash, layers)",
        "start": "min(2, hashed)",
        "third": "hashed - start",
        "pair": "(layers - hashed) // 2",
        "rest": "(layers - hashed) % 2",
        "paired": "hashed + 2 * pair",
        "wide": "streams * embed",
        "o_heads": "heads * head_dim / o_group",
        "both_dims": "2 * head_dim",
        "both_ix_dims": "2 * ix_dim",
        "shared_mlp": "shared * expert_mlp",
    },
    flags={
        "tied": TIED,
        "start_heavy": FlagRule(
            ("layer_types.0", "compress_ratios.0"), (128, "heavily_compressed_attention"), default=True
        ),
    },
    # Multi-token-prediction (MTP) layers.
    left_out=("mtp.*",),
    spellings=(PLAIN, RESAVED),
    settings=SettingRules(
        """
    model_name:                   "deepseek4-284b"
    decoder_block:                "deepseek4"
    attention_type:               "compressed"
    # Flash attention needs use_tokamax_splash=true.
    attention:                    "dot_product"
    use_indexer:                  true
    indexer_n_heads:              ix_heads
    indexer_head_dim:             ix_dim
    indexer_topk:                 config.index_topk
    head_dim:                     head_dim
    qk_rope_head_dim:             config.qk_rope_head_dim | head_dim // 8
    q_lora_rank:                  q_latent
    o_lora_rank:                  o_latent
    o_groups:                     o_group
    mhc_expansion_rate:           streams
    sinkhorn_iterations:          config.hc_sinkhorn_iters | 20
    first_num_hash_layers:        hashed
    compress_ratios:              config.layer_types as RATIOS | config.compress_ratios
    sliding_window_size:          config.sliding_window | 128
    num_experts:                  expert
    num_experts_per_tok:          chosen
    base_moe_mlp_dim:             expert_mlp
    base_mlp_dim:                 expert_mlp
    shared_experts:               shared
    routed_bias:                  true
    routed_score_func:            config.scoring_func | "sqrtsoftplus"
    routed_scaling_factor:        config.routed_scaling_factor | 1.5
    norm_topk_prob:               config.norm_topk_prob | true
    mlp_activations_limit:        config.swiglu_limit | 10
    rope_type:                    "default"
    # transformers 5 nests both values, and then ignores the older fields.
    rope_max_timescale:           config.rope_parameters.main.rope_theta | config.rope_theta | 10000
    compressed_rope_max_timescale:  config.rope_parameters.compress.rope_theta | config.compress_rope_theta
                                  | 160000
    max_position_embeddings:      config.max_position_embeddings
    must rope.type is "default" -- MaxText does not apply YaRN to compressed layers
    idle rope_scaling.*, rope_parameters.compress.* -- no scaling applies, because the type must be "default"
    must config.partial_rotary_factor is 0.125, if config.qk_rope_head_dim is null
        -- MaxText is configured for an eighth of each head, as in released models
    must config.rope_parameters.main.partial_rotary_factor is 0.125, if config.qk_rope_head_dim is null
        -- MaxText is configured for an eighth of each head, as in released models
    must config.swiglu_limit is null -- MaxText clips the routed experts but not the shared one
    must config.hc_eps is 1e-06 -- MaxText hardcodes 1e-06
    must config.scoring_func in ["sqrtsoftplus", "sigmoid"]
        -- MaxText does not normalize the weights of the chosen experts
    """.replace("RATIOS", RATIOS.strip())
        + DECODER_SETTINGS
    ),
)
