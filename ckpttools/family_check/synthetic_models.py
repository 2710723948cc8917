"""Models made up for a family: sizes that its formulas can do with, and every setting of its flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import field
from itertools import cycle, islice, product
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.family_check.definition import Definition
from ckpttools.mapping.arithmetic import DoesNotDivideError, axes_in, value
from ckpttools.mapping.flags import Flag
from ckpttools.model_families.family import Family

# Lengths differ from axis to axis, so that one taken for another does not fit.
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_LARGEST = 60
# Settings of flags that are tried; a family of twelve independent ones has more.
_MOST_SETTINGS = 64


@dataclass(frozen=True)
class SyntheticModel:
    """A model to try the rows on.

    Attributes:
        declared: what sets it apart from the others.
        config: its configuration; None where there is none.
        lengths: of the axes that the configuration does not give.
        flags: those that no configuration sets.
    """

    declared: str
    config: Mapping[str, Any] | None
    lengths: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, Flag] = field(default_factory=dict)


def synthetic_model(definition: Definition) -> Iterator[SyntheticModel]:
    """Models that differ in their flags, and in whether fields with a default are there."""
    family = definition.family
    optional = frozenset(axis for axis, names in family.sizes.items() if isinstance(names[-1], int))
    for absent in dict.fromkeys((frozenset[str](), optional)):
        any_size = Sizes.of(definition, absent)
        complete = any_size.with_complete_cycles(family)
        lacking = [f"no {family.sizes[axis][0]}" for axis in sorted(absent)]
        for sizes in dict.fromkeys((complete, any_size)):
            alike = [] if sizes is complete else ["an incomplete cycle"]
            for setting in islice(flag_settings(family, sizes.stated), _MOST_SETTINGS):
                declared = ", ".join([*setting.declared, *lacking, *alike]) or "no flags"
                config = configuration({**sizes.stated, **setting.fields})
                yield SyntheticModel(declared, config, sizes.lengths, {**definition.unruled, **setting.flags})


@dataclass(frozen=True)
class FlagSetting:
    """One setting of a family's flags.

    Attributes:
        fields: value of each configuration field that a flag reads, None for one that is not there.
        flags: those that only a user sets.
    """

    fields: Mapping[str, Any]
    flags: Mapping[str, Flag]

    @property
    def declared(self) -> list[str]:
        fields = [f"{name} {json.dumps(item)}" for name, item in self.fields.items()]
        return fields + [f"{name} {str(flag.value).lower()}" for name, flag in self.flags.items()]


def flag_settings(family: Family, stated: Mapping[str, int]) -> Iterator[FlagSetting]:
    """Every setting of a family's flags; those of how files were written take turns, as they double no rule.

    Args:
        family: whose flags.
        stated: fields that say a length; where a flag is whether such a field is there, it stays or goes.
    """
    choices: dict[str, list[Any]] = {}
    users: list[str] = []
    files: list[str] = []
    for name, rule in family.flags.items():
        if not rule.field:
            (files if rule.by_arrays else users).append(name)
        elif rule.equals:
            choices.setdefault(rule.field[0], [None]).extend(rule.equals)
        else:
            usual = [stated[rule.field[0]], None] if rule.field[0] in stated else [True, False]
            choices.setdefault(rule.field[0], []).extend(usual)
    distinct = [[v for k, v in enumerate(values) if v not in values[:k]] for values in choices.values()]
    is_only = not users and all(len(values) == 1 for values in distinct)
    settings = (
        (fields, values)
        for _ in range(2 if files and is_only else 1)
        for fields in product(*distinct)
        for values in product((False, True), repeat=len(users))
    )
    for (fields, values), turn in zip(settings, cycle((False, True)), strict=False):
        by_name = {**dict(zip(users, values, strict=True)), **dict.fromkeys(files, turn)}
        flags = {name: Flag(item, "made up") for name, item in by_name.items()}
        yield FlagSetting(dict(zip(choices, fields, strict=True)), flags)


def configuration(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with these fields, dots in their names for nested ones; those of None are left out.

    It is of no type that anybody knows: of that, fields that are left out would have sizes of their own.
    """
    built: dict[str, Any] = {"model_type": "made-up"}
    for name, item in fields.items():
        *above, last = name.split(".")
        inner = built
        for key in above:
            inner = inner.setdefault(key, {})
        if item is not None:
            inner[last] = item
    return built


