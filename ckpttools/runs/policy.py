"""Select the steps of a run to keep, like Orbax's preservation policies.

LatestN(n)              the last n steps
EveryNSteps(m)          steps whose number is a multiple of m
BestN(metric, k)        the k best steps by a metric, and those without the metric
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError, did_you_mean
from ckpttools.core.message_terms import option

Metrics = Mapping[str, float]

# Metrics whose best value is unambiguous.
_LOWEST = ("loss", "perplexity", "ppl", "error", "wer", "mse", "mae")
_HIGHEST = ("accuracy", "acc", "reward", "score", "bleu", "f1", "mfu")


@dataclass(frozen=True, slots=True)
class Best:
    """The best steps by a metric.

    Attributes:
        metric: Name of the metric.
        count: Number of steps to keep.
        lowest: Whether the lowest value is the best.
    """

    metric: str
    count: int
    lowest: bool

    @classmethod
    def of(cls, text: str) -> Best:
        """Parse `METRIC:K`, `METRIC:K:min` or `METRIC:K:max`.

        Raises:
            UsageError: The text has another form, or the name does not show which value is best.
        """
        name, _, rest = text.partition(":")
        count, _, mode = rest.partition(":")
        if not (name and count.isascii() and count.isdigit() and int(count) and mode in ("", "min", "max")):
            raise UsageError(
                f"{text!r} does not consist of a metric and a number of steps",
                expected="METRIC:K, METRIC:K:min or METRIC:K:max, such as loss:3",
            )
        parts = set(name.lower().replace("/", "_").replace("-", "_").split("_"))
        low, high = not parts.isdisjoint(_LOWEST), not parts.isdisjoint(_HIGHEST)
        if not mode and low == high:
            raise UsageError(
                f"the name {name!r} does not show whether lower or higher is better",
                hint=f"pass {option('keep_best', f'{name}:{count}:min')} or "
                f"{option('keep_best', f'{name}:{count}:max')}",
            )
        return cls(name, int(count), mode == "min" if mode else low)


@dataclass(frozen=True, slots=True)
class Keep:
    """The rules for steps to keep.

    Attributes:
        last: Number of latest steps to keep; None for no such rule.
        every: Keep steps whose number is a multiple of this; None for no such rule.
        best: Keep the best steps by a metric; None for no such rule.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.last), ("keep_every", self.every)):
            if value is not None and value < 1:
                raise UsageError(f"{option(name, value)} means nothing", expected="1 or more")

    @property
    def has_no_rule(self) -> bool:
        return self.last is None and self.every is None and self.best is None

    def reasons(self, steps: Mapping[int, Metrics | None]) -> Mapping[int, tuple[str, ...]]:
        """Return the reasons for keeping each step, by number; () for steps without a reason.

        Args:
            steps: Metrics of the finished steps, by number.

        Raises:
            UsageError: No step has the metric, or the metric is NaN in all of them.
        """
        ordered = sorted(steps)
        latest = set(ordered[-self.last :]) if self.last else set()
        best = _best(self.best, steps) if self.best else {}
        last = "the last one" if self.last == 1 else f"one of the last {self.last}"
        return {
            number: tuple(
                reason
                for reason in (
                    last if number in latest else "",
                    f"a multiple of {self.every}" if self.every and number % self.every == 0 else "",
                    best.get(number, ""),
                )
                if reason
            )
            for number in ordered
        }


def _best(rule: Best, steps: Mapping[int, Metrics | None]) -> dict[int, str]:
    known = {
        number: metrics[rule.metric]
        for number, metrics in steps.items()
        if metrics and rule.metric in metrics
    }
    if not known:
        names = sorted({name for metrics in steps.values() for name in metrics or ()})
        raise UsageError(
            f"no step has a metric {rule.metric!r}",
            expected=f"one of {', '.join(names)}" if names else None,
            got=None if names else "steps without metrics",
            hint=did_you_mean(rule.metric, names),
        )
    if all(map(math.isnan, known.values())):
        raise UsageError(f"no step is the best by {rule.metric!r}", got="NaN at every step that has it")
    sign = -1 if rule.lowest else 1
    # NaN is never the best; of equal values the later one is kept, as in Orbax's sort.
    ranked = sorted(
        known, key=lambda n: (not math.isnan(known[n]), sign * known[n] if known[n] == known[n] else 0, n)
    )
    result = {
        number: f"{rule.metric} {known[number]:.6g}, one of the best {rule.count}"
        for number in ranked[-rule.count :]
    }
    return result | {number: f"{rule.metric} is unknown" for number in steps if number not in known}
