"""Find mistakes in the definition of a family, without a model, and report findings as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import (
    CheckpointError,
    ConfigError,
    MappingError,
    ShapeError,
    did_you_mean,
    listing,
    similar_names,
)
from ckpttools.mapping.arithmetic import axes_in
from ckpttools.mapping.axes import Side
from ckpttools.mapping.coverage import Coverage, NotCoveredError
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.keys import Field, parse_key
from ckpttools.mapping.row import Row
from ckpttools.mapping.values import Scale
from ckpttools.model_families.family import Family

LAYOUTS = {"unscanned": None, "scanned on axis 0": 0, "scanned on axis 1": 1}
"""Layouts in MaxText, each with its scan axis."""

# Findings of these kinds do not prevent a check of the rows.
_HARMLESS = ("flag", "spelling")


def is_fatal(finding: FamilyFinding) -> bool:
    """Return whether a finding about a definition prevents further checks."""
    return finding.kind not in _HARMLESS


@dataclass(frozen=True)
class Definition:
    """A family with its rows in every layout.

    Attributes:
        family: The family.
    """

    family: Family

    @cached_property
    def _rows_by_layout(self) -> tuple[tuple[Row, ...], tuple[FamilyFinding, ...]]:
        rows = list(self.family.rows)
        broken: list[FamilyFinding] = []
        owned = [(group, row) for group in self.family.layers for row in group.rows]
        for scan_axis in LAYOUTS.values():
            for group, row in owned:
                try:
                    rows += replace(group, rows=(row,)).all_rows(scan_axis)
                except MappingError as error:
                    broken.append(FamilyFinding("row", str(row), f"{error.raw.message}: {error.raw.got}"))
        return tuple(rows), tuple(broken)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return all valid rows, the unscanned ones first."""
        return self._rows_by_layout[0]

    @property
    def sides(self) -> list[Side]:
        return [side for row in self.rows for side in (row.left, row.right)]

    @cached_property
    def labeled(self) -> dict[str, list[Field]]:
        """Return the fields that spell an axis as words, by axis."""
        fields_by_axis: dict[str, list[Field]] = {}
        for field in dict.fromkeys(field for side in self.sides for field in side.key.fields if field.labels):
            fields_by_axis.setdefault(field.axes[0], []).append(field)
        return fields_by_axis

    @cached_property
    def axes(self) -> frozenset[str]:
        """Return every axis that has a length."""
        family = self.family
        named = {axis for side in self.sides for axis in side.axes}
        return frozenset(named | family.sizes.keys() | family.derived.keys() | family.constants.keys())

    @cached_property
    def unruled(self) -> dict[str, Flag]:
        """Return the flags that rows use but no rule sets, as not set."""
        used_flags = {flag for row in self.rows for flag in row.flags}
        return {flag: Flag(False, "no rule") for flag in sorted(used_flags - self.family.flags.keys())}

    def findings(self) -> tuple[FamilyFinding, ...]:
        """Return all findings without duplicates."""
        texts = tuple(self._texts())
        if texts:
            return texts
        found = (
            *self._rows_by_layout[1],
            *self._rows(),
            *self._labels(),
            *self._flags(),
            *self._formulas(),
            *self._spelling_findings(),
        )
        return tuple(dict.fromkeys(found))

    def _texts(self) -> Iterator[FamilyFinding]:
        """Yield findings for strings in place of tuples, which Python would iterate letter by letter."""
        family = self.family
        tuples: dict[str, object] = {
            name: getattr(family, name) for name in ("model_types", "models", "dropped", "left_out", "towers")
        }
        tuples |= {f"sizes[{axis!r}]": names for axis, names in family.sizes.items()}
        tuples |= {f"parts[{name!r}].keys": part.keys for name, part in family.parts.items()}
        tuples |= {f"flags[{name!r}].field": rule.field for name, rule in family.flags.items()}
        tuples |= {f"layers[{k}].stacked": group.stacked for k, group in enumerate(family.layers)}
        for location, item in tuples.items():
            if isinstance(item, str):
                yield FamilyFinding(
                    "row", location, f"a string where a tuple of strings belongs: write ({item!r},)"
                )
        for axis, names in family.sizes.items():
            if not names or not isinstance(names[0], str):
                yield FamilyFinding("size", axis, "no configuration field states its length")

    def _rows(self) -> Iterator[FamilyFinding]:
        if not self.family.rows:
            yield FamilyFinding(
                "row", "rows", "there are no rows outside of layers, such as that of the embedding"
            )
        for side in self.sides:
            for axis, times in Counter(side.axes).items():
                if times > 1:
                    yield FamilyFinding("axis", str(side), f"{axis} occurs twice on one side")
            for name in sorted(side.key.needs - self.axes):
                yield FamilyFinding("axis", str(side), f"there is no axis {name}{suggest(name, self.axes)}")
        for row in (*self.family.rows, *(row for group in self.family.layers for row in group.rows)):
            if isinstance(row.op, Scale) and row.op.axis not in self.axes:
                text = (
                    f"values are scaled by {row.op.axis}, which no row has{suggest(row.op.axis, self.axes)}"
                )
                yield FamilyFinding("op", str(row.left.key), text)

    def _labels(self) -> Iterator[FamilyFinding]:
        constants = self.family.constants
        for axis, fields in self.labeled.items():
            counts = {len(field.labels) for field in fields}
            if len(counts) > 1:
                yield FamilyFinding("label", axis, f"{' and '.join(map(str, fields))} have different lengths")
            elif axis in constants and constants[axis] not in counts:
                yield FamilyFinding("label", axis, f"{fields[0]}, but [constants] has {constants[axis]}")

    def _flags(self) -> Iterator[FamilyFinding]:
        rules = self.family.flags
        asking = {flag: row for row in reversed(self.rows) for flag in row.flags}
        for flag, row in asking.items():
            if flag not in rules:
                yield FamilyFinding(
                    "flag", flag, f"no rule sets it, but {row.left.key} uses it{suggest(flag, rules)}"
                )
        for flag in (*rules, *(tower for tower in self.family.towers if tower not in rules)):
            if flag not in asking:
                yield FamilyFinding("flag", flag, f"no row uses it{suggest(flag, asking)}")

    def _formulas(self) -> Iterator[FamilyFinding]:
        family = self.family
        for axis, formula in family.derived.items():
            try:
                unknown = sorted(axes_in(formula) - self.axes)
            except MappingError as error:
                yield FamilyFinding("formula", axis, f"{error.raw.message}: {formula!r}")
                continue
            for name in unknown:
                yield FamilyFinding(
                    "formula", axis, f"{formula!r}: there is no axis {name}{suggest(name, self.axes)}"
                )
            if axis in self._required_axes(axis):
                yield FamilyFinding("formula", axis, f"{formula!r} depends on {axis} itself")
        for axis in sorted(family.constants.keys() & family.sizes.keys()):
            yield FamilyFinding("size", axis, "both the configuration and a constant state its length")
        for text in family.unplaced_keys:
            for name in sorted(parse_key(text).needs - self.axes):
                yield FamilyFinding("axis", text, f"there is no axis {name}{suggest(name, self.axes)}")

    def _required_axes(self, axis: str) -> frozenset[str]:
        """Return the axes that the length of an axis depends on through formulas."""
        stated_axes = self.family.sizes.keys() | self.family.constants.keys()
        followed: set[str] = set()
        pending = {axis}
        while pending:
            names = _names(self.family.derived.get(pending.pop())) - stated_axes - followed
            followed |= names
            pending |= names
        return frozenset(followed)

    def _spelling_findings(self) -> Iterator[FamilyFinding]:
        family = self.family
        if not family.spellings:
            yield FamilyFinding("row", "spellings", "the family has no spelling, not even an empty one")
        keys = {str(row.right.key) for row in self.rows}
        seen: dict[tuple[str, ...], str] = {}
        names: set[str] = set()
        for spelling in family.spellings:
            if spelling.name in names:
                yield FamilyFinding("spelling", spelling.name, "two spellings have this name")
            names.add(spelling.name)
            for prefix in spelling.prefixes:
                if not any(key.startswith(prefix) for key in keys):
                    yield FamilyFinding("spelling", spelling.name, f"no row's key begins with {prefix!r}")
            # A text model with another architecture belongs to another family, even if the names are the
            # same.
            for model_type in () if spelling.architecture else spelling.model_types:
                if model_type not in family.model_types:
                    text = (
                        f"the family has no model_type {model_type}{suggest(model_type, family.model_types)}"
                    )
                    yield FamilyFinding("spelling", spelling.name, text)
            own = tuple(str(spelling.key(row.right.key)) for row in self.rows) or (spelling.name,)
            if own in seen and not spelling.architecture:
                text = f"its files have {own[0]}, like those of {seen[own]}, and cannot be distinguished"
                yield FamilyFinding("spelling", spelling.name, text)
            seen.setdefault(own, spelling.name)


