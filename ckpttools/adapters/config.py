"""Read `adapter_config.json`: supported adapters and their scales."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from ckpttools.core.bounded_regex import PatternError, is_match, match_start
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, FormatError, listing
from ckpttools.formats.adapters import MERGE_WITH_PEFT

WITH_PEFT = f"merge it with PEFT, {MERGE_WITH_PEFT}"
# Fields of unsupported adapters, with the reason why such an adapter is more than factors added to weights.
_UNSUPPORTED = {
    "layer_replication": "it has more layers than its base",
    "use_qalora": "its factors apply to groups of inputs",
    "alora_invocation_tokens": "it acts only after certain tokens",
    "trainable_token_indices": "it replaces rows of embeddings",
    "megatron_config": "its layers are sharded over devices",
    "lora_bias": "it has biases of its own",
    "use_bdlora": "its factors are block-diagonal",
    "arrow_config": "it chooses between adapters for each token",
    "kasa_config": "it has more than two factors",
    "monteclora_config": "its weights are random variables",
}
# Initializations that change the base, so that it differs from the model that the adapter names.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")
# All other fields of LoraConfig in PEFT 0.21, which do not restrict support.
_PLAIN = """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r
    target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save
    init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_core loftq_config
    eva_config corda_config lora_ga_config use_dora velora_config qalora_group_size runtime_config
    target_parameters ensure_weight_tying
"""
ALL_LINEAR = "all-linear"
"""Value of `target_modules` for all linear layers except the model's output."""
# Names of output layers in transformers: for text, and for classification (PEFT 0.21, constants.py).
_HEADS = ("lm_head", "embed_out", "output_projection")
_CLASSIFIERS = ("score", "classifier")
# Modules that PEFT 0.21 keeps tied if `ensure_weight_tying` is set (EMBEDDING_LAYER_NAMES).
_TIED = ("embed_tokens", "lm_head")
_MAX_FLOAT = sys.float_info.max
_CONVERTED = "path_initial_model_for_weight_conversion"


def config_file(settings: Mapping[str, Any]) -> bytes:
    """Return the content of an `adapter_config.json`, in PEFT's order."""
    return f"{json.dumps(settings, indent=2, sort_keys=True)}\n".encode()


