"""The settings that decide what a run loads, and the problems that MaxText finds in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import did_you_mean
from ckpttools.maxtext.config.report import ModelSetting, format_value
from ckpttools.maxtext.config.setting_kinds import find_invalid_settings
from ckpttools.maxtext.loading.model_sizes import KNOWN_NAMES
from ckpttools.maxtext.loading.report import Problem, RunSetting
from ckpttools.maxtext.versions import Version

DEFAULT = "default"
LORA = "lora"
# Defaults of MaxText's base.yml. The type of a value is that of its setting; None stands for a number.
_BASE: Mapping[str, object] = {
    "run_name": "",
    "base_output_directory": "",
    "load_parameters_path": "",
    "load_full_state_path": "",
    "enable_checkpointing": True,
    "enable_multi_tier_checkpointing": False,
    "enable_emergency_checkpoint": False,
    "local_checkpoint_directory": "",
    "local_checkpoint_period": 0,
    "multi_tier_checkpointing_backup_interval_minutes": None,
    "multi_tier_checkpointing_backup_interval_steps": None,
    "source_checkpoint_layout": "orbax",
    "checkpoint_conversion_fn": "",
    "checkpoint_todelete_subdir": "",
    "enable_orbax_v1": False,
    "steps": 150_001,
    "learning_rate_schedule_steps": -1,
    "pure_nnx": True,
    "enable_diloco": False,
    "ici_pipeline_parallelism": 1,
    "dcn_pipeline_parallelism": 1,
    "lora_input_adapters_path": "",
    "hf_lora_adapter_path": "",
    "lora.enable_lora": False,
    "lora.lora_rank": 0,
    "lora.lora_alpha": 0.0,
    "lora.lora_restore_path": "",
}
_MODEL: Mapping[str, object] = {
    "model_name": "default",
    "override_model_config": False,
    "decoder_block": "llama2",
    "scan_layers": True,
    "param_scan_axis": 1,
    "global_parameter_scale": 1,
}
SIZES: Mapping[str, object] = {
    "base_emb_dim": 2048,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "head_dim": 128,
    "base_mlp_dim": 7168,
    "base_num_decoder_layers": 16,
    "vocab_size": 32_000,
    "num_experts": 1,
}
"""The default sizes of the model."""
DEFAULTS: Mapping[str, object] = {**_BASE, **_MODEL, **SIZES}
"""Maps the name of a setting to its value in MaxText's own configuration."""
LAYOUTS = ("orbax", "safetensors", "safetensors_dynamic")
LOCAL_TIERS = ("enable_multi_tier_checkpointing", "enable_emergency_checkpoint")
# The values that pydantic accepts.
_BOOLEAN_VALUES = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


@dataclass(frozen=True)
class Settings:
    """The declared settings, with MaxText's defaults for all others.

    Attributes:
        declared: Settings by name.
        has_file: Whether a configuration file is named, so that its defaults count as declared.
        contradictions: Contradictory declarations, which MaxText refuses.
        notes: Notes on how names were interpreted.
        given: All settings of files, the command line and the environment, including irrelevant ones.
    """

    declared: Mapping[str, RunSetting]
    has_file: bool = False
    contradictions: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    given: tuple[ModelSetting, ...] = ()

    def __getitem__(self, name: str) -> RunSetting:
        return self.declared.get(name) or RunSetting(name, DEFAULTS[name], DEFAULT)

    def text(self, name: str) -> str:
        """Return a text setting; "" if it is not a text."""
        value = self[name].value
        return value if isinstance(value, str) and value.lower() != "none" else ""

    def flag(self, name: str) -> bool:
        """Return whether a boolean setting is on; its default if the value is invalid."""
        value = _BOOLEAN_VALUES.get(str(self[name].value).lower())
        return bool(DEFAULTS[name]) if value is None else value

    def number(self, name: str) -> float | None:
        """Return a numeric setting; None if it is not a number."""
        value = self[name].value
        try:
            return float(str(value)) if value is not None else None
        except ValueError:
            return None

    def is_declared(self, name: str) -> bool:
        """Return whether a setting is declared, or a configuration file declares all settings."""
        return name in self.declared or self.has_file

    @property
    def non_default(self) -> tuple[RunSetting, ...]:
        """Return the relevant settings that are not at their defaults, in order."""
        values = [self.declared[name] for name in DEFAULTS if name in self.declared and name not in SIZES]
        return tuple(item for item in values if item.value != DEFAULTS[item.name])


