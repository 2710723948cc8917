"""Extract an adapter from a fine-tuned model: the low-rank difference of each matrix.

The matrices are read in blocks, several times, and are never completely in memory: subspace iteration
from a fixed start, in float64. The same matrices give the same factors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckpttools.adapters.bases import Base
from ckpttools.adapters.factors import Adapter, FactorPair
from ckpttools.adapters.fitting import without_copied_head
from ckpttools.array import read_blocks
from ckpttools.array.fingerprint import sources
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stored
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, MemoryBudgetError, ShapeError, UsageError, listing
from ckpttools.core.memory_limit import format_size
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Note, Notes
from ckpttools.core.region import Region, split_evenly
from ckpttools.core.text import array_count, sample_names, sort_naturally
from ckpttools.quantized.config import is_linear
from ckpttools.stores.base import check_unchanged
from ckpttools.stores.memory import Bytes

if TYPE_CHECKING:
    import numpy as np


_MAX_LISTED = 5


@dataclass(frozen=True)
class ExtractOptions:
    """Options for converting a difference to an adapter.

    Attributes:
        rank: The rank of the factors; the maximum if `error` is given.
        error: The allowed relative error of each matrix, in the Frobenius norm; None for any error.
        dtype: The dtype of the factors.
    """

    rank: int | None
    error: float | None
    dtype: DType

    def __post_init__(self) -> None:
        if self.rank is None and self.error is None:
            hint = f"give {option('rank', 'N')}, {option('error', 'X')}, or both"
            raise UsageError("neither a rank nor an error limits the difference to keep", hint=hint)
        if (self.rank is not None and self.rank < 1) or (self.error is not None and not 0 <= self.error < 1):
            raise UsageError(
                "the rank must be 1 or more, and the error from 0 to 1", got=f"{self.rank}, {self.error}"
            )

    def spectrum(self, tuned: LazyArray, base: LazyArray, name: str) -> Spectrum:
        """Return the part of a matrix's difference that is kept."""
        if self.error is not None:
            return ranked_spectrum(tuned, base, self.error, self.rank or min(tuned.shape), name)
        assert self.rank is not None  # `__post_init__` requires a rank or an error.
        return spectrum(tuned, base, min(self.rank, *tuned.shape), name)


@dataclass(frozen=True)
class ExtractedAdapter:
    """An adapter made from a difference.

    Attributes:
        adapter: The adapter in the base's names; its factors are in memory.
        nbytes: The bytes that the factors take.
        notes: The error of each matrix, and the arrays that are left out.
    """

    adapter: Adapter
    nbytes: int
    notes: Notes


def extract_low_rank(tuned: Base, base: Base, options: ExtractOptions, memory: int) -> ExtractedAdapter:
    """Return the adapter that approximates what fine-tuning changed. Reads both models.

    The matrices of linear layers are compared; other differing arrays are left out, and the notes name them.

    Args:
        tuned, base: Models of the same weights.
        options: How much of the difference to keep.
        memory: Maximum bytes of the factors.

    Raises:
        FormatError: The models do not have the same weights, or contain NaN or infinity.
        ShapeError: A weight has different shapes.
        UsageError: None of the matrices differs.
        MemoryBudgetError: The factors need more memory.
        SourceChangedError: A model changed while it was read.
    """
    tuned, base = without_copied_head(tuned, base), without_copied_head(base, tuned)
    _require_same_weights(tuned, base)
    factors: list[FactorPair] = []
    errors: dict[str, float] = {}
    other_names: list[str] = []
    nbytes = 0
    for name in sort_naturally(base.weights):
        pair = tuned.float32_weights[name], base.float32_weights[name]
        if not is_linear(name, base.weights[name]):
            other_names += [name] if squares_of(*pair) != 0 else []
            continue
        kept_spectrum = options.spectrum(*pair, name)
        if kept_spectrum.squares:
            factor = _factor(name, kept_spectrum, options.dtype)
            factors.append(factor)
            errors[name] = kept_spectrum.error(factor.rank)
            nbytes += factor.a.nbytes + factor.b.nbytes
            _require_memory(nbytes, memory)
    read = sources([*tuned.tree.arrays.values(), *base.tree.arrays.values()])
    check_unchanged({item.path: item for item in read}.values())
    if not factors:
        raise UsageError(
            "no matrix of a linear layer differs between the models",
            location=tuned.tree.metadata.location,
            got=base.tree.metadata.location,
            hint=f"{action('diff')} lists the differences",
        )
    return ExtractedAdapter(
        Adapter(tuned.tree.metadata.location, tuple(factors)), nbytes, _notes(factors, errors, other_names)
    )


