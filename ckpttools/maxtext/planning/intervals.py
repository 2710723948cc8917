"""Compute save intervals by weighing the cost of saving against the loss at a failure.

Training runs for T seconds, then a save blocks it for C seconds. Failures occur at random, every M seconds on
average, also while a checkpoint is saved or restored. Completing T + C seconds without a failure takes M
(exp((T + C) / M) - 1) on average, and exp(R / M) times that if each failure costs R seconds of restoring
(Daly 2006). The best T solves (1 - T / M) exp((T + C) / M) = 1; to first order, it is sqrt(2 C M) (Young
1974).
"""

from __future__ import annotations

from math import exp, expm1, log1p, sqrt

from ckpttools.core.dataclass import dataclass

# Bisection steps on the interval from 0 to 1; with more steps, a float64 would round to 1.
_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class Tier:
    """A destination of checkpoints, and the failures that it covers.

    Attributes:
        name: "local" or "persistent".
        save_seconds: Seconds for which a save blocks training.
        failure_seconds: Average seconds between failures after which training resumes from this tier.
        write_seconds: Seconds from the start of a save until the checkpoint is complete; restoring takes as
            long.
    """

    name: str
    save_seconds: float
    failure_seconds: float
    write_seconds: float = 0.0

    @property
    def young_seconds(self) -> float:
        """Return the best interval to first order (Young)."""
        return sqrt(2 * self.save_seconds * self.failure_seconds)

    @property
    def best_seconds(self) -> float:
        """Return the interval with the least loss; a save that waits for the previous one gains nothing."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_short = -log1p(-middle) - middle < self.save_seconds / self.failure_seconds
            low, high = (middle, high) if is_short else (low, middle)
        busy = min(self.write_seconds - self.save_seconds, self.failure_seconds)
        return max(high * self.failure_seconds, busy)

    def lost(self, interval: float) -> float:
        """Return the fraction of time that is lost with an interval in seconds, from 0 to 1."""
        hold = max(self.save_seconds, self.write_seconds - interval)
        # A failure loses the restore time, and the training done while the last save was still being written.
        again = self.write_seconds + max(0.0, self.write_seconds - hold)
        stretch = (interval + hold) / self.failure_seconds
        return 1 + interval * exp(-again / self.failure_seconds - stretch) / (
            self.failure_seconds * expm1(-stretch)
        )

    def best_steps(self, step_seconds: float, multiple: int = 1) -> int:
        """Return the best interval in steps, rounded to the better of the neighboring multiples."""
        fewer = max(1, int(self.best_seconds / step_seconds) // multiple) * multiple
        return min((fewer, fewer + multiple), key=lambda steps: self.lost(steps * step_seconds))


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The save interval of a tier.

    Attributes:
        tier: The name of the tier.
        save_seconds, failure_seconds: As for `Tier`.
        young_seconds, best_seconds: The best training time between two saves, to first order and exactly.
        steps: The planned interval in steps; None if the time of a step is unknown.
        seconds: The planned interval in seconds; the best interval if steps are unknown.
        lost: The fraction of time that is lost with this interval.
    """

    tier: str
    save_seconds: float
    failure_seconds: float
    young_seconds: float
    best_seconds: float
    steps: int | None
    seconds: float
    lost: float

    @classmethod
    def of(
        cls, tier: Tier, step_seconds: float | None, multiple: int = 1, steps: int | None = None
    ) -> SaveInterval:
        """Return the save interval of a tier.

        Args:
            tier: The costs of a save and of a failure.
            step_seconds: The duration of a step.
            multiple: The number of steps that the interval must be a multiple of.
            steps: The interval that the user sets, in place of the best one.
        """
        seconds = tier.best_seconds
        if step_seconds is not None:
            steps = steps or tier.best_steps(step_seconds, multiple)
            seconds = steps * step_seconds
        return cls(
            tier.name,
            tier.save_seconds,
            tier.failure_seconds,
            tier.young_seconds,
            tier.best_seconds,
            steps,
            seconds,
            tier.lost(seconds),
        )


def count_kept_checkpoints(total_steps: int, period: int, limit: int | None) -> int:
    """Return how many checkpoints exist at the end of a run."""
    saved = total_steps // period + (total_steps % period > 0)
    return saved if limit is None else min(saved, limit)
