"""Codes and scales that differ, and stand for the same numbers: one number is several codes times scales."""

from __future__ import annotations

from collections.abc import Collection

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree
from ckpttools.core.errors import FormatError
from ckpttools.core.text import array_count
from ckpttools.digest.pairing import Pairing
from ckpttools.quantized.dequantized_tree import numbers_of, weights_with


def same_numbers(
    a: Tree, b: Tree, differing: Collection[LazyArray], *, memory: int, jobs: int | None
) -> tuple[str, ...]:
    """What to say where nothing differs but codes and scales that stand for the same numbers.

    Args:
        a, b: the checkpoints.
        differing: those arrays of `a`, or made of such, that are not in `b` as they are.
        memory, jobs: as of `ckpttools.compare.verify.compare`.

    Raises:
        CheckpointError: an array cannot be read, or the memory is too small.
    """
    from ckpttools.compare.verify import compare

    names = weights_with(a, differing)
    mine, expected = numbers_of(a, names), numbers_of(b, names)
    if not names or mine.keys() != expected.keys():
        return ()
    smallest = min(mine, key=lambda name: mine[name].nbytes)
    try:
        # Two models differ in any of their weights: one is read before all are.
        for chosen in ({smallest}, names):
            sides = {name: mine[name] for name in chosen}, {name: expected[name] for name in chosen}
            if compare(Pairing(*sides), memory=memory, jobs=jobs):
                return ()
    except FormatError:
        # Scales that make no finite number.
        return ()
    return (
        f"dequantised, they are equal: codes and scales of {array_count(names)} differ, but their products "
        "in float32 do not",
    )
