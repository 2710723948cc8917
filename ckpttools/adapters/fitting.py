"""Match an adapter to its base model, and resolve what only the base shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ckpttools.adapters.bases import Base, missing_weights_error
from ckpttools.adapters.config import listed_names
from ckpttools.adapters.factors import Adapter, FactorPair, have_equal_bits
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import relayout, swap_last_axes, take, window
from ckpttools.core.errors import FormatError, listing

HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"
_TABLES = (TABLE, "wte.weight")
# Models in transformers whose matrices have their inputs first (`Conv1D`), and the names of these matrices.
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight", ".q_attn.weight")


def fit_adapter(base: Base, adapter: Adapter) -> Adapter:
    """Return the adapter in the base's names.

    Raises:
        FormatError: The adapter does not match this base (the message lists the missing weights), changes a
            weight several times, or lacks arrays that it should replace.
    """
    adapter = match_base_layout(base, adapter)
    expected = [*(factor.name for factor in adapter.factors), *adapter.replaced]
    names = {name: own for name in expected if (own := base.named(name)) is not None}
    if missing := [name for name in dict.fromkeys(expected) if name not in names]:
        _refuse_head(base, adapter, missing)
        raise missing_weights_error(adapter.location, base.tree.metadata.location, missing, base.weights)
    oriented = tuple(_orient(base, replace(factor, name=names[factor.name])) for factor in adapter.factors)
    _refuse_duplicates(
        adapter, [*(item.name for item in oriented), *(f"{names[item]}, whole" for item in adapter.replaced)]
    )
    replaced = {names[name]: array for name, array in adapter.replaced.items()}
    _require_replaced(base, adapter, replaced)
    return replace(adapter, factors=oriented, replaced=replaced)


def match_base_layout(base: Base, adapter: Adapter) -> Adapter:
    """Return the adapter with experts split and without a tied head, as in the base's files.

    Raises:
        FormatError: The base has a different number of experts.
    """
    adapter = _without_tied_head(base, adapter)
    return replace(
        adapter, factors=tuple(item for factor in adapter.factors for item in _split_experts(base, factor))
    )


def _without_tied_head(base: Base, adapter: Adapter) -> Adapter:
    """Remove the output head of a tied model's adapter if it repeats the embedding.

    PEFT saves both if it is set to save embeddings, if the vocabulary was resized, or if it keeps them tied.
    """
    if base.named(HEAD) is not None:
        return adapter
    tables = [factor for factor in adapter.factors if factor.name.endswith(_TABLES)]
    factors = [
        factor for factor in adapter.factors if not any(_is_tied_copy(factor, table) for table in tables)
    ]
    replaced_tables = {name: array for name, array in adapter.replaced.items() if name.endswith(_TABLES)}
    replaced = {
        name: array
        for name, array in adapter.replaced.items()
        if name != HEAD or not any(have_equal_bits(array, table) for table in replaced_tables.values())
    }
    return replace(adapter, factors=tuple(factors), replaced=replaced)


def _is_tied_copy(factor: FactorPair, table: FactorPair) -> bool:
    """Return whether head factors are the transposed factors of an embedding."""
    return (
        (factor.name, factor.kind, table.kind) == (HEAD, "linear", "embedding")
        and (factor.scale, factor.magnitude, table.magnitude) == (table.scale, None, None)
        and have_equal_bits(factor.a, swap_last_axes(table.b))
        and have_equal_bits(factor.b, swap_last_axes(table.a))
    )


def without_copied_head(model: Base, other: Base) -> Base:
    """Remove an output head that repeats the embedding, as FSDP and DeepSpeed save it.

    Args:
        model: The model.
        other: A model to compare with. The head stays if that model has one.
    """
    if HEAD not in model.weights or HEAD in other.weights:
        return model
    head, other_weights = (
        model.weights[HEAD],
        {name: item for name, item in model.weights.items() if name != HEAD},
    )
    tables = (array for name, array in other_weights.items() if name.endswith(_TABLES))
    return (
        replace(model, weights=other_weights)
        if any(have_equal_bits(head, table) for table in tables)
        else model
    )


def _refuse_duplicates(adapter: Adapter, changed: Sequence[str]) -> None:
    if duplicates := [name for name, times in Counter(changed).items() if times > 1]:
        raise FormatError(
            "the adapter changes these weights more than once:" + listing(duplicates),
            location=adapter.location,
            expected="one pair of factors for each weight",
            hint="save each adapter in a directory of its own",
        )


def _refuse_head(base: Base, adapter: Adapter, missing: Collection[str]) -> None:
    """Raise FormatError if only the output head is missing from the base."""
    if {*missing} == {HEAD} and any(name.endswith(_TABLES) for name in base.weights):
        raise FormatError(
            "the adapter changes the output head, but in the base the embedding table is the output head",
            location=adapter.location,
            got=base.tree.metadata.location,
            expected=f"a base with a {HEAD} of its own",
            hint="save the base with tie_word_embeddings false, and merge into that",
        )


def _split_experts(base: Base, factor: FactorPair) -> list[FactorPair]:
    """Return the factors of fused experts as the base stores them."""
    if factor.kind != "experts" or base.named(factor.name) is not None:
        return [factor]
    return single_experts(factor, base.weights) or [factor]


def _require_replaced(base: Base, adapter: Adapter, replaced: Collection[str]) -> None:
    """Raise FormatError if the adapter lacks weights of a fully trained module."""
    missing = [name for name in _declared_replacements(base, adapter) if name not in replaced]
    if missing:
        raise FormatError(
            "modules_to_save names modules of the base, but the adapter has no weights for these:"
            + listing(missing),
            location=adapter.location,
            expected="complete weights for all of them",
            hint="save it again, with all parameters gathered from the devices",
        )


def _declared_replacements(base: Base, adapter: Adapter) -> Iterator[str]:
    """Yield the base's weights in modules that `modules_to_save` names."""
    ends = listed_names(adapter.config, "modules_to_save")
    for name in base.weights if ends else ():
        keys = name.split(".")
        if any(".".join(keys[:stop]).endswith(ends) for stop in range(1, len(keys))):
            yield name


