"""Nothing missing, nothing left over, every shape as it should be: or one error that lists it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CoverageError, MappingError, listing, near_names
from ckpttools.core.region import Shape
from ckpttools.core.text import plural
from ckpttools.mapping.axes import Side
from ckpttools.mapping.coverage_hints import (
    CHECK,
    MOST_KEYS,
    Wrong,
    left_over,
    next_step,
    reasons,
    remedies_for,
)
from ckpttools.mapping.coverage_hints import Expected as Expected
from ckpttools.mapping.sizes import Size, lengths_of

_MESSAGE = "the arrays do not match the model"
# Beyond this many lines a list says only how many more there are.
_MOST_LINES = 200
# Of these many missing arrays those that are there and called nearly so are looked for.
_MOST_NEAR = 20


@dataclass(frozen=True, slots=True)
class Misfit:
    """An array whose shape is not the one that its row gives.

    Attributes:
        key: of the array.
        got, wanted: the two shapes.
        why: what gave the axes that differ their lengths.
    """

    key: str
    got: Shape
    wanted: Shape
    why: str

    def __str__(self) -> str:
        return f"{self.key}: got {list(self.got)}, wanted {list(self.wanted)} ({self.why})"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Arrays compared with the keys of rows.

    Attributes:
        missing: key that is not there -> shape it should have.
        extra: keys that no row has.
        misshapen: arrays of another shape.
        reasons: sentences that say why some of them are wanted or not.
    """

    missing: Mapping[str, Shape]
    extra: tuple[str, ...]
    misshapen: tuple[Misfit, ...]
    reasons: tuple[str, ...]

    def summary(self, most: int = 3) -> str:
        """What is wrong in few lines: how many arrays, and the first of them."""
        found = {
            "missing": list(self.missing),
            "not expected": list(self.extra),
            "of another shape": list(map(str, self.misshapen)),
        }
        parts = (
            f"\n  {_are(len(lines))} {what}:{listing(lines, most)}" for what, lines in found.items() if lines
        )
        return "".join(parts)


class NotCoveredError(CoverageError):
    """A `CoverageError` that also has its lists as they are.

    Attributes:
        coverage: the lists.
        is_unsupported: Whether the arrays agree with their configuration, and MaxText has no such model.
    """

    def __init__(
        self, message: str, coverage: Coverage, *, place: str, hint: str, is_unsupported: bool = False
    ) -> None:
        super().__init__(message, place=place, hint=hint)
        self.coverage, self.is_unsupported = coverage, is_unsupported

    def folded(self, patterns: Sequence[str], hint: str) -> NotCoveredError:
        """The same with one line for all arrays not expected that a glob names, and another next step."""
        found, place = self.coverage, self.place or ""
        globs = (next((p for p in patterns if fnmatchcase(key, p)), key) for key in found.extra)
        lines = [
            glob if glob in found.extra else f"{glob}: {plural(count, 'array')}"
            for glob, count in Counter(globs).items()
        ]
        return NotCoveredError(_MESSAGE + _listed(found, lines), found, place=place, hint=hint)


