"""Find out why arrays differ: try every cause on a few elements, and those that fit on all elements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.scratch import Scratch
from ckpttools.compare.causes import DETECTORS
from ckpttools.compare.causes.base import MIN_EVIDENCE, Case, Detector, Hypothesis
from ckpttools.compare.causes.others import tied
from ckpttools.compare.diff import ArrayDiff
from ckpttools.compare.measure import SCRATCH_BYTES
from ckpttools.compare.renames import Candidates, moves, template
from ckpttools.compare.samples import boxes, close, is_equal_within, load_for_sampling
from ckpttools.compare.verify import have_equal_bits
from ckpttools.core.region import Region
from ckpttools.digest.pairing import Pairing
from ckpttools.plan.pieces import Item
from ckpttools.run.scanning import scan

# Number of arrays on which all causes are tried, among arrays whose names differ only in numbers. On the
# others, only causes that fit a probe are tried.
_PROBES = 3
# Number of hypotheses that fit a sample and are checked in full, one after the other.
_MAX_FITTING = 3
# Each copy may take this part of the memory: there are two copies, each made from another one.
_COPIES = 8


def explain(
    result: Sequence[ArrayDiff],
    both: Pairing[LazyArray],
    *,
    detectors: Collection[Detector] = DETECTORS,
    memory: int,
    jobs: int | None,
    observe: Callable[[int], None] = lambda nbytes: None,
) -> tuple[ArrayDiff, ...]:
    """Add a cause to each entry whose arrays agree in all elements given that cause.

    Args:
        result: Result of `ckpttools.compare.diff.diff`.
        both: The compared arrays, and others with which they may have been confused.
        detectors: Detectors of causes, in any order.
        memory, jobs, observe: See `diff`.

    Raises:
        CheckpointError: An array cannot be read, or the memory is too small.
    """
    ranked = sorted(detectors, key=lambda detector: detector.rank)
    hypotheses = dict(_fitting_hypotheses(result, both, ranked, memory // _COPIES))
    proved: dict[str, Hypothesis] = {}
    for number in range(_MAX_FITTING):
        open_ = {name: item for name, item in hypotheses.items() if name not in proved and number < len(item)}
        tried = [item[number] for item in open_.values()]
        failed = _rejected_hypotheses(tried, memory, jobs, observe)
        proved |= {name: tried[k] for k, name in enumerate(open_) if k not in failed}
    moved = moves({name: item.origin for name, item in proved.items() if item.origin is not None})
    causes = {name: item.cause for name, item in proved.items()} | moved
    return tuple(replace(item, cause=causes.get(item.name)) for item in result)


def _fitting_hypotheses(
    result: Sequence[ArrayDiff],
    both: Pairing[LazyArray],
    ranked: Sequence[Detector],
    room: int,
) -> Iterator[tuple[str, list[Hypothesis]]]:
    """Yield names, with the hypotheses that fit a sample of their arrays."""
    a, b, candidates = both.a, both.b, Candidates(both.a)
    groups: dict[tuple[str, str], list[Case]] = {}
    for item in result:
        if item.a is None or item.b is None:
            side, own = ("A", a) if item.b is None else ("B", b)
            yield item.name, list(filter(_fits, tied(item.name, side, own)))
        elif _has_enough_evidence(item) and not (item.outcome == "shape" and _is_constant(a[item.name])):
            first = item.deviation.first if item.deviation else None
            case = Case(item.name, a[item.name], b[item.name], first, both.sizes, candidates)
            groups.setdefault((template(item.name), item.outcome), []).append(case)
    for cases in groups.values():
        yield from _explain_group(cases, [item for item in ranked if item.applies_to(cases[0])], room)


def _has_enough_evidence(diff: ArrayDiff) -> bool:
    """Return whether enough elements differ to rule out a coincidence."""
    if diff.outcome == "shape":
        return True
    return (
        diff.outcome == "differs"
        and diff.deviation is not None
        and diff.deviation.num_differing >= MIN_EVIDENCE
    )


def _is_constant(array: LazyArray) -> bool:
    """Return whether a sample has only one value, so that the order of elements shows nothing."""
    sample = np.concatenate([array.read(box).reshape(-1) for box in boxes(array.shape)] or [np.empty(0)])
    if sample.dtype == np.bool_:
        sample = sample.view(np.uint8) != 0
    # Some NaN values cause numpy warnings.
    with np.errstate(invalid="ignore"):
        return bool((sample == sample[:1]).all())


def _explain_group(
    cases: list[Case], ranked: Sequence[Detector], room: int
) -> Iterator[tuple[str, list[Hypothesis]]]:
    """Yield arrays whose names differ only in numbers.

    Causes that fit no probe are not tried on the others.
    """
    step = -(-len(cases) // _PROBES)
    known = {item for item in ranked if item.of_single_arrays}
    for case in cases[::step]:
        result = _first_fitting(case, ranked, room)
        known |= result.keys()
        yield case.name, [item for hypotheses in result.values() for item in hypotheses]
    candidates = [item for item in ranked if item in known]
    for number, case in enumerate(cases):
        if number % step:
            yield (
                case.name,
                [
                    item
                    for hypotheses in _first_fitting(case, candidates, room).values()
                    for item in hypotheses
                ],
            )


def _first_fitting(case: Case, ranked: Sequence[Detector], room: int) -> dict[Detector, list[Hypothesis]]:
    """Return the first detector with hypotheses that fit a sample, and the first few of these hypotheses."""
    # Hypotheses tried on copies are identified by number, so that no copy outlives the search.
    near = replace(case, a=load_for_sampling(case.a, room), b=load_for_sampling(case.b, room))
    for detector in ranked:
        matching = (number for number, item in enumerate(detector.hypotheses(near)) if _fits(item))
        numbers = list(islice(matching, _MAX_FITTING))
        if numbers:
            return {detector: [h for number, h in enumerate(detector.hypotheses(case)) if number in numbers]}
    return {}


def _fits(hypothesis: Hypothesis) -> bool:
    return all(
        is_equal_within(box, left, right, hypothesis.ulps)
        for left, right in hypothesis.pairs
        for box in boxes(right.shape)
    )


def _rejected_hypotheses(
    hypotheses: Sequence[Hypothesis], memory: int, jobs: int | None, observe: Callable[[int], None]
) -> set[int]:
    """Return the indices of the hypotheses that do not hold for all elements."""
    items: list[Item] = [pair for hypothese in hypotheses for pair in hypothese.pairs]
    numbers = [number for number, item in enumerate(hypotheses) for _ in item.pairs]

    def visit(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> bool:
        left, right = items[index]
        if left.dtype == right.dtype and have_equal_bits(*values):
            return True
        ulps = hypotheses[numbers[index]].ulps
        return close(values[0], values[1], (left.dtype, right.dtype), ulps, scratch)

    if not items:
        return set()
    results = scan(items, visit, memory=memory, jobs=jobs, scratch=SCRATCH_BYTES, observe=observe)
    return {numbers[item.index] for item in results if not item.result}
