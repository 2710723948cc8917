"""Reports on MaxText's settings for a model, as frozen dataclasses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttools.core.dataclass import dataclass

# The settings that are shown first, in this order.
_STORED = ("scan_layers", "param_scan_axis", "load_parameters_path")
_SIZES = (
    "decoder_block",
    "base_emb_dim",
    "base_num_decoder_layers",
    "base_num_query_heads",
    "base_num_kv_heads",
    "head_dim",
    "base_mlp_dim",
    "vocab_size",
)
_FIRST = ("model_name", "override_model_config", *_STORED)


@dataclass(frozen=True)
class ModelSetting:
    """A MaxText setting with its source.

    Attributes:
        name: The name in MaxText.
        value: The value as in JSON.
        source: Where the value comes from.
    """

    name: str
    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.name}={format_value(self.value)}"


@dataclass(frozen=True)
class Discrepancy:
    """A property that MaxText computes differently, regardless of its settings.

    Attributes:
        what: The model's field and value.
        reason: What MaxText does instead.
        effect: The difference between the results; empty if it was not measured.
        remedy: The action to take; empty if nothing helps.
    """

    what: str
    reason: str
    effect: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (f"{self.what}: {self.reason}", self.effect, self.remedy)))


@dataclass(frozen=True)
class Contradiction:
    """A setting of a run that contradicts the checkpoint.

    Attributes:
        name: The name of the setting.
        declared: The value in the run.
        declared_in: The source of the value in the run.
        expected: The value for the checkpoint.
        source: The source of the expected value.
    """

    name: str
    declared: Any
    declared_in: str
    expected: Any
    source: str


@dataclass(frozen=True)
class InvalidSetting:
    """A setting that MaxText refuses, regardless of the checkpoint.

    Attributes:
        name: The name as given.
        declared: The value as given.
        declared_in: The source of the value.
        reason: The reason why MaxText refuses it.
        hint: The action to take.
    """

    name: str
    declared: Any
    declared_in: str
    reason: str
    hint: str


@dataclass(frozen=True, repr=False)
class MaxTextConfig:
    """The settings that MaxText needs to run a checkpoint.

    Attributes:
        path: The path of the checkpoint.
        family: The name of the model's family.
        maxtext: The version of MaxText.
        model_name: The named MaxText model with the same computation, or whose code this model needs; None if
            there is neither.
        is_named: Whether the computation is the same, so that the name is sufficient.
        settings: All settings that describe the model, in order.
        required_settings: The settings that must be passed to MaxText.
        deviations: Differences in MaxText's computation, regardless of its settings.
        notes: Other notes for the user.
        unmapped_fields: Fields of the configuration, with their values, that have no MaxText setting but may
            affect the computation.
        contradictions: Contradictions in the settings that were checked.
        invalid_settings: Checked settings that MaxText does not have, or whose values it does not accept.
    """

    path: str
    family: str
    maxtext: str
    model_name: str | None
    is_named: bool
    settings: tuple[ModelSetting, ...]
    required_settings: tuple[ModelSetting, ...]
    deviations: tuple[Discrepancy, ...] = ()
    notes: tuple[str, ...] = ()
    unmapped_fields: tuple[str, ...] = ()
    contradictions: tuple[Contradiction, ...] = ()
    invalid_settings: tuple[InvalidSetting, ...] = ()

    def __repr__(self) -> str:
        return f"<MaxTextConfig of {self.path}: {' '.join(self.arguments())}>"

    def as_mapping(self) -> Mapping[str, Any]:
        """Return the settings that MaxText needs, by name."""
        return {item.name: item.value for item in self.required_settings}

    def arguments(self) -> tuple[str, ...]:
        """Return the settings as `NAME=VALUE`, for MaxText's command line."""
        return tuple(map(str, self.required_settings))

    def yaml(self) -> str:
        """Return the content of a YAML file that MaxText accepts instead of `base.yml`.

        If the model needs the code of a named MaxText model, the file replaces the file of that model.
        """
        given = self.as_mapping()
        name = given.get("model_name")
        if self.is_named or name is None:
            head = ["base_config: base.yml"]
            return "\n".join([*head, *_lines(given)]) + "\n"
        # In MaxText, a model's file overrides other files but not the command line.
        stored = [f"{key}={format_value(given[key])}" for key in _STORED if key in given]
        head = [
            f"# Save this as models/{name}.yml next to your configuration file. MaxText then uses it for its",
            f"# own model of this name. Then: {' '.join([f'model_name={name}', *stored])}",
        ]
        model = {key: value for key, value in given.items() if key not in _FIRST}
        return "\n".join([*head, *_lines(model)]) + "\n"


def format_value(value: Any) -> str:
    """Format a value for MaxText's command line."""
    try:
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
    except (ValueError, RecursionError):
        # A list that contains itself, through an alias in YAML.
        return str(value)


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]


def sort_settings(settings: Mapping[str, ModelSetting]) -> tuple[ModelSetting, ...]:
    """Return the settings in display order."""
    first = [name for name in (*_FIRST, *_SIZES) if name in settings]
    return tuple(settings[name] for name in (*first, *sorted(settings.keys() - set(first))))