def _names(formula: str | None) -> frozenset[str]:
    try:
        return axes_in(formula) if formula else frozenset()
    except MappingError:
        return frozenset()


# Number of missing keys for which a similar name is suggested; each search compares all unmatched arrays.
_MAX_NEAR = 20


@dataclass(frozen=True, slots=True)
class FamilyFinding:
    """A problem found in a family definition.

    Attributes:
        kind: "row", "key", "axis", "flag", "size", "formula", "label", "spelling" or "op" for a problem in
            the family itself; "missing", "not expected" or "shape" if arrays do not match the family.
        location: The row, key, axis or array.
        text: The description of the problem.
    """

    kind: str
    location: str
    text: str


@dataclass(frozen=True, slots=True)
class TriedLayout:
    """A layout of layers in MaxText that was tried.

    Attributes:
        name: "unscanned", "scanned on axis 0" or "scanned on axis 1".
        num_arrays: Number of arrays on the left side.
    """

    name: str
    num_arrays: int


@dataclass(frozen=True)
class FamilyCheck:
    """The result of a check.

    Attributes:
        family: The name of the family.
        against: The checkpoint that the family was compared with, or None.
        side: The naming scheme of the checkpoint, "huggingface" or "maxtext", or None.
        config: The configuration that gave the sizes, or None for synthetic sizes.
        models: A description of each model that was checked.
        num_arrays: Number of arrays on the right side, for the largest model.
        layouts: The layouts in which the round trip succeeded, for the largest model.
        findings: All problems; empty if the family is correct.
        hints: Sentences that may explain some findings.
    """

    family: str
    against: str | None = None
    side: str | None = None
    config: str | None = None
    models: tuple[str, ...] = ()
    num_arrays: int = 0
    layouts: tuple[TriedLayout, ...] = ()
    findings: tuple[FamilyFinding, ...] = ()
    hints: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the verdict and the findings."""
        lines = [f"{finding.kind}: {finding.location}: {finding.text}" for finding in self.findings]
        return f"<FamilyCheck of {self.family}: {'sound' if self.sound else 'not sound'}{listing(lines)}>"

    @property
    def sound(self) -> bool:
        return not self.findings


def findings_of(error: CheckpointError) -> Iterator[FamilyFinding]:
    """Yield the findings in an error from a table."""
    if isinstance(error, NotCoveredError):
        yield from _coverage_findings(error.coverage)
        return
    kind = "size" if isinstance(error, ShapeError | ConfigError) else "row"
    details = [
        f"{label} {text}"
        for label, text in (("got", error.raw.got), ("expected", error.raw.expected))
        if text
    ]
    yield FamilyFinding(kind, error.location or "", "; ".join([error.raw.message, *details]))


def _coverage_findings(coverage: Coverage) -> Iterator[FamilyFinding]:
    for number, (key, shape) in enumerate(coverage.missing.items()):
        near = similar_names(key, coverage.extra, 1) if number < _MAX_NEAR else []
        suggestion = f"; {near[0]} exists" if near else ""
        yield FamilyFinding("missing", key, f"an array of shape {list(shape)}{suggestion}")
    for key in coverage.extra:
        yield FamilyFinding("not expected", key, "no row has this key")
    for item in coverage.misshapen:
        yield FamilyFinding(
            "shape", item.key, f"got {list(item.got)}, expected {list(item.expected)} ({item.why})"
        )


def hints_of(error: CheckpointError) -> tuple[str, ...]:
    return error.coverage.reasons if isinstance(error, NotCoveredError) else ()


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to a sentence about an unknown name."""
    question = did_you_mean(name, known)
    return f"; {question}" if question else ""
