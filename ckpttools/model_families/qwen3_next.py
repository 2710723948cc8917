"""Qwen3-Next: cycles of three layers with linear attention and one with full attention, all with experts."""

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import (
    DECODER_SETTINGS,
    EMBEDDINGS,
    EXPERTS_EVERYWHERE,
    FUSED,
    HEAD_DIM_SETTING,
    SIZES,
    TIED,
    UNBIASED,
)
from ckpttools.model_families.family import Family, decoder_layers

NORMS = rows("""
    input_layernorm.scale:          embed <-> input_layernorm.weight:          embed
    post_attention_layernorm.scale: embed <-> post_attention_layernorm.weight: embed
""")
EXPERTS = rows("""
    below mlp.routed_experts <-> mlp
    gate.kernel: embed expert     <-> gate.weight:                       expert embed
    wi_0:        expert embed mlp <-> experts.{expert}.gate_proj.weight: mlp embed, unless fused
    wi_1:        expert embed mlp <-> experts.{expert}.up_proj.weight:   mlp embed, unless fused
    wo:          expert mlp embed <-> experts.{expert}.down_proj.weight: embed mlp, unless fused
    wi_{part}:   expert embed mlp <-> experts.gate_up_proj:              expert (part mlp) embed, when fused
    wo:          expert mlp embed <-> experts.down_proj:                 expert embed mlp, when fused
""")
SHARED_EXPERT = rows("""
    below mlp <-> mlp
    shared_expert.wi_0.kernel: embed shared_mlp <-> shared_expert.gate_proj.weight: shared_mlp embed
    shared_expert.wi_1.kernel: embed shared_mlp <-> shared_expert.up_proj.weight:   shared_mlp embed
    shared_expert.wo.kernel:   shared_mlp embed <-> shared_expert.down_proj.weight: embed shared_mlp
    shared_expert_gate.kernel: embed one        <-> shared_expert_gate.weight:      one embed
""")
COMMON = (*NORMS, *EXPERTS, *SHARED_EXPERT)
INPUTS = rows("""
    below attention <-> linear_attn
    in_proj_qkvz.kernel: embed qkvz <-> in_proj_qkvz.weight: qkvz embed
    in_proj_ba.kernel:   embed ba   <-> in_proj_ba.weight:   ba embed
""")
LINEAR = rows("""
    below attention <-> linear_attn
    conv1d.kernel:       taps one channels <-> conv1d.weight:   channels one taps
    A_log:               value_heads       <-> A_log:           value_heads
    dt_bias:             value_heads       <-> dt_bias:         value_heads
    norm.rms_norm.scale: value_dim         <-> norm.weight:     value_dim
    out_proj.kernel:     values embed      <-> out_proj.weight: embed values
""")
# The query projection contains the query and a gate of the same size; the output projection stays flat.
FULL = rows("""
    below attention.attention <-> self_attn
    query.kernel:     embed heads query_and_gate <-> q_proj.weight: (heads query_and_gate) embed
    key.kernel:       embed kv_heads head_dim    <-> k_proj.weight: (kv_heads head_dim) embed
    value.kernel:     embed kv_heads head_dim    <-> v_proj.weight: (kv_heads head_dim) embed
    out.kernel:       (heads head_dim) embed     <-> o_proj.weight: embed (heads head_dim)
    query_norm.scale: head_dim                   <-> q_norm.weight: head_dim
    key_norm.scale:   head_dim                   <-> k_norm.weight: head_dim
""")

SETTINGS = (
    """
    num_experts:                        expert
    num_experts_per_tok:                config.num_experts_per_tok
    base_moe_mlp_dim:                   mlp
    shared_experts:                     1
    norm_topk_prob:                     true
    inhomogeneous_layer_cycle_interval: 4
    gdn_conv_kernel_dim:                taps
    gdn_key_head_dim:                   key_dim
    gdn_value_head_dim:                 value_dim
    gdn_num_key_heads:                  key_heads
    gdn_num_value_heads:                value_heads
    rope_type:                          "default"
    rope_max_timescale:                 rope.theta | 10000
    partial_rotary_factor:              rope.partial_rotary_factor | 0.25
    must layer_types.full_every_4 -- only every fourth MaxText layer uses full attention
    must config.full_attention_interval is 4
        -- only every fourth MaxText layer uses full attention
    must shared_mlp is mlp -- MaxText's shared expert has the width of the others
    must rope.type is "default" -- MaxText's block supports no other RoPE type
    """
    + EXPERTS_EVERYWHERE
    + UNBIASED
    + HEAD_DIM_SETTING
    + DECODER_SETTINGS
)

FAMILY = Family(
    name="qwen3-next",
    model_types=("qwen3_next",),
    models=("Qwen3-Next-80B-A3B",),
    rows=EMBEDDINGS,
    layers=(
        decoder_layers(
            "4*block+linear", "layers.local_layers", ("block", "linear"), (*COMMON, *INPUTS, *LINEAR)
        ),
        decoder_layers("4*block+3", "layers.global_layer", ("block",), (*COMMON, *FULL)),
        # An incomplete cycle has only layers with linear attention.
        decoder_layers("rest+#cycled", "", (), (*COMMON, *INPUTS, *LINEAR)),
    ),
    sizes={
        **SIZES,
        "layers": ("num_hidden_layers",),
        "mlp": ("moe_intermediate_size",),
        "shared_mlp": ("shared_expert_intermediate_size",),
        "expert": ("num_experts",),
        "key_heads": ("linear_num_key_heads",),
        "key_dim": ("linear_key_head_dim",),
        "value_heads": ("linear_num_value_heads",),
        "value_dim": ("linear_value_head_dim",),
        "taps": ("linear_conv_kernel_dim",),
    },
    constants={"linear": 3, "one": 1, "part": 2},
    derived={
        "block": "layers // 4",
        "rest": "layers % 4",
        "cycled": "4 * block",
        "query_and_gate": "2 * head_dim",
        "values": "value_heads * value_dim",
        "keys": "key_heads * key_dim",
        "channels": "2 * keys + values",
        "qkvz": "2 * keys + 2 * values",
        "ba": "2 * value_heads",
    },
    flags={"tied": TIED, "fused": FUSED},
    left_out=("mtp.*",),
    settings=SettingRules('decoder_block: "qwen3_next"' + SETTINGS),
)
