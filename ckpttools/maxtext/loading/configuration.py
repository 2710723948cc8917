"""Merge a command and its configuration files into settings, in MaxText's order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, FormatError
from ckpttools.maxtext.config.report import ModelSetting
from ckpttools.maxtext.loading.command import ParsedCommand, merge_nested, parse_value
from ckpttools.maxtext.loading.model_sizes import MODELS, architecture
from ckpttools.maxtext.loading.report import Problem, RunSetting
from ckpttools.maxtext.loading.settings import DEFAULTS, LORA, Settings
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

_BASE_CONFIG, _BASE_FILE = "base_config", "base.yml"
_OWN_FILES = "src/maxtext/configs/"
_PREFIX = "M_"
COMMAND_LINE = "command line"
# Longer chains of base files are circular.
_MAX_CHAIN = 16


@dataclass(frozen=True)
class Layer:
    """Settings from one source.

    Attributes:
        source: Name of the source.
        values: The settings, with nested groups.
    """

    source: str
    values: Mapping[str, Any]


def merge_settings(command: ParsedCommand, environment: Mapping[str, str]) -> Settings:
    """Return the settings of a run.

    Args:
        command: The command of the run.
        environment: Environment variables of the run; `M_RUN_NAME` sets run_name.

    Raises:
        StorageError: A file does not exist, or cannot be read.
        FormatError, ConfigError: A file is not a configuration.
    """
    notes: list[str] = []
    path = parse(command.file) if command.file else None
    files = read_layers(path, notes) if path else []
    declared = Layer(COMMAND_LINE, command.overrides)
    model = model_layer([*files, declared], path)
    contradictions = list(_model_conflicts(model, declared, files))
    env = _environment(environment, [*files, model, declared])
    contradictions += _environment_conflicts(env, model, declared)
    result: dict[str, RunSetting] = {}
    for layer in (*files, _drop_overrides(model, declared), declared, env):
        result |= {name: RunSetting(name, value, layer.source) for name, value in flat_settings(layer.values)}
    known = {name: item for name, item in result.items() if name in DEFAULTS or f"{LORA}.{name}" in DEFAULTS}
    interpolated = [
        name for name, item in known.items() if isinstance(item.value, str) and "${" in item.value
    ]
    notes += [
        f"{name} contains ${{…}}, which is not evaluated here; its default is used" for name in interpolated
    ]
    plain = {name: item for name, item in known.items() if name not in interpolated}
    given = {
        name: ModelSetting(name, value, layer.source)
        for layer in (*files, declared, env)
        for name, value in flat_settings(layer.values)
    }
    return Settings(plain, path is not None, tuple(contradictions), tuple(notes), tuple(given.values()))


def flat_settings(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield settings by name; those in the LoRA group have its prefix."""
    for name, value in values.items():
        if name == LORA and isinstance(value, Mapping):
            yield from ((f"{LORA}.{inner}", item) for inner, item in value.items())
        else:
            yield name, value


def read_layers(path: Location, notes: list[str]) -> list[Layer]:
    """Read a configuration file and its base files; return them with the base first.

    Args:
        path: The path of the file.
        notes: Receives notes on how names were interpreted.
    """
    layers: list[Layer] = []
    location: Location | None = path
    while location is not None:
        if not location.exists() and (own := _installed_file(location)) is not None:
            location = own
        elif not location.exists() and _is_base(location):
            notes.append(f"{location} does not exist; MaxText's own file is used")
            break
        values = read_yaml(location)
        layers.insert(0, Layer(str(location), values))
        if len(layers) > _MAX_CHAIN:
            raise ConfigError(
                "configuration files are based on each other in a cycle", location=path, got=location
            )
        below = values.get(_BASE_CONFIG)
        location = _base_location(location, below) if isinstance(below, str) and below else None
    return layers


def _base_location(file: Location, below: str) -> Location:
    """Return the file that `base_config` names, next to the other file or in MaxText."""
    if "://" in below or below.startswith("/"):
        return parse(below)
    sibling = file.parent / below
    own = _installed_configs()
    return own / below if not sibling.is_file() and own is not None else sibling


