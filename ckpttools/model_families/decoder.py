"""The rows, sizes and flags that decoders derived from Llama share.

MaxText on the left, Hugging Face on the right. Every row was compared bit for bit with the output of
MaxText's own converter (commit e591f30); see tests/model_families/test_golden.py.
"""

from ckpttools.mapping.row import rows
from ckpttools.model_families.family import FlagRule, decoder_layers

EMBEDDINGS = rows("""
    token_embedder.embedding:    vocab embed <-> model.embed_tokens.weight: vocab embed
    decoder.decoder_norm.scale:  embed       <-> model.norm.weight:         embed
    decoder.logits_dense.kernel: embed vocab <-> lm_head.weight:            vocab embed, unless tied
""")

NORMS = rows("""
    pre_self_attention_layer_norm.scale:  embed <-> input_layernorm.weight:          embed
    post_self_attention_layer_norm.scale: embed <-> post_attention_layernorm.weight: embed
""")

MLP = rows("""
    mlp.wi_0.kernel: embed mlp <-> mlp.gate_proj.weight: mlp embed
    mlp.wi_1.kernel: embed mlp <-> mlp.up_proj.weight:   mlp embed
    mlp.wo.kernel:   mlp embed <-> mlp.down_proj.weight: embed mlp
""")

ATTENTION = rows("""
    below self_attention <-> self_attn
    query.kernel: embed heads head_dim    <-> q_proj.weight: (heads head_dim) embed
    key.kernel:   embed kv_heads head_dim <-> k_proj.weight: (kv_heads head_dim) embed
    value.kernel: embed kv_heads head_dim <-> v_proj.weight: (kv_heads head_dim) embed
    out.kernel:   heads head_dim embed    <-> o_proj.weight: embed (heads head_dim)
""")
HEAD_NORMS = rows("""
    self_attention.query_norm.scale: head_dim <-> self_attn.q_norm.weight: head_dim
    self_attention.key_norm.scale:   head_dim <-> self_attn.k_norm.weight: head_dim
""")

# In these families, MaxText's attention does not scale; the query weights include 1/sqrt(head_dim).
SCALED_ATTENTION = (
    *rows("""
        self_attention.query.kernel: embed heads head_dim
            <-> self_attn.q_proj.weight: (heads head_dim) embed, scale head_dim -0.5
    """),
    *ATTENTION[1:],
)

# RoPE has two layouts. Hugging Face rotates (x[i], x[i + head_dim/2]). MaxText's `llama3.1` rope rotates
# neighbors, so it stores head_dim as (pair half) rather than (half pair). Its default rope keeps the halves.
SCALED_ROTARY_ATTENTION = rows("""
    below self_attention <-> self_attn
    query.kernel: embed heads head_dim
        <-> q_proj.weight: (heads head_dim) embed, scale head_dim -0.5, unless interleaved
    query.kernel: embed heads (pair half)
        <-> q_proj.weight: (heads half pair) embed, scale head_dim -0.5, when interleaved
    key.kernel:   embed kv_heads head_dim    <-> k_proj.weight: (kv_heads head_dim) embed, unless interleaved
    key.kernel:   embed kv_heads (pair half) <-> k_proj.weight: (kv_heads half pair) embed, when interleaved
    value.kernel: embed kv_heads head_dim    <-> v_proj.weight: (kv_heads head_dim) embed
    out.kernel:   heads head_dim embed       <-> o_proj.weight: embed (heads head_dim)
""")

SIZES = {
    "layer": ("num_hidden_layers",),
    "embed": ("hidden_size",),
    "vocab": ("vocab_size",),
    "mlp": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim",),
}
# The default if the configuration does not state a value.
HEADS = {"head_dim": "embed // heads"}

