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
from ckpttools.core.message_terms import option
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
        rank: the rank of the factors; the maximum if `error` is given.
        error: the allowed relative error of each matrix, in the Frobenius norm; None for any error.
        dtype: the dtype of the factors.
    """

    rank: int | None
    error: float | None
    dtype: DType

    def __post_init__(self) -> None:
        if self.rank is None and self.error is None:
            hint = f"give {option('rank', 'N')}, {option('error', 'X')}, or both"
            raise UsageError("it is not said how much of the difference to keep", hint=hint)
        if (self.rank is not None and self.rank < 1) or (self.error is not None and not 0 <= self.error < 1):
            raise UsageError("a rank is 1 or more, an error from 0 to 1", got=f"{self.rank}, {self.error}")

    def spectrum(self, tuned: LazyArray, base: LazyArray, name: str) -> Spectrum:
        """Return the part of a matrix's difference that is kept."""
        if self.error is not None:
            return ranked_spectrum(tuned, base, self.error, self.rank or min(tuned.shape), name)
        assert self.rank is not None  # one of both is given
        return spectrum(tuned, base, min(self.rank, *tuned.shape), name)


@dataclass(frozen=True)
class ExtractedAdapter:
    """An adapter made from a difference.

    Attributes:
        adapter: in the base's names; its factors are in memory.
        nbytes: that they take.
        notes: the error of each matrix, and the arrays that are left out.
    """

    adapter: Adapter
    nbytes: int
    notes: Notes


def extract_low_rank(tuned: Base, base: Base, options: ExtractOptions, memory: int) -> ExtractedAdapter:
    """Return the adapter that approximates what fine-tuning changed. Reads both models.

    The matrices of linear layers are compared; what else differs is left out, and the notes name it.

    Args:
        tuned, base: models of the same weights.
        options: how much to keep.
        memory: bytes that the factors may take.

    Raises:
        FormatError: the models do not have the same weights, or have NaN or infinity.
        ShapeError: a weight has another shape.
        UsageError: none of the matrices differs.
        MemoryBudgetError: the factors need more memory.
        SourceChangedError: a model changed while it was read.
    """
    tuned, base = without_copied_head(tuned, base), without_copied_head(base, tuned)
    _require_same_weights(tuned, base)
    factors: list[FactorPair] = []
    errors: dict[str, float] = {}
    others: list[str] = []
    nbytes = 0
    for name in sort_naturally(base.weights):
        pair = tuned.in_float32[name], base.in_float32[name]
        if not is_linear(name, base.weights[name]):
            others += [name] if squares_of(*pair) != 0 else []
            continue
        result = options.spectrum(*pair, name)
        if result.squares:
            factor = _factor(name, result, options.dtype)
            factors.append(factor)
            errors[name] = result.error(factor.rank)
            nbytes += factor.a.nbytes + factor.b.nbytes
            _require_memory(nbytes, memory)
    read = sources([*tuned.tree.arrays.values(), *base.tree.arrays.values()])
    check_unchanged({item.path: item for item in read}.values())
    if not factors:
        raise UsageError(
            "no matrix of a linear layer differs between the models",
            location=tuned.tree.metadata.location,
            got=base.tree.metadata.location,
            hint="`ckpt diff` says what differs",
        )
    return ExtractedAdapter(
        Adapter(tuned.tree.metadata.location, tuple(factors)), nbytes, _notes(factors, errors, others)
    )


def _factor(name: str, result: Spectrum, dtype: DType) -> FactorPair:
    a, b = _in_memory(f"{name} A", result.right, dtype), _in_memory(f"{name} B", result.left, dtype)
    return FactorPair(name, a, b, 1.0, len(result.values))


def _in_memory(name: str, values: np.ndarray, dtype: DType) -> LazyArray:
    import numpy as np

    data = np.ascontiguousarray(values, np.float32).astype(dtype.numpy).tobytes()
    return Stored(values.shape, dtype, Bytes(name, data), 0)


def _require_same_weights(tuned: Base, base: Base) -> None:
    of_tuned = [f"{name}: not in the base" for name in tuned.weights if name not in base.weights]
    of_base = [f"{name}: in the base alone" for name in base.weights if name not in tuned.weights]
    if unlike := of_tuned + of_base:
        raise FormatError(
            f"the models have other weights: {array_count(unlike)}{listing(unlike)}",
            location=tuned.tree.metadata.location,
            expected=f"those of {base.tree.metadata.location}",
            hint="name the model from which it was tuned as its base",
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
            "the factors do not fit into the memory",
            got=f"more than {format_size(memory)} of factors, half of what is allowed",
            hint=f"allow more with {option('memory', 'SIZE')}, or keep less: a lower {option('rank', 'N')}, "
            f"or {option('dtype', 'bfloat16')}",
        )


def _notes(factors: list[FactorPair], errors: Mapping[str, float], others: list[str]) -> Notes:
    ranks = sorted(Counter(factor.rank for factor in factors).items())
    several = ", ".join(f"{rank} ({array_count(range(times))})" for rank, times in ranks)
    declared = f"ranks {several}" if len(ranks) > 1 else f"rank {ranks[0][0]}"
    worst = max(errors, key=lambda name: errors[name])
    text = f"{declared}; {errors[worst]:.2%} of the difference is left in the worst, {worst}"
    return Notes((Note.of_arrays(len(factors), text),), remarks=tuple(_left_out_remarks(others)))


def _left_out_remarks(others: list[str]) -> Iterator[str]:
    if others:
        shown = sample_names(others, _MAX_LISTED)
        yield f"left out, as they differ and are no matrices of layers: {array_count(others)} ({shown})"