def _orient(base: Base, factor: FactorPair) -> FactorPair:
    """Return factors with the axis order of the base's modules."""
    if factor.kind == "linear" and base.config is not None:
        is_conv1d = base.config.get("model_type") in _CONV1D_MODELS and factor.name.endswith(_CONV1D)
        return replace(factor, has_inputs_first=is_conv1d)
    shape = base.weights[factor.name].shape
    if factor.kind != "experts" or len(shape) != 3 or shape[1] != shape[2]:
        return factor
    above = factor.name.rpartition(".")[0]
    sibling = base.weights.get(f"{above}.gate_up_proj")
    if sibling is None or sibling.shape[1] == sibling.shape[2]:
        return factor
    # The input axis of gate and up has the width of the model.
    return replace(factor, has_inputs_first=sibling.shape[1] == shape[1])


# How transformers 5.23 (conversion_mapping.py) renames the modules of Hub models and joins their weights
# consecutively on the output axis.
_MODULES = {".mlp.experts": (".mlp.experts", ".block_sparse_moe.experts")}
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


def single_experts(factor: FactorPair, names: Collection[str]) -> list[FactorPair] | None:
    """Split the factors of fused experts; None if the base has no single experts.

    Args:
        factor: The factors of `…mlp.experts.gate_up_proj` or `….down_proj`.
        names: The names of the base's weights.

    Raises:
        FormatError: The base has a different number of experts.
    """
    above, _, last = factor.name.rpartition(".")
    ends = [end for end in _MODULES if above.endswith(end)]
    modules = [above.removesuffix(end) + own for end in ends for own in _MODULES[end]]
    for module in modules:
        for parts in _PARTS.get(last, ()):
            if f"{module}.0.{parts[0]}.weight" in names:
                return list(_split_factor(factor, module, parts, names))
    return None


def _split_factor(
    factor: FactorPair, module: str, parts: tuple[str, ...], names: Collection[str]
) -> Iterator[FactorPair]:
    count, outputs = factor.a.shape[0] // factor.rank, factor.b.shape[0]
    if (
        f"{module}.{count - 1}.{parts[0]}.weight" not in names
        or f"{module}.{count}.{parts[0]}.weight" in names
    ):
        raise FormatError(
            "the base has a different number of experts",
            location=factor.name,
            got=f"factors of rank {factor.rank} for {count} experts",
            expected=f"as many as {module}.*.{parts[0]}.weight",
        )
    # Along the columns of B, the expert index varies fastest.
    b = relayout(factor.b, ((outputs,), (factor.rank, count)), (0, 1, 2), (1, 1, 1))
    length = outputs // len(parts)
    for expert in range(count):
        a = window(factor.a, (expert * factor.rank, 0), (factor.rank, factor.a.shape[1]))
        for number, part in enumerate(parts):
            own = _rows(take(b, 2, expert), number * length, length)
            yield FactorPair(f"{module}.{expert}.{part}.weight", a, own, factor.scale, factor.rank)


def _rows(array: LazyArray, start: int, count: int) -> LazyArray:
    return window(array, (start, 0), (count, array.shape[1]))