def check_coverage(
    arrays: Mapping[str, LazyArray],
    wanted: Sequence[Expected],
    unwanted: Sequence[Expected],
    sizes: Mapping[str, Size],
    place: str,
    dropped: Collection[str] = (),
    remedies: Mapping[str, str] | None = None,
    leave_out: str = "",
) -> None:
    """Compares the arrays that are there with those that the rows name.

    Args:
        arrays: what is there.
        wanted, unwanted: the sides whose arrays must be there, and those whose must not.
        sizes: length of every axis.
        place: for messages.
        dropped: keys that are left out on purpose.
        remedies: pattern of keys that no row takes -> what to do about such.
        leave_out: how a user leaves arrays out, where no option does.

    Raises:
        NotCoveredError: with every missing, left-over and misshapen array.
    """
    lengths = lengths_of(sizes)
    require_countable((each.side for each in wanted), sizes, place)
    sides: dict[str, Side] = {}
    shapes: dict[str, Shape] = {}
    for each in wanted:
        keys = [*each.side.keys(lengths)]
        sides |= dict.fromkeys(keys, each.side)
        shapes |= dict.fromkeys(keys, each.side.shape(lengths) if keys else ())
    missing = [key for key in sides if key not in arrays]
    extra = [key for key in arrays if key not in sides]
    misshapen = [
        _misshapen(key, arrays[key].shape, side, sizes)
        for key, side in sides.items()
        if key in arrays and arrays[key].shape != shapes[key]
    ]
    if not (missing or extra or misshapen):
        return
    wrong = Wrong(tuple(missing), tuple(extra), tuple(each.key for each in misshapen))
    why = [*remedies_for(extra, remedies or {}), *reasons(wrong, arrays, wanted, unwanted, sizes, dropped)]
    told = [*why, *left_over(arrays, sides, extra, leave_out, is_told=bool(why))]
    found = Coverage({key: shapes[key] for key in missing}, wrong.extra, tuple(misshapen), tuple(why))
    raise NotCoveredError(
        _MESSAGE + _listed(found, extra),
        found,
        place=place,
        hint="; ".join((*told, *next_step(wrong, dropped, told if why else ()))) or CHECK,
    )


def require_countable(sides: Iterable[Side], sizes: Mapping[str, Size], place: str) -> None:
    """Refuses a configuration whose numbers ask for more names than can be listed.

    Raises:
        MappingError: with the number, and who says it.
    """
    for side in sides:
        axes = side.key.axes
        if prod(sizes[axis].length for axis in axes) > MOST_KEYS:
            size = max((sizes[axis] for axis in axes), key=lambda size: size.length)
            raise MappingError(
                "no model has so many arrays",
                place=place,
                got=f"{size.length} by {size.source}",
                wanted=f"at most {MOST_KEYS} arrays of one kind",
                hint=f"check {size.source}",
            )


def _listed(found: Coverage, extra: Sequence[str]) -> str:
    """All that is wrong, with these lines for what is not expected."""
    missing = [*found.missing]
    lines = [_with_near(key, found.extra) for key in missing[:_MOST_NEAR]] + missing[_MOST_NEAR:]
    parts = {
        "missing": (len(lines), lines),
        "not expected": (len(found.extra), extra),
        "of another shape": (len(found.misshapen), list(map(str, found.misshapen))),
    }
    return "".join(_section(what, count, lines) for what, (count, lines) in parts.items())


def _section(what: str, count: int, lines: Sequence[str]) -> str:
    return f"\n  {_are(count)} {what}:{listing(lines, _MOST_LINES)}" if count else ""


def _are(count: int) -> str:
    return "1 array is" if count == 1 else f"{count} arrays are"


def _with_near(key: str, extra: Sequence[str]) -> str:
    near = near_names(key, extra, 1)
    return f"{key}  (there is {near[0]})" if near else key


def _misshapen(key: str, shape: Shape, side: Side, sizes: Mapping[str, Size]) -> Misfit:
    wanted = side.shape(lengths_of(sizes))
    why = "it looks transposed" if shape == wanted[::-1] else "; ".join(_doubtful(shape, wanted, side, sizes))
    return Misfit(key, shape, wanted, why)


def _doubtful(shape: Shape, wanted: Shape, side: Side, sizes: Mapping[str, Size]) -> Iterator[str]:
    """The axes on which got and wanted differ, with who said their length."""
    if len(shape) != len(wanted):
        yield f"{len(wanted)} axes: {side}"
        return
    for at, (group, got, length) in enumerate(zip(side.groups, shape, wanted, strict=True)):
        if got != length:
            others = side.parts if side.join is not None and side.join.at == at else ()
            axes = dict.fromkeys((*group, *(axis for part in others for axis in part)))
            yield from (f"{axis} {sizes[axis].length} from {sizes[axis].source}" for axis in axes)
