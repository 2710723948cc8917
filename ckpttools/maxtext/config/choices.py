"""The fields of a `config.json` on which it depends which rules of a family apply, and what they may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.families.family import Family
from ckpttools.mapping.setting_terms import FLAG, Condition, Term
from ckpttools.maxtext.config.checking import same
from ckpttools.maxtext.config.facts import LAYER_TYPES
from ckpttools.maxtext.config.given import Given
from ckpttools.maxtext.config.written import MODEL_TYPE, text_types


@dataclass(frozen=True)
class Observed:
    """What the arrays of a checkpoint show.

    Attributes:
        lengths: of axes.
        flags: yes and no.
        has_arrays: whether there is a checkpoint at all.
    """

    lengths: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    has_arrays: bool = False


def choices_of(family: Family, given: Given, known: Observed) -> dict[str, list[Any]]:
    """Field -> its possible values, of those on which it depends which rules apply."""
    found: dict[str, list[Any]] = {MODEL_TYPE: list(text_types(family))}
    for name, rule in family.flags.items():
        if any(each.startswith(f"{LAYER_TYPES}.") for each in rule.field):
            found[f"{FLAG}{name}"] = [known.flags[name]] if name in known.flags else [False, True]
        flat = next((each for each in rule.field if "." not in each), None)
        sizes = {each for names in family.sizes.values() for each in names}
        if flat is None or rule.equals:
            continue
        # Set by a length that is there, a flag is assumed until the length is.
        of = f"{FLAG}{name}" if flat in sizes else f"config.{flat}"
        found[of] = [known.flags[name]] if name in known.flags else [False, True]
    rules = family.settings
    every = [each for rule in rules.settings for each in rule.conditions]
    every += [each for limit in rules.limits for each in limit.conditions]
    for each in every:
        _add(found, each)
    for limit in rules.limits:
        if limit.wanted.left.name in found or (limit.wanted.relation == "in" and not limit.conditions):
            _add(found, limit.wanted)
    for name in found.keys() - {MODEL_TYPE}:
        found[name] += [value for value in _given_for(family, given, name) if value not in found[name]]
    return {name: _in_order(values) for name, values in found.items() if values}


def _add(found: dict[str, list[Any]], condition: Condition) -> None:
    if condition.left.kind == "field":
        values = found.setdefault(condition.left.name, [])
        values += [value for value in _said(condition.right) if value not in values]


def _in_order(values: list[Any]) -> list[Any]:
    """Plain ones first, then by the rules; null last, since transformers fills up what is absent."""
    # What is 0 where it may be null is off, which transformers calls null alone.
    off = [each for each in values if each is not None and None in values and same(each, 0)]
    kept = [each for each in values if each not in off]
    return sorted(kept, key=lambda each: (each is None and not off, each != "default"))


def _said(term: Term) -> list[Any]:
    if term.kind == "formula":
        return [term]
    if term.kind != "value":
        return []
    return list(term.value) if isinstance(term.value, list) else [term.value]


def _given_for(family: Family, given: Given, name: str) -> Iterator[Any]:
    for rule in family.settings.settings:
        if any(term.name == name and term.words is None for term in rule.terms):
            found = given.value(rule.name)
            # Below zero is MaxText's word for none.
            if found is not None and not (isinstance(found, int) and found < 0):
                yield found
