"""Whether weights are quantized, how, and how many."""

from __future__ import annotations

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.quantized.config import declared_quantization, scheme
from ckpttools.quantized.scales import split_name
from ckpttools.quantized.weights import Quantized, last_keys, quantized_in


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are quantized.

    Attributes:
        method: `quant_method` of the configuration, or None if that does not mention quantisation.
        scheme: the configuration's description; without one, what is stored.
        modules: how many hold quantized weights.
        weights: how many there are; experts may lie several to a module.
        without_scales: those of them whose scales are missing.
    """

    method: str | None
    scheme: str
    modules: int
    weights: int
    without_scales: int


def quantization_of(tree: Tree) -> Quantization | None:
    """What is quantized in a tree; None if nothing is and the configuration does not mention it."""
    declared, weights = declared_quantization(tree.metadata.config), list(quantized_in(tree).weights.values())
    if not (declared or weights):
        return None
    method = (declared or {}).get("quant_method") or (declared or {}).get("quant_algo")
    return Quantization(
        method=str(method) if method else None,
        scheme=scheme(declared) or _stored(weights),
        modules=len({split_name(weight.name)[0] for weight in weights}),
        weights=len(weights),
        without_scales=sum(weight.is_bare for weight in weights),
    )


def _stored(weights: list[Quantized]) -> str:
    """`int32 with scales, qzeros, g_idx`: the same for many weights."""
    kinds = (
        f"{weight.dtype} with {last_keys(weight.sides)}" if weight.sides else str(weight.dtype)
        for weight in weights
    )
    return "; ".join(dict.fromkeys(kinds))
