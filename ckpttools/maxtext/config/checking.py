"""Settings of a run beside those of a checkpoint: where they contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttools.core.errors import UsageError
from ckpttools.maxtext.config.models import defaults, models
from ckpttools.maxtext.config.report import Contradiction
from ckpttools.maxtext.config.telling import MODEL_NAME, Values
from ckpttools.maxtext.loading.command import Command, parsed
from ckpttools.maxtext.loading.configuration import COMMAND_LINE, Layer, files_of, flat, model_of
from ckpttools.maxtext.loading.settings import DEFAULTS
from ckpttools.maxtext.loading.sizes import architecture
from ckpttools.stores.registry import parse

_SCAN, _AXIS = "scan_layers", "param_scan_axis"
_NUMBERS = (int, float)


@dataclass(frozen=True)
class _Said:
    """A setting as a run has it."""

    value: Any
    source: str


def contradictions(words: Sequence[str], values: Values) -> Iterator[Contradiction]:
    """The settings of a run that are not the checkpoint's.

    What is not said counts as well, as MaxText's default, if a configuration file or a model is named.

    Args:
        words: as they are given to MaxText: a configuration file, then `NAME=VALUE`.
        values: those of the checkpoint.

    Raises:
        UsageError: nothing is said, or a word is no setting.
        StorageError, FormatError, ConfigError: a file is not there, or no configuration.
    """
    command = parsed(list(words))
    if not command.file and not command.overrides:
        raise UsageError("nothing is said that could be checked", wanted="a configuration file or NAME=VALUE")
    said = _said(command)
    for name, setting in values.items():
        found = said.get(name)
        if found is None or _agrees(name, found.value, setting.value):
            continue
        yield Contradiction(name, found.value, found.source, setting.value, setting.source)


def _said(command: Command) -> Mapping[str, _Said]:
    path = parse(command.file) if command.file else None
    files = files_of(path, []) if path else []
    own = Layer(COMMAND_LINE, command.overrides)
    model = model_of([*files, own], path)
    is_whole = path is not None or bool(model.values)
    name = {**_flat(files), **dict(flat(own.values))}.get(MODEL_NAME)
    layers = [_defaults()] if is_whole else []
    layers += [*files, _known(name), model, own]
    found: dict[str, _Said] = {}
    for layer in layers:
        found |= {key: _Said(value, layer.source) for key, value in flat(layer.values)}
    return found


def _flat(layers: Sequence[Layer]) -> dict[str, Any]:
    return {key: value for layer in layers for key, value in flat(layer.values)}


def _defaults() -> Layer:
    scan = {name: DEFAULTS[name] for name in (_SCAN, _AXIS)}
    return Layer("MaxText's default", {**defaults(), **scan, MODEL_NAME: DEFAULTS[MODEL_NAME]})


def _known(name: object) -> Layer:
    """What the model of a name has where MaxText is not installed."""
    values = models().get(architecture(name), {}) if isinstance(name, str) else {}
    return Layer(f"model {name}", values)


def _agrees(name: str, said: Any, wanted: Any) -> bool:
    if name == MODEL_NAME:
        # Names that begin alike have the same code.
        return isinstance(said, str) and said.partition("-")[0] == str(wanted).partition("-")[0]
    if isinstance(wanted, bool) or not isinstance(wanted, _NUMBERS):
        return bool(said == wanted)
    try:
        return float(said) == float(wanted)
    except (TypeError, ValueError):
        return False
