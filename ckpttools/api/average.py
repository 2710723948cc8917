"""Average steps of a run, or checkpoints in any format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Unpack

from ckpttools.api.convert import ChangedRun, write_changed
from ckpttools.api.options.build import AVERAGE
from ckpttools.api.options.convert import CHANGING
from ckpttools.api.prepared import Prepared, command
from ckpttools.api.sources import Source, float_dtype_of, location_of, opened, read_options
from ckpttools.array.tree import Tree
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import action, option
from ckpttools.core.options import declare
from ckpttools.core.text import first_and_last
from ckpttools.formats.detect import detect
from ckpttools.formats.orbax.steps import OrbaxRun
from ckpttools.formats.registry import not_opened, writer_options
from ckpttools.maxtext.average import Average
from ckpttools.run.overlap_check import check_no_overlap
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.transforms.mean_weights import Decay, MeanWeights


@command(ChangedRun, more=writer_options)
@declare(*AVERAGE, *CHANGING)
def average(
    source: Source,
    destination: LocationLike,
    *,
    others: Sequence[Source] = (),
    steps: str | Sequence[int] | None = None,
    last: int | None = None,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    decay: Decay | None = None,
    normalize: bool = True,
    parameters: str | None = None,
    dtype: DType | str | None = None,
    force: bool = False,
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Write the weighted mean of steps of a run, or of checkpoints in any format.

    Sums follow the order of the checkpoints and are rounded once, so the result does not depend on `jobs` or
    `memory`. They are computed in float32 if all arrays have 16 bits, otherwise in float64. Of training
    states, only the parameters are averaged. Other arrays, the step and the model files come from the last
    checkpoint.

    Args:
        source: The first checkpoint, or a run with `steps` or `last`.
        destination: The directory to create. It appears only when everything is written.
        others: The other checkpoints, in order.

    Raises:
        ConfigError: The configurations describe different computations. The message lists all differences.
        UsageError: Only one checkpoint is given, steps do not exist, or the number of weights is wrong.
        CoverageError: Names or shapes differ. The message lists all of them.
        MappingError: Integer parameters differ.
        CheckpointError: See `ckpttools.convert`.
    """
    if common.get("step") is not None:
        raise UsageError(f"{option('step')} opens one step", hint="name the steps to average instead")
    step_numbers = _steps_to_open(source, others, steps, last)
    transform = Average(MeanWeights(weights, ema, decay, normalize), float_dtype_of(dtype), parameters, force)
    if len(others) + len(step_numbers) < 2 and parameters is None:
        raise UsageError(
            "an average needs at least two checkpoints",
            got=_single_step(source, *step_numbers) or "one source, and the destination",
            hint=f"name several, or the last steps of a run: {option('last', 'N')}",
        )
    for other in others:
        location = location_of(other)
        if location is not None:
            check_no_overlap(location, parse(destination))

    def make(opening: Mapping[str, Any]) -> Tree:
        trees = [
            opened(source, read_options({**opening, "step": number}), *others) for number in step_numbers
        ]
        return transform(
            [*trees, *(opened(other, read_options(opening), source, *others) for other in others)]
        )

    return write_changed([], source, destination, common, make=make)


def _single_step(source: Source, number: int | None) -> str | None:
    """Return the step if only one step of a run is given; otherwise None."""
    if number is None or isinstance(source, Tree):
        return None
    return f"step {number} of {first_and_last(finished_steps(source))}"


def _steps_to_open(
    source: Source, others: Sequence[Source], steps: str | Sequence[int] | None, last: int | None
) -> Sequence[int | None]:
    """Return the steps to open; [None] for the latest one."""
    if steps is None and last is None:
        return [None]
    if others or isinstance(source, Tree):
        raise UsageError(
            "steps can be selected only from one run",
            got="other checkpoints as well" if others else "an open tree",
            hint="name one run and its steps, or a step directory of each checkpoint",
        )
    if steps is not None and last is not None:
        raise UsageError(
            "two options select steps", got=f"{steps}, and {option('last', last)}", hint="leave one out"
        )
    if last is not None:
        result = finished_steps(source)[-last:] if last > 0 else ()
        if len(result) < last or last < 1:
            raise UsageError(
                f"{source} has fewer finished steps",
                got=len(result),
                expected=last,
                hint=f"{action('ls', str(source))} lists them",
            )
        return result
    return steps_of(source, steps or ())


