"""Dealing the tasks of a plan out: contiguous parts, so that each reads few files, as even as can be."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts of a plan.

    Attributes:
        number: from 0 on.
        count: how many there are.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise UsageError(
                f"there is no part {self.number} of {self.count}",
                expected=f"0 to {self.count - 1}" if self.count > 0 else "at least one part",
                hint="parts are counted from 0: 0/4, 1/4, 2/4, 3/4",
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_part(text: str) -> Part:
    """The part that a user means by "3/8".

    Raises:
        UsageError: not a part.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isascii() and number.isdigit() and count.isascii() and count.isdigit()):
        raise UsageError(f"{text!r} is no part", expected="such as 3/8: number 3, counted from 0, of 8")
    return Part(int(number), int(count))


def dealt(sizes: Sequence[int], count: int) -> list[int]:
    """Where parts begin and end: `count + 1` numbers, from 0 to how many sizes there are.

    No other way to cut a sequence into so many stretches makes the largest of them smaller; the others are as
    even as that allows.

    Args:
        sizes: bytes of what is dealt out, in order.
        count: how many parts; some are empty where there is less to do.
    """
    ends = list(accumulate(sizes, initial=0))
    limit = _least_most(ends, max(sizes, default=0), count)
    # Where a part may begin at the earliest, with so many parts from there on.
    earliest = [len(sizes)]
    for _ in range(count):
        earliest.append(bisect_left(ends, ends[earliest[-1]] - limit))
    cuts = [0]
    for left in range(count, 0, -1):
        start = cuts[-1]
        expected = ends[start] + (ends[-1] - ends[start]) / left
        after = bisect_left(ends, expected, start)
        nearest = (
            after - 1 if after > start and expected - ends[after - 1] < ends[after] - expected else after
        )
        latest = bisect_right(ends, ends[start] + limit) - 1
        cuts.append(min(max(nearest, earliest[left - 1]), latest))
    return cuts


