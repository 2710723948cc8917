"""Check that arrays match the rows: none missing, none extra, and every shape as expected.

If not, a single error lists all faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CoverageError, MappingError, listing, similar_names
from ckpttools.core.message_terms import action, option
from ckpttools.core.region import Shape
from ckpttools.core.text import fold_lines, plural
from ckpttools.mapping.axes import Side
from ckpttools.mapping.sizes import Size, lengths_of
from ckpttools.quantized.weights import find_weights, is_scale

_MESSAGE = "the arrays do not match the model"
# Longer lists end with the number of remaining lines.
_MAX_LINES = 200
# Similar names are suggested for at most this many missing arrays.
_MAX_NEAR = 20


@dataclass(frozen=True, slots=True)
class ShapeMismatch:
    """An array whose shape differs from the shape that its row gives.

    Attributes:
        key: Key of the array.
        got, expected: The two shapes.
        why: The origin of the lengths that differ.
    """

    key: str
    got: Shape
    expected: Shape
    why: str

    def __str__(self) -> str:
        return f"{self.key}: got {list(self.got)}, expected {list(self.expected)} ({self.why})"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The result of comparing arrays with the keys of rows.

    Attributes:
        missing: Missing key -> its expected shape.
        extra: Keys that no row has.
        misshapen: Arrays with an unexpected shape.
        reasons: Sentences that explain why some arrays are expected or not.
    """

    missing: Mapping[str, Shape]
    extra: tuple[str, ...]
    misshapen: tuple[ShapeMismatch, ...]
    reasons: tuple[str, ...]

    def summary(self, limit: int = 3) -> str:
        """Summarize the faults in a few lines: the number of arrays, and the first of them."""
        sections = {
            "missing": list(self.missing),
            "not expected": list(self.extra),
            "of the wrong shape": list(map(str, self.misshapen)),
        }
        parts = (
            f"\n  {_is_or_are(len(lines))} {title}:{listing(lines, limit)}"
            for title, lines in sections.items()
            if lines
        )
        return "".join(parts)


class NotCoveredError(CoverageError):
    """A `CoverageError` with its lists as data.

    Attributes:
        coverage: The lists of missing, extra and misshapen arrays.
        is_unsupported: Whether the arrays agree with their configuration, but MaxText does not support such a
            model.
    """

    def __init__(
        self, message: str, coverage: Coverage, *, location: str, hint: str, is_unsupported: bool = False
    ) -> None:
        super().__init__(message, location=location, hint=hint)
        self.coverage, self.is_unsupported = coverage, is_unsupported

    def folded(self, patterns: Sequence[str], hint: str) -> NotCoveredError:
        """Return this error with one line for all unexpected arrays that match a pattern, and a new hint."""
        coverage, location = self.coverage, self.location or ""
        globs = (next((p for p in patterns if fnmatchcase(key, p)), key) for key in coverage.extra)
        lines = [
            glob if glob in coverage.extra else f"{glob}: {plural(count, 'array')}"
            for glob, count in Counter(globs).items()
        ]
        return NotCoveredError(
            _MESSAGE + _list_faults(coverage, lines), coverage, location=location, hint=hint
        )


