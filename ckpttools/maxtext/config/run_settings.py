"""Read the settings of a run, each with its source."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.maxtext.config.infer_settings import MODEL_NAME, Values
from ckpttools.maxtext.config.models import defaults, named_models, tower_defaults
from ckpttools.maxtext.config.report import Contradiction, ModelSetting
from ckpttools.maxtext.loading.command import SETTING, ParsedCommand, parse_command
from ckpttools.maxtext.loading.configuration import (
    COMMAND_LINE,
    Layer,
    flat_settings,
    model_layer,
    read_layers,
)
from ckpttools.maxtext.loading.model_sizes import architecture
from ckpttools.maxtext.loading.settings import DEFAULTS
from ckpttools.stores.registry import parse

# Operators that end a command in a shell or redirect its output.
_SHELL_OPERATOR = re.compile(r"[|&;]+|[0-9&]?>.*")
_PYTHON = re.compile(r"\s(\S*/)?python[\d.]*\s")
_SCAN, _AXIS = "scan_layers", "param_scan_axis"


@dataclass(frozen=True)
class GivenSettings:
    """The settings of a run.

    Attributes:
        values: Name -> setting.
        is_whole: Whether `values` includes MaxText's defaults.
        declared: Settings of the files and the command line, including overridden ones.
    """

    values: Mapping[str, ModelSetting]
    is_whole: bool
    declared: tuple[ModelSetting, ...] = ()

    def value(self, name: str) -> Any:
        """Return the value of a setting; None if it is not set."""
        result = self.values.get(name)
        return None if result is None else result.value


def read_settings(words: Sequence[str]) -> GivenSettings:
    """Return the settings in the arguments of a run; includes defaults if a file or a model is named.

    Args:
        words: The arguments as passed to MaxText: a configuration file, then `NAME=VALUE`.

    Raises:
        UsageError: There are no arguments, or one of them is not a setting.
        StorageError, FormatError, ConfigError: A file does not exist or is not a configuration.
    """
    command = parse_command(_as_pasted(words))
    if not command.file and not command.overrides:
        raise UsageError("no settings are given", expected="a configuration file or NAME=VALUE")
    return _merge_layers(command)


def _as_pasted(words: Sequence[str]) -> list[str]:
    """Split pasted command lines into words, up to the first shell operator."""
    result: list[str] = []
    for word in words:
        is_line = any(map(str.isspace, word)) and (not SETTING.match(word) or _PYTHON.search(word))
        result += _split(word) if is_line else [word]
    return list(takewhile(lambda word: not _SHELL_OPERATOR.fullmatch(word), result))


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(
            "this is not a valid command line", got=f"{error}: {line}", hint="quote it as for a shell"
        ) from error


def _merge_layers(command: ParsedCommand) -> GivenSettings:
    path = parse(command.file) if command.file else None
    files = read_layers(path, []) if path else []
    own = Layer(COMMAND_LINE, command.overrides)
    model = model_layer([*files, own], path)
    name = {**_flat_values(files), **dict(flat_settings(own.values))}.get(MODEL_NAME)
    is_whole = path is not None or bool(model.values)
    layers = [_defaults()] if is_whole else []
    layers += [*files, _model_defaults(name), model, own]
    result: dict[str, ModelSetting] = {}
    for layer in layers:
        result |= {key: ModelSetting(key, value, layer.source) for key, value in flat_settings(layer.values)}
    declared = (
        ModelSetting(key, value, layer.source)
        for layer in (*files, own)
        for key, value in flat_settings(layer.values)
    )
    return GivenSettings(result, is_whole, tuple(declared))


def _flat_values(layers: Sequence[Layer]) -> dict[str, Any]:
    return {key: value for layer in layers for key, value in flat_settings(layer.values)}


def _defaults() -> Layer:
    scan = {name: DEFAULTS[name] for name in (_SCAN, _AXIS)}
    return Layer(
        "MaxText's default", {**defaults(), **tower_defaults(), **scan, MODEL_NAME: DEFAULTS[MODEL_NAME]}
    )


def _model_defaults(name: object) -> Layer:
    """Return the settings of a named model, for use without an installed MaxText."""
    values = named_models().get(architecture(name), {}) if isinstance(name, str) else {}
    return Layer(f"model {name}", values)


_ATTENTION, _KERNELS = "attention", ("dot_product", "flash")
_NUMBERS = (int, float)


def find_contradictions(given: GivenSettings, values: Values) -> Iterator[Contradiction]:
    """Yield the settings of a run that contradict the checkpoint.

    Undeclared settings have MaxText's defaults if a configuration file or a model is named.

    Args:
        given: The settings of the run.
        values: The settings of the checkpoint.
    """
    for name, setting in values.items():
        result = given.values.get(name)
        if result is not None and not is_equivalent(name, result.value, setting.value):
            yield Contradiction(name, result.value, result.source, setting.value, setting.source)
        # MaxText overwrites num_decoder_layers and others with values computed from base_num_decoder_layers.
        computed = given.values.get(name.removeprefix("base_"))
        if (
            computed is None
            or computed is result
            or computed.value in (None, setting.value)
            or given.value("global_parameter_scale") not in (None, 1)
        ):
            continue
        source = f"MaxText computes it from {name}"
        yield Contradiction(computed.name, computed.value, computed.source, setting.value, source)


def is_equivalent(name: str, value: Any, expected: Any) -> bool:
    """Return whether a run's setting is equivalent to the model's."""
    if name == MODEL_NAME:
        # Names with the same prefix use the same code.
        return isinstance(value, str) and value.partition("-")[0] == str(expected).partition("-")[0]
    if name == _ATTENTION:
        # These settings choose an implementation; all accepted values give the same result.
        return value in _KERNELS
    return is_same_value(value, expected)


def is_same_value(value: Any, expected: Any) -> bool:
    """Return whether two values are equal; numbers may be written as text."""
    if isinstance(expected, bool) or not isinstance(expected, _NUMBERS):
        return bool(value == expected)
    try:
        return float(value) == float(expected)
    except (TypeError, ValueError):
        return False
