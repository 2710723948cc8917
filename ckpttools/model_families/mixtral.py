"""Mixtral: every layer has experts; queries are scaled as in Mistral."""

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import (
    EMBEDDINGS,
    EXPERT_SETTINGS,
    FUSED,
    HEADS,
    LLAMA_SETTINGS,
    NO_WINDOW,
    NORMS,
    SCALED_ATTENTION,
    SIZES,
    TIED,
    UNBIASED,
)
from ckpttools.model_families.family import Family, decoder_layers

EXPERTS = rows("""
    below MoeBlock_0 <-> block_sparse_moe, unless fused
    gate.kernel: embed expert     <-> gate.weight:                expert embed
    wi_0:        expert embed mlp <-> experts.{expert}.w1.weight: mlp embed
    wi_1:        expert embed mlp <-> experts.{expert}.w3.weight: mlp embed
    wo:          expert mlp embed <-> experts.{expert}.w2.weight: embed mlp

    below MoeBlock_0 <-> mlp, when fused
    gate.kernel: embed expert     <-> gate.weight:          expert embed
    wi_{part}:   expert embed mlp <-> experts.gate_up_proj: expert (part mlp) embed
    wo:          expert mlp embed <-> experts.down_proj:    expert embed mlp
""")

FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    models=("Mixtral 8x7B", "Mixtral 8x22B"),
    rows=EMBEDDINGS,
    layers=(decoder_layers("layer", "layers", ("layer",), (*NORMS, *SCALED_ATTENTION, *EXPERTS)),),
    sizes={**SIZES, "expert": ("num_local_experts",)},
    constants={"part": 2},
    derived=HEADS,
    flags={"tied": TIED, "fused": FUSED},
    settings=SettingRules(
        """
    decoder_block: "mixtral"
    """
        + EXPERT_SETTINGS
        + LLAMA_SETTINGS
        + NO_WINDOW
        + UNBIASED
    ),
)
