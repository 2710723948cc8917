"""Finding out why arrays differ: every cause is tried on a few elements, and those that fit on all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.scratch import Scratch
from ckpttools.compare.bits import same_bits
from ckpttools.compare.causes import DETECTORS
from ckpttools.compare.causes.base import ENOUGH, Case, Detector, Hypothesis
from ckpttools.compare.causes.others import tied
from ckpttools.compare.diff import ArrayDiff
from ckpttools.compare.measure import SCRATCH_BYTES
from ckpttools.compare.renames import Candidates, moves, template
from ckpttools.compare.samples import boxes, close, in_memory, same_in
from ckpttools.core.region import Region
from ckpttools.digest.pairing import Pairing
from ckpttools.plan.pieces import Item
from ckpttools.run.scanning import scan

# Of arrays whose names differ only in numbers, all causes are tried on so many; on the others those that fit.
_PROBES = 3
# Of the hypotheses that fit a sample so many are looked at on the whole, one after the other.
_MOST_FITTING = 3
# A copy of an array has room in this part of the memory: there are two, each made from another one.
_COPIES = 8


def explain(
    found: Sequence[ArrayDiff],
    both: Pairing[LazyArray],
    *,
    detectors: Collection[Detector] = DETECTORS,
    memory: int,
    jobs: int | None,
    observe: Callable[[int], None] = lambda nbytes: None,
) -> tuple[ArrayDiff, ...]:
    """The same with causes, for arrays of which all elements agree with one.

    Args:
        found: what `ckpttools.compare.diff.diff` found.
        both: the arrays that it compared, and others that they may have been confused with.
        detectors: of causes, in any order.
        memory, jobs, observe: as `diff`.

    Raises:
        CheckpointError: an array cannot be read, or the memory is too small.
    """
    ranked = sorted(detectors, key=lambda each: each.rank)
    fitting = dict(_fitting(found, both, ranked, memory // _COPIES))
    proved: dict[str, Hypothesis] = {}
    for number in range(_MOST_FITTING):
        open_ = {name: each for name, each in fitting.items() if name not in proved and number < len(each)}
        tried = [each[number] for each in open_.values()]
        failed = _failed(tried, memory, jobs, observe)
        proved |= {name: tried[k] for k, name in enumerate(open_) if k not in failed}
    moved = moves({name: each.origin for name, each in proved.items() if each.origin is not None})
    causes = {name: each.cause for name, each in proved.items()} | moved
    return tuple(replace(each, cause=causes.get(each.name)) for each in found)


def _fitting(
    found: Sequence[ArrayDiff],
    both: Pairing[LazyArray],
    ranked: Sequence[Detector],
    room: int,
) -> Iterator[tuple[str, list[Hypothesis]]]:
    """Names and the hypotheses that fit a sample of their arrays."""
    a, b, candidates = both.a, both.b, Candidates(both.a)
    groups: dict[tuple[str, str], list[Case]] = {}
    for each in found:
        if each.a is None or each.b is None:
            side, own = ("A", a) if each.b is None else ("B", b)
            yield each.name, list(filter(_fits, tied(each.name, side, own)))
        elif _is_worth_a_look(each) and not (each.outcome == "shape" and _is_constant(a[each.name])):
            first = each.deviation.first if each.deviation else None
            case = Case(each.name, a[each.name], b[each.name], first, both.sizes, candidates)
            groups.setdefault((template(each.name), each.outcome), []).append(case)
    for cases in groups.values():
        yield from _of_group(cases, [each for each in ranked if each.looks_at(cases[0])], room)


def _is_worth_a_look(each: ArrayDiff) -> bool:
    """Whether enough differs for evidence beyond chance."""
    if each.outcome == "shape":
        return True
    return each.outcome == "differs" and each.deviation is not None and each.deviation.differing >= ENOUGH


def _is_constant(array: LazyArray) -> bool:
    """Whether a sample holds only one number, so that the order of elements means nothing."""
    sample = np.concatenate([array.read(box).reshape(-1) for box in boxes(array.shape)] or [np.empty(0)])
    if sample.dtype == np.bool_:
        sample = sample.view(np.uint8) != 0
    # Some NaN make numpy complain.
    with np.errstate(invalid="ignore"):
        return bool((sample == sample[:1]).all())


def _of_group(
    cases: list[Case], ranked: Sequence[Detector], room: int
) -> Iterator[tuple[str, list[Hypothesis]]]:
    """Arrays whose names differ only in numbers: what fits no probe is not tried on the others."""
    step = -(-len(cases) // _PROBES)
    known = {each for each in ranked if each.of_single_arrays}
    for case in cases[::step]:
        found = _that_fit(case, ranked, room)
        known |= found.keys()
        yield case.name, [each for fitting in found.values() for each in fitting]
    some = [each for each in ranked if each in known]
    for number, case in enumerate(cases):
        if number % step:
            yield case.name, [each for fitting in _that_fit(case, some, room).values() for each in fitting]


def _that_fit(case: Case, ranked: Sequence[Detector], room: int) -> dict[Detector, list[Hypothesis]]:
    """The first detector with hypotheses that fit a sample, and the first few of these."""
    # Hypotheses tried on copies are identified by number, so that no copy outlives the search.
    near = replace(case, a=in_memory(case.a, room), b=in_memory(case.b, room))
    for detector in ranked:
        fitting = (number for number, each in enumerate(detector.hypotheses(near)) if _fits(each))
        numbers = list(islice(fitting, _MOST_FITTING))
        if numbers:
            return {detector: [h for number, h in enumerate(detector.hypotheses(case)) if number in numbers]}
    return {}


def _fits(hypothesis: Hypothesis) -> bool:
    return all(
        same_in(box, left, right, hypothesis.ulps)
        for left, right in hypothesis.pairs
        for box in boxes(right.shape)
    )


def _failed(
    hypotheses: Sequence[Hypothesis], memory: int, jobs: int | None, observe: Callable[[int], None]
) -> set[int]:
    """The hypotheses, by number, that do not hold for all elements."""
    items: list[Item] = [pair for each in hypotheses for pair in each.pairs]
    numbers = [number for number, each in enumerate(hypotheses) for _ in each.pairs]

    def visit(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> bool:
        left, right = items[index]
        if left.dtype == right.dtype and same_bits(*values):
            return True
        ulps = hypotheses[numbers[index]].ulps
        return close(values[0], values[1], (left.dtype, right.dtype), ulps, scratch)

    if not items:
        return set()
    seen = scan(items, visit, memory=memory, jobs=jobs, scratch=SCRATCH_BYTES, observe=observe)
    return {numbers[each.index] for each in seen if not each.result}
