"""Check a family on its own, with the sizes of a configuration, or against a checkpoint of either side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant
from ckpttools.array.tree import Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import CheckpointError, ConfigError
from ckpttools.core.message_terms import option
from ckpttools.core.region import Shape
from ckpttools.family_check.definition import (
    LAYOUTS,
    Definition,
    FamilyCheck,
    FamilyFinding,
    TriedLayout,
    findings_of,
    hints_of,
    is_fatal,
)
from ckpttools.family_check.synthetic_models import Sizes, SyntheticModel, synthetic_model
from ckpttools.formats.json_file import read_json
from ckpttools.formats.registry import open_tree
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.axes import Side
from ckpttools.mapping.build import Mapped
from ckpttools.mapping.flags import inferred_flags
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import Size, derive, lengths_of
from ckpttools.mapping.table import Table
from ckpttools.mapping.values import Fill
from ckpttools.maxtext.family_layouts import family_as_stored
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import PLAIN, Family, Spelling
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse


def check_family(
    family: Family, against: LocationLike | None = None, config: LocationLike | None = None
) -> FamilyCheck:
    """Check a family without reading array data.

    Args:
        family: The family whose rows are checked.
        against: A Hugging Face or MaxText checkpoint of such a model; None checks the family on its own.
        config: The model's `config.json` or its directory; None uses the one next to `against`, or synthetic
            models.

    Raises:
        CheckpointError: `against` or `config` cannot be read.
    """
    file = None if config is None else _config_file(parse(config))
    parsed: Mapping[str, Any] | None = None if file is None else read_json(file.require_exists())
    if against is not None:
        tree = open_tree(against)
        parsed = parsed or tree.metadata.config or ModelFiles.of(tree, None).config
        return check_against(family, tree, parsed, str(file or CONFIG))
    return check_alone(family) if parsed is None else check_on_config(family, parsed, str(file))


def _config_file(location: Location) -> Location:
    """Return a configuration file, given its path or its directory."""
    if not location.is_dir():
        return location
    if not (location / CONFIG).exists():
        raise ConfigError(
            "config.json does not exist", location=location, hint=f"{option('config')} names it"
        )
    return location / CONFIG


def check_alone(family: Family) -> FamilyCheck:
    """Check the rows on synthetic models, in each spelling."""
    definition = Definition(family)
    own = definition.findings()
    if any(map(is_fatal, own)):
        return FamilyCheck(family.name, findings=own)
    findings = [
        FamilyFinding(
            "formula", axis, f"{family.derived[axis]!r} has no valid length for any of the tried sizes"
        )
        for axis in Sizes.of(definition).wrong
    ]
    models = list(synthetic_model(definition))
    trips = list(_round_trips(family, models))
    largest = max(trips, key=lambda trip: (len(trip.layouts), trip.num_arrays))
    return FamilyCheck(
        family.name,
        models=tuple(model.declared for model in models),
        num_arrays=largest.num_arrays,
        layouts=largest.layouts,
        findings=tuple(
            dict.fromkeys([*own, *findings, *(finding for trip in trips for finding in trip.findings)])
        ),
    )


def check_on_config(family: Family, config: Mapping[str, Any], location: str) -> FamilyCheck:
    """Check the rows with the sizes of a configuration, using synthetic values for missing sizes."""
    definition = Definition(family)
    check = FamilyCheck(family.name, config=location, findings=definition.findings())
    if any(map(is_fatal, check.findings)):
        return check
    model_type = config.get("model_type")
    spelling = family.spelling_for(model_type if isinstance(model_type, str) else None)
    model = SyntheticModel("", config, Sizes.of(definition).lengths, definition.unruled)
    return _finish(check, _check_layout(family, model, spelling))


def check_against(
    family: Family, tree: Tree, config: Mapping[str, Any] | None = None, location: str = CONFIG
) -> FamilyCheck:
    """Compare the rows with a checkpoint of either side, without reading array data.

    Args:
        family: The family whose rows are checked.
        tree: The checkpoint.
        config: The model's configuration; None if there is none, in which case array shapes decide.
        location: The location of the configuration, for messages.
    """
    check = FamilyCheck(
        family.name,
        against=tree.metadata.location,
        config=None if config is None else location,
        findings=Definition(family).findings(),
    )
    if any(map(is_fatal, check.findings)):
        return check
    try:
        fits = _fits(family, tree, config)
    except CheckpointError as error:
        return _failed_check(check, error)
    share = max(fit.share for fit in fits)
    outcomes = [(fit, fit.mapped()) for fit in fits if fit.share == share]
    fit, mapped = min(outcomes, key=lambda outcome: _failure_finding(outcome[1]))
    check = replace(check, side=fit.side, hints=fit.hints())
    if isinstance(mapped, CheckpointError):
        return _failed_check(check, mapped)
    return _finish(check, _check_round_trip(family, fit, mapped, config))


def _failure_finding(mapped: Mapped | CheckpointError) -> int:
    """Count the findings, to choose the best of the possible layouts of a checkpoint."""
    return len(list(findings_of(mapped))) if isinstance(mapped, CheckpointError) else 0


def _failed_check(check: FamilyCheck, error: CheckpointError) -> FamilyCheck:
    return replace(
        check,
        findings=(*check.findings, *findings_of(error)),
        hints=(*check.hints, *hints_of(error)),
    )


def _finish(check: FamilyCheck, trip: RoundTrip) -> FamilyCheck:
    """Add the findings of a round trip to a check."""
    return replace(
        check,
        num_arrays=trip.num_arrays,
        layouts=trip.layouts,
        findings=check.findings + trip.findings,
        hints=check.hints + trip.hints,
    )


def _round_trips(family: Family, models: Iterable[SyntheticModel]) -> Iterator[RoundTrip]:
    """Run round trips of the rows on each model in each spelling.

    A model with the same rows and sizes as a correct one is skipped. A third of all models differ only in
    flags that have no effect in a spelling, or have an effect only together with others.
    """
    passed: set[Hashable] = set()
    for model, (number, spelling) in product(models, enumerate(family.spellings)):
        rows = _rows_of_side(family, model, spelling)
        if isinstance(rows, RoundTrip):
            yield rows
        elif (same := (number, rows.identity)) not in passed:
            trip = round_trip(rows.bind, rows.lengths)
            if not trip.findings:
                passed.add(same)
            yield trip


def _check_layout(family: Family, model: SyntheticModel, spelling: Spelling) -> RoundTrip:
    """Run the round trip of the rows on one model in one spelling."""
    rows = _rows_of_side(family, model, spelling)
    return rows if isinstance(rows, RoundTrip) else round_trip(rows.bind, rows.lengths)


@dataclass(frozen=True)
class _BoundRows:
    """The rows of a family, bound to a model.

    Attributes:
        bind: See `Bind`.
        lengths: The length of every axis.
    """

    bind: Bind
    lengths: Mapping[str, int]

    @property
    def identity(self) -> Hashable:
        """Return a key that is equal for models that give equal results in one spelling."""
        table = self.bind(None)
        rows = tuple(map(table.has, table.rows))
        lengths = frozenset(lengths_of(table.sizes).items())
        return rows, lengths, frozenset(self.lengths.items())


def _rows_of_side(family: Family, model: SyntheticModel, spelling: Spelling) -> _BoundRows | RoundTrip:
    """Bind the rows to a model in one spelling, or return the findings about its sizes."""

    @cache
    def bind(scan_axis: int | None) -> Table:
        return family.table(
            model.config, CONFIG, scan_axis=scan_axis, spelling=spelling, overrides=model.flags
        )

    try:
        config_sizes = bind(None).sizes
        synthetic_sizes = {
            axis: Size(n, "synthetic") for axis, n in model.lengths.items() if axis not in family.derived
        }
        sizes = derive({**synthetic_sizes, **config_sizes}, family.derived, CONFIG)
    except CheckpointError as error:
        return RoundTrip(tuple(findings_of(error)))
    return _BoundRows(bind, lengths_of(sizes))


@dataclass(frozen=True)
class _SideReading:
    """A checkpoint's arrays interpreted as one side of the family's rows, in one layout.

    Attributes:
        side: "huggingface" or "maxtext".
        arrays: The arrays by name.
        table: The rows, with all flags decided.
        share: The fraction of the rows' first names that exist.
        open_flags: The undecided flags, which are assumed not to be set.
    """

    side: str
    arrays: Mapping[str, LazyArray]
    table: Table
    share: float
    open_flags: tuple[str, ...]

    @classmethod
    def of(cls, side: str, arrays: Mapping[str, LazyArray], table: Table) -> _SideReading:
        sides = [(row, row.right if side == "huggingface" else row.left) for row in table.rows]
        names = {item.key.first() for _, item in sides}
        undecided = {name for row in table.rows for name in row.flags} - table.flags.keys()
        inferred = inferred_flags(sorted(undecided), sides, arrays)
        flags = {**table.flags, **{name: replace(flag, open_key=None) for name, flag in inferred.items()}}
        share = sum(name in arrays for name in names) / len(names)
        is_open = tuple(name for name, flag in inferred.items() if flag.open_key is not None)
        return cls(side, arrays, replace(table, flags=flags), share, is_open)

    def mapped(self) -> Mapped | CheckpointError:
        """Return the arrays of the other side, or the error that prevents mapping them."""
        try:
            if self.side == "huggingface":
                return self.table.to_left(self.arrays)
            return self.table.to_right(self.arrays, ("vocab",))
        except CheckpointError as error:
            return error

    def hints(self) -> tuple[str, ...]:
        return tuple(f"it is unknown whether the model is {name}; assumed not" for name in self.open_flags)


def _fits(family: Family, tree: Tree, config: Mapping[str, Any] | None) -> list[_SideReading]:
    """Interpret the checkpoint as either side, in every layout.

    Raises:
        CheckpointError: The configuration lacks a size.
    """
    names = {dotted(path): array for path, array in tree.arrays.items()}
    inner = view_of(tree).named
    right = family.table(config, CONFIG, spelling=family.spelling_of(names))
    stored = family_as_stored(family, inner)
    lefts = [stored.table(config, CONFIG)]
    with contextlib.suppress(CheckpointError):  # MaxText cannot scan every number of layers.
        lefts = [*(stored.table(config, CONFIG, scan_axis=axis) for axis in (1, 0)), *lefts]
    return [
        _SideReading.of("huggingface", names, right),
        *(_SideReading.of("maxtext", inner, left) for left in lefts),
    ]


def _check_round_trip(
    family: Family, fit: _SideReading, mapped: Mapped, config: Mapping[str, Any] | None
) -> RoundTrip:
    """Run the round trips of the checkpoint's arrays, with their inferred sizes and flags."""
    arrays = fit.arrays if fit.side == "huggingface" else mapped.arrays
    shapes = {key: array.shape for key, array in arrays.items() if key not in mapped.dropped}
    spelling = family.spelling_of(arrays) if fit.side == "huggingface" else PLAIN
    sizes = {axis: Size(length, "the checkpoint") for axis, length in mapped.sizes.items()}

    def bind(scan_axis: int | None) -> Table:
        table = family.table(
            config, CONFIG, scan_axis=scan_axis, spelling=spelling, overrides=fit.table.flags
        )
        return replace(table, sizes=sizes, is_configured=True)

    return round_trip(bind, mapped.sizes, shapes)


