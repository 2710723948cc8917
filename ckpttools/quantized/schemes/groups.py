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
    groups = module.said.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    weights = (each.get("weights") for each in found if isinstance(each, Mapping))
    return [each for each in weights if isinstance(each, Mapping)]


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
    said = [each for each in groups if each.get("num_bits") == bits and each.get("type", "int") == "int"]
    for width in widths:
        fitting = [size for size in _sizes(said, width) if ceil_div(width, size) == count]
        if width % per_code:
            # Groups of such rows are whole, which tells a damaged length from a true one.
            fitting = [size for size in fitting if width % size == 0]
        if len(fitting) == 1:
            return width, fitting[0]
        if fitting:
            break
    known = ", ".join(map(str, sorted(_sizes(said, widths[0])))) or "nothing"
    raise UnreadableError(
        f"{module.name}: rows of {widths[0]} have {count} scales, and the configuration says groups of "
        f"{known}"
    )


def _sizes(groups: list[Mapping[str, Any]], width: int) -> set[int]:
    said = [each.get("group_size") for each in groups]
    return {size if isinstance(size, int) and size > 0 else width for size in said}


def refuse_other_bits(module: Module, bits: int) -> None:
    """Raises UnsupportedError where no group of the configuration has whole numbers of so many bits."""
    said = {(each.get("type", "int"), each.get("num_bits")) for each in weight_groups(module)}
    if said and ("int", bits) not in said:
        named = ", ".join(sorted(f"{kind}{size}" for kind, size in said))
        raise UnsupportedError(f"{module.name}: {named}; of packed whole numbers int{bits} is read")


def refuse_reordered(module: Module) -> None:
    """Raises UnsupportedError where columns of a group are not neighbours."""
    said = {each["actorder"] for each in weight_groups(module) if each.get("actorder") in _REORDERED}
    odd = ["weight_g_idx"] if "weight_g_idx" in module.by_key else []
    odd += [] if odd else [f"a configuration that says actorder: {each}" for each in sorted(said)]
    if odd:
        raise UnsupportedError(f"{module.name}: with {', '.join(odd)}; only groups in order are read")


def is_shifted(module: Module, bits: int) -> bool:
    """Whether a number is taken from those of each group of so many bits before they are scaled.

    Raises:
        UnsupportedError: there are zero points, and no group of the configuration has some.
    """
    said = [each.get("symmetric") is False for each in weight_groups(module) if each.get("num_bits") == bits]
    is_there = ZERO_POINT in module.by_key
    if is_there and not any(said):
        raise UnsupportedError(
            f"{module.name}: with {ZERO_POINT}, where the configuration says symmetric groups"
        )
    return is_there or (bool(said) and all(said))
