"""What compressed-tensors says of the weights of each group of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpttools.core.region import ceil_div
from ckpttools.quantized.schemes.base import Module, UnreadableError, UnsupportedError

ZERO_POINT = "weight_zero_point"
# Orders in which the columns of a group are not neighbours: `weight_g_idx` says which they are.
_REORDERED = ("group", "dynamic")


def weight_groups(module: Module) -> list[Mapping[str, Any]]:
    """What is said of weights, a mapping for each group."""
    groups = module.declared.get("config_groups")
    result = groups.values() if isinstance(groups, Mapping) else ()
    weights = (item.get("weights") for item in result if isinstance(item, Mapping))
    return [weight for weight in weights if isinstance(weight, Mapping)]


def rows_and_groups(
    module: Module, widths: Sequence[int], count: int, *, bits: int, per_code: int
) -> tuple[int, int]:
    """How many numbers a row has, and how many of them share a scale.

    Args:
        module: the weight.
        widths: what a row may have, the likeliest first.
        count: scales of a row.
        bits: of a number.
        per_code: numbers in a code; rows that are no multiple of it end within one.

    Raises:
        UnreadableError: the configuration says nothing of groups that fits, or two things.
    """
    groups = weight_groups(module)
    declared = [
        group for group in groups if group.get("num_bits") == bits and group.get("type", "int") == "int"
    ]
    for width in widths:
        fitting = [size for size in _sizes(declared, width) if ceil_div(width, size) == count]
        if width % per_code:
            # Groups of such rows are whole, which tells a damaged length from a true one.
            fitting = [size for size in fitting if width % size == 0]
        if len(fitting) == 1:
            return width, fitting[0]
        if fitting:
            break
    known = ", ".join(map(str, sorted(_sizes(declared, widths[0])))) or "nothing"
    raise UnreadableError(
        f"{module.name}: rows of {widths[0]} have {count} scales, and the configuration says groups of "
        f"{known}"
    )


def _sizes(groups: list[Mapping[str, Any]], width: int) -> set[int]:
    declared = [group.get("group_size") for group in groups]
    return {size if isinstance(size, int) and size > 0 else width for size in declared}


def refuse_other_bits(module: Module, bits: int) -> None:
    """Raises UnsupportedError where no group of the configuration has whole numbers of so many bits."""
    declared = {(group.get("type", "int"), group.get("num_bits")) for group in weight_groups(module)}
    if declared and ("int", bits) not in declared:
        named = ", ".join(sorted(f"{kind}{size}" for kind, size in declared))
        raise UnsupportedError(f"{module.name}: {named}; of packed whole numbers int{bits} is read")


def refuse_reordered(module: Module) -> None:
    """Raises UnsupportedError where columns of a group are not neighbours."""
    declared = {group["actorder"] for group in weight_groups(module) if group.get("actorder") in _REORDERED}
    odd = ["weight_g_idx"] if "weight_g_idx" in module.by_key else []
    odd += [] if odd else [f"a configuration that says actorder: {item}" for item in sorted(declared)]
    if odd:
        raise UnsupportedError(f"{module.name}: with {', '.join(odd)}; only groups in order are read")


def is_shifted(module: Module, bits: int) -> bool:
    """Whether a number is taken from those of each group of so many bits before they are scaled.

    Raises:
        UnsupportedError: there are zero points, and no group of the configuration has some.
    """
    declared = [
        group.get("symmetric") is False for group in weight_groups(module) if group.get("num_bits") == bits
    ]
    is_there = ZERO_POINT in module.by_key
    if is_there and not any(declared):
        raise UnsupportedError(
            f"{module.name}: with {ZERO_POINT}, where the configuration says symmetric groups"
        )
    return is_there or (bool(declared) and all(declared))
