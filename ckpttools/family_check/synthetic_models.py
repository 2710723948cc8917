"""Create synthetic models of a family: sizes that satisfy its formulas, with every setting of its flags."""

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

# Lengths differ between axes, so that confusing two axes causes a mismatch.
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_LARGEST = 60
# Maximum number of flag settings to try; twelve independent flags have more.
_MAX_SETTINGS = 64


@dataclass(frozen=True)
class SyntheticModel:
    """A synthetic model for checking the rows.

    Attributes:
        declared: A description that distinguishes the model from the others.
        config: The configuration; None if there is none.
        lengths: The lengths of axes that the configuration does not give.
        flags: Flags that no configuration sets.
    """

    declared: str
    config: Mapping[str, Any] | None
    lengths: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, Flag] = field(default_factory=dict)


def synthetic_model(definition: Definition) -> Iterator[SyntheticModel]:
    """Yield models that differ in their flags, and in whether fields with a default are stated."""
    family = definition.family
    optional = frozenset(axis for axis, names in family.sizes.items() if isinstance(names[-1], int))
    for absent in dict.fromkeys((frozenset[str](), optional)):
        any_size = Sizes.of(definition, absent)
        complete = any_size.with_complete_cycles(family)
        lacking = [f"no {family.sizes[axis][0]}" for axis in sorted(absent)]
        for sizes in dict.fromkeys((complete, any_size)):
            missing_parts = [] if sizes is complete else ["an incomplete cycle"]
            for setting in islice(flag_settings(family, sizes.stated), _MAX_SETTINGS):
                description = ", ".join([*setting.declared, *lacking, *missing_parts]) or "no flags"
                config = configuration({**sizes.stated, **setting.fields})
                yield SyntheticModel(
                    description, config, sizes.lengths, {**definition.unruled, **setting.flags}
                )


@dataclass(frozen=True)
class FlagSetting:
    """One combination of flag values of a family.

    Attributes:
        fields: The value of each configuration field that a flag reads; None for an absent field.
        flags: Flags that only a user sets.
    """

    fields: Mapping[str, Any]
    flags: Mapping[str, Flag]

    @property
    def declared(self) -> list[str]:
        fields = [f"{name} {json.dumps(item)}" for name, item in self.fields.items()]
        return fields + [f"{name} {str(flag.value).lower()}" for name, flag in self.flags.items()]


def flag_settings(family: Family, stated: Mapping[str, int]) -> Iterator[FlagSetting]:
    """Yield every setting of a family's flags.

    Flags that describe files alternate, because no rule depends on them.

    Args:
        family: The family.
        stated: Fields that state a length; a flag that depends on the presence of such a field keeps or
            removes the field.
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
        flags = {name: Flag(item, "synthetic") for name, item in by_name.items()}
        yield FlagSetting(dict(zip(choices, fields, strict=True)), flags)


def configuration(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with these fields, with dots for nested fields; None values are left out.

    The model type is an unknown one, because known types would have defaults for missing fields.
    """
    config: dict[str, Any] = {"model_type": "made-up"}
    for name, item in fields.items():
        *parents, last = name.split(".")
        inner = config
        for key in parents:
            inner = inner.setdefault(key, {})
        if item is not None:
            inner[last] = item
    return config


@dataclass(frozen=True, eq=False)
class Sizes:
    """The lengths of all axes of a synthetic model.

    Attributes:
        formulas: Axis -> formula.
        fixed: Axis -> length that does not depend on the model.
        names: Axis -> the source of its length: a configuration field, or the axis itself in brackets.
        variables: Source -> length.
    """

    formulas: Mapping[str, str]
    fixed: Mapping[str, int]
    names: Mapping[str, str]
    variables: dict[str, int]

    @classmethod
    def of(cls, definition: Definition, absent: frozenset[str] = frozenset()) -> Sizes:
        """Return sizes for which all formulas have valid lengths, of two or more if possible.

        With a single block or layer, a wrong index in a name could not collide with another index.

        Args:
            definition: The definition of the family.
            absent: Axes whose fields are absent, so that defaults apply.
        """
        family = definition.family
        labeled = {axis: len(fields[0].labels) for axis, fields in definition.labeled.items()}
        fixed = {**labeled, **family.constants, **{axis: int(family.sizes[axis][-1]) for axis in absent}}
        formulas = {axis: item for axis, item in family.derived.items() if axis not in fixed}
        # Axes in keys, and the axes that they depend on, are short, because each coordinate is an array.
        short = {axis for side in definition.sides for axis in side.key.axes}
        short |= {name for axis in short & formulas.keys() for name in axes_in(formulas[axis])}
        free = sorted(definition.axes - {*fixed, *formulas}, key=lambda axis: (axis not in short, axis))
        names = {axis: str(family.sizes.get(axis, (f"({axis})",))[0]) for axis in free}
        distinct = list(dict.fromkeys(names.values()))
        primes = _PRIMES * (1 + len(distinct) // len(_PRIMES))
        sizes = cls(formulas, fixed, names, dict(zip(distinct, primes, strict=False)))
        sizes._solve()
        return sizes

    def with_complete_cycles(self, family: Family) -> Sizes:
        """Return sizes for which MaxText can scan the layers: these sizes, or another number of layers."""
        changes = [{**self.variables, name: n} for name in sorted(self.variables) for n in range(1, _LARGEST)]
        complete_sizes = [
            change for change in changes if not family.layers_beyond_cycles(self._evaluate(change)[0])
        ]
        if not family.layers_beyond_cycles(self.lengths) or not complete_sizes:
            return self
        return Sizes(self.formulas, self.fixed, self.names, min(complete_sizes, key=self._score))

    @property
    def stated(self) -> dict[str, int]:
        """Return field -> length, as in a configuration."""
        return {name: length for name, length in self.variables.items() if not name.startswith("(")}

    @property
    def lengths(self) -> dict[str, int]:
        """Return the lengths of all axes whose formula has a valid length."""
        return self._evaluate(self.variables)[0]

    @property
    def wrong(self) -> list[str]:
        """Return the axes whose formula has no valid length for any of the tried sizes."""
        return self._evaluate(self.variables)[1]

    def _evaluate(self, variables: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
        """Return the lengths, and the axes whose formula has no valid length."""
        lengths = {**{axis: variables[name] for axis, name in self.names.items()}, **self.fixed}
        invalid_axes: list[str] = []
        for _ in self.formulas:
            for axis, formula in self.formulas.items():
                if axis in lengths or axis in invalid_axes or not axes_in(formula) <= lengths.keys():
                    continue
                try:
                    length = value(formula, lengths)
                except DoesNotDivideError:
                    length = -1
                if length < 0:
                    invalid_axes.append(axis)
                else:
                    lengths[axis] = length
        return lengths, invalid_axes

    def _solve(self) -> None:
        """Change one size at a time, as long as more formulas get valid lengths."""
        axes = {axis for formula in self.formulas.values() for axis in axes_in(formula)}
        names = {self.names[axis] for axis in axes & self.names.keys()}
        while (score := self._score(self.variables)) != (0, 0):
            changes = [{**self.variables, name: n} for name in sorted(names) for n in range(1, _LARGEST)]
            best = min(changes, key=self._score, default=self.variables)
            if self._score(best) >= score:
                return
            self.variables.update(best)

    def _score(self, variables: Mapping[str, int]) -> tuple[int, int]:
        """Return the number of failing formulas, and how far the other lengths fall short of two."""
        lengths, invalid_axes = self._evaluate(variables)
        return len(invalid_axes), sum(max(0, 2 - lengths.get(axis, 2)) for axis in self.formulas)
