"""Why arrays that are not those of a model are wanted or not, and what a user can do then."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import folded
from ckpttools.core.wording import option
from ckpttools.mapping.axes import Side
from ckpttools.mapping.sizes import Size, lengths_of
from ckpttools.quantized.weights import is_scale, quantized

CHECK = "check that config.json belongs to these weights"
FETCH = f"fetch the files that hold the missing arrays again, or {CHECK}"
MOST_KEYS = 1 << 20
"""Of one row; the largest models have some 130,000, layers times experts."""
# Words in the names of what a model works out anew, and stores all the same.
_BUFFERS = ("rotary", "inv_freq", "mask")


@dataclass(frozen=True, slots=True)
class Expected:
    """A side whose arrays must be there, or must not be.

    Attributes:
        side: of a row.
        why: who says so; empty where nobody has to.
        remedy: what a user can do where only such arrays are wrong.
    """

    side: Side
    why: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Wrong:
    """Keys of arrays that are missing, that no row has, and that have another shape."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    misshapen: tuple[str, ...]


def reasons(
    wrong: Wrong,
    arrays: Collection[str],
    wanted: Sequence[Expected],
    unwanted: Sequence[Expected],
    sizes: Mapping[str, Size],
    dropped: Collection[str],
) -> Iterator[str]:
    """Sentences that say why arrays are wanted or not; arguments as of `check_coverage`, `arrays` by name."""
    lengths = lengths_of(sizes)
    lost = [key for key in wrong.missing if key in dropped]
    yield from (f"{key} is missing because it was dropped" for key in folded(lost))
    alternatives = {key for each in unwanted for key in _keys(each, lengths)}
    yield from _flag_hints({*wrong.missing} - alternatives, wanted, lengths, "wanted")
    yield from _flag_hints({*wrong.extra}, unwanted, lengths, "not expected")
    yield from _beyond_hints(wrong.extra, wanted, sizes)
    yield from _short_hints(arrays, wanted, sizes)
    yield from _choices(wrong, (*wanted, *unwanted), lengths)


def left_over(
    arrays: Mapping[str, LazyArray], known: Collection[str], extra: Sequence[str], way: str, *, is_told: bool
) -> Iterator[str]:
    """What to do with arrays that no row has.

    Args:
        arrays: all that are there.
        known: keys that rows have.
        extra: keys that no row has.
        way: how a user leaves arrays out, where no option does.
        is_told: whether something else is said already of what is wrong.
    """
    packed = quantized(arrays)
    needed = {side for each in packed.values() for side in each.sides}
    scaled = next((key for key in extra if is_scale(key) or key in packed or key in needed), None)
    if scaled:
        yield f"{scaled} belongs to a quantised weight, whose numbers mean nothing without its scales"
    elif extra and not is_told:
        if 2 * len(extra) > len(arrays) and any(key not in arrays for key in known):
            yield f"most array names do not belong to this family: {CHECK}"
            return
        part = next((key for key in extra if _is_part(key, arrays[key], known)), None)
        yield _not_to_drop(part) if part else _to_drop(way)


def _is_part(key: str, array: LazyArray, sides: Collection[str]) -> bool:
    """Whether an array that no row has lies among those that rows have, and is not a constant buffer."""
    if not array.dtype.is_float or any(word in key for word in _BUFFERS):
        return False
    module = key.rpartition(".")[0]
    around = {module, module.rpartition(".")[0]} - {""}
    return any(each.startswith(f"{head}.") for head in around for each in sides)


def _not_to_drop(key: str) -> str:
    file = option("family", "FILE.toml")
    return (
        f"{key} is a part of the model that no row of this family has, and without it the model computes "
        f"otherwise: {CHECK}, or describe such a model in a file: {file}"
    )


def _to_drop(leave_out: str) -> str:
    way = leave_out or f"name them with {option('drop', 'PATTERN')}"
    return f"if they are to be left out, {way}"


def remedies_for(extra: Sequence[str], remedies: Mapping[str, str]) -> Iterator[str]:
    """What to do about keys that no row takes, once for each remedy."""
    for pattern, text in remedies.items():
        hit = next((key for key in extra if fnmatchcase(key, pattern)), None)
        if hit:
            yield f"{text} (there is {hit})"


