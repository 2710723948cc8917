"""Compare two sets of arrays value by value: equal arrays, differences with their size, and one-sided
arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.read_blocks import subview
from ckpttools.array.scratch import Scratch
from ckpttools.compare.measure import EXACT, SCRATCH_BYTES, Deviation, Tolerances, block_elements, deviation
from ckpttools.compare.verify import same_bits, side_by_side
from ckpttools.core.budget import estimate_names_bytes
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Region, Shape, split_evenly
from ckpttools.core.text import sort_naturally
from ckpttools.digest.pairing import LeafDifference, Pairing
from ckpttools.digest.stacks import WholeArray
from ckpttools.plan.pieces import Item
from ckpttools.run.scanning import scan

if TYPE_CHECKING:
    from ckpttools.compare.causes.base import Cause

Outcome = Literal["differs", "shape", "kind", "dtype", "bits", "only in A", "only in B", "within", "equal"]
"""The outcome for an array, worst first. The last two count as equal."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An array without its values."""

    dtype: str
    shape: Shape

    @classmethod
    def of(cls, array: LazyArray) -> ArrayType:
        return cls(array.dtype.name, array.shape)


@dataclass(frozen=True, slots=True)
class ArrayDiff:
    """An array of A and its counterpart in B.

    Attributes:
        name: Name of the array.
        outcome: One of `OUTCOMES`. "kind": a leaf that is not an array, or of another kind; "dtype": another
            dtype with the same numbers or with numbers within the tolerances; "bits": the same numbers, with
            another sign of zero or other bits of NaN, and no tolerance; "within": other numbers or bits
            within the tolerances.
        a, b: The leaf on each side, or None.
        deviation: Size of the difference; None if the leaves cannot be compared.
        cause: Cause of the difference, if known.
    """

    name: str
    outcome: Outcome
    a: ArrayType | None
    b: ArrayType | None
    deviation: Deviation | None = None
    cause: Cause | None = None

    @property
    def is_equal(self) -> bool:
        return self.outcome in ("equal", "within")


def diff(
    both: Pairing[LazyArray],
    tolerances: Tolerances = EXACT,
    *,
    ignore_dtypes: bool = False,
    memory: int,
    jobs: int | None,
    observe: Callable[[int], None] = lambda nbytes: None,
) -> tuple[ArrayDiff, ...]:
    """Compare every array of both sides, in the order of names.

    Args:
        both: The arrays.
        tolerances: Differences to ignore.
        ignore_dtypes: Whether the same numbers in another dtype count as equal.
        memory: Maximum resident bytes.
        jobs: Number of workers.
        observe: Called with the bytes of each piece that was read, of both sides.

    Raises:
        CheckpointError: An array cannot be read, or the memory is too small.
    """
    of_one_shape = {name: a for name, a, b in both.pairs if a.shape == b.shape}
    result = _deviations(of_one_shape, both.b, tolerances, memory, jobs, observe)
    built = {
        name: ArrayDiff(name, "only in A", ArrayType.of(array), None) for name, array in both.only_a.items()
    }
    built |= {
        name: ArrayDiff(name, "only in B", None, ArrayType.of(array)) for name, array in both.only_b.items()
    }
    for name, a, b in both.pairs:
        if name in of_one_shape:
            total = replace(result.get(name, Deviation()), elements=a.size)
            outcome = _outcome(total, ignore_dtypes or a.dtype == b.dtype, tolerances)
            built[name] = ArrayDiff(name, outcome, ArrayType.of(a), ArrayType.of(b), total)
        else:
            built[name] = ArrayDiff(name, "shape", ArrayType.of(a), ArrayType.of(b))
    return tuple(built[name] for name in sort_naturally(built))


def _outcome(total: Deviation, same_type: bool, tolerances: Tolerances) -> Outcome:
    if total.beyond:
        return "differs"
    if not same_type:
        return "dtype"
    if total.other_bits and not tolerances.any:
        return "bits"
    return "within" if total.differing or total.other_bits else "equal"


def of_leaf(each: LeafDifference) -> ArrayDiff:
    """Return the entry of a leaf that is not an array, or of another kind."""
    a, b = (None if kind is None else ArrayType(kind, ()) for kind in (each.a, each.b))
    return ArrayDiff(each.name, "only in B" if a is None else "only in A" if b is None else "kind", a, b)


_Deviations = dict[str, Deviation]


def _deviations(
    a: Mapping[str, LazyArray],
    b: Mapping[str, LazyArray],
    tolerances: Tolerances,
    memory: int,
    jobs: int | None,
    observe: Callable[[int], None],
) -> _Deviations:
    """Return the deviations of arrays. Arrays without a deviation are bit-identical."""
    by_dtypes: dict[tuple[DType, DType], dict[str, LazyArray]] = {}
    for name, array in a.items():
        by_dtypes.setdefault((array.dtype, b[name].dtype), {})[name] = array
    pairs = [pair for arrays in by_dtypes.values() for pair in side_by_side(arrays, b)]
    dtypes = [(whole.array.dtype, other.dtype) for whole, other in pairs]

    def visit(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> _Deviations:
        if dtypes[index][0] == dtypes[index][1] and same_bits(*values):
            return {}
        return _joined(_apart(pairs[index][0], region, values, dtypes[index], tolerances, scratch))

    items: list[Item] = [(whole.array, other) for whole, other in pairs]
    seen = scan(
        items,
        visit,
        memory=memory,
        jobs=jobs,
        scratch=SCRATCH_BYTES,
        reserved=estimate_names_bytes(a),
        observe=observe,
        name=lambda index: pairs[index][0].name,
    )
    return _joined(result for item in seen for result in item.result.items())


def _joined(parts: Iterator[tuple[str, Deviation]]) -> _Deviations:
    result: _Deviations = {}
    for name, part in parts:
        result[name] = result[name] + part if name in result else part
    return result


def _apart(
    whole: WholeArray,
    region: Region,
    values: tuple[np.ndarray, ...],
    dtypes: tuple[DType, DType],
    tolerances: Tolerances,
    scratch: Scratch,
) -> Iterator[tuple[str, Deviation]]:
    """Yield the deviations of the parts of a piece, block by block."""
    for block in split_evenly(region, block_elements(dtypes)):
        here, there = (subview(item, block.relative_to(region)) for item in values)
        for (name, inner, mine), (_, _, theirs) in zip(
            whole.split(block, here), whole.split(block, there), strict=True
        ):
            blocks = np.ascontiguousarray(mine), np.ascontiguousarray(theirs)
            part = deviation(*blocks, dtypes, tolerances, scratch)
            if part.first is not None:
                # numpy turns rank 0 into rank 1, but the only index of the array is empty.
                index = part.first[: inner.rank]
                first = tuple(start + k for start, k in zip(inner.start, index, strict=True))
                part = replace(part, first=first)
            if part.differing or part.other_bits:
                yield name, part
