"""Infer the settings of a model from its family's rules, and find an equivalent named MaxText model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttools.core.errors import ConfigError
from ckpttools.mapping.settings import Setting, SettingRules
from ckpttools.maxtext.config.model_facts import TOWERS, ModelFacts, Reading
from ckpttools.maxtext.config.models import defaults, named_models, tower_defaults
from ckpttools.maxtext.config.report import ModelSetting
from ckpttools.maxtext.config.setting_kinds import setting_kinds
from ckpttools.maxtext.loading.settings import DEFAULTS
from ckpttools.maxtext.versions import NEWEST
from ckpttools.model_families.family import Family
from ckpttools.model_families.hf_defaults import THETA

MODEL_NAME, OVERRIDE = "model_name", "override_model_config"
# These are read only for YaRN rotary embeddings.
_YARN_SETTINGS = frozenset(
    (
        "max_position_embeddings",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "rope_factor",
        "rope_truncate",
        "rope_interleave",
        "rope_attention_scaling",
    )
)
# These settings are passed along with a model name, because MaxText's model files do not set them.
_EXTRA_SETTINGS = ("use_multimodal", "use_audio", "attention")
# Values from this limit on are infinite in MaxText, and NaN is not below it either.
_TOO_LARGE = 2**63
Values = Mapping[str, ModelSetting]


def setting_rules(family: Family) -> SettingRules:
    """Return the setting rules of a family.

    Raises:
        ConfigError: The family has no setting rules.
    """
    if not family.settings.settings:
        raise ConfigError(
            f"the MaxText settings of family {family.name} are unknown",
            hint="add the rules to the family as `settings`: docs/add-a-family.md",
        )
    return family.settings


def model_settings(family: Family, facts: ModelFacts, location: str) -> Values:
    """Return all settings that describe a model, by name.

    Raises:
        ConfigError: The configuration lacks a setting, or has a value that MaxText cannot express.
    """
    rules = setting_rules(family).chosen(facts)
    reading = Reading(family, facts)
    return {name: _setting(rule, reading, location) for name, rule in rules.items()}


def _setting(rule: Setting, reading: Reading, location: str) -> ModelSetting:
    facts = reading.facts
    for term in rule.terms:
        try:
            value = term.of(facts)
        except KeyError as error:
            raise ConfigError(
                f"MaxText has no value of {rule.name} for this model",
                location=location,
                got=f"{reading.called(term)} {json.dumps(facts.field(term.name))}",
                expected="one of " + ", ".join(term.words or ()),
                hint="MaxText cannot run this model; correct the field if it is not the model's",
            ) from error
        if value is not None:
            if term.kind == "field" and term.words is None:
                _require_usable(rule.name, reading.called(term), value, location)
            return _require_accepted(
                ModelSetting(rule.name, _as_integer(value), reading.source(term, location)), location
            )
    raise ConfigError(
        f"{rule.name} is unknown",
        location=location,
        expected=" or ".join(map(reading.called, rule.terms)),
        hint="complete the config.json",
    )


def _require_accepted(setting: ModelSetting, location: str) -> ModelSetting:
    """Check that MaxText accepts a setting, and return it.

    Raises:
        ConfigError: MaxText does not accept the setting.
    """
    kind = setting_kinds(NEWEST).get(setting.name)
    expected = None if kind is None else kind.expected(setting.value)
    if expected is None:
        return setting
    raise ConfigError(
        f"MaxText does not accept this {setting.name}",
        location=location,
        got=f"{setting} ({setting.source})",
        expected=expected,
        hint="MaxText cannot run this model",
    )


def _require_usable(name: str, field: str, value: Any, location: str) -> None:
    """Raise an error if a field is not the number or boolean that MaxText needs."""
    usual = defaults().get(name)
    if isinstance(usual, bool):
        fits, expected = isinstance(value, bool), "true or false"
    elif isinstance(usual, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits, expected = is_number and abs(value) < _TOO_LARGE, "a number"
    else:
        return
    if not fits:
        raise ConfigError(
            f"{field} does not give a valid {name}",
            location=location,
            got=json.dumps(value),
            expected=expected,
        )


def _as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def model_notes(family: Family, facts: ModelFacts) -> Iterator[str]:
    """Yield notes about a model."""
    rules = setting_rules(family)
    yield from (note.text for note in rules.notes if note.applies(facts))
    thetas = facts.theta_conflicts() if any(term.name == THETA for term in rules.terms()) else ()
    yield from (
        f"{declared}, which transformers 5 and ckpttools use; but {other}" for declared, other in thetas
    )
    towers = {field for field, flag in TOWERS.items() if flag not in family.towers}
    present = sorted(field for _, part in facts.parts for field in towers if part.get(field))
    if present:
        yield f"text only: MaxText does not support {', '.join(present)} in models of family {family.name}"


def matching_model(values: Values) -> str | None:
    """Return the shortest name of a MaxText model with these settings; None if there is none."""
    own = {**defaults(), **tower_defaults()}
    expected = {name: item.value for name, item in values.items() if name != MODEL_NAME}
    matching = [
        name for name, declared in named_models().items() if _matches(expected, {**own, **declared}, own)
    ]
    return min(matching, key=lambda name: (len(name), name), default=None)


def _matches(expected: Mapping[str, Any], model: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    names = {name for name, value in model.items() if value != own.get(name)} | expected.keys()
    # Only tower settings in the family's rules count, because the choice of images does not belong to the
    # model.
    names -= {*unused_settings(expected), *_EXTRA_SETTINGS, *(tower_defaults().keys() - expected.keys())}
    return all(expected.get(name, own.get(name)) == model.get(name) for name in names)


def unused_settings(expected: Mapping[str, Any]) -> frozenset[str]:
    """Return the settings that are not read by a model with the given settings."""
    result = _YARN_SETTINGS if expected.get("rope_type") != "yarn" else frozenset()
    if expected.get("attention_type") == "mla":
        result |= {"head_dim"}
    if not expected.get("logits_via_embedding"):
        result |= {"normalize_embedding_logits"}
    return result


def required_settings(values: Values, named: str | None) -> dict[str, ModelSetting]:
    """Return the settings that must be passed to a MaxText run.

    Args:
        values: All settings that describe the model.
        named: The name of the equivalent MaxText model.
    """
    if named is not None:
        extra = {name: values[name] for name in _EXTRA_SETTINGS if name in values}
        return {MODEL_NAME: ModelSetting(MODEL_NAME, named, "MaxText's own model"), **extra}
    if MODEL_NAME not in values:
        return dict(values)
    override = ModelSetting(OVERRIDE, not DEFAULTS[OVERRIDE], "sizes of another model of this code")
    return {MODEL_NAME: values[MODEL_NAME], OVERRIDE: override, **values}