def check_coverage(
    arrays: Mapping[str, LazyArray],
    expected: Sequence[ExpectedArray],
    unwanted: Sequence[ExpectedArray],
    sizes: Mapping[str, Size],
    location: str,
    dropped: Collection[str] = (),
    remedies: Mapping[str, str] | None = None,
    leave_out: str = "",
) -> None:
    """Compare the arrays that exist with those that the rows describe.

    Args:
        arrays: The arrays that exist.
        expected, unwanted: The sides whose arrays must exist, and the sides whose arrays must not.
        sizes: The length of every axis.
        location: Location of the checkpoint, for messages.
        dropped: Keys that the user leaves out.
        remedies: Pattern of keys without a row -> what to do about them.
        leave_out: How the user can leave out arrays if there is no option for it.

    Raises:
        NotCoveredError: Arrays are missing, extra or misshapen. The message lists them.
    """
    lengths = lengths_of(sizes)
    require_countable((item.side for item in expected), sizes, location)
    sides: dict[str, Side] = {}
    shapes: dict[str, Shape] = {}
    for item in expected:
        keys = [*item.side.keys(lengths)]
        sides |= dict.fromkeys(keys, item.side)
        shapes |= dict.fromkeys(keys, item.side.shape(lengths) if keys else ())
    missing = [key for key in sides if key not in arrays]
    extra = [key for key in arrays if key not in sides]
    misshapen = [
        _misshapen(key, arrays[key].shape, side, sizes)
        for key, side in sides.items()
        if key in arrays and arrays[key].shape != shapes[key]
    ]
    if not (missing or extra or misshapen):
        return
    faults = CoverageFaults(tuple(missing), tuple(extra), tuple(item.key for item in misshapen))
    hints = [
        *remedies_for(extra, remedies or {}),
        *reasons(faults, arrays, expected, unwanted, sizes, dropped),
    ]
    reasons_and_steps = [*hints, *remaining_keys(arrays, sides, extra, leave_out, is_told=bool(hints))]
    coverage = Coverage({key: shapes[key] for key in missing}, faults.extra, tuple(misshapen), tuple(hints))
    raise NotCoveredError(
        _MESSAGE + _list_faults(coverage, extra),
        coverage,
        location=location,
        hint="; ".join((*reasons_and_steps, *next_step(faults, dropped, reasons_and_steps if hints else ())))
        or CHECK,
    )


def require_countable(sides: Iterable[Side], sizes: Mapping[str, Size], location: str) -> None:
    """Refuse a configuration whose counts require more names than can be listed.

    Raises:
        MappingError: The counts are too large. The message states the count and its origin.
    """
    for side in sides:
        axes = side.key.axes
        if prod(sizes[axis].length for axis in axes) > MAX_KEYS:
            size = max((sizes[axis] for axis in axes), key=lambda size: size.length)
            raise MappingError(
                "the number of arrays is implausibly large",
                location=location,
                got=f"{size.length} by {size.source}",
                expected=f"at most {MAX_KEYS} arrays per row",
                hint=f"check {size.source}",
            )


def _list_faults(coverage: Coverage, extra: Sequence[str]) -> str:
    """List all faults, with the given lines for unexpected arrays."""
    missing = [*coverage.missing]
    lines = [_add_near_names(key, coverage.extra) for key in missing[:_MAX_NEAR]] + missing[_MAX_NEAR:]
    parts = {
        "missing": (len(lines), lines),
        "not expected": (len(coverage.extra), extra),
        "of the wrong shape": (len(coverage.misshapen), list(map(str, coverage.misshapen))),
    }
    return "".join(_section(title, count, lines) for title, (count, lines) in parts.items())


def _section(title: str, count: int, lines: Sequence[str]) -> str:
    return f"\n  {_is_or_are(count)} {title}:{listing(lines, _MAX_LINES)}" if count else ""


def _is_or_are(count: int) -> str:
    return "1 array is" if count == 1 else f"{count} arrays are"


def _add_near_names(key: str, extra: Sequence[str]) -> str:
    near = similar_names(key, extra, 1)
    return f"{key}  ({near[0]} exists)" if near else key


def _misshapen(key: str, shape: Shape, side: Side, sizes: Mapping[str, Size]) -> ShapeMismatch:
    expected = side.shape(lengths_of(sizes))
    reason = (
        "it looks transposed"
        if shape == expected[::-1]
        else "; ".join(_doubtful(shape, expected, side, sizes))
    )
    return ShapeMismatch(key, shape, expected, reason)


def _doubtful(shape: Shape, expected: Shape, side: Side, sizes: Mapping[str, Size]) -> Iterator[str]:
    """Yield the axes on which the actual and expected shapes differ, with the origin of each length."""
    if len(shape) != len(expected):
        yield f"{len(expected)} axes: {side}"
        return
    for at, (group, got, length) in enumerate(zip(side.groups, shape, expected, strict=True)):
        if got != length:
            parts = side.parts if side.join is not None and side.join.at == at else ()
            axes = dict.fromkeys((*group, *(axis for part in parts for axis in part)))
            yield from (f"{axis} {sizes[axis].length} from {sizes[axis].source}" for axis in axes)


CHECK = "check that config.json belongs to these weights"
FETCH = f"download the files with the missing arrays again, or {CHECK}"
MAX_KEYS = 1 << 20
"""Maximum number of keys of one row; the largest models have about 130,000 (layers times experts)."""
# Parts of the names of buffers, which a model recomputes but may also store.
_BUFFERS = ("rotary", "inv_freq", "mask")


