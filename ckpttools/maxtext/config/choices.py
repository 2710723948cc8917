"""The fields of a `config.json` on which it depends which rules of a family apply, and what they may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.mapping.setting_terms import FLAG, Condition, Term
from ckpttools.maxtext.config.checking import same
from ckpttools.maxtext.config.facts import LAYER_TYPES
from ckpttools.maxtext.config.given import Given
from ckpttools.maxtext.config.written import MODEL_TYPE, text_types
from ckpttools.model_families.family import Family


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
    result: dict[str, list[Any]] = {MODEL_TYPE: list(text_types(family))}
    for name, rule in family.flags.items():
        if any(item.startswith(f"{LAYER_TYPES}.") for item in rule.field):
            result[f"{FLAG}{name}"] = [known.flags[name]] if name in known.flags else [False, True]
        flat = next((item for item in rule.field if "." not in item), None)
        sizes = {item for names in family.sizes.values() for item in names}
        if flat is None or rule.equals:
            continue
        # Set by a length that is there, a flag is assumed until the length is.
        of = f"{FLAG}{name}" if flat in sizes else f"config.{flat}"
        result[of] = [known.flags[name]] if name in known.flags else [False, True]
    rules = family.settings
    every = [condition for rule in rules.settings for condition in rule.conditions]
    every += [condition for limit in rules.limits for condition in limit.conditions]
    for item in every:
        _add(result, item)
    for limit in rules.limits:
        if limit.expected.left.name in result or (limit.expected.relation == "in" and not limit.conditions):
            _add(result, limit.expected)
    for name in result.keys() - {MODEL_TYPE}:
        result[name] += [value for value in _given_for(family, given, name) if value not in result[name]]
    return {name: _in_order(values) for name, values in result.items() if values}


def _add(result: dict[str, list[Any]], condition: Condition) -> None:
    if condition.left.kind == "field":
        values = result.setdefault(condition.left.name, [])
        values += [value for value in _said(condition.right) if value not in values]


def _in_order(values: list[Any]) -> list[Any]:
    """Plain ones first, then by the rules; null last, since transformers fills up what is absent."""
    # What is 0 where it may be null is off, which transformers calls null alone.
    off = [item for item in values if item is not None and None in values and same(item, 0)]
    kept = [item for item in values if item not in off]
    return sorted(kept, key=lambda item: (item is None and not off, item != "default"))


def _said(term: Term) -> list[Any]:
    if term.kind == "formula":
        return [term]
    if term.kind != "value":
        return []
    return list(term.value) if isinstance(term.value, list) else [term.value]


def _given_for(family: Family, given: Given, name: str) -> Iterator[Any]:
    for rule in family.settings.settings:
        if any(term.name == name and term.words is None for term in rule.terms):
            result = given.value(rule.name)
            # Below zero is MaxText's word for none.
            if result is not None and not (isinstance(result, int) and result < 0):
                yield result
