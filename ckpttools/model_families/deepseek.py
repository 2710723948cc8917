"""DeepSeek V2, V3 and V3.2, and Kimi K2: latent attention; dense layers first, then layers with experts."""

from ckpttools.mapping.row import Layers, rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import DECODER_SETTINGS, EMBEDDINGS, FUSED, MLP, NORMS, TIED
from ckpttools.model_families.family import Family, FlagRule

# `query` is the part of a head that is multiplied with keys, with and without position. `kv` is its key and
# value parts from the latent vector. MaxText keeps the columns of both.
ATTENTION = rows("""
    below self_attention <-> self_attn
    kv_norm.scale: kv_latent              <-> kv_a_layernorm.weight:     kv_latent
    wkv_a.kernel:  embed kv_down          <-> kv_a_proj_with_mqa.weight: kv_down embed
    wkv_b.kernel:  kv_latent heads kv     <-> kv_b_proj.weight:          (heads kv) kv_latent
    out.kernel:    heads v_head_dim embed <-> o_proj.weight:             embed (heads v_head_dim)

    below self_attention <-> self_attn, unless query_latent
    query.kernel:  embed heads query      <-> q_proj.weight:             (heads query) embed

    below self_attention <-> self_attn, when query_latent
    q_norm.scale:  q_latent               <-> q_a_layernorm.weight:      q_latent
    wq_a.kernel:   embed q_latent         <-> q_a_proj.weight:           q_latent embed
    wq_b.kernel:   q_latent heads query   <-> q_b_proj.weight:           (heads query) q_latent
""")
# V3.2 selects the tokens that each token attends to.
INDEXER = rows("""
    below self_attention.indexer <-> self_attn.indexer, when indexer
    wq_b.kernel:         q_latent ix_heads ix_dim <-> wq_b.weight:         (ix_heads ix_dim) q_latent
    wk.kernel:           embed ix_dim             <-> wk.weight:           ix_dim embed
    weights_proj.kernel: embed ix_heads           <-> weights_proj.weight: ix_heads embed
    k_norm.scale:        ix_dim                   <-> k_norm.weight:       ix_dim
    k_norm.bias:         ix_dim                   <-> k_norm.bias:         ix_dim
""")
EXPERTS = rows("""
    below DeepSeekMoeBlock_0.shared_experts <-> mlp.shared_experts
    wi_0.kernel: embed shared_mlp        <-> gate_proj.weight:             shared_mlp embed
    wi_1.kernel: embed shared_mlp        <-> up_proj.weight:               shared_mlp embed
    wo.kernel:   shared_mlp embed        <-> down_proj.weight:             embed shared_mlp

    below DeepSeekMoeBlock_0.MoeBlock_0 <-> mlp
    gate.kernel: embed expert            <-> gate.weight:                  expert embed
    gate.bias:   expert                  <-> gate.e_score_correction_bias: expert, when score_correction

    below DeepSeekMoeBlock_0.MoeBlock_0 <-> mlp, unless fused
    wi_0:        expert embed expert_mlp <-> experts.{expert}.gate_proj.weight: expert_mlp embed
    wi_1:        expert embed expert_mlp <-> experts.{expert}.up_proj.weight:   expert_mlp embed
    wo:          expert expert_mlp embed <-> experts.{expert}.down_proj.weight: embed expert_mlp

    below DeepSeekMoeBlock_0.MoeBlock_0 <-> mlp, when fused
    wi_{part}:   expert embed expert_mlp <-> experts.gate_up_proj: expert (part expert_mlp) embed
    wo:          expert expert_mlp embed <-> experts.down_proj:    expert embed expert_mlp
""")

# The expert selection methods with a learned bias, and the model types that use such a method by default.
CORRECTED = ("noaux_tc", "deepseek_v3", "deepseek_v32", "kimi_k2")

