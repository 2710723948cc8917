"""Qwen 3, dense: norms on query and key, no biases, no scale in the query."""

from ckpttools.families.decoder import ATTENTION, EMBEDDINGS, HEAD_NORMS, MLP, NORMS, SIZES, TIED
from ckpttools.families.family import Family, decoder_layers

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    models=("Qwen3 0.6B to 32B",),
    rows=EMBEDDINGS,
    layers=(decoder_layers("layer", "layers", ("layer",), (*NORMS, *MLP, *ATTENTION, *HEAD_NORMS)),),
    sizes=SIZES,
    flags={"tied": TIED},
)
