"""Finding out why arrays differ: every cause is tried on a few elements, and what fits there on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.scratch import Scratch
from ckpttools.compare.bits import same_bits
from ckpttools.compare.causes import (
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
from ckpttools.compare.diff import ArrayDiff
from ckpttools.compare.measure import SCRATCH_BYTES
from ckpttools.compare.relatives import Relatives, moves, template
from ckpttools.compare.samples import boxes, close, in_memory, same_in
from ckpttools.core.region import Region
from ckpttools.plan.pieces import Item
from ckpttools.run.scanning import scan

# Of arrays that differ in numbers only, all causes are tried on so many; on the others those that fit there.
_PROBES = 3
# Of the hypotheses that fit a sample so many are looked at on the whole, one after the other.
_MOST_FITTING = 3
# A copy of an array has room in this part of the memory: there are two, each made from another one.
_COPIES = 8


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
        found: what `ckpttools.compare.diff.diff` found.
        a, b: the arrays that it compared.
        sizes: lengths of the model's axes, as far as they are known.
        memory, jobs, observe: as `diff`.

    Raises:
        CheckpointError: an array cannot be read, or the memory is too small.
    """
    fitting = dict(_fitting(found, a, b, sizes or {}, memory // _COPIES))
    proved: dict[str, Hypothesis] = {}
    for number in range(_MOST_FITTING):
        open_ = {name: each for name, each in fitting.items() if name not in proved and number < len(each)}
        tried = [each[number] for each in open_.values()]
        failed = _failed(tried, memory, jobs, observe)
        proved |= {name: tried[k] for k, name in enumerate(open_) if k not in failed}
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
    room: int,
) -> Iterator[tuple[str, list[Hypothesis]]]:
    """Names and what fits a sample of their arrays."""
    relatives = Relatives(a, b)
    groups: dict[tuple[str, str], list[Case]] = {}
    for each in found:
        if each.outcome.startswith("only"):
            side, own = ("A", a) if each.b is None else ("B", b)
            yield each.name, list(filter(_fits, tied(each.name, own[each.name], side, own)))
        elif _is_worth_a_look(each) and not (each.outcome == "shape" and _is_constant(a[each.name])):
            first = each.deviation.first if each.deviation else None
            case = Case(each.name, a[each.name], b[each.name], first, sizes, relatives)
            groups.setdefault((template(each.name), each.outcome), []).append(case)
    for (_, outcome), cases in groups.items():
        yield from _of_group(cases, CAUSES if outcome == "differs" else CAUSES_OF_SHAPES, room)


def _is_worth_a_look(each: ArrayDiff) -> bool:
    """Whether so much differs that more than chance can be told from it."""
    if each.outcome == "shape":
        return True
    return each.outcome == "differs" and each.deviation is not None and each.deviation.differing >= ENOUGH


def _is_constant(array: LazyArray) -> bool:
    """Whether a sample holds one number only: any order of elements is as good as another then."""
    sample = np.concatenate([array.read(box).reshape(-1) for box in boxes(array.shape)] or [np.empty(0)])
    if sample.dtype == np.bool_:
        sample = sample.view(np.uint8) != 0
    # Some NaN make numpy complain.
    with np.errstate(invalid="ignore"):
        return bool((sample == sample[:1]).all())


def _of_group(
    cases: list[Case], causes: Sequence[Causes], room: int
) -> Iterator[tuple[str, list[Hypothesis]]]:
    """Arrays of one name but for numbers: what fits no probe is not looked for in all the others."""
    step = -(-len(cases) // _PROBES)
    known: set[Causes] = {another_array}
    for case in cases[::step]:
        found = _that_fit(case, causes, room)
        known |= {cause for cause, _ in found}
        yield case.name, [each for _, each in found]
    for number, case in enumerate(cases):
        if number % step:
            some = [cause for cause in causes if cause in known]
            yield case.name, [each for _, each in _that_fit(case, some, room)]


def _that_fit(case: Case, causes: Sequence[Causes], room: int) -> list[tuple[Causes, Hypothesis]]:
    """The first cause of which hypotheses fit a sample, with the first few of these."""
    # What is tried in memory is found again by its number, so that no copy outlives the search.
    near = replace(case, a=in_memory(case.a, room), b=in_memory(case.b, room))
    for cause in causes:
        fitting = (number for number, each in enumerate(cause(near)) if _fits(each))
        numbers = list(islice(fitting, _MOST_FITTING))
        if numbers:
            return [(cause, each) for number, each in enumerate(cause(case)) if number in numbers]
    return []


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
        return close(values[0], values[1], dtypes, proof.ulps, scratch)

    items: list[Item] = [(each.left, each.right) for each in proofs]
    if not items:
        return set()
    seen = scan(items, visit, memory=memory, jobs=jobs, scratch=SCRATCH_BYTES, observe=observe)
    return {proofs[each.index].number for each in seen if not each.result}