FAMILY = Family(
    name="deepseek",
    model_types=("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"),
    models=("DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-V3", "DeepSeek-R1", "DeepSeek-V3.2", "Kimi-K2"),
    rows=EMBEDDINGS,
    layers=(
        Layers(
            "model.layers.{dense}",
            "decoder.dense_layers_{dense}",
            "decoder.dense_layers",
            ("dense",),
            (*NORMS, *ATTENTION, *INDEXER, *MLP),
        ),
        Layers(
            "model.layers.{moe+#dense}",
            "decoder.moe_layers_{moe}",
            "decoder.moe_layers",
            ("moe",),
            (*NORMS, *ATTENTION, *INDEXER, *EXPERTS),
        ),
    ),
    sizes={
        "layers": ("num_hidden_layers",),
        "dense": ("first_k_dense_replace", 0),
        "prediction": ("num_nextn_predict_layers", 0),
        "embed": ("hidden_size",),
        "vocab": ("vocab_size",),
        "mlp": ("intermediate_size",),
        "heads": ("num_attention_heads",),
        "kv_latent": ("kv_lora_rank",),
        "q_latent": ("q_lora_rank",),
        "v_head_dim": ("v_head_dim",),
        "ix_heads": ("index_n_heads",),
        "ix_dim": ("index_head_dim",),
        "nope": ("qk_nope_head_dim",),
        "rope": ("qk_rope_head_dim",),
        "expert": ("n_routed_experts",),
        "expert_mlp": ("moe_intermediate_size",),
        "shared": ("n_shared_experts",),
    },
    constants={"part": 2},
    derived={
        "moe": "layers - dense",
        "query": "nope + rope",
        "kv": "nope + v_head_dim",
        "kv_down": "kv_latent + rope",
        "shared_mlp": "shared * expert_mlp",
    },
    flags={
        "tied": TIED,
        "fused": FUSED,
        "query_latent": FlagRule(("q_lora_rank",)),
        "indexer": FlagRule(("index_n_heads",)),
        "score_correction": FlagRule(("topk_method", "model_type"), CORRECTED),
    },
    # Layers after the last one are multi-token-prediction (MTP) layers.
    left_out=("model.layers.{prediction+#layers}.*",),
    settings=SettingRules(
        """
    model_name:                       "deepseek3.2-671b", if flag.indexer
    model_name:                       "kimi-k2-1t", if config.model_type is "kimi_k2"
    model_name:                       "deepseek3-671b", if config.model_type is "deepseek_v3"
    use_indexer:                      true, if flag.indexer
    # Flash attention needs use_tokamax_splash=true.
    attention:                        "dot_product", if flag.indexer
    indexer_n_heads:                  config.index_n_heads, if flag.indexer
    indexer_head_dim:                 config.index_head_dim, if flag.indexer
    indexer_topk:                     config.index_topk, if flag.indexer
    decoder_block:                    "deepseek"
    attention_type:                   "mla"
    q_lora_rank:                      q_latent | 0
    kv_lora_rank:                     kv_latent
    qk_nope_head_dim:                 nope
    qk_rope_head_dim:                 rope
    v_head_dim:                       v_head_dim
    first_num_dense_layers:           dense
    num_experts:                      expert
    num_experts_per_tok:              config.num_experts_per_tok
    base_moe_mlp_dim:                 expert_mlp
    # Without dense layers, MaxText requires both widths to be equal.
    base_mlp_dim:                     expert_mlp, if dense is 0
    shared_experts:                   shared
    routed_scaling_factor:            config.routed_scaling_factor | 1
    routed_bias:                      flag.score_correction
    routed_score_func:                "sigmoid", if flag.score_correction
    routed_score_func:                "softmax"
    n_routing_groups:                 config.n_group, if config.n_group not in [null, 1]
    topk_routing_group:               config.topk_group, if config.n_group not in [null, 1]
    # Without scaling, use YaRN with a factor of 1, because only YaRN rotates neighbors.
    rope_type:                        "yarn"
    rope_max_timescale:               rope.theta | 10000
    rope_factor:                      rope.factor, if rope.type is "yarn"
    rope_factor:                      1
    max_position_embeddings:          config.max_position_embeddings
    original_max_position_embeddings: rope.original_max_position_embeddings | config.max_position_embeddings
    beta_fast:                        rope.beta_fast | 32
    beta_slow:                        rope.beta_slow | 1
    mscale:                           rope.mscale_all_dim | 1
    rope_interleave:                  config.rope_interleave | true
    rope_truncate:                    rope.truncate | true
    rope_attention_scaling:           false
    must rope.type in ["default", "yarn"] -- MaxText's block supports no other RoPE type
    must rope.mscale is rope.mscale_all_dim, if rope.type is "yarn" -- MaxText scales only the scores
    must rope.attention_factor in [null, 1], if rope.type is "yarn" -- MaxText scales only the scores
    must config.norm_topk_prob is flag.score_correction -- MaxText derives it from the scoring function
    must config.topk_group is 1, if config.n_group in [null, 1] -- MaxText chooses from all experts
    must config.scoring_func is "sigmoid", if flag.score_correction
        -- MaxText uses the sigmoid if scores are corrected, as transformers does
    must config.scoring_func is "softmax", if flag.score_correction is false
        -- MaxText uses the softmax if scores are not corrected
    must config.moe_layer_freq is 1 -- MaxText has experts in every layer after the first dense ones
    must config.attention_bias is false -- MaxText's block has no attention biases
    must config.mlp_bias is false -- MaxText's block has no MLP biases
    idle head_dim, qk_head_dim -- latent attention has its own head sizes
    idle layer_types -- all layers of this model type have the same attention
    note if flag.indexer -- in further training, MaxText trains only the indexer, with a loss of 0, unless
        -- indexer_sparse_training=true is set as well
    must config.num_key_value_heads is heads -- MaxText's latent attention has separate keys for each head
    must flag.indexer, if config.model_type is "deepseek_v32" -- DeepSeek V3.2 has an indexer
    must config.model_type is "deepseek_v32", if flag.indexer -- MaxText has an indexer only in V3.2
    must config.model_type is not "deepseek_v2", if flag.score_correction
        -- MaxText corrects scores as V3 does
    must config.topk_method is "noaux_tc", if config.n_group not in [null, 1] -- MaxText has only V3's groups
    """
        + DECODER_SETTINGS
    ),
)
