"""Derive the fields of a `config.json` from MaxText's settings by inverting a family's rules.

Rules have conditions on fields, so every choice of those fields is tried. A choice determines the rules that
apply, and each rule gives the field that it reads. The result is verified: the same rules must give the
original settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from itertools import product
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.mapping.arithmetic import DoesNotDivideError, axes_in, value
from ckpttools.mapping.settings import FLAG, Condition, Limit, Setting, Term
from ckpttools.maxtext.config.infer_settings import MODEL_NAME, unused_settings
from ckpttools.maxtext.config.model_facts import CYCLE, LAYER_TYPES, ModelFacts, layer_types
from ckpttools.maxtext.config.models import defaults
from ckpttools.maxtext.config.report import Contradiction, ModelSetting
from ckpttools.maxtext.config.run_settings import GivenSettings, is_equivalent, is_same_value
from ckpttools.model_families.family import Family
from ckpttools.model_families.hf_defaults import default_fields

MODEL_TYPE = "config.model_type"
_CONFIG, _ROPE, _LOCAL = "config.", "rope.", "rope.local_"
_TEXT = "_text"
# The older fields next to those of the rotary embedding, which all versions of transformers read.
_ROPE_FIELDS = {
    "rope.theta": "rope_theta",
    "rope.local_theta": "rope_local_base_freq",
    "rope.partial_rotary_factor": "partial_rotary_factor",
}
_KINDS = {"full_attention": _ROPE, "sliding_attention": _LOCAL}
# transformers expects these fields as floating-point numbers, but settings may have 30 for 30.0.
_FLOAT_FIELDS = frozenset(
    (
        "attn_logit_softcapping",
        "beta_fast",
        "beta_slow",
        "factor",
        "final_logit_softcapping",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_local_base_freq",
        "rope_theta",
        "routed_scaling_factor",
        "swiglu_limit",
    )
)
# Class names that do not follow from the model type.
_ARCHITECTURES = {
    "kimi_k2": "DeepseekV3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def text_types(family: Family) -> tuple[str, ...]:
    """Return the `model_type` values of the family's text-only models.

    Empty if the family has none, or if its text model belongs to another family, as in Qwen3-VL.
    """
    if any(spelling.architecture for spelling in family.spellings):
        return ()
    plain = [kind for kind in family.model_types if kind.endswith(_TEXT)] or family.model_types
    is_flat = any(isinstance(name, str) and "." not in name for name in family.sizes.get("embed", ()))
    return tuple(plain) if is_flat else ()


def architecture_of(model_type: str) -> str:
    """Return the transformers class for the `model_type` of a text model."""
    words = model_type.removesuffix(_TEXT).split("_")
    return _ARCHITECTURES.get(model_type, "".join(word.capitalize() for word in words) + "ForCausalLM")


def build_config(family: Family, lengths: Mapping[str, int], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Build the configuration of a model.

    Args:
        family: The model's family.
        lengths: Axis lengths; lengths without a field are left out.
        fields: Values by their names in rules, such as `config.rms_norm_eps` and `rope.theta`.
    """
    config: dict[str, Any] = {"architectures": [architecture_of(fields[MODEL_TYPE])]}
    for axis, names in family.sizes.items():
        flat = next((name for name in names if isinstance(name, str) and "." not in name), None)
        if flat is not None and axis in lengths:
            config[flat] = lengths[axis]
    config |= {
        name.removeprefix(_CONFIG): value for name, value in fields.items() if name.startswith(_CONFIG)
    }
    result: dict[str, Any] = _with_floats(config | _rope(family, fields))
    return result


def _with_floats(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _with_floats(item, key) for key, item in value.items()}
    return float(value) if name in _FLOAT_FIELDS and type(value) is int else value


