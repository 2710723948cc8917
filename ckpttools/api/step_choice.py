"""Which steps of a run are meant: 1000,2000, 1000..5000/500, 1000..5000."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from shlex import quote

from ckpttools.core.errors import UsageError
from ckpttools.core.text import first_and_last
from ckpttools.formats.interrupted import absent, refuse_empty
from ckpttools.formats.orbax.steps import OrbaxRun, orbax_at
from ckpttools.stores.registry import Where, parse

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
