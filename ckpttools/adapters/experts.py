"""Factors of fused experts as those of single ones: transformers 5 fuses what files of the hub have apart."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckpttools.adapters.factors import FactorPair
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import relayout, take, window
from ckpttools.core.errors import FormatError

# What transformers 5.23 (conversion_mapping.py) makes of the modules of hub models, and of their weights: one
# after the other on the axis of outputs.
_MODULES = {".mlp.experts": (".mlp.experts", ".block_sparse_moe.experts")}
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


def single_experts(factor: FactorPair, names: Collection[str]) -> list[FactorPair] | None:
    """The factors of single experts that those of fused ones are; None where the names have no such.

    Args:
        factor: of `…mlp.experts.gate_up_proj` or `….down_proj`.
        names: of the base's weights.

    Raises:
        FormatError: the base has another number of experts.
    """
    above, _, last = factor.name.rpartition(".")
    ends = [end for end in _MODULES if above.endswith(end)]
    modules = [above.removesuffix(end) + own for end in ends for own in _MODULES[end]]
    for module in modules:
        for parts in _PARTS.get(last, ()):
            if f"{module}.0.{parts[0]}.weight" in names:
                return list(_single(factor, module, parts, names))
    return None


def _single(
    factor: FactorPair, module: str, parts: tuple[str, ...], names: Collection[str]
) -> Iterator[FactorPair]:
    count, outputs = factor.a.shape[0] // factor.rank, factor.b.shape[0]
    if (
        f"{module}.{count - 1}.{parts[0]}.weight" not in names
        or f"{module}.{count}.{parts[0]}.weight" in names
    ):
        raise FormatError(
            "the base has another number of experts",
            location=factor.name,
            got=f"factors of rank {factor.rank} for {count}",
            expected=f"as many as {module}.*.{parts[0]}.weight",
        )
    # The expert is the fastest axis of B.
    b = relayout(factor.b, ((outputs,), (factor.rank, count)), (0, 1, 2), (1, 1, 1))
    length = outputs // len(parts)
    for expert in range(count):
        a = window(factor.a, (expert * factor.rank, 0), (factor.rank, factor.a.shape[1]))
        for number, part in enumerate(parts):
            own = _rows(take(b, 2, expert), number * length, length)
            yield FactorPair(f"{module}.{expert}.{part}.weight", a, own, factor.scale, factor.rank)


def _rows(array: LazyArray, start: int, count: int) -> LazyArray:
    return window(array, (start, 0), (count, array.shape[1]))
