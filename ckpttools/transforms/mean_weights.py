"""Compute the weights of checkpoints in a mean, from explicit numbers or from points of a curve.

Decay weights turn a mean of evenly spaced checkpoints, saved at a constant learning rate, into the result of
training with a decaying learning rate on that curve: w_i = l(i/n) - l((i+1)/n), with l falling from 1 to 0
(WSM, arXiv:2507.17634, theorem 3.1). They add up to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import cos, frexp, fsum, isfinite, ldexp, pi, sqrt
from typing import Literal, NamedTuple

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option

Decay = Literal["cosine", "linear", "sqrt"]
# Maximum power of two between the largest weight and 1: beyond it, products leave float32's range.
_MAX_EXPONENT = 16
DECAYS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda t: (1 + cos(pi * t)) / 2,
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: 1 - sqrt(t),
}


class WeightedMean(NamedTuple):
    """A weight for each checkpoint, in order, and the divisor of the sum."""

    weights: tuple[float, ...]
    total: float

    @property
    def is_far_from_one(self) -> bool:
        """Return whether products leave float32's range although the weights themselves do not."""
        return abs(_exponent(self.weights)) > _MAX_EXPONENT


@dataclass(frozen=True)
class MeanWeights:
    """Options for the weights of checkpoints; equal weights by default.

    Attributes:
        weights: One weight for each checkpoint.
        ema: The decay b of an exponential moving average: (1 - b) b^(n - i), and b^(n - 1) for the first.
        decay: The decay curve of a learning rate.
        normalize: Whether to divide by the sum of the weights; otherwise they are used unchanged.
    """

    weights: Sequence[float] | None = None
    ema: float | None = None
    decay: Decay | None = None
    normalize: bool = True

    def of(self, count: int) -> WeightedMean:
        """Return the weights of `count` checkpoints.

        The weights of a mean are scaled by a power of two if they are far from 1.

        Raises:
            UsageError: Several options are set, a weight is not a number, the number of weights is not that
                of the checkpoints, all weights are 0, or the weights of a mean add up to 0.
        """
        options = [name for name in ("weights", "ema", "decay") if getattr(self, name) is not None]
        if len(options) > 1:
            raise UsageError(
                "only one option may set the weights of checkpoints",
                got=" and ".join(map(option, options)),
                hint="pass only one of them",
            )
        weights = tuple(map(float, self._weights(count)))
        if len(weights) != count or not all(map(isfinite, weights)):
            raise UsageError(
                "each checkpoint needs a finite weight",
                expected=f"one finite number for each of the {count} checkpoints",
                got=f"{', '.join(f'{weight:g}' for weight in weights)} for {count} checkpoints",
            )
        if not self.normalize:
            if not any(weights):
                raise UsageError("all weights are 0", expected="at least one weight that is not 0")
            return WeightedMean(weights, 1.0)
        if not isfinite(sum(map(abs, weights))):
            raise UsageError(
                "the sum of the weights overflows",
                got=", ".join(f"{weight:g}" for weight in weights),
                hint="scale all weights down by the same factor",
            )
        total = fsum(weights)
        if not total or abs(total) < 1e-9 * max(map(abs, weights)):
            raise UsageError(
                "the weights add up to 0, so the mean does not exist",
                got=", ".join(f"{weight:g}" for weight in weights),
                hint=f"for a sum or a difference, use {option('normalize', False)}",
            )
        return _scale_near_one(weights, total)

    def _weights(self, count: int) -> Sequence[float]:
        if self.ema is not None:
            return _moving_average_weights(self.ema, count)
        if self.decay is not None:
            return _decay_weights(self.decay, count)
        return [1.0] * count if self.weights is None else self.weights


def _scale_near_one(weights: Sequence[float], total: float) -> WeightedMean:
    """Scale the weights so that no product is lost below the smallest float32 number."""
    exponent = _exponent(weights)
    shift = -exponent if abs(exponent) > _MAX_EXPONENT else 0
    return WeightedMean(tuple(ldexp(weight, shift) for weight in weights), ldexp(total, shift))


def _exponent(weights: Sequence[float]) -> int:
    """Return the exponent of the power of two above the largest weight."""
    return frexp(max(map(abs, weights)))[1]


def _moving_average_weights(decay: float, count: int) -> list[float]:
    if not 0 <= decay < 1:
        raise UsageError(
            "the decay of a moving average must be between 0 and 1", got=f"{option('ema', decay)}"
        )
    return [decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - k) for k in range(1, count))]


def _decay_weights(name: str, count: int) -> list[float]:
    if name not in DECAYS:
        raise UsageError(f"unknown decay curve {name}", expected=", ".join(DECAYS), hint="choose one of them")
    curve = DECAYS[name]
    return [curve(k / count) - curve((k + 1) / count) for k in range(count)]
