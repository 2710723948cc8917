"""Mixtral: every layer has experts; queries are scaled as in Mistral."""

from ckpttools.families.decoder import (
    EMBEDDINGS,
    HF_LAYERS,
    NORMS,
    SCALED_ATTENTION,
    SCANNED,
    SIZES,
    TIED,
    UNSCANNED,
)
from ckpttools.families.family import Family
from ckpttools.mapping.layers import Layers
from ckpttools.mapping.row import rows

EXPERTS = rows("""
    below MoeBlock_0 <-> block_sparse_moe
    gate.kernel: embed expert     <-> gate.weight:                expert embed
    wi_0:        expert embed mlp <-> experts.{expert}.w1.weight: mlp embed
    wi_1:        expert embed mlp <-> experts.{expert}.w3.weight: mlp embed
    wo:          expert mlp embed <-> experts.{expert}.w2.weight: embed mlp
""")

FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    models=("Mixtral 8x7B", "Mixtral 8x22B"),
    rows=EMBEDDINGS,
    layers=(Layers(HF_LAYERS, UNSCANNED, SCANNED, ("layer",), (*NORMS, *SCALED_ATTENTION, *EXPERTS)),),
    sizes={**SIZES, "expert": ("num_local_experts",)},
    flags={"tied": TIED},
)