def _least_most(ends: Sequence[int], largest: int, count: int) -> int:
    """The least that the largest of so many parts can have."""
    low, high = max(largest, -(-ends[-1] // count)) - 1, ends[-1]
    while high - low > 1:
        middle = (low + high) // 2
        if _is_enough(ends, middle, count):
            high = middle
        else:
            low = middle
    return high


def _is_enough(ends: Sequence[int], limit: int, count: int) -> bool:
    """Whether so many parts of so much each take all."""
    position = 0
    for _ in range(count):
        position = bisect_right(ends, ends[position] + limit) - 1
    return position == len(ends) - 1


@dataclass(frozen=True, slots=True)
class Engine:
    """Variables of the environment.

    Attributes:
        words: what sets them.
        number: says which process this is.
        count: says how many there are; "" where the engine does not tell.
        first, last: say the numbers of the first and of the last one; "" where they begin with 0.
        step: says how far apart numbers are; "" where that is 1.
    """

    words: str
    number: str
    count: str = ""
    first: str = ""
    last: str = ""
    step: str = ""


# A batch script of SLURM has SLURM_PROCID, too: only a step of `srun` says how many of it there are.
ENGINES = (
    Engine("a job of Kubernetes", "JOB_COMPLETION_INDEX"),
    Engine("a job of Cloud Run", "CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"),
    Engine("an array job of AWS Batch", "AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
    Engine("a job array", *(f"SLURM_ARRAY_TASK_{item}" for item in ("ID", "COUNT", "MIN", "MAX", "STEP"))),
    Engine("a step of srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
# What SLURM and Open MPI say to `jax.distributed`: which process this is, and of how many.
_JOBS_OF_JAX = (("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def misnumbered() -> str:
    """What the environment says of the processes of a job that cannot be; "" where all it says can be."""
    for number, count in _JOBS_OF_JAX:
        if number in os.environ and count in os.environ:
            try:
                parse_part(f"{os.environ[number]}/{os.environ[count]}")
            except UsageError:
                return f"{number}={os.environ[number]}, {count}={os.environ[count]}"
    return ""


def part_here(count: int | None = None, environment: Mapping[str, str] = os.environ) -> Part:
    """The part of this process.

    Args:
        count: how many parts there are, which then are numbered as the engine numbers processes; None for as
            many as the engine has started.
        environment: its variables.

    Raises:
        UsageError: nothing says which part, or how many there are; or two say different things.
    """
    _check_one_of(environment)
    for engine in ENGINES:
        if engine.number in environment and (
            count is not None or engine.count in environment or not engine.count
        ):
            return _part(engine, count, environment)
    raise UsageError(
        "nothing says which part to do",
        got="none of " + ", ".join(engine.number for engine in ENGINES),
        expected=f"{option('part', 'I/N')}, or one of these variables",
        hint=f"{option('part', '0/1')} does all that is left",
    )


def _check_one_of(environment: Mapping[str, str]) -> None:
    """Raises UsageError where two engines number this process, and not alike.

    Of several processes of a task of a job array, or of a pod, that are tasks of srun, all have its number.
    """
    *jobs, step = ENGINES
    result = [job for job in jobs if job.number in environment]
    tasks = environment.get(step.count, "1")
    if result and tasks != "1":
        raise UsageError(
            f"{result[0].words} and a step of srun both number this process",
            got=f"{_said(result[0], environment)} and {tasks} tasks of srun",
            expected=f"one process for each {result[0].number}",
            hint=f"start it without srun, or say which part it does: {option('part', 'I/N')}",
        )
    for other in result[1:]:
        if environment[other.number] != environment[result[0].number]:
            raise UsageError(
                f"{result[0].words} and {other.words} both number this process, and not alike",
                got=f"{_said(result[0], environment)} and {_said(other, environment)}",
                expected="one of them, or the same number",
                hint=f"say which part it does: {option('part', 'I/N')}; or unset the one that does not",
            )


def _said(engine: Engine, environment: Mapping[str, str]) -> str:
    return f"{engine.number}={environment[engine.number]}"


def _part(engine: Engine, count: int | None, environment: Mapping[str, str]) -> Part:
    number = _whole(engine.number, environment)
    numbers = _numbers(engine, environment)
    if count is not None:
        # A job array that does a few parts again has their numbers, and its own first one and count.
        if len(numbers) == count and numbers != range(count):
            raise _not_from_0(engine, number, numbers, count)
        return Part(number, count)
    if not engine.count:
        raise UsageError(
            f"{engine.number} says which part this is, and nothing how many there are",
            got=f"{engine.number}={number}",
            hint=f"say it: {option('parts', 'N')}, the completions of the job",
        )
    started = _whole(engine.count, environment)
    if not started:
        raise UsageError(
            f"{engine.words} says that it has no processes",
            got=f"{_said(engine, environment)}, {engine.count}=0",
            expected=f"{engine.count}=1 or more",
            hint=f"say which part this is: {option('part', 'I/N')}",
        )
    if numbers and (number not in numbers or len(numbers) != started):
        raise UsageError(
            "the numbers of the job array are not those of parts: some are left out",
            got=f"{started} tasks, {_range_text(numbers)}, of which this is {number}",
            expected=f"{option('parts', 'N')}, as in the array of which these are some",
        )
    return Part(numbers.index(number) if numbers else number, started)


def _numbers(engine: Engine, environment: Mapping[str, str]) -> range:
    """All numbers that an engine has given, were none left out; empty where it does not tell."""
    if not {engine.first, engine.last} <= environment.keys():
        return range(0)
    step = _whole(engine.step, environment) if engine.step in environment else 1
    return range(_whole(engine.first, environment), _whole(engine.last, environment) + 1, max(1, step))


def _not_from_0(engine: Engine, number: int, numbers: range, count: int) -> UsageError:
    """The error of an array that has as many tasks as there are parts, under other numbers."""
    return UsageError(
        "the job array numbers its tasks in another way than parts are",
        got=f"{_range_text(numbers)}: {engine.number}={number}",
        expected=f"0 to {count - 1}, as by sbatch --array=0-{count - 1}",
        hint=f"submit it so; or leave {option('parts')} out: then the array itself says how many there are",
    )


def _range_text(numbers: range) -> str:
    step = f" by steps of {numbers.step}" if numbers.step != 1 else ""
    return f"{numbers[0]} to {numbers[-1]}{step}"


def _whole(name: str, environment: Mapping[str, str]) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is no number", got=text, expected="0, 1, 2, …")
    return int(text)