def _factor(name: str, spectrum: Spectrum, dtype: DType) -> FactorPair:
    a, b = _wrap_values(f"{name} A", spectrum.right, dtype), _wrap_values(f"{name} B", spectrum.left, dtype)
    return FactorPair(name, a, b, 1.0, len(spectrum.values))


def _wrap_values(name: str, values: np.ndarray, dtype: DType) -> LazyArray:
    import numpy as np

    data = np.ascontiguousarray(values, np.float32).astype(dtype.numpy).tobytes()
    return Stored(values.shape, dtype, Bytes(name, data), 0)


def _require_same_weights(tuned: Base, base: Base) -> None:
    of_tuned = [f"{name}: not in the base" for name in tuned.weights if name not in base.weights]
    of_base = [f"{name}: only in the base" for name in base.weights if name not in tuned.weights]
    if unlike := of_tuned + of_base:
        raise FormatError(
            f"the models do not have the same weights: {array_count(unlike)}{listing(unlike)}",
            location=tuned.tree.metadata.location,
            expected=f"the weights of {base.tree.metadata.location}",
            hint="use the model that was fine-tuned as the base",
        )
    for name, array in base.weights.items():
        if tuned.weights[name].shape != array.shape:
            raise ShapeError(
                "the models have a weight of different shapes",
                location=f"{tuned.tree.metadata.location}, {name}",
                got=list(tuned.weights[name].shape),
                expected=f"{list(array.shape)} ({base.tree.metadata.location})",
            )


def _require_memory(nbytes: int, memory: int) -> None:
    if nbytes > memory:
        raise MemoryBudgetError(
            "the factors do not fit into memory",
            got=f"more than {format_size(memory)} of factors, half of the memory limit",
            hint=f"allow more with {option('memory', 'SIZE')}, or keep less: a lower {option('rank', 'N')}, "
            f"or {option('dtype', 'bfloat16')}",
        )


def _notes(factors: list[FactorPair], errors: Mapping[str, float], left_out: list[str]) -> Notes:
    ranks = sorted(Counter(factor.rank for factor in factors).items())
    rank_counts = ", ".join(f"{rank} ({array_count(range(times))})" for rank, times in ranks)
    rank_text = f"ranks {rank_counts}" if len(ranks) > 1 else f"rank {ranks[0][0]}"
    worst = max(errors, key=lambda name: errors[name])
    text = f"{rank_text}; {errors[worst]:.2%} of the difference is lost in the worst matrix, {worst}"
    return Notes((Note.of_arrays(len(factors), text),), remarks=tuple(_left_out_remarks(left_out)))


def _left_out_remarks(left_out: list[str]) -> Iterator[str]:
    if left_out:
        names = sample_names(left_out, _MAX_LISTED)
        yield f"left out, because they differ but are not layer matrices: {array_count(left_out)} ({names})"


# Directions in addition to the requested ones, and rounds over the matrices. With 16 directions, noise of 600
# x 500 had an error of 1.005 times the optimum, and singular values that decay with exp(-k/40) had 1.002.
_SPARE, _ROUNDS = 16, 3


@dataclass(frozen=True)
class Spectrum:
    """The factors of a difference, and the remaining error.

    Attributes:
        left: (rows, rank), and.
        right: (rank, columns), both scaled by the square roots of the singular values; float64.
        values: Singular values, the largest first.
        squares: The sum of squares of all elements of the difference.
    """

    left: np.ndarray
    right: np.ndarray
    values: np.ndarray
    squares: float

    def error(self, rank: int) -> float:
        """Return the relative error of the largest `rank` values, in the Frobenius norm."""
        kept_energy = float((self.values[:rank] ** 2).sum())
        return max(0.0, 1 - kept_energy / self.squares) ** 0.5 if self.squares else 0.0

    def cut(self, rank: int) -> Spectrum:
        """Return the largest `rank` values."""
        return Spectrum(self.left[:, :rank], self.right[:rank], self.values[:rank], self.squares)