_EXPECTED = "1000, 1000..5000/500, 1000..5000, 1000.. or ..5000"
# Step numbers have at most 18 digits.
_STEPS = re.compile(
    r"(?P<one>\d{1,18})"
    r"|(?P<first>\d{1,18})?\.\.(?P<last>\d{1,18})?(?(first)(?(last)(/(?P<stride>0*[1-9]\d{0,17}))?))",
    re.ASCII,
)
# Number of steps that an error names.
_MAX_NAMED = 8


def steps_of(run: LocationLike, value: str | Sequence[int]) -> tuple[int, ...]:
    """Return the selected steps, in order.

    Args:
        run: A run directory.
        value: Step numbers, or text with comma-separated numbers and ranges: "1000"; "1000..5000/500" for
            exactly these steps, which must exist; "1000..5000", "1000.." and "..5000" for all finished steps
            in the range.

    Raises:
        UsageError: The text is malformed, a range contains no steps, steps are not ascending or do not exist,
            or the location is not a run.
        StorageError, FormatError: See `finished_steps`.
    """
    result = _run_at(run)
    parts = [_part(result, part.strip()) for part in value.split(",")] if isinstance(value, str) else [value]
    if not any(parts):
        raise UsageError("no steps are named", got=repr(value), expected=_EXPECTED)
    _require_steps(parts, result, value)
    steps = [number for part in parts for number in part]
    if (rising := sorted({*steps})) != steps:
        raise UsageError(
            "each step must be named once, in ascending order",
            got=value,
            hint=f"pass {','.join(map(str, rising))} instead",
        )
    return tuple(steps)


def finished_steps(run: LocationLike) -> tuple[int, ...]:
    """Return the finished steps of a run, in order.

    Raises:
        StorageError: The path does not exist or cannot be read.
        FormatError: The directory is empty.
        UsageError: The location is not a run.
    """
    return _finished_steps(_run_at(run))


def _run_at(where: LocationLike) -> OrbaxRun:
    """Open the run at a location; raises the errors of `finished_steps`."""
    location = parse(where)
    detected = detect(location)
    if detected.is_empty:
        raise not_opened(detected)
    result = detected.orbax
    if not isinstance(result, OrbaxRun) or not result.steps:
        raise UsageError(
            f"{location} has no steps",
            expected="a run directory, with a directory for each step",
            hint=f"{action('summary', str(location))} identifies it",
        )
    return result


def _finished_steps(run: OrbaxRun) -> tuple[int, ...]:
    return tuple(number for number, step in run.steps.items() if step.unfinished_reason is None)


def _part(run: OrbaxRun, declared: str) -> Sequence[int]:
    """Return the steps of one number or range."""
    result = _STEPS.fullmatch(declared)
    if result is None:
        raise UsageError(f"{declared!r} names no steps", expected=_EXPECTED)
    one, first, last, stride = result.group("one", "first", "last", "stride")
    if one:
        return (int(one),)
    if stride:
        return range(int(first), int(last) + 1, int(stride))
    within = [n for n in _finished_steps(run) if int(first or 0) <= n <= int(last or n)]
    if not within:
        raise UsageError(f"{run.path} has no finished steps in {declared}", hint=_list_steps(run))
    return within


def _require_steps(parts: Sequence[Sequence[int]], run: OrbaxRun, value: object) -> None:
    # A range may cover many missing steps, so the message counts existing ones.
    missing = sum(map(len, parts)) - sum(part.count(n) for part in parts for n in run.steps)
    if not missing:
        return
    first = islice((number for part in parts for number in part if number not in run.steps), _MAX_NAMED)
    more = f" and {missing - _MAX_NAMED:,} more" if missing > _MAX_NAMED else ""
    absent = "there is no step" if missing == 1 else "there are no steps"
    raise UsageError(
        f"{absent} {', '.join(map(str, first))}{more}",
        location=run.path,
        got=value,
        expected=f"some of {first_and_last(sorted(run.steps))}",
        hint=_list_steps(run),
    )


def _list_steps(run: OrbaxRun) -> str:
    return f"{action('ls', str(run.path))} lists all"
