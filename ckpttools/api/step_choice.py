"""Which steps of a run are meant: 1000,2000, 1000..5000/500, 1000..5000."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote

from ckpttools.core.errors import UsageError
from ckpttools.formats.interrupted import absent, refuse_empty
from ckpttools.formats.orbax.steps import OrbaxRun, orbax_at
from ckpttools.stores.registry import Where, parse


def steps_of(run: Where, said: str | Sequence[int]) -> tuple[int, ...]:
    """The steps that are named, in order.

    Args:
        run: a run directory.
        said: numbers; or text, numbers and ranges with commas between: "1000", "1000..5000/500" for all of
            these, whether they are there or not, "1000..5000", "1000.." and "..5000" for all finished steps
            within.

    Raises:
        UsageError: it is no such text; a range without steps in it; steps are no rising numbers.
    """
    if isinstance(said, str):
        said = [step for part in said.split(",") for step in _steps(run, part.strip())]
    found = list(said)
    if sorted(set(found)) != found:
        raise UsageError("steps are named once each, in rising order", got=said)
    return tuple(found)


def finished_steps(run: Where) -> tuple[int, ...]:
    """The finished steps of a run, in order.

    Raises:
        StorageError: nothing is there.
        FormatError: it is an empty directory.
        UsageError: it is no run.
    """
    place = parse(run)
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
    return tuple(number for number, step in found.steps.items() if step.why_unfinished is None)


def _steps(run: Where, said: str) -> Iterator[int]:
    ends, slash, stride = said.partition("/")
    first, dots, last = ends.partition("..")
    numbers = [first, last, stride] if dots else [ends, stride]
    is_whole = first and (not slash or (dots and last and stride and int(stride or 0)))
    if not all(each.isdecimal() or not each for each in numbers) or not (is_whole or (dots and not slash)):
        raise UsageError(
            f"{said!r} names no steps", wanted="1000, 1000..5000/500, 1000..5000, 1000.. or ..5000"
        )
    if not dots:
        yield int(first)
        return
    if slash:
        yield from range(int(first), int(last) + 1, int(stride))
        return
    within = [n for n in finished_steps(run) if int(first or 0) <= n <= int(last or n)]
    if not within:
        raise UsageError(
            f"{run} has no finished steps in {said}", hint=f"`ckpt ls {quote(str(run))}` lists its steps"
        )
    yield from within