def _installed_file(location: Location) -> Location | None:
    """Return the file of an installed MaxText for a path in its source tree."""
    own = _installed_configs()
    name = str(location).partition(_OWN_FILES)[2] or (location.name if _is_base(location) else "")
    return own / name if own is not None and name and (own / name).is_file() else None


def _is_base(location: Location) -> bool:
    return location.name == _BASE_FILE


@cache
def _installed_configs() -> Location | None:
    """Return the configuration directory of an installed MaxText; None if it is not installed."""
    spec = find_spec("maxtext")
    search_locations = spec.submodule_search_locations if spec else None
    result = [parse(str(directory)) / "configs" for directory in search_locations or ()]
    return next((item for item in result if item.is_dir()), None)


def model_layer(layers: list[Layer], path: Location | None) -> Layer:
    """Return the settings of the named model, which override files but not the command line.

    Args:
        layers: The declared settings, lowest precedence first.
        path: The path of the configuration file, near which models are searched.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        values = merge_nested(values, layer.values)
    name = values.get("model_name")
    if not isinstance(name, str) or name == DEFAULTS["model_name"]:
        return Layer("model", {})
    name = architecture(name)
    directories = [path.parent, path.parent.parent] if path else []
    directories += [own] if (own := _installed_configs()) is not None else []
    for directory in directories:
        if (file := directory / "models" / f"{name}.yml").is_file():
            return Layer(str(file), read_yaml(file))
    return Layer(f"model {name}", MODELS.get(name, {}))


def _drop_overrides(model: Layer, layer: Layer) -> Layer:
    """Return the model's settings that the command line does not override."""
    return Layer(
        model.source, {name: item for name, item in model.values.items() if name not in layer.values}
    )


def _may_override(*layers: Layer) -> bool:
    return any(layer.values.get("override_model_config") is True for layer in layers)


def _model_conflicts(model: Layer, layer: Layer, files: list[Layer]) -> Iterator[Problem]:
    """Yield settings that the model and the command line set to different values."""
    duplicates = [
        name for name, value in model.values.items() if name in layer.values and layer.values[name] != value
    ]
    if duplicates and not _may_override(layer, *files):
        yield Problem(
            f"{', '.join(duplicates)}: the model sets other values ({model.source}), and MaxText "
            "refuses both",
            "leave them out, or add override_model_config=true",
        )


def _environment(environment: Mapping[str, str], layers: list[Layer]) -> Layer:
    """Return the known settings in environment variables."""
    names = {*DEFAULTS, *(name for layer in layers for name in layer.values)}
    result = {
        name: environment[variable]
        for name in names
        if (variable := f"{_PREFIX}{name.upper()}") in environment and "." not in name
    }
    typed = {
        name: text if isinstance(DEFAULTS.get(name), str) else parse_value(f"{_PREFIX}{name.upper()}", text)
        for name, text in result.items()
    }
    return Layer("environment", typed)


def _environment_conflicts(env: Layer, model: Layer, layer: Layer) -> Iterator[Problem]:
    for name in env.values:
        if name in layer.values:
            yield Problem(
                f"{name} is set on the command line and by {_PREFIX}{name.upper()}, and MaxText refuses both",
                "leave one of them out",
            )
        elif name in model.values and not _may_override(layer):
            yield Problem(
                f"{name} is set by the model and by {_PREFIX}{name.upper()}, and MaxText refuses both",
                "leave the variable out, or add override_model_config=true",
            )


def read_yaml(path: Location) -> dict[str, Any]:
    """Read the settings in a YAML file.

    Raises:
        StorageError: The file does not exist, or cannot be read.
        FormatError: The file is not valid YAML.
        ConfigError: The file does not contain settings.
    """
    from ckpttools.maxtext.loading.yaml_values import load_yaml

    try:
        document = load_yaml(path.require_exists().read_bytes().decode())
    except ValueError as error:
        raise FormatError("not a YAML file", location=path, got=" ".join(str(error).split())) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            "not a MaxText configuration", location=path, got=type(document).__name__, expected="NAME: VALUE"
        )
    return {str(name): value for name, value in document.items()}
