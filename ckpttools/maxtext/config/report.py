"""Reports on MaxText's settings for a model, as frozen dataclasses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttools.core.dataclass import dataclass

# What is said first, in this order; then all others.
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
        name: MaxText's.
        value: as JSON has it.
        source: where it was said.
    """

    name: str
    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.name}={format_value(self.value)}"


@dataclass(frozen=True)
class Discrepancy:
    """A property that MaxText computes differently, whatever its settings.

    Attributes:
        what: the model's field and value.
        reason: what MaxText does instead.
        effect: how far results are apart; empty where that was not measured.
        remedy: what to do; empty where nothing helps.
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
        name: of the setting.
        declared: its value.
        said_in: who says it.
        expected: the checkpoint's.
        source: who says that.
    """

    name: str
    declared: Any
    said_in: str
    expected: Any
    source: str


@dataclass(frozen=True)
class Mistake:
    """A setting that MaxText refuses, whatever the checkpoint.

    Attributes:
        name: as it was said.
        declared: its value.
        said_in: who says it.
        reason: why it is refused.
        hint: what to do.
    """

    name: str
    declared: Any
    said_in: str
    reason: str
    hint: str


@dataclass(frozen=True, repr=False)
class MaxTextConfig:
    """The settings that MaxText needs to run a checkpoint.

    Attributes:
        path: of the checkpoint.
        family: name of its family.
        maxtext: version of MaxText.
        model_name: of MaxText's own model that is this one in all that decides what it computes, or of the
            one whose code this model needs; None where neither is.
        is_named: whether it is the former, so that its name says all.
        settings: all settings that describe the model, in order.
        told: those that MaxText needs to be given.
        deviations: what MaxText computes otherwise, whatever its settings.
        notes: what else there is to know.
        unread: fields of the configuration, with their values, of which nobody knows whether they change what
            MaxText computes: it is told nothing of them.
        contradictions: of the settings that were to be checked.
        mistakes: those of them that MaxText has not, or not with such values.
    """

    path: str
    family: str
    maxtext: str
    model_name: str | None
    is_named: bool
    settings: tuple[ModelSetting, ...]
    told: tuple[ModelSetting, ...]
    deviations: tuple[Discrepancy, ...] = ()
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    contradictions: tuple[Contradiction, ...] = ()
    mistakes: tuple[Mistake, ...] = ()

    def __repr__(self) -> str:
        return f"<MaxTextConfig of {self.path}: {' '.join(self.arguments())}>"

    def as_mapping(self) -> Mapping[str, Any]:
        """Return the settings that MaxText needs, by name."""
        return {item.name: item.value for item in self.told}

    def arguments(self) -> tuple[str, ...]:
        """Return the settings as `NAME=VALUE`, for MaxText's command line."""
        return tuple(map(str, self.told))

    def yaml(self) -> str:
        """Return the content of a YAML file that MaxText accepts instead of `base.yml`.

        Where the model needs the code of one of MaxText's own, by its name, it is that model's own file.
        """
        given = self.as_mapping()
        name = given.get("model_name")
        if self.is_named or name is None:
            head = ["base_config: base.yml"]
            return "\n".join([*head, *_lines(given)]) + "\n"
        # MaxText lets the file of a model overrule the others, but for what its command line says.
        stored = [f"{key}={format_value(given[key])}" for key in _STORED if key in given]
        head = [
            f"# Save this as models/{name}.yml beside your configuration file: MaxText then takes it for its",
            f"# own model of this name. Then: {' '.join([f'model_name={name}', *stored])}",
        ]
        model = {key: value for key, value in given.items() if key not in _FIRST}
        return "\n".join([*head, *_lines(model)]) + "\n"


def format_value(value: Any) -> str:
    """Format a value for MaxText's command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]


def ordered(settings: Mapping[str, ModelSetting]) -> tuple[ModelSetting, ...]:
    """Return the settings in display order."""
    first = [name for name in (*_FIRST, *_SIZES) if name in settings]
    return tuple(settings[name] for name in (*first, *sorted(settings.keys() - set(first))))
