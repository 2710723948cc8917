"""Rules of a family read the other way: from settings to the fields of a `config.json`.

Rules have conditions, and conditions look at fields. So each choice of those fields is tried: with it the
rules that apply are known, and each gives the field that it reads. Nothing is believed of that: what was
made must say, by the same rules, what was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.mapping.arithmetic import DoesNotDivideError, axes_in, value
from ckpttools.mapping.setting_terms import FLAG, Term
from ckpttools.mapping.settings import Limit, Setting
from ckpttools.maxtext.config.checking import agrees, same
from ckpttools.maxtext.config.choices import Observed, choices_of
from ckpttools.maxtext.config.facts import CYCLE, LAYER_TYPES, ModelFacts, layer_types
from ckpttools.maxtext.config.given import Given
from ckpttools.maxtext.config.infer_settings import MODEL_NAME, idle
from ckpttools.maxtext.config.models import defaults
from ckpttools.maxtext.config.report import Contradiction, ModelSetting
from ckpttools.maxtext.config.written import MODEL_TYPE, written
from ckpttools.model_families.family import Family
from ckpttools.model_families.hf_defaults import silent_fields

# Rules stand on each other's results: a condition on a field, that on the length of an axis.
_PASSES = 4
# Texts have one position for each token, in whichever sections.
_OF_IMAGES = ("use_mrope", "mrope_section")
# Beyond any number of layers.
_LONGEST = 2000
_SETTINGS = "MaxText's settings"


@dataclass(frozen=True)
class Candidate:
    """A configuration by one choice.

    Attributes:
        config: what was made.
        settings: what its rules say of it.
        missing: settings that would have to be said.
        contradictions: between settings, rules and arrays.
    """

    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    missing: tuple[str, ...]
    contradictions: tuple[Contradiction, ...]


def candidates(family: Family, given: Given, known: Observed) -> Iterator[Candidate]:
    """The configurations by all choices, likely ones first."""
    choices = choices_of(family, given, known)
    for values in product(*choices.values()):
        yield _Attempt(family, given, known, dict(zip(choices, values, strict=True))).built()


class _Attempt:
    """One choice, and what follows from it."""

    def __init__(self, family: Family, given: Given, known: Observed, choice: Mapping[str, Any]) -> None:
        self.family, self.given, self.known = family, given, known
        self.choice = {name: item for name, item in choice.items() if not name.startswith(FLAG)}
        self.assumed = {
            name.removeprefix(FLAG): item for name, item in choice.items() if name.startswith(FLAG)
        }
        self._forget()

    def _forget(self) -> None:
        self.lengths = {**self.family.constants, **self.known.lengths}
        self.fields: dict[str, Any] = {}
        self.sources: dict[str, ModelSetting] = {}
        self.wrong: dict[str, Contradiction] = {}

    def built(self) -> Candidate:
        """What comes of it."""
        for _ in range(_PASSES):
            # What follows from rules that did not apply after all is forgotten.
            facts = self._facts(self.assumed)
            self._forget()
            self._choose(facts)
            for rule in self.family.settings.chosen(facts).values():
                declared = self.given.values.get(rule.name)
                if declared is not None and declared.value is not None:
                    self._invert(rule, declared)
            for limit in self.family.settings.limits:
                self._keep(limit, facts)
            self._derive()
        facts = self._facts()
        told = dict(self._forward(facts))
        missing = tuple(name for name in told if self._is_missing(name, told[name], facts))
        wrong = (*self.wrong.values(), *self._contradictions(facts, told))
        return Candidate(facts.config, told, missing, wrong)

    def _choose(self, facts: ModelFacts) -> None:
        """Takes the choice, formulas among it once they can be worked out."""
        for name, item in self.choice.items():
            result = item.of(facts) if isinstance(item, Term) else item
            if result is not None or not isinstance(item, Term):
                self.fields[name] = result

    def _facts(self, assumed: Mapping[str, bool] | None = None) -> ModelFacts:
        fields = {MODEL_TYPE: self.choice[MODEL_TYPE], **self.fields}
        config = written(self.family, self.lengths, fields)
        silent = silent_fields(config)
        flags = {name: rule.read(config, "", silent).value for name, rule in self.family.flags.items()}
        return ModelFacts(config, self.lengths, {**flags, **(assumed or {})})

    def _invert(self, rule: Setting, declared: ModelSetting) -> None:
        for term, below in zip(rule.terms, (*rule.terms[1:], None), strict=True):
            # A zero that stands for nothing: transformers wants null.
            is_off = below is not None and below.kind == "value" and below.value == 0 == declared.value
            if term.kind == "field" and term.name not in self.choice:
                self.fields[term.name] = None if is_off else _word(term, declared.value)
                return
            if term.kind == "formula" and is_off:
                self._absent(term.name)
                return
            if term.kind == "formula" and self._length(term.name, declared):
                return

    def _absent(self, axis: str) -> None:
        for name in self.family.sizes.get(axis, ()):
            if isinstance(name, str) and "." not in name and axis not in self.known.lengths:
                self.fields[f"config.{name}"] = None

    def _length(self, axis: str, declared: ModelSetting) -> bool:
        """Takes the length of an axis; False where the term is no axis of this family."""
        if axis not in self.family.sizes and axis not in self.family.derived and axis not in self.lengths:
            return False
        if isinstance(declared.value, bool) or not isinstance(declared.value, int):
            return True
        there = self.lengths.setdefault(axis, declared.value)
        if there != declared.value:
            source = self.sources.get(axis)
            by = f"{source}, {source.source}" if source else "the arrays"
            self.wrong[declared.name] = Contradiction(
                declared.name, declared.value, declared.source, there, by
            )
        elif axis not in self.known.lengths:
            self.sources.setdefault(axis, declared)
        return True

    def _keep(self, limit: Limit, facts: ModelFacts) -> None:
        """Says what MaxText does whatever it is told."""
        left, right = limit.expected.left, limit.expected.right
        if limit.expected.relation != "is" or not all(
            condition.holds(facts) for condition in limit.conditions
        ):
            return
        # Of layers in which not all models of a type are alike, transformers cannot know.
        if left.name.startswith(CYCLE) and any(
            condition.left.kind == "flag" for condition in limit.conditions
        ):
            layers = self.lengths.get("layers") or self.lengths.get("layer", 0)
            self.fields[f"config.{LAYER_TYPES}"] = layer_types(int(left.name.removeprefix(CYCLE)), layers)
            return
        expected = right.of(facts)
        if left.kind == "formula" and left.name in self.family.sizes and isinstance(expected, int):
            self.lengths.setdefault(left.name, expected)
        # Of a rotary embedding of one type; what is not there is as of the plain one.
        is_told = left.kind == "field" and (not left.name.startswith("rope.") or limit.conditions)
        if is_told and left.name not in self.choice and (expected is not None or right.kind == "value"):
            self.fields[left.name] = expected

    def _derive(self) -> None:
        """Lengths by formulas over others, and the one unknown of a formula whose value is known."""
        for axis, formula in self.family.derived.items():
            unknown = axes_in(formula) - self.lengths.keys()
            if axis not in self.lengths and not unknown:
                result = _value(formula, self.lengths)
                self.lengths |= {} if result is None else {axis: result}
            elif axis in self.lengths and len(unknown) == 1:
                (other,) = unknown
                fitting = [
                    n
                    for n in range(1, _LONGEST)
                    if _value(formula, {**self.lengths, other: n}) == self.lengths[axis]
                ]
                # All larger lengths have the same minimum: the least is sufficient.
                is_unique = len(fitting) == 1 or (formula.startswith("min(") and fitting)
                self.lengths |= {other: fitting[0]} if is_unique else {}

    def _forward(self, facts: ModelFacts) -> Iterator[tuple[str, Any]]:
        """What the configuration says by the rules; None where that is nothing."""
        for name, rule in self.family.settings.chosen(facts).items():
            result = (_of(term, facts) for term in rule.terms)
            yield name, next((item for item in result if item is not None), None)

    def _is_missing(self, name: str, result: Any, facts: ModelFacts) -> bool:
        if self.given.value(name) is not None:
            return False
        terms = self.family.settings.chosen(facts)[name].terms
        free = [term for term in terms if term.kind in ("field", "formula")]
        fields = [item for item in free if item.kind == "field" and item.name not in self.fields]
        unseen = [item for item in free if item.kind == "formula" and not self.known.has_arrays]
        return result is None or bool(fields or unseen)

    def _contradictions(self, facts: ModelFacts, declared: Mapping[str, Any]) -> Iterator[Contradiction]:
        own = defaults()
        asked = {
            name: item
            for name, item in self.given.values.items()
            if (name in own or name in declared or name == MODEL_NAME)
            and (item.value is not None and name not in _OF_IMAGES)
        }
        for name in sorted((asked.keys() | declared.keys()) - idle(declared)):
            expected = declared.get(name, own.get(name))
            if name not in asked or (name == MODEL_NAME and not self._is_of_code(asked[name].value)):
                continue
            if not self._agrees(name, asked[name].value, expected):
                source = (
                    f"family {self.family.name}"
                    if name in declared
                    else "MaxText's default, with this family"
                )
                yield Contradiction(name, asked[name].value, asked[name].source, expected, source)
        for name, there in self.known.flags.items():
            if (rule := self.family.flags[name]).field and facts.flags[name] != there:
                yield Contradiction(rule.field[0], facts.flags[name], _SETTINGS, there, "the arrays")
        for limit in self.family.settings.limits:
            if not limit.holds(facts):
                what = str(limit.expected.left)
                yield Contradiction(what, facts.field(what), _SETTINGS, str(limit.expected), limit.reason)

    def _agrees(self, name: str, declared: Any, expected: Any) -> bool:
        if name == MODEL_NAME:
            return same(self._as_in_rules(name, declared), expected)
        return agrees(name, declared, expected)

    def _as_in_rules(self, name: str, declared: Any) -> Any:
        """A setting; of models that have one code, the name that the rules know."""
        if name != MODEL_NAME or not isinstance(declared, str):
            return declared
        known = self._names()
        alike = [item for item in known if item.partition("-")[0] == declared.partition("-")[0]]
        return declared if declared in known or not alike else alike[0]

    def _is_of_code(self, declared: Any) -> bool:
        """Whether the name of a model is one of those that the family's code looks at."""
        return self._as_in_rules(MODEL_NAME, declared) in self._names()

    def _names(self) -> list[str]:
        """Those of which the text depends."""
        rules = (setting for setting in self.family.settings.settings if setting.name == MODEL_NAME)
        of_text = [item for item in rules if not self._is_for_towers(item)]
        return [str(term.value) for rule in of_text for term in rule.terms]

    def _is_for_towers(self, rule: Setting) -> bool:
        flags = {condition.left.name for condition in rule.conditions if condition.left.kind == "flag"}
        return not flags.isdisjoint(self.family.towers)


def _word(term: Term, declared: Any) -> Any:
    """The value of the field that gives a setting; None where there is none."""
    if term.words is None:
        return declared
    result = next((word for word, value in term.words.items() if value == declared), None)
    if result is None and isinstance(declared, list):
        words = [_word(term, item) for item in declared]
        return None if None in words else words
    return result


def _of(term: Term, facts: ModelFacts) -> Any:
    try:
        return term.of(facts)
    except KeyError:
        return None


def _value(formula: str, lengths: Mapping[str, int]) -> int | None:
    try:
        return value(formula, lengths)
    except DoesNotDivideError:
        return None