@dataclass(frozen=True, slots=True)
class ExpectedArray:
    """A side whose arrays must exist or must not exist.

    Attributes:
        side: A side of a row.
        why: The reason for this expectation; empty if it needs none.
        remedy: What the user can do if only such arrays are wrong.
    """

    side: Side
    why: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CoverageFaults:
    """Keys of missing arrays, of arrays without a row, and of arrays of the wrong shape."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    misshapen: tuple[str, ...]


def reasons(
    faults: CoverageFaults,
    arrays: Collection[str],
    expected: Sequence[ExpectedArray],
    unwanted: Sequence[ExpectedArray],
    sizes: Mapping[str, Size],
    dropped: Collection[str],
) -> Iterator[str]:
    """Yield reasons why arrays are expected or not; arguments as for `check_coverage`, `arrays` by name."""
    lengths = lengths_of(sizes)
    lost = [key for key in faults.missing if key in dropped]
    yield from (f"{key} is missing because it was dropped" for key in fold_lines(lost))
    alternatives = {key for item in unwanted for key in _keys(item, lengths)}
    yield from _flag_hints({*faults.missing} - alternatives, expected, lengths, "expected")
    yield from _flag_hints({*faults.extra}, unwanted, lengths, "not expected")
    yield from _beyond_hints(faults.extra, expected, sizes)
    yield from _short_hints(arrays, expected, sizes)
    yield from _choices(faults, (*expected, *unwanted), lengths)


def remaining_keys(
    arrays: Mapping[str, LazyArray],
    known: Collection[str],
    extra: Sequence[str],
    drop_hint: str,
    *,
    is_told: bool,
) -> Iterator[str]:
    """Yield hints for arrays that no row describes.

    Args:
        arrays: All arrays that exist.
        known: Keys that rows describe.
        extra: Keys that no row describes.
        drop_hint: How the user can leave out arrays if there is no option for it.
        is_told: Whether the error already explains the fault in another way.
    """
    packed = find_weights(arrays)
    needed = {side for item in packed.values() for side in item.sides}
    scaled = next((key for key in extra if is_scale(key) or key in packed or key in needed), None)
    if scaled:
        yield f"{scaled} belongs to a quantized weight, whose values are meaningless without their scales"
    elif extra and not is_told:
        if 2 * len(extra) > len(arrays) and any(key not in arrays for key in known):
            yield f"most array names do not belong to this family: {CHECK}"
            return
        part = next((key for key in extra if _is_part(key, arrays[key], known)), None)
        yield _refused_drops(part) if part else _drop_options(drop_hint)


def _is_part(key: str, array: LazyArray, sides: Collection[str]) -> bool:
    """Return whether an array without a row belongs to a module with rows and is not a constant buffer."""
    if not array.dtype.is_float or any(word in key for word in _BUFFERS):
        return False
    module = key.rpartition(".")[0]
    around = {module, module.rpartition(".")[0]} - {""}
    return any(side.startswith(f"{head}.") for head in around for side in sides)


def _refused_drops(key: str) -> str:
    file = option("family", "FILE.toml")
    return (
        f"this family has no row for {key}, which seems to belong to the model: {CHECK}, rename it with "
        f"{action('remap')}, or describe such a model in a file: {file}"
    )


def _drop_options(leave_out: str) -> str:
    drop_hint = leave_out or f"name them with {option('drop', 'PATTERN')}"
    return f"to leave them out, {drop_hint}"


def remedies_for(extra: Sequence[str], remedies: Mapping[str, str]) -> Iterator[str]:
    """Yield the remedies for keys that no row describes, without duplicates."""
    for pattern, text in remedies.items():
        hit = next((key for key in extra if fnmatchcase(key, pattern)), None)
        if hit:
            yield f"{text} ({hit} exists)"


def _flag_hints(
    keys: Collection[str], expected: Sequence[ExpectedArray], lengths: Mapping[str, int], verdict: str
) -> Iterator[str]:
    """Yield the flags that decide about the listed keys, without duplicates."""
    keys_by_reason: dict[str, list[str]] = {}
    for item in expected:
        hit = next((key for key in _keys(item, lengths) if key in keys), None) if item.why else None
        if hit and hit not in keys_by_reason.setdefault(item.why, []):
            keys_by_reason[item.why].append(hit)
    for reason, (first, *others) in keys_by_reason.items():
        subject = f"{first} and others are" if others else f"{first} is"
        yield f"{subject} {verdict} because of {reason}"


def next_step(faults: CoverageFaults, dropped: Collection[str], reasons: Collection[str]) -> Iterator[str]:
    """Yield the hint if `reasons` only explain why arrays are expected or not."""
    if not reasons or any(CHECK in text or "download" in text for text in reasons):
        return
    if any(key not in dropped for key in faults.missing):
        yield FETCH
    elif faults.misshapen or not faults.missing:
        yield CHECK


def _choices(
    faults: CoverageFaults, expected: Sequence[ExpectedArray], lengths: Mapping[str, int]
) -> Iterator[str]:
    """Yield the choices that would resolve all faults.

    If there are other faults, a choice would only hide them.
    """
    open_to_choice = [item for item in expected if item.remedy]
    keys = {key: item.remedy for item in open_to_choice for key in _keys(item, lengths)}
    all_keys = {*faults.missing, *faults.extra, *faults.misshapen}
    hits = [key for key in keys if key in all_keys]
    if len(hits) < len(all_keys):
        if hits:
            yield CHECK if faults.extra or faults.misshapen else FETCH
        return
    # A lost or damaged array must not be replaced silently by another one.
    for key in (hit for hit in hits if hit not in faults.extra):
        unless = ", unless the model never had it" if faults.missing else ""
        yield f"download the file with {key} again{unless}"
    if not faults.misshapen:
        yield from dict.fromkeys(keys[key] for key in hits)


def _keys(expected: ExpectedArray, lengths: Mapping[str, int]) -> Iterator[str]:
    """Yield the keys of a side.

    Yields nothing if the length of a key axis is unknown, or if there are too many keys to list.
    """
    axes = expected.side.key.axes
    if set(axes) <= set(lengths) and prod(lengths[axis] for axis in axes) <= MAX_KEYS:
        yield from expected.side.keys(lengths)


def _beyond_hints(
    extra: Sequence[str], expected: Sequence[ExpectedArray], sizes: Mapping[str, Size]
) -> Iterator[str]:
    """Yield the sizes that are too small for the existing keys."""
    keys = [item.side.key for item in expected]
    for axis in dict.fromkeys(axis for key in keys for axis in key.axes):
        other_sizes = {item: length for item, length in lengths_of(sizes).items() if item != axis}
        open_keys = (key for key in keys if key.is_open_on(axis))
        matches = ((key.match(name, other_sizes), name) for key in open_keys for name in extra)
        hits = [(index[axis], name) for index, name in matches if index]
        if hits:
            yield f"{min(hits)[1]} is beyond the {sizes[axis].length} of {sizes[axis].source}"


def _short_hints(
    arrays: Collection[str], expected: Sequence[ExpectedArray], sizes: Mapping[str, Size]
) -> Iterator[str]:
    """Yield the sizes that are too large for the existing keys, or that no configuration states."""
    lengths = lengths_of(sizes)
    hinted: set[str] = set()
    for side in (item.side for item in expected):
        missing_key = next((key for key in side.keys(lengths) if key not in arrays), None)
        for axis in side.axes if missing_key else ():
            size, count = sizes[axis], _count_leading(side, axis, lengths, arrays)
            if axis in hinted or not (size.is_assumed or count):
                continue
            hinted.add(axis)
            if size.is_assumed:
                yield f"{missing_key} is expected with {axis} {size.length} from {size.source}"
            else:
                yield f"{size.source} is {size.length}, but the arrays have {plural(count, axis)}"


def _count_leading(side: Side, axis: str, lengths: Mapping[str, int], arrays: Collection[str]) -> int:
    """Return how many of the first arrays along an axis of a side's key exist; 0 if the last one does."""
    if axis not in side.key.axes:
        return 0
    first = dict.fromkeys(side.key.axes, 0)
    keys = (side.key.format({**first, axis: index}, lengths) for index in range(lengths[axis]))
    count = next((index for index, key in enumerate(keys) if key not in arrays), 0)
    last = side.key.format({**first, axis: lengths[axis] - 1}, lengths)
    return 0 if last in arrays else count
