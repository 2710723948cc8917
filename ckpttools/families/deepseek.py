"""DeepSeek V2 and V3: latent attention, dense layers first, then layers with routed and shared experts."""

from ckpttools.families.decoder import EMBEDDINGS, MLP, NORMS, TIED
from ckpttools.families.family import Family, FlagRule
from ckpttools.mapping.layers import Layers
from ckpttools.mapping.row import row

# `query` is the part of a head that meets keys (with and without position), `kv` its key and value parts
# that come out of the latent vector; MaxText leaves the columns of both as they are.
ATTENTION = (
    row("self_attention.kv_norm.scale", "kv_latent", "self_attn.kv_a_layernorm.weight", "kv_latent"),
    row(
        "self_attention.wkv_a.kernel",
        "embed kv_down",
        "self_attn.kv_a_proj_with_mqa.weight",
        "kv_down embed",
    ),
    row(
        "self_attention.wkv_b.kernel",
        "kv_latent heads kv",
        "self_attn.kv_b_proj.weight",
        "(heads kv) kv_latent",
    ),
    row(
        "self_attention.out.kernel",
        "heads v_head_dim embed",
        "self_attn.o_proj.weight",
        "embed (heads v_head_dim)",
    ),
    row(
        "self_attention.query.kernel",
        "embed heads query",
        "self_attn.q_proj.weight",
        "(heads query) embed",
        unless="query_latent",
    ),
    row(
        "self_attention.q_norm.scale",
        "q_latent",
        "self_attn.q_a_layernorm.weight",
        "q_latent",
        when="query_latent",
    ),
    row(
        "self_attention.wq_a.kernel",
        "embed q_latent",
        "self_attn.q_a_proj.weight",
        "q_latent embed",
        when="query_latent",
    ),
    row(
        "self_attention.wq_b.kernel",
        "q_latent heads query",
        "self_attn.q_b_proj.weight",
        "(heads query) q_latent",
        when="query_latent",
    ),
)
EXPERTS = (
    row(
        "DeepSeekMoeBlock_0.shared_experts.wi_0.kernel",
        "embed shared_mlp",
        "mlp.shared_experts.gate_proj.weight",
        "shared_mlp embed",
    ),
    row(
        "DeepSeekMoeBlock_0.shared_experts.wi_1.kernel",
        "embed shared_mlp",
        "mlp.shared_experts.up_proj.weight",
        "shared_mlp embed",
    ),
    row(
        "DeepSeekMoeBlock_0.shared_experts.wo.kernel",
        "shared_mlp embed",
        "mlp.shared_experts.down_proj.weight",
        "embed shared_mlp",
    ),
    row("DeepSeekMoeBlock_0.MoeBlock_0.gate.kernel", "embed expert", "mlp.gate.weight", "expert embed"),
    row(
        "DeepSeekMoeBlock_0.MoeBlock_0.gate.bias",
        "expert",
        "mlp.gate.e_score_correction_bias",
        "expert",
        when="score_correction",
    ),
    row(
        "DeepSeekMoeBlock_0.MoeBlock_0.wi_0",
        "expert embed expert_mlp",
        "mlp.experts.{expert}.gate_proj.weight",
        "expert_mlp embed",
    ),
    row(
        "DeepSeekMoeBlock_0.MoeBlock_0.wi_1",
        "expert embed expert_mlp",
        "mlp.experts.{expert}.up_proj.weight",
        "expert_mlp embed",
    ),
    row(
        "DeepSeekMoeBlock_0.MoeBlock_0.wo",
        "expert expert_mlp embed",
        "mlp.experts.{expert}.down_proj.weight",
        "embed expert_mlp",
    ),
)

FAMILY = Family(
    name="deepseek",
    model_types=("deepseek_v2", "deepseek_v3"),
    models=("DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-V3", "DeepSeek-R1"),
    rows=EMBEDDINGS,
    layers=(
        Layers(
            "model.layers.{dense}",
            "decoder.dense_layers_{dense}",
            "decoder.dense_layers",
            ("dense",),
            (*NORMS, *ATTENTION, *MLP),
        ),
        Layers(
            "model.layers.{moe+#dense}",
            "decoder.moe_layers_{moe}",
            "decoder.moe_layers",
            ("moe",),
            (*NORMS, *ATTENTION, *EXPERTS),
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
        "nope": ("qk_nope_head_dim",),
        "rope": ("qk_rope_head_dim",),
        "expert": ("n_routed_experts",),
        "expert_mlp": ("moe_intermediate_size",),
        "shared": ("n_shared_experts",),
    },
    derived={
        "moe": "layers - dense",
        "query": "nope + rope",
        "kv": "nope + v_head_dim",
        "kv_down": "kv_latent + rope",
        "shared_mlp": "shared * expert_mlp",
    },
    flags={
        "tied": TIED,
        "query_latent": FlagRule(("q_lora_rank",)),
        "score_correction": FlagRule(("topk_method", "model_type"), ("noaux_tc", "deepseek_v3")),
    },
    # Layers after the last one predict further tokens.
    left_out=("model.layers.{prediction+#layers}.*",),
)
