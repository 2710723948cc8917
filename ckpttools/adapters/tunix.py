"""Adapters of Tunix's own models, as adapters of the Hugging Face model.

    layers/0/attn/q_proj/w_lora_a (embed, rank)          w_lora_b (rank, heads, head)       Llama, Qwen
    layers/0/attn/o_proj/w_lora_a (heads, head, rank)    w_lora_b (rank, embed)
    layers/0/mlp/up_proj/kernel_lora_a (in, rank)        kernel_lora_b (rank, out)
    layers/0/attn/q_einsum/w_lora_a (embed, rank)        w_lora_b (rank, heads, head)       Gemma
    layers/0/attn/kv_einsum/w_lora_a (embed, rank)       w_lora_b (rank, 2, heads, head)

Tunix merges A, with all axes but the last as one, times B, with all axes but the first as one. Rotary pairs
are in Hugging Face's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckpttools.adapters.base_names import noted_base
from ckpttools.adapters.bases import Base, not_of_base
from ckpttools.adapters.factors import Adapter, FactorPair
from ckpttools.adapters.from_maxtext import (
    KernelFactors,
    adapter_of_maxtext,
    half_of,
    pairs_of,
    said_of,
    scale_of,
)
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import relayout, swapped, take
from ckpttools.array.tree import Path, Tree
from ckpttools.core.errors import FormatError, listing
from ckpttools.formats.adapters import BASE_NAME

_LAYERS = "layers"
# Module of Tunix -> name of its kernel, and of the module in transformers.
_MODULES = {"attn": ("w", "self_attn"), "mlp": ("kernel", "mlp")}
# Layer of Tunix -> layers of transformers; B has an axis for those of several.
_PROJECTIONS = {
    **{name: (name,) for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: (name,) for name in ("gate_proj", "up_proj", "down_proj")},
    "q_einsum": ("q_proj",),
    "kv_einsum": ("k_proj", "v_proj"),
    "attn_vec_einsum": ("o_proj",),
}


def tunix_kernels(paths: Iterable[Path]) -> list[str]:
    """Return the dotted names of the kernels of a Tunix model that a tree has factors of.

    Args:
        paths: Paths of parameters.
    """
    halves = filter(None, map(half_of, paths))
    return [name for name in dict.fromkeys(name for name, _ in halves) if _weights(name)]


def adapter_of_jax(base: Base, tree: Tree, alpha: float | None = None) -> Adapter:
    """Return the adapter that a trainer in JAX wrote, in the base's names.

    Args:
        base: The model that it is of.
        tree: An adapter of a MaxText model, in any of MaxText's layouts, or of a model of Tunix.
        alpha: Alpha of the adapter; None for what is noted next to it.

    Raises:
        FormatError: There are no factors, or they are not of this base.
        ConfigError: Nothing states alpha, or the adapter has another.
        UsageError: `alpha` is NaN or infinite.
    """
    pairs = pairs_of(tree)
    if not any(map(_weights, pairs)):
        return adapter_of_maxtext(base, tree, alpha)
    location = tree.metadata.location
    if unknown := [name for name in pairs if not _weights(name)]:
        raise FormatError(
            "these factors of Tunix have no known counterpart in Hugging Face's model" + listing(unknown),
            location=location,
            expected=f"factors of {', '.join(_PROJECTIONS)}",
            hint="merge them in Tunix (save_lora_merged_model_as_safetensors), and convert the merged model",
        )
    names = {weight: base.named(weight) for name in pairs for weight in _weights(name)}
    if lacking := [weight for weight, own in names.items() if own is None]:
        raise not_of_base(location, base.tree.metadata.location, lacking, base.weights)
    declared = said_of(tree)
    built: list[FactorPair] = []
    for name, pair in pairs.items():
        scale = scale_of(declared, pair.rank, alpha, location)
        built += _factors(location, name, pair, scale, names)
    for factor in built:
        factor.require_fit(base.weights[factor.name].shape)
    return Adapter(location, tuple(built), config={BASE_NAME: noted_base(tree)})


def _weights(kernel: str) -> tuple[str, ...]:
    """Names of the weights that Tunix has in a kernel; () for other kernels."""
    keys = kernel.split(".")[-5:]
    if len(keys) < 5 or keys[0] != _LAYERS or not keys[1].isdecimal():
        return ()
    own, theirs = _MODULES.get(keys[2], (None, ""))
    if keys[4] != own:
        return ()
    layer = f"model.{_LAYERS}.{keys[1]}.{theirs}"
    return tuple(f"{layer}.{name}.weight" for name in _PROJECTIONS.get(keys[3], ()))


def _factors(
    location: str, kernel: str, pair: KernelFactors, scale: float, names: Mapping[str, str | None]
) -> Iterator[FactorPair]:
    """The factors of each weight in a kernel."""
    weights = _weights(kernel)
    several = len(weights) > 1
    has_axes = pair.a.ndim > 1 and pair.b.ndim > 1 + several
    if not has_axes or pair.b.shape[0] != pair.rank or (several and pair.b.shape[1] != len(weights)):
        rank = pair.rank
        parts = (rank, len(weights), "outputs") if several else (rank, "outputs")
        raise FormatError(
            "these are not factors of Tunix",
            location=f"{location}, {kernel}",
            got=f"A {list(pair.a.shape)} and B {list(pair.b.shape)}",
            expected=f"A [inputs, {rank}] and B [{', '.join(map(str, parts))}]",
        )
    a = swapped(_matrix(pair.a, pair.a.ndim - 1))
    for number, weight in enumerate(weights):
        b = swapped(_matrix(take(pair.b, 1, number) if several else pair.b, 1))
        yield FactorPair(names[weight] or weight, a, b, scale, pair.rank)


def _matrix(array: LazyArray, rows: int) -> LazyArray:
    """An array with its first axes as one, and the others as one."""
    split = tuple((length,) for length in array.shape)
    return relayout(array, split, range(array.ndim), (rows, array.ndim - rows))
