"""gpt-oss: local and global layers in turn, experts with biases, gate and up columns interleaved."""

from ckpttools.families.decoder import EMBEDDINGS, SIZES, TIED
from ckpttools.families.family import Family
from ckpttools.mapping.layers import Layers
from ckpttools.mapping.row import row

ROWS = (
    row("pre_self_attention_layer_norm.scale", "embed", "input_layernorm.weight", "embed"),
    row("post_self_attention_layer_norm.scale", "embed", "post_attention_layernorm.weight", "embed"),
    row(
        "GptOssAttention.query.kernel",
        "embed heads head_dim",
        "self_attn.q_proj.weight",
        "(heads head_dim) embed",
    ),
    row(
        "GptOssAttention.key.kernel",
        "embed kv_heads head_dim",
        "self_attn.k_proj.weight",
        "(kv_heads head_dim) embed",
    ),
    row(
        "GptOssAttention.value.kernel",
        "embed kv_heads head_dim",
        "self_attn.v_proj.weight",
        "(kv_heads head_dim) embed",
    ),
    row(
        "GptOssAttention.out.kernel",
        "heads head_dim embed",
        "self_attn.o_proj.weight",
        "embed (heads head_dim)",
    ),
    row("GptOssAttention.query.bias", "heads head_dim", "self_attn.q_proj.bias", "(heads head_dim)"),
    row("GptOssAttention.key.bias", "kv_heads head_dim", "self_attn.k_proj.bias", "(kv_heads head_dim)"),
    row("GptOssAttention.value.bias", "kv_heads head_dim", "self_attn.v_proj.bias", "(kv_heads head_dim)"),
    row("GptOssAttention.out.bias", "embed", "self_attn.o_proj.bias", "embed"),
    row("GptOssAttention.sinks", "heads", "self_attn.sinks", "heads"),
    row("GptOssMlp.gate.kernel", "embed expert", "mlp.router.weight", "expert embed"),
    row("GptOssMlp.gate.bias", "expert", "mlp.router.bias", "expert"),
    row("GptOssMlp.wi_{part}", "expert embed mlp", "mlp.experts.gate_up_proj", "expert embed (mlp part)"),
    row("GptOssMlp.wi_{part}_bias", "expert mlp", "mlp.experts.gate_up_proj_bias", "expert (mlp part)"),
    row("GptOssMlp.wo", "expert mlp embed", "mlp.experts.down_proj", "expert mlp embed"),
    row("GptOssMlp.wo_bias", "expert embed", "mlp.experts.down_proj_bias", "expert embed"),
)

FAMILY = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    models=("gpt-oss-20b", "gpt-oss-120b"),
    rows=EMBEDDINGS,
    layers=(
        Layers(
            "model.layers.{2*block+position}",
            "decoder.layers_{2*block+position}",
            "decoder.layers.layers_{position}",
            ("block",),
            ROWS,
        ),
    ),
    sizes={**SIZES, "layers": ("num_hidden_layers",), "expert": ("num_local_experts",)},
    constants={"position": 2, "part": 2},
    derived={"block": "layers / 2"},
    flags={"tied": TIED},
)
