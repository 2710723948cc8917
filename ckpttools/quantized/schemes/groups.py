"""What compressed-tensors says of the weights of each group of modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttools.core.region import Shape, ceil_div
from ckpttools.quantized.schemes.base import Module, UnreadableError


def weight_groups(module: Module) -> list[Mapping[str, Any]]:
    """What is said of weights, a mapping for each group."""
    groups = module.said.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    weights = (each.get("weights") for each in found if isinstance(each, Mapping))
    return [each for each in weights if isinstance(each, Mapping)]


def group_size(module: Module, shape: Shape, count: int, *, bits: int) -> int:
    """How many numbers of a row share a scale.

    Args:
        module: the weight.
        shape: of its numbers.
        count: scales of a row.
        bits: of a number.

    Raises:
        UnreadableError: the configuration says nothing of groups that fits, or two things.
    """
    said = [each for each in weight_groups(module) if each.get("num_bits") == bits]
    sizes = {size if isinstance(size, int) and size > 0 else shape[-1] for size in _sizes(said)}
    fitting = sorted(size for size in sizes if ceil_div(shape[-1], size) == count)
    if len(fitting) != 1:
        known = ", ".join(map(str, sorted(sizes))) or "nothing"
        raise UnreadableError(
            f"{module.name}: rows of {shape[-1]} have {count} scales, and the configuration says groups of "
            f"{known}"
        )
    return fitting[0]


def _sizes(groups: list[Mapping[str, Any]]) -> list[object]:
    return [each.get("group_size") for each in groups]


def refuse_asymmetric(module: Module) -> None:
    """Raises UnreadableError where numbers are shifted, or their columns reordered, before scaling."""
    odd = [key for key in ("weight_zero_point", "weight_g_idx") if key in module.by_key]
    if odd or any(each.get("symmetric") is False for each in weight_groups(module)):
        what = ", ".join(odd) or "a configuration that says symmetric: false"
        raise UnreadableError(f"{module.name}: with {what}; only symmetric groups in order are read")
