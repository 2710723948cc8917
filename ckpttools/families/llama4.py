"""Llama 4, the text model: cycles of four layers, with experts in every or in every second one."""

from ckpttools.families.decoder import ATTENTION, EMBEDDINGS, NORMS, TIED
from ckpttools.families.family import Family, FlagRule, Spelling, decoder_layers
from ckpttools.mapping.row import rows

DENSE = rows("""
    mlp.wi_0.kernel: embed mlp <-> feed_forward.gate_proj.weight: mlp embed
    mlp.wi_1.kernel: embed mlp <-> feed_forward.up_proj.weight:   mlp embed
    mlp.wo.kernel:   mlp embed <-> feed_forward.down_proj.weight: embed mlp
""")
EXPERTS = rows("""
    below Llama4MoEBlock_0.MoeBlock_0 <-> feed_forward
    gate.kernel: embed expert            <-> router.weight:        expert embed
    wi_{part}:   expert embed expert_mlp <-> experts.gate_up_proj: expert embed (part expert_mlp)
    wo:          expert expert_mlp embed <-> experts.down_proj:    expert expert_mlp embed

    below Llama4MoEBlock_0.shared_experts <-> feed_forward.shared_expert
    wi_0.kernel: embed expert_mlp        <-> gate_proj.weight:     expert_mlp embed
    wi_1.kernel: embed expert_mlp        <-> up_proj.weight:       expert_mlp embed
    wo.kernel:   expert_mlp embed        <-> down_proj.weight:     embed expert_mlp
""")

FAMILY = Family(
    name="llama4",
    model_types=("llama4", "llama4_text"),
    models=("Llama 4 Scout", "Llama 4 Maverick"),
    rows=EMBEDDINGS,
    layers=(
        decoder_layers(
            "4*block+position",
            "layers.layers_{position}",
            ("block",),
            (*NORMS, *ATTENTION, *EXPERTS),
            unless="interleaved_experts",
        ),
        decoder_layers(
            "4*block+2*half",
            "layers.layers_{2*half}",
            ("block",),
            (*NORMS, *ATTENTION, *DENSE),
            when="interleaved_experts",
        ),
        decoder_layers(
            "4*block+2*half+1",
            "layers.layers_{2*half+1}",
            ("block",),
            (*NORMS, *ATTENTION, *EXPERTS),
            when="interleaved_experts",
        ),
    ),
    sizes={
        "layers": ("text_config.num_hidden_layers", "num_hidden_layers"),
        "embed": ("text_config.hidden_size", "hidden_size"),
        "vocab": ("text_config.vocab_size", "vocab_size"),
        "mlp": ("text_config.intermediate_size_mlp", "intermediate_size_mlp"),
        "expert_mlp": ("text_config.intermediate_size", "intermediate_size"),
        "heads": ("text_config.num_attention_heads", "num_attention_heads"),
        "kv_heads": ("text_config.num_key_value_heads", "num_key_value_heads"),
        "head_dim": ("text_config.head_dim", "head_dim"),
        "expert": ("text_config.num_local_experts", "num_local_experts"),
    },
    constants={"position": 4, "half": 2, "part": 2},
    derived={"block": "layers / 4"},
    flags={
        "tied": TIED,
        "interleaved_experts": FlagRule(
            ("text_config.interleave_moe_layer_step", "interleave_moe_layer_step"), (2,)
        ),
    },
    left_out=(
        "vision_model.*",
        "model.vision_model.*",
        "multi_modal_projector.*",
        "model.multi_modal_projector.*",
    ),
    spellings=(
        Spelling({"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}),
        Spelling({"model.": "model.language_model."}, name="transformers"),
        Spelling(model_types=("llama4_text",), name="text"),
    ),
)