def spectrum(first: LazyArray, second: LazyArray, rank: int, name: str = "") -> Spectrum:
    """Return the largest `rank` singular values of `first - second`.

    Args:
        first, second: Matrices of the same shape, in float32.
        rank: Number of singular values; fewer if a side is shorter.
        name: The name of the matrix, for messages.

    Raises:
        FormatError: A matrix contains NaN or infinity.
    """
    import numpy as np

    rows, columns = first.shape
    count = min(rank + _SPARE, rows, columns)
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((columns, count)))[0]
    for _ in range(_ROUNDS):
        image = np.linalg.qr(_image(first, second, basis)[0])[0]
        projected, squares = _project_back(first, second, image)
        if not np.isfinite(squares):
            raise FormatError(
                "the difference of the matrices contains NaN or infinity", location=name or None
            )
        basis = np.linalg.qr(projected)[0]
    # In the span of these directions, the difference is image @ back.T.
    rotation, values, axes = np.linalg.svd(projected.T, full_matrices=False)
    roots = np.sqrt(values)
    return Spectrum((image @ rotation) * roots, axes * roots[:, None], values, squares).cut(rank)


def ranked_spectrum(
    first: LazyArray, second: LazyArray, error: float, limit: int, name: str = ""
) -> Spectrum:
    """Return the fewest singular values with a relative error of at most `error`, up to `limit`.

    The arguments and errors are those of `spectrum`.
    """
    limit = min(limit, *first.shape)
    rank = min(16, limit)
    while True:
        truncated = spectrum(first, second, rank, name)
        if truncated.error(rank) <= error or rank == limit:
            return truncated.cut(next((k for k in range(rank + 1) if truncated.error(k) <= error), rank))
        rank = min(2 * rank, limit)


def squares_of(first: LazyArray, second: LazyArray) -> float:
    """Return the sum of squares of all elements of `first - second`, of any shape."""
    return sum(float((item**2).sum()) for _, item in _read_blocks(first, second))


def _image(first: LazyArray, second: LazyArray, basis: np.ndarray) -> tuple[np.ndarray, float]:
    """Return (first - second) @ basis, and the sum of squares of the difference."""
    import numpy as np

    out, squares = np.empty((first.shape[0], basis.shape[1])), 0.0
    for region, item in _rows(first, second):
        np.matmul(item, basis, out=out[region.start[0] : region.stop[0]])
        squares += float((item**2).sum())
    return out, squares


def _project_back(first: LazyArray, second: LazyArray, image: np.ndarray) -> tuple[np.ndarray, float]:
    """Return (first - second).T @ image, and the sum of squares of the difference."""
    import numpy as np

    out, squares = np.zeros((first.shape[1], image.shape[1])), 0.0
    for region, item in _rows(first, second):
        out += item.T @ image[region.start[0] : region.stop[0]]
        squares += float((item**2).sum())
    return out, squares


def _rows(first: LazyArray, second: LazyArray) -> Iterator[tuple[Region, np.ndarray]]:
    """Yield the difference of two matrices, several rows at a time."""
    step = max(1, read_blocks.elements(8) // max(1, first.shape[1]))
    for region in Region.whole(first.shape).pieces(0, step):
        yield region, _difference(first, second, region)


def _read_blocks(first: LazyArray, second: LazyArray) -> Iterator[tuple[Region, np.ndarray]]:
    for region in split_evenly(Region.whole(first.shape), read_blocks.elements(8)):
        yield region, _difference(first, second, region)


def _difference(first: LazyArray, second: LazyArray, region: Region) -> np.ndarray:
    import numpy as np

    with np.errstate(invalid="ignore"):
        difference: np.ndarray = first.read(region).astype(np.float64) - second.read(region)
    return difference