# MaxText settings that all these decoders share.
DECODER_SETTINGS = """
    base_emb_dim:                embed
    base_num_query_heads:        heads
    base_num_kv_heads:           kv_heads | heads
    base_mlp_dim:                mlp
    base_num_decoder_layers:     layer | layers
    vocab_size:                  vocab
    mlp_activations:             config.hidden_act as {"silu": ["silu", "linear"]} | ["silu", "linear"]
    normalization_layer_epsilon: config.rms_norm_eps
    logits_via_embedding:        flag.tied
    normalize_embedding_logits:  false, if flag.tied
"""
HEAD_DIM_SETTING = """
    head_dim: head_dim | embed // heads
"""
ROPE_SETTINGS = """
    rope_max_timescale:                 rope.theta | 10000
    rope_type:                          "llama3.1", if rope.type is "llama3"
    rope_type:                          "yarn", if rope.type is "yarn"
    rope_type:                          "default"
    rope_linear_scaling_factor:         rope.factor, if rope.type is "linear"
    rope_factor:                        rope.factor, if rope.type is "yarn"
    max_position_embeddings:            config.max_position_embeddings, if rope.type is "yarn"
    original_max_position_embeddings:   rope.original_max_position_embeddings, if rope.type is "yarn"
    beta_fast:                          rope.beta_fast | 32, if rope.type is "yarn"
    beta_slow:                          rope.beta_slow | 1, if rope.type is "yarn"
    rope_truncate:                      rope.truncate | true, if rope.type is "yarn"
    rope_interleave:                    false, if rope.type is "yarn"
    rope_attention_scaling:             true, if rope.type is "yarn"
    must rope.type in ["default", "linear", "llama3", "yarn"] -- MaxText supports no other RoPE type
    must rope.partial_rotary_factor is 1 -- MaxText rotates whole heads
    must rope.usual_attention_factor in [null, true], if rope.type is "yarn"
        -- MaxText multiplies by 0.1 ln(factor) + 1
"""
UNBIASED = """
    must config.attention_bias is false -- MaxText's block has no attention biases
"""
EVERY_LAYER = """
    must layer_types.full_every_1 -- every MaxText layer uses full attention
"""
NO_WINDOW = (
    """
    must config.sliding_window is null -- MaxText's block has no sliding window: longer texts differ
"""
    + EVERY_LAYER
)
NO_SWITCHED_WINDOW = (
    """
    must config.use_sliding_window is false -- MaxText's block has no sliding window
    idle sliding_window, max_window_layers -- no layer has a sliding window
"""
    + EVERY_LAYER
)
EXPERTS_EVERYWHERE = """
    must config.norm_topk_prob is true -- MaxText always normalizes the weights of the chosen experts
    must config.decoder_sparse_step is 1 -- MaxText has experts in every layer
    must config.mlp_only_layers is [] -- MaxText has experts in every layer
    idle intermediate_size -- every layer has experts
"""
# MaxText's Llama 3.1 rotary embedding has fixed parameters.
LLAMA3_LIMITS = """
    must rope.factor is 8, if rope.type is "llama3" -- MaxText hardcodes 8
    must rope.low_freq_factor is 1, if rope.type is "llama3" -- MaxText hardcodes 1
    must rope.high_freq_factor is 4, if rope.type is "llama3" -- MaxText hardcodes 4
    must rope.original_max_position_embeddings is 8192, if rope.type is "llama3"
        -- MaxText hardcodes 8192
"""
LLAMA_SETTINGS = DECODER_SETTINGS + HEAD_DIM_SETTING + ROPE_SETTINGS + LLAMA3_LIMITS
# Routing takes the softmax of the chosen experts, which equals the renormalized softmax of all experts.
EXPERT_SETTINGS = """
    num_experts:         expert
    num_experts_per_tok: config.num_experts_per_tok
    base_moe_mlp_dim:    mlp
"""

TIED = FlagRule(
    ("tie_word_embeddings", "text_config.tie_word_embeddings"),
    remedy="{tied} keep, drop or materialize overrides it: use drop if the stored head duplicates the "
    "embedding, as FSDP and DeepSpeed save it",
)
# Published files have one array per expert. transformers 5 fuses all experts of a layer into two arrays, also
# in saved state dicts.
FUSED = FlagRule((), by_arrays=True)
# The field is `rope_scaling` in transformers 4. In transformers 5 it is `rope_parameters`, but the older
# field is preferred if both exist. `type` is the older name of `rope_type`.
LLAMA3_ROPE = FlagRule(
    (
        "rope_scaling.rope_type",
        "rope_scaling.type",
        "rope_parameters.rope_type",
        "rope_parameters.type",
    ),
    ("llama3",),
)
# A flag that only the user sets.
NEVER = FlagRule(())
# Buffers that transformers before 4.32 saved with the weights; they are recomputed from the configuration.
ROTARY_BUFFERS = ("model.layers.*.self_attn.rotary_emb.inv_freq",)

LLAMA_LAYERS = decoder_layers("layer", "layers", ("layer",), (*NORMS, *MLP, *SCALED_ROTARY_ATTENTION))
