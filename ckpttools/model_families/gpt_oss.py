"""gpt-oss: alternating local and global layers, experts with biases, interleaved gate and up columns."""

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import EMBEDDINGS, EXPERT_SETTINGS, LLAMA_SETTINGS, NORMS, SIZES, TIED
from ckpttools.model_families.family import Family, decoder_layers

ROWS = rows("""
    below GptOssAttention <-> self_attn
    query.kernel: embed heads head_dim    <-> q_proj.weight: (heads head_dim) embed
    key.kernel:   embed kv_heads head_dim <-> k_proj.weight: (kv_heads head_dim) embed
    value.kernel: embed kv_heads head_dim <-> v_proj.weight: (kv_heads head_dim) embed
    out.kernel:   heads head_dim embed    <-> o_proj.weight: embed (heads head_dim)
    query.bias:   heads head_dim          <-> q_proj.bias:   (heads head_dim)
    key.bias:     kv_heads head_dim       <-> k_proj.bias:   (kv_heads head_dim)
    value.bias:   kv_heads head_dim       <-> v_proj.bias:   (kv_heads head_dim)
    out.bias:     embed                   <-> o_proj.bias:   embed
    sinks:        heads                   <-> sinks:         heads

    below GptOssMlp <-> mlp
    gate.kernel:    embed expert     <-> router.weight:             expert embed
    gate.bias:      expert           <-> router.bias:               expert
    wi_{part}:      expert embed mlp <-> experts.gate_up_proj:      expert embed (mlp part)
    wi_{part}_bias: expert mlp       <-> experts.gate_up_proj_bias: expert (mlp part)
    wo:             expert mlp embed <-> experts.down_proj:         expert mlp embed
    wo_bias:        expert embed     <-> experts.down_proj_bias:    expert embed
""")

FAMILY = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    models=("gpt-oss-20b", "gpt-oss-120b"),
    rows=EMBEDDINGS,
    layers=(
        decoder_layers("2*block+position", "layers.layers_{position}", ("block",), (*NORMS, *ROWS)),
        decoder_layers("rest+#cycled", "", (), (*NORMS, *ROWS)),
    ),
    sizes={**SIZES, "layers": ("num_hidden_layers",), "expert": ("num_local_experts",)},
    constants={"position": 2, "part": 2},
    derived={"block": "layers // 2", "rest": "layers % 2", "cycled": "2 * block"},
    flags={"tied": TIED},
    settings=SettingRules(
        """
    decoder_block:                      "gpt_oss"
    attention_bias:                     true
    attention_sink:                     true
    mlp_bias:                           true
    routed_bias:                        true
    mlp_activations:                    ["sigmoid", "linear"]
    mlp_activations_limit:              config.swiglu_limit | 7
    sliding_window_size:                config.sliding_window
    inhomogeneous_layer_cycle_interval: position
    must layer_types.full_every_2 -- only every second MaxText layer uses full attention
    must config.attention_bias is true -- MaxText's block has attention biases
    idle initial_context_length -- the rotary embedding has it as original_max_position_embeddings
    idle experts_per_token -- num_experts_per_tok states it
    must config.swiglu_alpha is 1.702 -- MaxText hardcodes 1.702
    """
        + EXPERT_SETTINGS
        + LLAMA_SETTINGS
    ),
)