@dataclass(frozen=True, eq=False)
class Sizes:
    """Lengths of all axes of a model made up.

    Attributes:
        formulas: axis -> formula.
        fixed: axis -> length that does not depend on the model.
        names: axis -> what says its length: a configuration field, or the axis itself in brackets.
        variables: such a name -> length.
    """

    formulas: Mapping[str, str]
    fixed: Mapping[str, int]
    names: Mapping[str, str]
    variables: dict[str, int]

    @classmethod
    def of(cls, definition: Definition, absent: frozenset[str] = frozenset()) -> Sizes:
        """Sizes with which all formulas come out, and to two or more, as far as there are such.

        In a single block or layer a wrong number in a name would meet no other.

        Args:
            definition: of the family.
            absent: axes whose fields are not there, so that their default counts.
        """
        family = definition.family
        labeled = {axis: len(fields[0].labels) for axis, fields in definition.labeled.items()}
        fixed = {**labeled, **family.constants, **{axis: int(family.sizes[axis][-1]) for axis in absent}}
        formulas = {axis: item for axis, item in family.derived.items() if axis not in fixed}
        # Axes in keys, and what these follow from, are short: each of their coordinates is an array.
        short = {axis for side in definition.sides for axis in side.key.axes}
        short |= {name for axis in short & formulas.keys() for name in axes_in(formulas[axis])}
        free = sorted(definition.axes - {*fixed, *formulas}, key=lambda axis: (axis not in short, axis))
        names = {axis: str(family.sizes.get(axis, (f"({axis})",))[0]) for axis in free}
        distinct = list(dict.fromkeys(names.values()))
        primes = _PRIMES * (1 + len(distinct) // len(_PRIMES))
        built = cls(formulas, fixed, names, dict(zip(distinct, primes, strict=False)))
        built._solve()
        return built

    def with_complete_cycles(self, family: Family) -> Sizes:
        """Return sizes with which MaxText scans the layers: these, or those of another number of layers."""
        changes = [{**self.variables, name: n} for name in sorted(self.variables) for n in range(1, _LARGEST)]
        fitting = [
            change for change in changes if not family.layers_beyond_cycles(self._evaluated(change)[0])
        ]
        if not family.layers_beyond_cycles(self.lengths) or not fitting:
            return self
        return Sizes(self.formulas, self.fixed, self.names, min(fitting, key=self._score))

    @property
    def stated(self) -> dict[str, int]:
        """What a configuration says: field -> length."""
        return {name: length for name, length in self.variables.items() if not name.startswith("(")}

    @property
    def lengths(self) -> dict[str, int]:
        """The length of every axis; those whose formula does not come out are left out."""
        return self._evaluated(self.variables)[0]

    @property
    def wrong(self) -> list[str]:
        """The axes whose formula comes out with none of the sizes that were tried."""
        return self._evaluated(self.variables)[1]

    def _evaluated(self, variables: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
        """Lengths, and the axes whose formula does not come out."""
        lengths = {**{axis: variables[name] for axis, name in self.names.items()}, **self.fixed}
        wrong: list[str] = []
        for _ in self.formulas:
            for axis, formula in self.formulas.items():
                if axis in lengths or axis in wrong or not axes_in(formula) <= lengths.keys():
                    continue
                try:
                    length = value(formula, lengths)
                except DoesNotDivideError:
                    length = -1
                if length < 0:
                    wrong.append(axis)
                else:
                    lengths[axis] = length
        return lengths, wrong

    def _solve(self) -> None:
        """Changes one size at a time, as long as more formulas come out so."""
        axes = {axis for formula in self.formulas.values() for axis in axes_in(formula)}
        names = {self.names[axis] for axis in axes & self.names.keys()}
        while (score := self._score(self.variables)) != (0, 0):
            changes = [{**self.variables, name: n} for name in sorted(names) for n in range(1, _LARGEST)]
            best = min(changes, key=self._score, default=self.variables)
            if self._score(best) >= score:
                return
            self.variables.update(best)

    def _score(self, variables: Mapping[str, int]) -> tuple[int, int]:
        """Formulas that do not come out, and what lacks to make each of the others two at least."""
        lengths, wrong = self._evaluated(variables)
        return len(wrong), sum(max(0, 2 - lengths.get(axis, 2)) for axis in self.formulas)
