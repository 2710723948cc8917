"""How often to save: what saving takes against what a failure loses.

Training goes on for T seconds, then a save holds it up for C. Failures come at random, every M seconds on
average, also while a checkpoint is saved or restored. To get through a stretch of T + C seconds without one
takes M (exp((T + C) / M) - 1) on average, and exp(R / M) times that where each failure costs R seconds of
restoring (Daly 2006). The T that loses least is where (1 - T / M) exp((T + C) / M) = 1; to first order it is
sqrt(2 C M) (Young 1974).
"""

from __future__ import annotations

from math import exp, expm1, log1p, sqrt

from ckpttools.core.dataclass import dataclass

# Of what is searched, 0 to 1; with more of them a float64 would be 1.
_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class Tier:
    """A destination of checkpoints and the failures that it covers.

    Attributes:
        name: "local" or "persistent".
        save_seconds: for which a save holds training up.
        failure_seconds: between failures, on average, after which training goes on from here.
        write_seconds: until a checkpoint is complete, from the beginning of its save; going on from it takes
            as long.
    """

    name: str
    save_seconds: float
    failure_seconds: float
    write_seconds: float = 0.0

    @property
    def young_seconds(self) -> float:
        """Return the best interval to first order."""
        return sqrt(2 * self.save_seconds * self.failure_seconds)

    @property
    def best_seconds(self) -> float:
        """Return the interval with the least loss. A save that waits for the previous one gains nothing."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_short = -log1p(-middle) - middle < self.save_seconds / self.failure_seconds
            low, high = (middle, high) if is_short else (low, middle)
        busy = min(self.write_seconds - self.save_seconds, self.failure_seconds)
        return max(high * self.failure_seconds, busy)

    def lost(self, interval: float) -> float:
        """Return the fraction of time lost with an interval in seconds, from 0 to 1."""
        hold = max(self.save_seconds, self.write_seconds - interval)
        # After a failure: what restoring takes, and what was trained while the last save was still written.
        again = self.write_seconds + max(0.0, self.write_seconds - hold)
        stretch = (interval + hold) / self.failure_seconds
        return 1 + interval * exp(-again / self.failure_seconds - stretch) / (
            self.failure_seconds * expm1(-stretch)
        )

    def best_steps(self, step_seconds: float, multiple: int = 1) -> int:
        """Return the best interval in steps, rounded to the better neighboring multiple."""
        fewer = max(1, int(self.best_seconds / step_seconds) // multiple) * multiple
        return min((fewer, fewer + multiple), key=lambda steps: self.lost(steps * step_seconds))


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The save interval of one tier.

    Attributes:
        tier: its name.
        save_seconds, failure_seconds: as of `Tier`.
        young_seconds, best_seconds: of training between two saves: what loses least, to first order, and
            with failures at any time.
        steps: what is planned, in steps; None where it is not known how long a step takes.
        seconds: the same in seconds, the best ones where steps are not known.
        lost: the part of the time that is lost with it.
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
            tier: what a save and a failure of it cost.
            step_seconds: how long a step takes.
            multiple: what the best steps are a multiple of.
            steps: those that are set, instead of the best ones.
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