@dataclass(frozen=True)
class PeftConfig:
    """The configuration of a LoRA adapter.

    Attributes:
        declared: The complete configuration.
        location: Its location, for messages.
    """

    declared: Mapping[str, Any]
    location: str

    def __post_init__(self) -> None:
        kind = self.declared.get("peft_type", "LORA")
        if kind != "LORA":
            raise FormatError(
                f"this kind of adapter is not supported: {kind}",
                location=self.location,
                expected="peft_type LORA",
                hint=WITH_PEFT,
            )
        if problems := list(self._problems()):
            raise FormatError(
                "this adapter does more than add factors to weights:" + listing(problems),
                location=self.location,
                hint=WITH_PEFT,
            )

    def _problems(self) -> Iterator[str]:
        for name, reason in _UNSUPPORTED.items():
            if self.declared.get(name):
                yield f"{name}: {reason}"
        if self.declared.get("bias", "none") != "none":
            yield f"bias {self.declared['bias']!r}: it trains the model's own biases"
        yield from self._contradictions()
        init = str(self.declared.get("init_lora_weights", "")).lower()
        if init.startswith(_BASE_CHANGING_INITS) and not self.declared.get(_CONVERTED):
            yield f"init_lora_weights {init!r}: its base differs from the model that it names"

    def _contradictions(self) -> Iterator[str]:
        """Describe combinations of settings that PEFT refuses (LoraConfig.__post_init__)."""
        layers, pattern = (self.declared.get(name) for name in ("layers_to_transform", "layers_pattern"))
        if isinstance(self.declared.get("target_modules"), str):
            if layers is not None:
                yield "layers_to_transform: PEFT refuses it when target_modules is a pattern"
            if pattern is not None:
                yield "layers_pattern: PEFT refuses it when target_modules is a pattern"
        elif pattern and layers is None:
            yield "layers_pattern: PEFT refuses it without layers_to_transform"

    def rank(self, module: str) -> int:
        """Return the rank of a module's factors. Raise ConfigError if it is not an integer."""
        rank = self._number_for("rank_pattern", module, "r", 8)
        if rank != int(rank) or rank < 1:
            raise ConfigError(
                "the rank must be an integer", location=self.location, got=rank, expected="1 or more"
            )
        return int(rank)

    def scale(self, module: str) -> float:
        """Return the factor by which a module's product is scaled. Raise the errors of `rank`."""
        alpha, rank = self._number_for("alpha_pattern", module, "lora_alpha", 8), self.rank(module)
        return alpha / (math.sqrt(rank) if self._flag("use_rslora") else rank)

    @property
    def is_dora(self) -> bool:
        """Return whether the adapter sets row norms (DoRA). Raise ConfigError if it is not a boolean."""
        return self._flag("use_dora")

    @property
    def replaced(self) -> tuple[str, ...]:
        """Return the names of modules that are stored as complete arrays."""
        return listed_names(self.declared, "modules_to_save", self.location)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of module parameters with factors, such as fused experts."""
        return listed_names(self.declared, "target_parameters", self.location)

    def is_target(self, module: str) -> bool:
        """Return whether PEFT adds factors to a linear module. Raise the errors of `skip_reason`."""
        return self.skip_reason(module) is None

    def skip_reason(self, module: str, *, is_embedding: bool = False) -> str | None:
        """Return the config field that makes PEFT ignore the factors stored for a module.

        The tests run in the order of `check_target_module_exists` in PEFT 0.21 (tuners/tuners_utils.py).

        Args:
            module: The module's path in the model.
            is_embedding: Whether the module is an embedding table.

        Returns:
            The field's name; None if PEFT adds the factors.

        Raises:
            ConfigError: A field is not a list of names or a valid pattern.
        """
        if self._is_tied(module):
            return None
        if self._is_excluded(module):
            return "exclude_modules"
        if any(self._is_in_saved(module, name) for name in self.replaced):
            return "modules_to_save"
        targets = self.declared.get("target_modules")
        if isinstance(targets, str):
            if targets.lower() == ALL_LINEAR:
                is_target = not is_embedding and module.rpartition(".")[2] not in self._heads
            else:
                is_target = self._matches(targets, module, "target_modules")
            return None if is_target else "target_modules"
        names = listed_names(self.declared, "target_modules", self.location)
        if module in names:
            return None
        if not any(module.endswith(f".{name}") for name in names):
            return "target_modules"
        return None if self._is_in_layers(module) else "layers_to_transform"

    def _is_tied(self, module: str) -> bool:
        """Return whether PEFT ties the factors of embeddings and head.

        One of them as a target is then enough.
        """
        if not self._flag("ensure_weight_tying") or module.rpartition(".")[2] not in _TIED:
            return False
        targets = self.declared.get("target_modules")
        if isinstance(targets, str):
            return any(self._matches(targets, name, "target_modules") for name in _TIED)
        names = listed_names(self.declared, "target_modules", self.location)
        return any(name.rpartition(".")[2] in _TIED for name in names)

    @property
    def has_targets(self) -> bool:
        """Return whether a field names the adapted modules. Otherwise PEFT chooses them by model type."""
        return self.declared.get("target_modules") is not None or bool(self.parameters)

    @property
    def _heads(self) -> tuple[str, ...]:
        """Return the names of the output layers, which "all-linear" leaves out."""
        return (*_HEADS, *_CLASSIFIERS) if self.declared.get("task_type") == "SEQ_CLS" else _HEADS

    def _is_excluded(self, module: str) -> bool:
        excluded = self.declared.get("exclude_modules")
        if isinstance(excluded, str):
            return bool(excluded) and self._matches(excluded, module, "exclude_modules")
        names = listed_names(self.declared, "exclude_modules", self.location)
        return any(f".{module}".endswith(f".{name}") for name in names)

    def _is_in_saved(self, module: str, saved: str) -> bool:
        """Return whether a module is inside a fully trained module; PEFT treats these names as patterns."""
        if re.escape(saved) == saved.replace(".", r"\."):
            # A dot matches any character, but in module names these positions have dots.
            return f".{saved}." in f".{module}."
        return self._matches(rf"(^|.*\.){saved}($|\..*)", module, "modules_to_save")

    def _is_in_layers(self, module: str) -> bool:
        """Return whether `layers_to_transform` includes the layer of a module, or is not set."""
        layers = self._layers
        if layers is None:
            return True
        pattern = self.declared.get("layers_pattern")
        is_text = isinstance(pattern, str) and pattern
        names = (pattern,) if is_text else listed_names(self.declared, "layers_pattern")
        prefixes = [rf"(?:^|.*?\.){name}" for name in names] or [r".*?\.[^.]*"]
        for prefix in prefixes:
            try:
                match = match_start(rf"{prefix}\.(?P<idx>\d+)\.", module)
            except PatternError as error:
                raise self._bad_pattern_error("layers_pattern", prefix, error) from error
            if match is not None:
                return match["idx"] is not None and int(match["idx"]) in layers
        return False

    @property
    def _layers(self) -> tuple[int, ...] | None:
        """Return the layer indexes in `layers_to_transform`; None for all layers."""
        value = self.declared.get("layers_to_transform")
        if value is None or value == []:
            return None
        layers = value if isinstance(value, list | tuple) else [value]
        if all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
            return tuple(layers)
        raise ConfigError(
            "layers_to_transform is not a list of layer indexes", location=self.location, got=repr(value)[:40]
        )

    def parameters_of(self, module: str) -> set[str]:
        """Return the parameters of a module that have factors instead of its weight."""
        targets = [parameter.rpartition(".") for parameter in self.parameters]
        names = {name for above, _, name in targets if above and f".{module}".endswith(f".{above}")}
        if not targets or "weight" in names or self.is_target(module):
            return names
        # A name without a module applies to all modules with such a parameter, except adapted ones.
        return names | {name for above, _, name in targets if not above}

    def pattern_of(self, field: str, module: str) -> str | None:
        """Return the first key of `rank_pattern` or `alpha_pattern` that matches a module.

        Raises:
            ConfigError: The field is not an object, or has a key that cannot be matched.
        """
        patterns = self.declared.get(field) or {}
        if not isinstance(patterns, Mapping):
            raise ConfigError(f"{field} is not an object", location=self.location, got=repr(patterns))
        return next(
            (key for key in patterns if self._matches(key, module, f"a key of {field}", below=True)), None
        )

    def _flag(self, name: str) -> bool:
        value = self.declared.get(name) or False
        if value not in (True, False):
            raise ConfigError(f"{name} is neither true nor false", location=self.location, got=repr(value))
        return bool(value)

    def _number_for(self, patterns: str, module: str, otherwise: str, default: int) -> float:
        """Return a number for a module, from its pattern if there is one."""
        pattern = self.pattern_of(patterns, module)
        if pattern is not None:
            return self._number(self.declared[patterns][pattern], patterns)
        return self._number(self.declared.get(otherwise, default), otherwise)

    def _matches(self, pattern: str, module: str, setting: str, *, below: bool = False) -> bool:
        """Return whether a pattern matches a path, or its end if `below`."""
        try:
            return is_match(pattern, module, below=below)
        except PatternError as error:
            raise self._bad_pattern_error(setting, pattern, error) from error

    def _bad_pattern_error(self, field: str, pattern: str, error: PatternError) -> ConfigError:
        return ConfigError(
            f"{field} is not a supported pattern",
            location=self.location,
            got=f"{repr(pattern)[:80]}: {error}",
            hint="write the names of the modules, or a pattern with fewer repeats",
        )

    def _number(self, value: object, name: str) -> float:
        if not is_number(value):
            raise ConfigError(f"{name} is not a number", location=self.location, got=repr(value)[:40])
        return value

    @property
    def has_inputs_first(self) -> bool:
        """Return whether weights have their input axis first, as in GPT-2. Raise the errors of `is_dora`."""
        return self._flag("fan_in_fan_out")


def unknown_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that PEFT 0.21 does not know."""
    known = {*_PLAIN.split(), *_UNSUPPORTED, _CONVERTED}
    return sorted(name for name, value in settings.items() if value and name not in known)


def listed_names(settings: Mapping[str, Any], field: str, location: str = "") -> tuple[str, ...]:
    """Return the names in a field of a configuration, such as `modules_to_save`.

    Raises:
        ConfigError: The field is not a list of names.
    """
    names = settings.get(field) or ()
    names = (names,) if isinstance(names, str) else names
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise ConfigError(f"{field} is not a list of names", location=location or None, got=repr(names)[:40])


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a finite number."""
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= _MAX_FLOAT