def _flag_hints(
    keys: Collection[str], expected: Sequence[Expected], lengths: Mapping[str, int], verdict: str
) -> Iterator[str]:
    """Says which flag decides about keys of the list, once for each flag."""
    found: dict[str, list[str]] = {}
    for each in expected:
        hit = next((key for key in _keys(each, lengths) if key in keys), None) if each.why else None
        if hit and hit not in found.setdefault(each.why, []):
            found[each.why].append(hit)
    for why, (first, *others) in found.items():
        subject = f"{first} and others are" if others else f"{first} is"
        yield f"{subject} {verdict} because of {why}"


def next_step(wrong: Wrong, dropped: Collection[str], told: Collection[str]) -> Iterator[str]:
    """Yield what to do, if the reasons in `told` only say why arrays are expected or not."""
    if not told or any(CHECK in text or "fetch" in text for text in told):
        return
    if any(key not in dropped for key in wrong.missing):
        yield FETCH
    elif wrong.misshapen or not wrong.missing:
        yield CHECK


def _choices(wrong: Wrong, expected: Sequence[Expected], lengths: Mapping[str, int]) -> Iterator[str]:
    """What a user can choose, where that would mend all; where more is wrong it would only hide that."""
    open_to_choice = [each for each in expected if each.remedy]
    keys = {key: each.remedy for each in open_to_choice for key in _keys(each, lengths)}
    every = {*wrong.missing, *wrong.extra, *wrong.misshapen}
    hits = [key for key in keys if key in every]
    if len(hits) < len(every):
        if hits:
            yield CHECK if wrong.extra or wrong.misshapen else FETCH
        return
    # An array that is lost or damaged must not be replaced by another one without a thought.
    for key in (each for each in hits if each not in wrong.extra):
        unless = ", unless the model never had it" if wrong.missing else ""
        yield f"fetch the file that holds {key} again{unless}"
    if not wrong.misshapen:
        yield from dict.fromkeys(keys[key] for key in hits)


def _keys(expected: Expected, lengths: Mapping[str, int]) -> Iterator[str]:
    """The keys of a side, none where the length of an axis in its key is not known, or too many to list."""
    axes = expected.side.key.axes
    if set(axes) <= set(lengths) and prod(lengths[axis] for axis in axes) <= MOST_KEYS:
        yield from expected.side.keys(lengths)


def _beyond_hints(
    extra: Sequence[str], wanted: Sequence[Expected], sizes: Mapping[str, Size]
) -> Iterator[str]:
    """Says which size is too small for the keys that are there."""
    keys = [each.side.key for each in wanted]
    for axis in dict.fromkeys(axis for key in keys for axis in key.axes):
        others = {each: length for each, length in lengths_of(sizes).items() if each != axis}
        telling = (key for key in keys if key.is_open_on(axis))
        found = ((key.match(name, others), name) for key in telling for name in extra)
        hits = [(index[axis], name) for index, name in found if index]
        if hits:
            yield f"{min(hits)[1]} is beyond the {sizes[axis].length} that {sizes[axis].source} says"


def _short_hints(
    arrays: Collection[str], wanted: Sequence[Expected], sizes: Mapping[str, Size]
) -> Iterator[str]:
    """Says which size is too large for the keys that are there, or which nobody states."""
    lengths = lengths_of(sizes)
    told: set[str] = set()
    for side in (each.side for each in wanted):
        lacking = next((key for key in side.keys(lengths) if key not in arrays), None)
        for axis in side.axes if lacking else ():
            short = sizes[axis].is_assumed or _lacks_the_last(side, axis, lengths, arrays)
            if short and axis not in told:
                told.add(axis)
                yield f"{lacking} is wanted with {axis} {lengths[axis]} from {sizes[axis].source}"


def _lacks_the_last(side: Side, axis: str, lengths: Mapping[str, int], arrays: Collection[str]) -> bool:
    """Whether the first of the arrays along an axis in a side's key is there, and the last is not."""
    if axis not in side.key.axes:
        return False
    first = dict.fromkeys(side.key.axes, 0)
    last = {**first, axis: lengths[axis] - 1}
    return side.key.format(first, lengths) in arrays and side.key.format(last, lengths) not in arrays
