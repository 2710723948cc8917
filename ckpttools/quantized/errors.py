"""Quantization errors: maximum and root-mean-square error, accumulated from parts in any order."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING

from ckpttools.core.dataclass import dataclass
from ckpttools.core.tally import LARGEST

if TYPE_CHECKING:
    import numpy as np

_MAX, _ELEMENTS = f"{LARGEST}quantization_error", "quantized_elements"
_SQUARES, _OWN = "quantization_error_squares", "quantized_squares"


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """The deviation of a quantized array from its original values.

    Attributes:
        elements: number of elements.
        largest: the largest absolute error.
        rms: root mean square of the errors.
        rms_of_values: root mean square of the values.
        relative: `rms` divided by `rms_of_values`; 0 if all values are zero.
    """

    elements: int
    largest: float
    rms: float
    rms_of_values: float
    relative: float


def error_sums(values: np.ndarray, decoded: np.ndarray) -> dict[str, float]:
    """Compute the contribution of a part to the tally of its array.

    Args:
        values: the original values, of any floating-point dtype.
        decoded: float32 of the same shape, the decoded values.
    """
    import numpy as np

    wide = np.float64 if values.dtype.itemsize == 8 else np.float32
    exact = values.astype(wide, copy=False)
    apart = np.subtract(exact, decoded, dtype=wide)
    largest = float(max(apart.max(initial=0), -apart.min(initial=0)))
    return {
        _MAX: largest,
        _ELEMENTS: values.size,
        _SQUARES: _squares(apart),
        _OWN: _squares(exact),
    }


def _squares(values: np.ndarray) -> float:
    import numpy as np

    flat = values.reshape(-1)
    largest = float(np.abs(flat).max(initial=0))
    if 0 < largest < 1e-15 or largest > 1e15:
        flat = flat.astype(np.float64)
    return float(np.dot(flat, flat))


def quantization_errors(counts: Mapping[str, Mapping[str, float]]) -> dict[str, QuantizationError]:
    """Return the errors in the tallies of arrays by name, the largest first."""
    result = {
        name: _error(int(tally[_ELEMENTS]), tally[_MAX], tally[_SQUARES], tally[_OWN])
        for name, tally in counts.items()
        if _ELEMENTS in tally
    }
    return dict(sorted(result.items(), key=lambda item: (-item[1].relative, item[0])))


def total_error(errors: Mapping[str, QuantizationError]) -> QuantizationError:
    """Return the error of several arrays together."""
    result = errors.values()
    return _error(
        sum(item.elements for item in result),
        max((item.largest for item in result), default=0.0),
        sum(item.rms**2 * item.elements for item in result),
        sum(item.rms_of_values**2 * item.elements for item in result),
    )


def drop_error_counts(counts: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, int]]:
    """Return the tallies of arrays without error counts."""
    own = {_MAX, _ELEMENTS, _SQUARES, _OWN}
    left = {
        name: {kind: int(n) for kind, n in tally.items() if kind not in own} for name, tally in counts.items()
    }
    return {name: tally for name, tally in left.items() if tally}


def _error(elements: int, largest: float, squares: float, own: float) -> QuantizationError:
    """Compute an error from the sums of squared deviations and squared values."""
    rms, rms_of_values = (sqrt(item / elements) if elements else 0.0 for item in (squares, own))
    return QuantizationError(
        elements, largest, rms, rms_of_values, rms / rms_of_values if rms_of_values else 0.0
    )
