"""Division of a plan into contiguous, evenly sized parts, and detection of the part of this process."""

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
    """A part of a plan.

    Attributes:
        number: Index of the part, from 0.
        count: Number of parts.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            count = self.count if 0 < self.count <= 4 else 4
            raise UsageError(
                f"part {self.number} of {self.count} does not exist",
                expected=f"0 to {self.count - 1}" if self.count > 0 else "at least one part",
                hint=f"parts are numbered from 0: {', '.join(f'{n}/{count}' for n in range(count))}",
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_part(text: str) -> Part:
    """Parse a part such as "3/8".

    Raises:
        UsageError: The text is not a part.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isascii() and number.isdigit() and count.isascii() and count.isdigit()):
        raise UsageError(f"{text!r} is not a part", expected="such as 3/8: number 3, counted from 0, of 8")
    return Part(int(number), int(count))


def dealt(sizes: Sequence[int], count: int) -> list[int]:
    """Return the boundaries of the parts: `count + 1` indices, from 0 to the number of sizes.

    The largest part is as small as possible for contiguous parts; within that limit, the other parts are as
    even as possible.

    Args:
        sizes: Bytes of the items to divide, in order.
        count: Number of parts; some are empty if there are fewer items.
    """
    ends = list(accumulate(sizes, initial=0))
    limit = _smallest_maximum(ends, max(sizes, default=0), count)
    # The earliest start of each part such that the remaining parts can take the rest.
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