Bind = Callable[[int | None], Table]
"""A function that returns the table for a scan axis, or for unscanned layers; all flags are known."""
Shapes = Mapping[str, Shape]

_F32 = DTYPES["float32"]


@dataclass(frozen=True)
class RoundTrip:
    """The result of the round trips in all layouts.

    Attributes:
        findings: The problems in all layouts.
        hints: Hints that may explain some findings.
        num_arrays: Number of arrays on the right side.
        layouts: The layouts in which all arrays were restored.
    """

    findings: tuple[FamilyFinding, ...] = ()
    hints: tuple[str, ...] = ()
    num_arrays: int = 0
    layouts: tuple[TriedLayout, ...] = ()


def round_trip(bind: Bind, lengths: Mapping[str, int], right: Shapes | None = None) -> RoundTrip:
    """Map right arrays to the left and back, in every layout.

    Args:
        bind: Returns the table of a layout.
        lengths: The length of every axis.
        right: Keys and shapes of the right arrays; None uses those of the rows.
    """
    rows = present_rows(bind(None), lengths)
    findings = list(_duplicate_targets([(row.right, row.left) for row in rows], lengths))
    stored = [row.right for row in rows if not isinstance(row.op, Fill)]
    right = _shapes(stored, lengths) if right is None else right
    hints: list[str] = []
    layouts: list[TriedLayout] = []
    # If two rows produce the same key, other findings would only be consequences.
    ambiguous = bool(findings)
    for name, scan_axis in LAYOUTS.items():
        try:
            table = bind(scan_axis)
        except CheckpointError:
            # Binding succeeded for unstacked layers above, so MaxText does not scan this number of layers.
            continue
        rows = present_rows(table, lengths)
        left = _shapes([row.left for row in rows], lengths)
        layout_findings = list(_duplicate_targets([(row.left, row.right) for row in rows], lengths))
        if not (layout_findings or ambiguous):
            try:
                layout_findings += _compare_round_trip(table, right, left)
            except CheckpointError as error:
                layout_findings += findings_of(error)
                hints += hints_of(error)
        findings += layout_findings
        if not (layout_findings or ambiguous):
            layouts.append(TriedLayout(name, len(left)))
    return RoundTrip(tuple(dict.fromkeys(findings)), tuple(dict.fromkeys(hints)), len(right), tuple(layouts))