def _rope(family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    rope = {name: value for name, value in fields.items() if name.startswith(_ROPE)}
    # For two kinds of layers, if the family states the type of each; only transformers 5 and later supports
    # this.
    if any(limit.expected.left.name == "rope.local_type" for limit in family.settings.limits):
        return {"rope_parameters": {kind: _rope_part(rope, prefix) for kind, prefix in _KINDS.items()}}
    result = {name: rope[field] for field, name in _ROPE_FIELDS.items() if field in rope}
    kind = rope.get("rope.type", "default")
    if kind == "default":
        return result
    inner = {name.removeprefix(_ROPE): item for name, item in rope.items() if name not in _ROPE_FIELDS}
    del inner["type"]
    return {**result, "rope_scaling": {"rope_type": kind, **inner}}


def _rope_part(rope: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    own = {
        name.removeprefix(prefix): value
        for name, value in rope.items()
        if name.startswith(prefix) and (prefix == _LOCAL or not name.startswith(_LOCAL))
    }
    names = {"type": "rope_type", "theta": "rope_theta"}
    return {"rope_type": "default", **{names.get(name, name): value for name, value in own.items()}}


@dataclass(frozen=True)
class ObservedArrays:
    """Facts that are visible in the arrays of a checkpoint.

    Attributes:
        lengths: Axis lengths.
        flags: Boolean facts.
        has_arrays: Whether there is a checkpoint.
    """

    lengths: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    has_arrays: bool = False


def field_choices(family: Family, given: GivenSettings, known: ObservedArrays) -> dict[str, list[Any]]:
    """Map each field that decides which rules apply to its possible values."""
    result: dict[str, list[Any]] = {MODEL_TYPE: list(text_types(family))}
    for name, rule in family.flags.items():
        if any(item.startswith(f"{LAYER_TYPES}.") for item in rule.field):
            result[f"{FLAG}{name}"] = [known.flags[name]] if name in known.flags else [False, True]
        flat = next((item for item in rule.field if "." not in item), None)
        sizes = {item for names in family.sizes.values() for item in names}
        if flat is None or rule.equals:
            continue
        # A flag that an existing length sets is assumed until the length is known.
        of = f"{FLAG}{name}" if flat in sizes else f"config.{flat}"
        result[of] = [known.flags[name]] if name in known.flags else [False, True]
    rules = family.settings
    all_conditions = [condition for rule in rules.settings for condition in rule.conditions]
    all_conditions += [condition for limit in rules.limits for condition in limit.conditions]
    for item in all_conditions:
        _add_values(result, item)
    for limit in rules.limits:
        if limit.expected.left.name in result or (limit.expected.relation == "in" and not limit.conditions):
            _add_values(result, limit.expected)
    for name in result.keys() - {MODEL_TYPE}:
        result[name] += [value for value in _setting_values(family, given, name) if value not in result[name]]
    return {name: _sort_by_likelihood(values) for name, values in result.items() if values}


def _add_values(result: dict[str, list[Any]], condition: Condition) -> None:
    if condition.left.kind == "field":
        values = result.setdefault(condition.left.name, [])
        values += [value for value in _term_values(condition.right) if value not in values]


def _sort_by_likelihood(values: list[Any]) -> list[Any]:
    """Sort values in order of likelihood: plain ones first, then as in the rules.

    Null comes last, because transformers fills in absent fields.
    """
    # Where 0 and null both mean "off", transformers accepts only null.
    off = [item for item in values if item is not None and None in values and is_same_value(item, 0)]
    kept = [item for item in values if item not in off]
    return sorted(kept, key=lambda item: (item is None and not off, item != "default"))


def _term_values(term: Term) -> list[Any]:
    if term.kind == "formula":
        return [term]
    if term.kind != "value":
        return []
    return list(term.value) if isinstance(term.value, list) else [term.value]


def _setting_values(family: Family, given: GivenSettings, name: str) -> Iterator[Any]:
    for rule in family.settings.settings:
        if any(term.name == name and term.words is None for term in rule.terms):
            result = given.value(rule.name)
            # MaxText represents "none" as a negative number.
            if result is not None and not (isinstance(result, int) and result < 0):
                yield result


# Rules depend on each other's results, such as conditions on a field or on an axis length.
_PASSES = 4
# In text, all sections have the same position for a token.
_IMAGE_SETTINGS = ("use_mrope", "mrope_section")
# An upper bound for the number of layers.
_MAX_LENGTH = 2000
_SETTINGS = "MaxText's settings"


@dataclass(frozen=True)
class Candidate:
    """A configuration built from one choice of values.

    Attributes:
        config: The configuration.
        settings: The settings that the rules give for the configuration.
        missing: The settings that are still needed.
        contradictions: Contradictions between settings, rules and arrays.
    """

    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    missing: tuple[str, ...]
    contradictions: tuple[Contradiction, ...]


def candidates(family: Family, given: GivenSettings, known: ObservedArrays) -> Iterator[Candidate]:
    """Yield the configurations for all choices, likely ones first."""
    choices = field_choices(family, given, known)
    for values in product(*choices.values()):
        yield _Attempt(family, given, known, dict(zip(choices, values, strict=True))).built()


class _Attempt:
    """A choice of values and its consequences."""

    def __init__(
        self, family: Family, given: GivenSettings, known: ObservedArrays, choice: Mapping[str, Any]
    ) -> None:
        self.family, self.given, self.known = family, given, known
        self.choice = {name: item for name, item in choice.items() if not name.startswith(FLAG)}
        self.assumed = {
            name.removeprefix(FLAG): item for name, item in choice.items() if name.startswith(FLAG)
        }
        self._reset()

    def _reset(self) -> None:
        self.lengths = {**self.family.constants, **self.known.lengths}
        self.fields: dict[str, Any] = {}
        self.sources: dict[str, ModelSetting] = {}
        self.wrong: dict[str, Contradiction] = {}

    def built(self) -> Candidate:
        """Return the candidate for this choice."""
        for _ in range(_PASSES):
            # Consequences of rules that turned out not to apply are discarded.
            facts = self._facts(self.assumed)
            self._reset()
            self._apply_choice(facts)
            for rule in self.family.settings.chosen(facts).values():
                declared = self.given.values.get(rule.name)
                if declared is not None and declared.value is not None:
                    self._invert(rule, declared)
            for limit in self.family.settings.limits:
                self._apply_limit(limit, facts)
            self._derive()
        facts = self._facts()
        inferred = dict(self._infer_settings(facts))
        missing = tuple(name for name in inferred if self._is_missing(name, inferred[name], facts))
        contradictions = (*self.wrong.values(), *self._contradictions(facts, inferred))
        return Candidate(facts.config, inferred, missing, contradictions)

    def _apply_choice(self, facts: ModelFacts) -> None:
        """Apply the choice, then formulas as soon as they can be evaluated."""
        for name, item in self.choice.items():
            result = item.of(facts) if isinstance(item, Term) else item
            if result is not None or not isinstance(item, Term):
                self.fields[name] = result

    def _facts(self, assumed: Mapping[str, bool] | None = None) -> ModelFacts:
        fields = {MODEL_TYPE: self.choice[MODEL_TYPE], **self.fields}
        config = build_config(self.family, self.lengths, fields)
        silent = default_fields(config)
        flags = {name: rule.read(config, "", silent).value for name, rule in self.family.flags.items()}
        return ModelFacts(config, self.lengths, {**flags, **(assumed or {})})

    def _invert(self, rule: Setting, setting: ModelSetting) -> None:
        for term, below in zip(rule.terms, (*rule.terms[1:], None), strict=True):
            # Zero means "none" here, for which transformers expects null.
            is_off = below is not None and below.kind == "value" and below.value == 0 == setting.value
            if term.kind == "field" and term.name not in self.choice:
                self.fields[term.name] = None if is_off else _field_value(term, setting.value)
                return
            if term.kind == "formula" and is_off:
                self._clear_axis(term.name)
                return
            if term.kind == "formula" and self._set_length(term.name, setting):
                return

    def _clear_axis(self, axis: str) -> None:
        for name in self.family.sizes.get(axis, ()):
            if isinstance(name, str) and "." not in name and axis not in self.known.lengths:
                self.fields[f"config.{name}"] = None

    def _set_length(self, axis: str, setting: ModelSetting) -> bool:
        """Set the length of an axis; return False if the family has no such axis."""
        if axis not in self.family.sizes and axis not in self.family.derived and axis not in self.lengths:
            return False
        if isinstance(setting.value, bool) or not isinstance(setting.value, int):
            return True
        length = self.lengths.setdefault(axis, setting.value)
        if length != setting.value:
            source = self.sources.get(axis)
            by = f"{source}, {source.source}" if source else "the arrays"
            self.wrong[setting.name] = Contradiction(setting.name, setting.value, setting.source, length, by)
        elif axis not in self.known.lengths:
            self.sources.setdefault(axis, setting)
        return True

    def _apply_limit(self, limit: Limit, facts: ModelFacts) -> None:
        """Set a field to the value that is fixed in MaxText's code."""
        left, right = limit.expected.left, limit.expected.right
        if limit.expected.relation != "is" or not all(
            condition.holds(facts) for condition in limit.conditions
        ):
            return
        # If layers vary among the models of a type, transformers has no default for them.
        if left.name.startswith(CYCLE) and any(
            condition.left.kind == "flag" for condition in limit.conditions
        ):
            layers = self.lengths.get("layers") or self.lengths.get("layer", 0)
            self.fields[f"config.{LAYER_TYPES}"] = layer_types(int(left.name.removeprefix(CYCLE)), layers)
            return
        expected = right.of(facts)
        if left.kind == "formula" and left.name in self.family.sizes and isinstance(expected, int):
            self.lengths.setdefault(left.name, expected)
        # Rotary embeddings of one type; absent fields have the values of the plain embedding.
        is_told = left.kind == "field" and (not left.name.startswith("rope.") or limit.conditions)
        if is_told and left.name not in self.choice and (expected is not None or right.kind == "value"):
            self.fields[left.name] = expected

    def _derive(self) -> None:
        """Compute lengths from formulas, and solve formulas with one unknown length."""
        for axis, formula in self.family.derived.items():
            unknown = axes_in(formula) - self.lengths.keys()
            if axis not in self.lengths and not unknown:
                result = _formula_value(formula, self.lengths)
                self.lengths |= {} if result is None else {axis: result}
            elif axis in self.lengths and len(unknown) == 1:
                (other,) = unknown
                matching = [
                    n
                    for n in range(1, _MAX_LENGTH)
                    if _formula_value(formula, {**self.lengths, other: n}) == self.lengths[axis]
                ]
                # All larger lengths have the same minimum, so the smallest one is sufficient.
                is_unique = len(matching) == 1 or (formula.startswith("min(") and matching)
                self.lengths |= {other: matching[0]} if is_unique else {}

    def _infer_settings(self, facts: ModelFacts) -> Iterator[tuple[str, Any]]:
        """Yield the settings that follow from the configuration and the rules; None if there is no value."""
        for name, rule in self.family.settings.chosen(facts).items():
            result = (_term_value(term, facts) for term in rule.terms)
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
        expected_by_setting = {
            name: item
            for name, item in self.given.values.items()
            if (name in own or name in declared or name == MODEL_NAME)
            and (item.value is not None and name not in _IMAGE_SETTINGS)
        }
        for name in sorted((expected_by_setting.keys() | declared.keys()) - unused_settings(declared)):
            expected = declared.get(name, own.get(name))
            if name not in expected_by_setting or (
                name == MODEL_NAME and not self._is_of_code(expected_by_setting[name].value)
            ):
                continue
            if not self._agrees(name, expected_by_setting[name].value, expected):
                source = (
                    f"family {self.family.name}"
                    if name in declared
                    else "MaxText's default, with this family"
                )
                yield Contradiction(
                    name, expected_by_setting[name].value, expected_by_setting[name].source, expected, source
                )
        for name, flag in self.known.flags.items():
            if (rule := self.family.flags[name]).field and facts.flags[name] != flag:
                yield Contradiction(rule.field[0], facts.flags[name], _SETTINGS, flag, "the arrays")
        for limit in self.family.settings.limits:
            if not limit.holds(facts):
                setting = str(limit.expected.left)
                yield Contradiction(
                    setting, facts.field(setting), _SETTINGS, str(limit.expected), limit.reason
                )

    def _agrees(self, name: str, value: Any, expected: Any) -> bool:
        if name == MODEL_NAME:
            return is_same_value(self._rule_name(name, value), expected)
        return is_equivalent(name, value, expected)

    def _rule_name(self, name: str, value: Any) -> Any:
        """Return the value of a setting; for models that share code, use the name in the rules."""
        if name != MODEL_NAME or not isinstance(value, str):
            return value
        known = self._text_model_names()
        similar = [item for item in known if item.partition("-")[0] == value.partition("-")[0]]
        return value if value in known or not similar else similar[0]

    def _is_of_code(self, value: Any) -> bool:
        """Return whether a model name uses the family's code."""
        return self._rule_name(MODEL_NAME, value) in self._text_model_names()

    def _text_model_names(self) -> list[str]:
        """Return the model names that determine the text model."""
        rules = (setting for setting in self.family.settings.settings if setting.name == MODEL_NAME)
        of_text = [item for item in rules if not self._is_for_towers(item)]
        return [str(term.value) for rule in of_text for term in rule.terms]

    def _is_for_towers(self, rule: Setting) -> bool:
        flags = {condition.left.name for condition in rule.conditions if condition.left.kind == "flag"}
        return not flags.isdisjoint(self.family.towers)


def _field_value(term: Term, declared: Any) -> Any:
    """Return the field value that gives a setting; None if there is none."""
    if term.words is None:
        return declared
    result = next((word for word, value in term.words.items() if value == declared), None)
    if result is None and isinstance(declared, list):
        words = [_field_value(term, item) for item in declared]
        return None if None in words else words
    return result


def _term_value(term: Term, facts: ModelFacts) -> Any:
    try:
        return term.of(facts)
    except KeyError:
        return None


def _formula_value(formula: str, lengths: Mapping[str, int]) -> int | None:
    try:
        return value(formula, lengths)
    except DoesNotDivideError:
        return None
