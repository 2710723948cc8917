"""Compare two sets of arrays value by value: equal arrays, differences with their size, and one-sided
arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.read_blocks import subview
from ckpttools.array.scratch import Scratch
from ckpttools.compare.measure import EXACT, SCRATCH_BYTES, Deviation, Tolerances, block_elements, deviation
from ckpttools.compare.norms import Distance, Sums, sums
from ckpttools.compare.verify import have_equal_bits, side_by_side
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.memory_limit import estimate_names_bytes
from ckpttools.core.region import Region, Shape, split_evenly
from ckpttools.core.text import sort_naturally
from ckpttools.digest.pairing import LeafDifference, Pairing
from ckpttools.digest.stacks import WholeArray
from ckpttools.plan.pieces import Item
from ckpttools.roles.of_tree import Role
from ckpttools.run.scanning import scan

if TYPE_CHECKING:
    from ckpttools.compare.causes.base import Cause

Outcome = Literal["differs", "shape", "kind", "dtype", "bits", "only in A", "only in B", "within", "equal"]
"""The outcome for an array, worst first. The last two count as equal."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# Norms take less time with the sparse method if fewer than 1/8 of the elements have different bits.
_SPARSE = 8


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
        distance: Distance as vectors; None if the leaves are bit-identical or cannot be compared.
        cause: Cause of the difference, if known.
        role: Whether the array is a parameter or training state.
    """

    name: str
    outcome: Outcome
    a: ArrayType | None
    b: ArrayType | None
    deviation: Deviation | None = None
    distance: Distance | None = None
    cause: Cause | None = None
    role: Role = "parameter"

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
    result = _measures(of_one_shape, both.b, tolerances, memory, jobs, observe)
    built = {
        name: ArrayDiff(name, "only in A", ArrayType.of(array), None) for name, array in both.only_a.items()
    }
    built |= {
        name: ArrayDiff(name, "only in B", None, ArrayType.of(array)) for name, array in both.only_b.items()
    }
    for name, a, b in both.pairs:
        if name in of_one_shape:
            total, distance = result.get(name, (Deviation(), None))
            total = replace(total, elements=a.size)
            outcome = _outcome(total, ignore_dtypes or a.dtype == b.dtype, tolerances)
            built[name] = ArrayDiff(name, outcome, ArrayType.of(a), ArrayType.of(b), total, distance)
        else:
            built[name] = ArrayDiff(name, "shape", ArrayType.of(a), ArrayType.of(b))
    return tuple(built[name] for name in sort_naturally(built))


def _outcome(total: Deviation, same_type: bool, tolerances: Tolerances) -> Outcome:
    if total.num_exceeding:
        return "differs"
    if not same_type:
        return "dtype"
    if total.other_bits and not tolerances.any:
        return "bits"
    return "within" if total.num_differing or total.other_bits else "equal"


def leaf_diff(difference: LeafDifference) -> ArrayDiff:
    """Return the entry of a leaf that is not an array, or of another kind."""
    a, b = (None if kind is None else ArrayType(kind, ()) for kind in (difference.a, difference.b))
    return ArrayDiff(
        difference.name, "only in B" if a is None else "only in A" if b is None else "kind", a, b
    )


_Measured = dict[str, tuple[Deviation, Sums]]
"""The measures of arrays, or of parts of them, by name."""


def _measures(
    a: Mapping[str, LazyArray],
    b: Mapping[str, LazyArray],
    tolerances: Tolerances,
    memory: int,
    jobs: int | None,
    observe: Callable[[int], None],
) -> dict[str, tuple[Deviation, Distance]]:
    """Return the deviations and distances of arrays; missing ones are bit-identical.

    Equal checkpoints need no norms, so bit-identical pieces are measured only if their array differs. Where
    they come before its first difference, one side of them is read again.
    """
    by_dtypes: dict[tuple[DType, DType], dict[str, LazyArray]] = {}
    for name, array in a.items():
        by_dtypes.setdefault((array.dtype, b[name].dtype), {})[name] = array
    pairs = [pair for arrays in by_dtypes.values() for pair in side_by_side(arrays, b)]
    measurer = _PairMeasurer(pairs, tolerances)
    items: list[Item] = [(full.array, other) for full, other in pairs]
    seen = scan(
        items,
        measurer.compare,
        memory=memory,
        jobs=jobs,
        scratch=SCRATCH_BYTES,
        reserved=estimate_names_bytes(a),
        observe=observe,
        name=measurer.name,
    )
    result: dict[str, tuple[Deviation, Distance]] = {}
    partial: dict[int, _Measured] = {}
    unmeasured: dict[int, list[Region]] = {}
    for index, pieces in groupby(seen, key=lambda item: item.index):
        known, equal_regions = _Measured(), list[Region]()
        for piece in pieces:
            if piece.result is None:
                equal_regions.append(piece.region)
            else:
                _merge(known, piece.result)
        if known and equal_regions:
            partial[index], unmeasured[index] = known, equal_regions
        else:
            result |= measurer.finished(index, known)
    if partial:
        _add_alike(measurer, partial, unmeasured, memory, jobs)
    for index, known in partial.items():
        result |= measurer.finished(index, known)
    return result


def _add_alike(
    measurer: _PairMeasurer,
    partial: Mapping[int, _Measured],
    unmeasured: Mapping[int, Sequence[Region]],
    memory: int,
    jobs: int | None,
) -> None:
    """Add the bit-identical regions of pairs, by index, to what is known of them. Reads one side."""
    indices, regions = list(partial), iter(unmeasured.values())
    items: list[Item] = [(measurer.pairs[index][0].array,) for index in indices]
    rest = scan(
        items,
        lambda k, *piece: measurer.measure_alike(indices[k], *piece),
        memory=memory,
        jobs=jobs,
        cut=lambda item, limit: (part for region in next(regions) for part in split_evenly(region, limit)),
        scratch=SCRATCH_BYTES,
        reserved=estimate_names_bytes(name for known in partial.values() for name in known),
        name=lambda k: measurer.name(indices[k]),
    )
    for item in rest:
        _merge(partial[indices[item.index]], item.result)


def _merge(known: _Measured, parts: Mapping[str, tuple[Deviation, Sums]]) -> None:
    for name, part in parts.items():
        before = known.get(name)
        known[name] = part if before is None else (before[0] + part[0], before[1] + part[1])


@dataclass(frozen=True)
class _PairMeasurer:
    """Measures pieces of arrays, in several threads at once.

    Attributes:
        pairs: Arrays of A with their parts, and of B.
        tolerances: Differences that do not count.
        differing: Indices of the pairs that are known to differ.
    """

    pairs: Sequence[tuple[WholeArray, LazyArray]]
    tolerances: Tolerances
    differing: set[int] = field(default_factory=set)

    def name(self, index: int) -> str:
        return self.pairs[index][0].name

    def dtypes(self, index: int) -> tuple[DType, DType]:
        full, other = self.pairs[index]
        return full.array.dtype, other.dtype

    def compare(
        self, index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch
    ) -> _Measured | None:
        """Return the measures of a piece; None if it and all earlier ones of its pair are bit-identical."""
        dtypes = self.dtypes(index)
        if dtypes[0] == dtypes[1] and have_equal_bits(*values):
            if index not in self.differing:
                return None
            return self.measure_alike(index, region, values, scratch)
        self.differing.add(index)
        return self._parts(index, region, values, scratch)

    def measure_alike(
        self, index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch
    ) -> _Measured:
        """Return the measures of a piece that is bit-identical on both sides."""
        return self._parts(index, region, values[:1], scratch)

    def _parts(
        self, index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch
    ) -> _Measured:
        """Measure the parts of a piece, block by block."""
        full, dtypes, result = self.pairs[index][0], self.dtypes(index), _Measured()
        for block in split_evenly(region, block_elements(dtypes)):
            sides = [full.split(block, subview(item, block.relative_to(region))) for item in values]
            for parts in zip(*sides, strict=True):
                name, inner, _ = parts[0]
                mine, *others = (np.ascontiguousarray(view) for _, _, view in parts)
                part = self._measured(inner, mine, *others, dtypes=dtypes, scratch=scratch)
                _merge(result, {name: part})
        return result

    def _measured(
        self,
        region: Region,
        mine: np.ndarray,
        other: np.ndarray | None = None,
        *,
        dtypes: tuple[DType, DType],
        scratch: Scratch,
    ) -> tuple[Deviation, Sums]:
        """Measure a block of an array; `other` is None if it has the bits of `mine`."""
        if other is None:
            return Deviation(), sums(mine, None, dtypes, scratch)
        result = deviation(mine, other, dtypes, self.tolerances, scratch)
        unequal = result.num_differing + result.other_bits if dtypes[0] == dtypes[1] else mine.size
        if result.first is not None:
            # numpy turns rank 0 into rank 1, but the only index of the array is empty.
            index = result.first[: region.rank]
            first = tuple(start + k for start, k in zip(region.start, index, strict=True))
            result = replace(result, first=first)
        is_sparse = _SPARSE * unequal < mine.size
        return result, sums(mine, other if unequal else None, dtypes, scratch, is_sparse=is_sparse)

    def finished(self, index: int, known: _Measured) -> dict[str, tuple[Deviation, Distance]]:
        """Return the measures of a pair's arrays, without those that are bit-identical."""
        one, other = self.dtypes(index)
        return {
            name: (total, Distance.of(products))
            for name, (total, products) in known.items()
            if one != other or total.num_differing or total.other_bits
        }
