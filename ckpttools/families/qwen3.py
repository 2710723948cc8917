"""Qwen 3, dense: norms on query and key, no biases, no scale in the query."""

from ckpttools.families.decoder import (
    ATTENTION,
    EMBEDDINGS,
    HEAD_NORMS,
    HF_LAYERS,
    MLP,
    NORMS,
    SCANNED,
    SIZES,
    TIED,
    UNSCANNED,
)
from ckpttools.families.family import Family
from ckpttools.mapping.layers import Layers

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    models=("Qwen3 0.6B to 32B",),
    rows=EMBEDDINGS,
    layers=(Layers(HF_LAYERS, UNSCANNED, SCANNED, ("layer",), (*NORMS, *MLP, *ATTENTION, *HEAD_NORMS)),),
    sizes=SIZES,
    flags={"tied": TIED},
)
