"""Finding out why arrays differ: every cause is tried on a few elements, and what fits there on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from ckpttools.ir.array import LazyArray
from ckpttools.ir.scratch import Scratch
from ckpttools.plan.pieces import Item
from ckpttools.prove.bits import same_bits
from ckpttools.prove.causes import (
    CAUSES,
    CAUSES_OF_SHAPES,
    ENOUGH,
    Case,
    Cause,
    Causes,
    Hypothesis,
    another_array,
    tied,
)
from ckpttools.prove.deviation import SCRATCH_BYTES
from ckpttools.prove.diff import ArrayDiff
from ckpttools.prove.relatives import Relatives, moves, template
from ckpttools.prove.samples import boxes, close, same_in
from ckpttools.region import Region
from ckpttools.run.scanning import scan

# Of arrays that differ in numbers only, all causes are tried on so many; on the others those that fit there.
_PROBES = 3
# Of the hypotheses that fit a sample so many are looked at on the whole, one after the other.
_MOST_FITTING = 3


def explain(
    found: Sequence[ArrayDiff],
    a: Mapping[str, LazyArray],
    b: Mapping[str, LazyArray],
    sizes: Mapping[str, int] | None = None,
    *,
    memory: int,
    jobs: int,
    observe: Callable[[int], None] = lambda nbytes: None,
) -> tuple[ArrayDiff, ...]:
    """The same with causes, where all elements of an array agree with one.

    Args:
        found: what `ckpttools.prove.diff.diff` found.
        a, b: the arrays that it compared.
        sizes: lengths of the model's axes, as far as they are known.
        memory, jobs, observe: as `diff`.

    Raises:
        CheckpointError: an array cannot be read, or the memory is too small.
    """
    fitting = dict(_fitting(found, a, b, sizes or {}))
    proved: dict[str, Hypothesis] = {}
    for _ in range(_MOST_FITTING):
        tried = {name: next(each, None) for name, each in fitting.items() if name not in proved}
        likely = {name: each for name, each in tried.items() if each is not None}
        failed = _failed(list(likely.values()), memory, jobs, observe)
        proved |= {name: each for k, (name, each) in enumerate(likely.items()) if k not in failed}
    causes = {name: each.cause for name, each in proved.items()} | _causes_of_moves(proved)
    return tuple(replace(each, cause=causes.get(each.name)) for each in found)


def _causes_of_moves(proved: Mapping[str, Hypothesis]) -> dict[str, Cause]:
    named = moves({name: each.origin for name, each in proved.items() if each.origin is not None})
    return {name: Cause(move.kind, move.text, move.advice) for name, move in named.items()}


def _fitting(
    found: Sequence[ArrayDiff],
    a: Mapping[str, LazyArray],
    b: Mapping[str, LazyArray],
    sizes: Mapping[str, int],
) -> Iterator[tuple[str, Iterator[Hypothesis]]]:
    """Names and, found when asked for, what fits a sample of their arrays."""
    relatives = Relatives(a, b)
    groups: dict[tuple[str, str], list[Case]] = {}
    for each in found:
        if each.outcome.startswith("only"):
            side, own = ("A", a) if each.b is None else ("B", b)
            yield each.name, filter(_fits, tied(each.name, own[each.name], side, own))
        elif _is_worth_a_look(each):
            first = each.deviation.first if each.deviation else None
            case = Case(each.name, a[each.name], b[each.name], first, sizes, relatives)
            groups.setdefault((template(each.name), each.outcome), []).append(case)
    for (_, outcome), cases in groups.items():
        yield from _of_group(cases, CAUSES if outcome == "differs" else CAUSES_OF_SHAPES)


def _is_worth_a_look(each: ArrayDiff) -> bool:
    """Whether so much differs that more than chance can be told from it."""
    if each.outcome == "shape":
        return True
    return each.outcome == "differs" and each.deviation is not None and each.deviation.differing >= ENOUGH


def _of_group(cases: list[Case], causes: Sequence[Causes]) -> Iterator[tuple[str, Iterator[Hypothesis]]]:
    """Arrays of one name but for numbers: what fits no probe is not looked for in all the others."""
    step = -(-len(cases) // _PROBES)
    known: set[Causes] = {another_array}
    for case in cases[::step]:
        fits = _that_fit(case, causes)
        first = next(fits, None)
        if first is not None:
            known.add(first[0])
            yield case.name, (each for _, each in chain([first], fits))
    for number, case in enumerate(cases):
        if number % step:
            yield case.name, (each for _, each in _that_fit(case, [c for c in causes if c in known]))


def _that_fit(case: Case, causes: Sequence[Causes]) -> Iterator[tuple[Causes, Hypothesis]]:
    return ((cause, each) for cause in causes for each in cause(case) if _fits(each))


def _fits(hypothesis: Hypothesis) -> bool:
    return all(
        same_in(box, left, right, hypothesis.ulps)
        for left, right in hypothesis.pairs
        for box in boxes(right.shape)
    )


@dataclass(frozen=True, slots=True)
class _Proof:
    """Two arrays that should be the same, and the number of the hypothesis that says so."""

    number: int
    left: LazyArray
    right: LazyArray
    ulps: int


def _failed(
    hypotheses: Sequence[Hypothesis], memory: int, jobs: int, observe: Callable[[int], None]
) -> set[int]:
    """The hypotheses, by number, that do not hold for all elements."""
    proofs = [
        _Proof(number, left, right, each.ulps)
        for number, each in enumerate(hypotheses)
        for left, right in each.pairs
    ]

    def visit(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> bool:
        proof = proofs[index]
        dtypes = proof.left.dtype, proof.right.dtype
        if dtypes[0] == dtypes[1] and same_bits(*values):
            return True
        return close(values[0], values[1], dtypes, proof.ulps)

    items: list[Item] = [(each.left, each.right) for each in proofs]
    if not items:
        return set()
    seen = scan(items, visit, memory=memory, jobs=jobs, scratch=SCRATCH_BYTES, observe=observe)
    return {proofs[each.index].number for each in seen if not each.result}
