"""Causes that involve another array, or two causes at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import relayout
from ckpttools.compare.causes.axes import rope_layout, transposed
from ckpttools.compare.causes.base import Case, Cause, Claim, Hypothesis, detector
from ckpttools.compare.causes.factors import factor, norm_offset
from ckpttools.compare.samples import read_sample_values, to_common_dtype
from ckpttools.core.message_terms import option

# Few arrays have the shape of an embedding or a head, but many have that of a projection.
_MAX_ALIKE = 8


@detector("renamed", Claim.OTHER_ARRAY, of_single_arrays=True)
def renamed(case: Case) -> Iterator[Hypothesis]:
    """Find arrays of A that equal this array of B: swapped names or shifted layers."""
    if case.candidates is not None:
        for name, array in case.candidates.like(case.b):
            if name != case.name:
                cause = Cause("renamed", f"B has A's {name} under this name")
                yield Hypothesis(cause, (to_common_dtype(array, case.b),), origin=name)


@detector("moved-and-changed", Claim.TWO_AT_ONCE)
def moved_and_changed(case: Case) -> Iterator[Hypothesis]:
    """Detect elements that are both moved and multiplied, like a query converted with other rows."""
    for moves, values in itertools.product((rope_layout, transposed), (norm_offset, factor)):
        for move in moves.hypotheses(case):
            ((result, _),) = move.pairs
            for change in values.hypotheses(replace(case, a=result, candidates=None)):
                text = f"{move.cause.text}, and then {change.cause.text}"
                advice = "; ".join(filter(None, (move.cause.advice, change.cause.advice)))
                cause = Cause(f"{move.cause.name}+{change.cause.name}", text, advice)
                yield Hypothesis(cause, change.pairs, change.ulps)


def tied(name: str, side: str, own: Mapping[str, LazyArray]) -> Iterator[Hypothesis]:
    """Yield arrays that a one-sided array equals, on the same side: an output head and its embedding."""
    array = own[name]
    shapes = (array.shape, array.shape[::-1])
    same_shape = {other: item for other, item in own.items() if other != name and item.shape in shapes}
    if len(array.shape) != 2 or len(same_shape) > _MAX_ALIKE:
        return
    sample_values = read_sample_values(array)
    if np.all(sample_values == sample_values[:1]):
        # Constants, such as the values of a new adapter, are equal by coincidence.
        return
    options = " or ".join(option("tied", mode) for mode in ("drop", "materialize"))
    for other, same in same_shape.items():
        if same.dtype == array.dtype:
            cause = Cause(
                "tied",
                f"it is {side}'s {other}",
                f"the other side ties them: a conversion with {options} makes both equal",
            )
            transposed = (
                same
                if same.shape == array.shape
                else relayout(same, [(n,) for n in same.shape], (1, 0), (1, 1))
            )
            yield Hypothesis(cause, ((transposed, array),))
