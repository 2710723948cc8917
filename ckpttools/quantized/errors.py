"""What quantizing has lost: largest and root-mean-square error, added up from parts in any order."""

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
    """How far the values of a quantized array are from what they were.

    Attributes:
        elements: how many there are.
        largest: the largest distance of one.
        rms: root of the mean square of all distances.
        rms_of_values: root of the mean square of the values.
        relative: `rms` over that; 0 where all values are zero.
    """

    elements: int
    largest: float
    rms: float
    rms_of_values: float
    relative: float


def error_sums(values: np.ndarray, decoded: np.ndarray) -> dict[str, float]:
    """What a part adds to the tally of its array.

    Args:
        values: what was quantized, floating-point numbers of any dtype.
        decoded: float32 of the same shape, what the codes stand for.
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
    """The errors in the tallies of arrays, by their names, the worst first."""
    result = {
        name: _error(int(tally[_ELEMENTS]), tally[_MAX], tally[_SQUARES], tally[_OWN])
        for name, tally in counts.items()
        if _ELEMENTS in tally
    }
    return dict(sorted(result.items(), key=lambda item: (-item[1].relative, item[0])))


def total_error(errors: Mapping[str, QuantizationError]) -> QuantizationError:
    """The error of several arrays together."""
    result = errors.values()
    return _error(
        sum(item.elements for item in result),
        max((item.largest for item in result), default=0.0),
        sum(item.rms**2 * item.elements for item in result),
        sum(item.rms_of_values**2 * item.elements for item in result),
    )


def drop_error_counts(counts: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, int]]:
    """The tallies of arrays without what is of errors."""
    own = {_MAX, _ELEMENTS, _SQUARES, _OWN}
    left = {
        name: {kind: int(n) for kind, n in tally.items() if kind not in own} for name, tally in counts.items()
    }
    return {name: tally for name, tally in left.items() if tally}


def _error(elements: int, largest: float, squares: float, own: float) -> QuantizationError:
    """An error from the sums of the squares of distances, and of the values."""
    rms, rms_of_values = (sqrt(item / elements) if elements else 0.0 for item in (squares, own))
    return QuantizationError(
        elements, largest, rms, rms_of_values, rms / rms_of_values if rms_of_values else 0.0
    )