def _smallest_maximum(ends: Sequence[int], largest: int, count: int) -> int:
    """Return the smallest possible size of the largest part."""
    low, high = max(largest, -(-ends[-1] // count)) - 1, ends[-1]
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(ends, middle, count):
            high = middle
        else:
            low = middle
    return high


def _fits(ends: Sequence[int], limit: int, count: int) -> bool:
    """Return whether `count` parts of at most `limit` bytes can take all items."""
    position = 0
    for _ in range(count):
        position = bisect_right(ends, ends[position] + limit) - 1
    return position == len(ends) - 1


@dataclass(frozen=True, slots=True)
class Engine:
    """The environment variables in which a job engine numbers its processes.

    Attributes:
        words: What sets the variables, for messages.
        number: Variable for the index of the process.
        count: Variable for the number of processes; "" if the engine does not set one.
        first, last: Variables for the first and last index; "" if indices start from 0.
        step: Variable for the step between indices; "" if the step is 1.
    """

    words: str
    number: str
    count: str = ""
    first: str = ""
    last: str = ""
    step: str = ""


# A SLURM batch script also has SLURM_PROCID, but only an `srun` step has the number of tasks.
ENGINES = (
    Engine("a job of Kubernetes", "JOB_COMPLETION_INDEX"),
    Engine("a job of Cloud Run", "CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"),
    Engine("an array job of AWS Batch", "AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
    Engine("a job array", *(f"SLURM_ARRAY_TASK_{item}" for item in ("ID", "COUNT", "MIN", "MAX", "STEP"))),
    Engine("a step of srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
# The variables from which `jax.distributed` reads the index and number of processes on SLURM and Open MPI.
_JAX_JOB_VARIABLES = (("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def invalid_process_numbers() -> str:
    """Return the environment's process index and count if they contradict each other; "" otherwise."""
    for number, count in _JAX_JOB_VARIABLES:
        if number in os.environ and count in os.environ:
            try:
                parse_part(f"{os.environ[number]}/{os.environ[count]}")
            except UsageError:
                return f"{number}={os.environ[number]}, {count}={os.environ[count]}"
    return ""


def detect_part(count: int | None = None, environment: Mapping[str, str] = os.environ) -> Part:
    """Detect the part of this process.

    Args:
        count: Number of parts, which are numbered like the engine's processes; None for the number of
            processes that the engine has started.
        environment: Environment variables.

    Raises:
        UsageError: The part or the number of parts cannot be detected, or two engines contradict each other.
    """
    _check_single_engine(environment)
    for engine in ENGINES:
        if engine.number in environment and (
            count is not None or engine.count in environment or not engine.count
        ):
            return _part(engine, count, environment)
    raise UsageError(
        "cannot detect which part to do",
        got="none of " + ", ".join(engine.number for engine in ENGINES),
        expected=f"{option('part', 'I/N')}, or one of these variables",
        hint=f"{option('part', '0/1')} does all remaining tasks",
    )


def _check_single_engine(environment: Mapping[str, str]) -> None:
    """Raise UsageError if two engines number this process differently.

    If one job-array task or pod runs several srun tasks, all of them have the number of that task or pod.
    """
    *jobs, step = ENGINES
    result = [job for job in jobs if job.number in environment]
    tasks = environment.get(step.count, "1")
    if result and tasks != "1":
        raise UsageError(
            f"{result[0].words} and a step of srun both number this process",
            got=f"{_variable_text(result[0], environment)} and {tasks} tasks of srun",
            expected=f"one process for each {result[0].number}",
            hint=f"start it without srun, or give the part: {option('part', 'I/N')}",
        )
    for other in result[1:]:
        if environment[other.number] != environment[result[0].number]:
            raise UsageError(
                f"{result[0].words} and {other.words} number this process differently",
                got=f"{_variable_text(result[0], environment)} and {_variable_text(other, environment)}",
                expected="one of them, or the same number",
                hint=f"give the part: {option('part', 'I/N')}; or unset the wrong variable",
            )


def _variable_text(engine: Engine, environment: Mapping[str, str]) -> str:
    return f"{engine.number}={environment[engine.number]}"


def _part(engine: Engine, count: int | None, environment: Mapping[str, str]) -> Part:
    number = _parse_number(engine.number, environment)
    numbers = _job_indices(engine, environment)
    if count is not None:
        # A job array that repeats a few parts has the numbers of those parts, and its own first index and
        # count.
        if len(numbers) == count and numbers != range(count):
            raise _numbering_error(engine, number, numbers, count)
        return Part(number, count)
    if not engine.count:
        raise UsageError(
            f"{engine.number} numbers this part, but the number of parts is unknown",
            got=f"{engine.number}={number}",
            hint=f"give {option('parts', 'N')}, the completions of the job",
        )
    started = _parse_number(engine.count, environment)
    if not started:
        raise UsageError(
            f"the environment describes {engine.words} without processes",
            got=f"{_variable_text(engine, environment)}, {engine.count}=0",
            expected=f"{engine.count}=1 or more",
            hint=f"give the part: {option('part', 'I/N')}",
        )
    if numbers and (number not in numbers or len(numbers) != started):
        raise UsageError(
            "the job array skips some numbers, so they do not number parts",
            got=f"{started} tasks, {_range_text(numbers)}, of which this is {number}",
            expected=f"{option('parts', 'N')}, the size of the full job array",
        )
    return Part(numbers.index(number) if numbers else number, started)


def _job_indices(engine: Engine, environment: Mapping[str, str]) -> range:
    """Return all indices that an engine assigns, without gaps; an empty range if it sets no limits."""
    if not {engine.first, engine.last} <= environment.keys():
        return range(0)
    step = _parse_number(engine.step, environment) if engine.step in environment else 1
    return range(
        _parse_number(engine.first, environment), _parse_number(engine.last, environment) + 1, max(1, step)
    )


def _numbering_error(engine: Engine, number: int, numbers: range, count: int) -> UsageError:
    """Return the error for a job array with as many tasks as parts but different numbers."""
    return UsageError(
        "the job array does not number its tasks from 0",
        got=f"{_range_text(numbers)}: {engine.number}={number}",
        expected=f"0 to {count - 1}, as by sbatch --array=0-{count - 1}",
        hint=f"submit it with these numbers; or omit {option('parts')}: the array then defines their number",
    )


def _range_text(numbers: range) -> str:
    step = f" by steps of {numbers.step}" if numbers.step != 1 else ""
    return f"{numbers[0]} to {numbers[-1]}{step}"


def _parse_number(name: str, environment: Mapping[str, str]) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is not a number", got=text, expected="0, 1, 2, …")
    return int(text)