def settings_problems(settings: Settings, version: Version) -> Iterator[Problem]:
    """Yield settings that MaxText refuses before it checks any checkpoint.

    Args:
        settings: The settings of the run.
        version: The version of MaxText.
    """
    yield from settings.contradictions
    yield from _name_problems(settings, version)
    if settings.text("load_parameters_path") and settings.text("load_full_state_path"):
        yield Problem(
            "At most one of `load_parameters_path` or `load_full_state_path` should be set",
            "leave one out: parameters start a new run, the full state resumes with its optimizer",
        )
    yield from _checkpointing_problems(settings, version)
    yield from _local_tier_problems(settings)
    if not version.renames_before_deletion and _renames_before_deletion(settings):
        yield Problem(
            f"MaxText {version.name} refuses checkpoint_todelete_subdir",
            "set checkpoint_todelete_full_path instead",
        )


def _renames_before_deletion(settings: Settings) -> bool:
    is_local = any(settings.flag(name) for name in LOCAL_TIERS)
    is_managed = settings.flag("enable_checkpointing") and not is_local
    return is_managed and bool(settings.text("checkpoint_todelete_subdir"))


def _name_problems(settings: Settings, version: Version) -> Iterator[Problem]:
    for invalid in find_invalid_settings(settings.given, version.name):
        setting = f"{invalid.name}={format_value(invalid.declared)} ({invalid.declared_in})"
        yield Problem(f"{setting}: {invalid.reason}", invalid.hint)
    layout = settings.text("source_checkpoint_layout")
    if layout not in LAYOUTS:
        yield Problem(
            f"MaxText does not support source_checkpoint_layout={layout}", f"use one of {', '.join(LAYOUTS)}"
        )
    name = settings.text("model_name")
    if name in version.absent_models or name not in KNOWN_NAMES:
        hint = did_you_mean(name, KNOWN_NAMES - version.absent_models)
        yield Problem(f"MaxText {version.name} does not support model_name={name}", hint)


def _checkpointing_problems(settings: Settings, version: Version) -> Iterator[Problem]:
    if settings.flag("enable_checkpointing"):
        return
    names = ["load_full_state_path"]
    if version.parameters_need_checkpointing:
        names.append("load_parameters_path")
    for name in names:
        if settings.text(name):
            yield Problem(
                f"MaxText {version.name} refuses {name} together with enable_checkpointing=false",
                "set enable_checkpointing=true",
            )


def _local_tier_problems(settings: Settings) -> Iterator[Problem]:
    for name in LOCAL_TIERS:
        if not settings.flag(name):
            continue
        if not settings.text("local_checkpoint_directory"):
            yield Problem(f"{name} needs local_checkpoint_directory", "set it to the disk of each host")
        if (settings.number("local_checkpoint_period") or 0) <= 0:
            yield Problem(f"{name} needs local_checkpoint_period above 0", "set it to a number of steps")
    if settings.flag("enable_multi_tier_checkpointing"):
        yield from _backup_interval_problems(settings)


def _backup_interval_problems(settings: Settings) -> Iterator[Problem]:
    minutes, steps = (
        settings.number(f"multi_tier_checkpointing_backup_interval_{unit}") for unit in ("minutes", "steps")
    )
    if (minutes is None) == (steps is None):
        yield Problem(
            "enable_multi_tier_checkpointing needs multi_tier_checkpointing_backup_interval_minutes or "
            "multi_tier_checkpointing_backup_interval_steps, but not both",
            "set one of them",
        )
    elif steps is not None and steps < (settings.number("local_checkpoint_period") or 0):
        yield Problem(
            "multi_tier_checkpointing_backup_interval_steps must not be smaller than local_checkpoint_period",
            "make it larger",
        )