def present_rows(table: Table, lengths: Mapping[str, int]) -> list[Row]:
    """Return the rows of a model, without those with an axis that is empty or of unknown length."""
    return [
        row
        for row in filter(table.has, table.rows)
        if all(lengths.get(axis) for axis in row.left.axes + row.right.axes)
        and (row.left.key.needs | row.right.key.needs) <= lengths.keys()
    ]


def _shapes(sides: Iterable[Side], lengths: Mapping[str, int]) -> dict[str, Shape]:
    """Return every key of the sides, with the shape of its array."""
    return {key: side.shape(lengths) for side in sides for key in side.keys(lengths)}


def _duplicate_targets(
    sides: Sequence[tuple[Side, Side]], lengths: Mapping[str, int]
) -> Iterator[FamilyFinding]:
    """Yield the keys that are produced twice; pairs are (target side, source side)."""
    makers: dict[str, int] = {}
    for number, (side, other) in enumerate(sides):
        if side.join is not None and side.join.number > 0:
            # A later part of an array, which the row of its first part produces.
            continue
        for key in side.keys(lengths):
            if key not in makers:
                makers[key] = number
            elif makers[key] == number:
                yield FamilyFinding("key", key, f"produced twice by {side.key}, at two coordinates")
            else:
                first = sides[makers[key]][1].key
                yield FamilyFinding("key", key, f"produced twice, from {first} and from {other.key}")


def _compare_round_trip(table: Table, right: Shapes, left: Shapes) -> Iterator[FamilyFinding]:
    """Compare the left arrays with the sides of the rows, and the returned arrays with the originals."""
    # Rows that change values need a float dtype, and keep float32.
    converted = table.to_left({key: Constant(shape, _F32, bytes(4)) for key, shape in right.items()})
    yield from _differences(converted.arrays, left)
    kept = {key: shape for key, shape in right.items() if key not in converted.dropped}
    yield from _differences(table.to_right(converted.arrays).arrays, kept)


def _differences(arrays: Mapping[str, LazyArray], expected: Shapes) -> Iterator[FamilyFinding]:
    yield from (FamilyFinding("missing", key, "no row produces it") for key in expected if key not in arrays)
    for key, array in arrays.items():
        if key not in expected:
            yield FamilyFinding("not expected", key, "no row has this key")
        elif array.shape != expected[key] or (array.dtype.is_float and array.dtype != _F32):
            actual = f"{array.dtype}{list(array.shape)}"
            yield FamilyFinding("shape", key, f"got {actual}, expected {_F32}{list(expected[key])}")
