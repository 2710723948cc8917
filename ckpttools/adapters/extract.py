"""Extract an adapter from a fine-tuned model: the low-rank difference of each matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckpttools.adapters.bases import Base
from ckpttools.adapters.factors import Adapter, FactorPair
from ckpttools.adapters.fitting import without_copied_head
from ckpttools.adapters.truncated_svd import Spectrum, ranked_spectrum, spectrum, squares_of
from ckpttools.array.fingerprint import sources
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stored
from ckpttools.core.budget import format_size
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, MemoryBudgetError, ShapeError, UsageError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count, sample_names, sort_naturally
from ckpttools.quantized.modules import is_linear
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
        pair = tuned.in_float32[name], base.in_float32[name]
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
    a, b = _in_memory(f"{name} A", spectrum.right, dtype), _in_memory(f"{name} B", spectrum.left, dtype)
    return FactorPair(name, a, b, 1.0, len(spectrum.values))


def _in_memory(name: str, values: np.ndarray, dtype: DType) -> LazyArray:
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
    several = ", ".join(f"{rank} ({array_count(range(times))})" for rank, times in ranks)
    rank_text = f"ranks {several}" if len(ranks) > 1 else f"rank {ranks[0][0]}"
    worst = max(errors, key=lambda name: errors[name])
    text = f"{rank_text}; {errors[worst]:.2%} of the difference is lost in the worst matrix, {worst}"
    return Notes((Note.of_arrays(len(factors), text),), remarks=tuple(_left_out_remarks(left_out)))


def _left_out_remarks(left_out: list[str]) -> Iterator[str]:
    if left_out:
        shown = sample_names(left_out, _MAX_LISTED)
        yield f"left out, because they differ but are not layer matrices: {array_count(left_out)} ({shown})"
