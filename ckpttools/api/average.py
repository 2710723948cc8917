"""Means of checkpoints: steps of a run, or checkpoints of any formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from shlex import quote
from typing import Any, Unpack

from ckpttools.api.arguments import float_dtype_of
from ckpttools.api.convert import Changing, write_changed
from ckpttools.api.prepared import Prepared, command
from ckpttools.api.sources import Source, opened, place_of, read_options
from ckpttools.array.tree import Tree
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.text import first_and_last
from ckpttools.core.wording import option
from ckpttools.formats.interrupted import absent, refuse_empty
from ckpttools.formats.orbax.steps import OrbaxRun, orbax_at
from ckpttools.formats.registry import writer_options
from ckpttools.maxtext.average import Average
from ckpttools.run.apart import check_apart
from ckpttools.stores.registry import Where, parse
from ckpttools.transforms.mean_weights import Decay, MeanWeights


@command(Changing, more=writer_options)
def average(
    source: Source,
    destination: Where,
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
    **common: Unpack[Changing],
) -> Prepared:
    """Writes the weighted mean of steps of a run, or of several checkpoints of any formats.

    Sums are made in the order of the checkpoints and rounded once, so that the bits do not depend on `jobs`
    or `memory`: in float32 where all numbers have 16 bits, else in float64. Of training states the parameters
    are taken. What is no floating-point number, the step and the files of a model are those of the last.

    Args:
        source: the first checkpoint, or a run with `steps` or `last`.
        destination: directory that appears when everything is written.
        others: the other checkpoints, in order.
        steps: of a run: numbers, or text such as "1000..5000/500", "1000,2000", "1000..5000".
        last: of a run: so many of the latest finished steps.
        weights: one for each checkpoint; None for all alike.
        ema: weights of an exponential moving average with this decay, such as 0.9.
        decay: weights that amount to a learning rate that falls in this way: "linear", "cosine", "sqrt".
        normalize: divide by the sum of the weights. Without it a + s (b - c) is `weights=[1, s, -s]`.
        parameters: in a training state the key of an average that stands for the parameters, such as
            "opt_state/1/ema"; "ema" for the only one there is. One checkpoint is enough then.
        dtype: of the result; None for that of the arrays, the widest of several.
        force: average models whose configurations describe different computations; the last configuration
            is written.
        common: `ckpttools.api.convert.Changing`.

    Raises:
        ConfigError: the configurations describe different computations; lists all differences.
        UsageError: one checkpoint alone, steps that are not there, or weights that do not fit.
        CoverageError: names or shapes differ; lists all.
        MappingError: whole numbers that are parameters differ.
        CheckpointError: as `ckpttools.convert`.
    """
    if common.get("step") is not None:
        raise UsageError(f"{option('step')} opens one step", hint="name the steps of the mean instead")
    chosen = _numbers(source, others, steps, last)
    how = Average(MeanWeights(weights, ema, decay, normalize), float_dtype_of(dtype), parameters, force)
    if len(others) + len(chosen) < 2 and parameters is None:
        raise UsageError(
            "one checkpoint alone has no mean",
            got=_alone(source, *chosen),
            hint=f"name several, or steps of a run, as {option('last', 'N')} does",
        )
    for each in others:
        place = place_of(each)
        if place is not None:
            check_apart(place, parse(destination))

    def make(opening: Mapping[str, Any]) -> Tree:
        trees = [opened(source, read_options({**opening, "step": number}), *others) for number in chosen]
        return how([*trees, *(opened(each, read_options(opening), source, *others) for each in others)])

    return write_changed([], source, destination, common, make=make)


def _alone(source: Source, number: int | None) -> str | None:
    """Which step of a run is named alone; None where none is."""
    if number is None or isinstance(source, Tree):
        return None
    return f"step {number} of {first_and_last(finished_steps(source))}"


def _numbers(
    source: Source, others: Sequence[Source], steps: str | Sequence[int] | None, last: int | None
) -> Sequence[int | None]:
    """The steps of the source that are opened; [None] for the latest alone."""
    if steps is None and last is None:
        return [None]
    if others or isinstance(source, Tree):
        raise UsageError(
            "steps must be those of one run",
            got="other checkpoints beside it" if others else "an open tree",
            hint="name one run and its steps, or a step directory of each checkpoint",
        )
    if steps is not None and last is not None:
        raise UsageError(
            "there are two choices of steps", got=f"{steps}, and {option('last', last)}", hint="leave one out"
        )
    if last is not None:
        found = finished_steps(source)[-last:] if last > 0 else ()
        if len(found) < last or last < 1:
            raise UsageError(f"{source} has fewer finished steps", got=len(found), wanted=last)
        return found
    return steps_of(source, steps or ())


_WANTED = "1000, 1000..5000/500, 1000..5000, 1000.. or ..5000"
# A number of more digits is of no step.
_STEPS = re.compile(
    r"(?P<one>\d{1,18})"
    r"|(?P<first>\d{1,18})?\.\.(?P<last>\d{1,18})?(?(first)(?(last)(/(?P<stride>0*[1-9]\d{0,17}))?))",
    re.ASCII,
)
# Steps that are named in an error.
_MOST = 8


def steps_of(run: Where, said: str | Sequence[int]) -> tuple[int, ...]:
    """The steps that are named, in order.

    Args:
        run: a run directory.
        said: numbers; or text, numbers and ranges with commas between: "1000", "1000..5000/500" for all of
            these, which must be there, "1000..5000", "1000.." and "..5000" for all finished steps within.

    Raises:
        UsageError: it is no such text; a range without steps in it; steps are no rising numbers, or not
            there; it is no run.
        StorageError, FormatError: as of `finished_steps`.
    """
    found = _run_at(run)
    parts = [_part(found, part.strip()) for part in said.split(",")] if isinstance(said, str) else [said]
    if not any(parts):
        raise UsageError("no steps are named", got=repr(said), wanted=_WANTED)
    _require_there(parts, found, said)
    steps = [number for part in parts for number in part]
    if (rising := sorted({*steps})) != steps:
        raise UsageError(
            "steps are named once each, in rising order",
            got=said,
            hint=f"say {','.join(map(str, rising))} instead",
        )
    return tuple(steps)


def finished_steps(run: Where) -> tuple[int, ...]:
    """The finished steps of a run, in order.

    Raises:
        StorageError: nothing is there.
        FormatError: it is an empty directory.
        UsageError: it is no run.
    """
    return _finished(_run_at(run))


def _run_at(where: Where) -> OrbaxRun:
    """The run at a place; errors as of `finished_steps`."""
    place = parse(where)
    if not place.exists():
        raise absent(place)
    refuse_empty(place)
    found = orbax_at(place)
    if not isinstance(found, OrbaxRun) or not found.steps:
        raise UsageError(
            f"{place} has no steps",
            wanted="a run directory, with a directory for each step",
            hint=f"`ckpt {quote(str(place))}` says what it is",
        )
    return found


def _finished(run: OrbaxRun) -> tuple[int, ...]:
    return tuple(number for number, step in run.steps.items() if step.why_unfinished is None)


def _part(run: OrbaxRun, said: str) -> Sequence[int]:
    """The steps of one number or range."""
    found = _STEPS.fullmatch(said)
    if found is None:
        raise UsageError(f"{said!r} names no steps", wanted=_WANTED)
    one, first, last, stride = found.group("one", "first", "last", "stride")
    if one:
        return (int(one),)
    if stride:
        return range(int(first), int(last) + 1, int(stride))
    within = [n for n in _finished(run) if int(first or 0) <= n <= int(last or n)]
    if not within:
        raise UsageError(f"{run.path} has no finished steps in {said}", hint=_listing(run))
    return within


def _require_there(parts: Sequence[Sequence[int]], run: OrbaxRun, said: object) -> None:
    # A range may name more than anybody has: those that are not there are counted by those that are.
    missing = sum(map(len, parts)) - sum(part.count(n) for part in parts for n in run.steps)
    if not missing:
        return
    first = islice((number for part in parts for number in part if number not in run.steps), _MOST)
    more = f" and {missing - _MOST:,} more" if missing > _MOST else ""
    raise UsageError(
        f"there {'is no step' if missing == 1 else 'are no steps'} {', '.join(map(str, first))}{more}",
        place=run.path,
        got=said,
        wanted=f"some of {first_and_last(sorted(run.steps))}",
        hint=_listing(run),
    )


def _listing(run: OrbaxRun) -> str:
    return f"`ckpt ls {quote(str(run.path))}` lists all"
