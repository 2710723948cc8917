"""How often to save: what saving takes against what a failure loses.

A save that holds training up for C seconds every T seconds costs C / T of the time; a failure every M seconds
loses half an interval and R seconds of restoring, (T / 2 + R) / M. Young (1974) has the T that loses least,
sqrt(2 C M); Daly (2006) has further terms, which matter where C is no small part of M.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True)
class Tier:
    """Where checkpoints are saved, and which failures they are for.

    Attributes:
        name: "local" or "persistent".
        save_seconds: for which a save holds training up.
        failure_seconds: between failures, on average, after which training goes on from here.
        restore_seconds: that going on takes.
    """

    name: str
    save_seconds: float
    failure_seconds: float
    restore_seconds: float = 0.0

    @property
    def young_seconds(self) -> float:
        """The interval that loses least, to first order."""
        return sqrt(2 * self.save_seconds * self.failure_seconds)

    @property
    def best_seconds(self) -> float:
        """The interval that loses least, as Daly has it; never less than the save itself takes."""
        ratio = self.save_seconds / (2 * self.failure_seconds)
        if ratio >= 1:
            return self.failure_seconds
        found = self.young_seconds * (1 + sqrt(ratio) / 3 + ratio / 9) - self.save_seconds
        return max(found, self.save_seconds)

    def lost(self, interval: float) -> float:
        """The part of the time that is lost with an interval of so many seconds."""
        return self.save_seconds / interval + (interval / 2 + self.restore_seconds) / self.failure_seconds

    def best_steps(self, step_seconds: float, multiple: int = 1) -> int:
        """The best interval in steps: of the two multiples of so many around it the one that loses less."""
        fewer = max(1, int(self.best_seconds / step_seconds) // multiple) * multiple
        return min((fewer, fewer + multiple), key=lambda steps: self.lost(steps * step_seconds))


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """How often one tier saves.

    Attributes:
        tier: its name.
        save_seconds, failure_seconds: as of `Tier`.
        young_seconds, best_seconds: what loses least, to first order and by Daly.
        steps: the same in steps; None where it is not known how long a step takes.
        lost: the part of the time that is lost with it.
    """

    tier: str
    save_seconds: float
    failure_seconds: float
    young_seconds: float
    best_seconds: float
    steps: int | None
    lost: float

    @classmethod
    def of(cls, tier: Tier, step_seconds: float | None, multiple: int = 1) -> SaveInterval:
        """The best one of a tier; steps are a multiple of so many."""
        steps = None if step_seconds is None else tier.best_steps(step_seconds, multiple)
        taken = tier.best_seconds if steps is None or step_seconds is None else steps * step_seconds
        return cls(
            tier.name,
            tier.save_seconds,
            tier.failure_seconds,
            tier.young_seconds,
            tier.best_seconds,
            steps,
            tier.lost(taken),
        )


def kept_checkpoints(total_steps: int, period: int, most: int | None) -> int:
    """Checkpoints of a run that are there at its end, one every `period` steps and one at the last."""
    saved = total_steps // period + (total_steps % period > 0)
    return saved if most is None else min(saved, most)
