"""Infer the MaxText settings of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Unpack

from ckpttools.api.options import READING
from ckpttools.api.options.convert import MAXTEXT_CONFIG
from ckpttools.api.sources import Opening, Source, config_alone, opened, read_options, text_of
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.errors import ConfigError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.options import declare
from ckpttools.core.text import plural
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.json_file import read_json
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.config.deviations import deviations
from ckpttools.maxtext.config.infer_settings import (
    MODEL_NAME,
    matching_model,
    model_notes,
    model_settings,
    required_settings,
)
from ckpttools.maxtext.config.model_facts import Reading
from ckpttools.maxtext.config.observed_model import ObservedModel, observe_config, observe_model
from ckpttools.maxtext.config.report import MaxTextConfig, ModelSetting, sort_settings
from ckpttools.maxtext.config.run_settings import GivenSettings, find_contradictions, read_settings
from ckpttools.maxtext.config.setting_kinds import find_invalid_settings
from ckpttools.maxtext.versions import NEWEST, SCAN_LAYERS, version_called
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.registry import LocationLike


@validate_arguments
@declare(*MAXTEXT_CONFIG, *READING)
def maxtext_config(
    source: Source,
    *,
    check: Sequence[LocationLike] = (),
    scan: bool | None = None,
    like: LocationLike | None = None,
    family: LocationLike | None = None,
    maxtext: str = NEWEST,
    requests: int | None = None,
    **reading: Unpack[Opening],
) -> MaxTextConfig:
    """Infer the settings with which MaxText runs a checkpoint as the same model. Reads no arrays.

        ckpttools.maxtext_config("models/Llama-3.1-8B").arguments()  # ("model_name=llama3.1-8b", …)
        ckpttools.maxtext_config("maxtext/llama", check=["rope_type=default"]).contradictions

    Args:
        source: A Hugging Face model, its `config.json` alone, or a converted MaxText checkpoint.
        check: Settings of a run, as passed to MaxText: a configuration file, then `NAME=VALUE`.

    Raises:
        CheckpointError: The path does not exist or cannot be read.
        ConfigError: The model cannot be identified completely, or MaxText cannot express it.
        UsageError: An item of `check` is not a setting.
    """
    version = version_called(maxtext)
    with use_concurrency(requests):
        model = _observe_source(source, text_of(like), text_of(family), read_options(reading))
        try:
            values = model_settings(model.family, model.facts, model.location)
        except ConfigError as error:
            raise error.at(_config_location(source, model)) from error
        stored = {item.name: item for item in _storage_settings(model, scan)}
        result = matching_model(values)
        named = None if result in version.absent_models else result
        all_settings = {**values, **stored}
        given = read_settings([str(item) for item in check]) if check else GivenSettings({}, False)
    base = values.get(MODEL_NAME)
    return MaxTextConfig(
        path=str(source.metadata.location if isinstance(source, Tree) else source),
        family=model.family.name,
        maxtext=version.name,
        model_name=named or (base.value if base else None),
        is_named=named is not None,
        settings=sort_settings(all_settings),
        required_settings=sort_settings({**required_settings(values, named), **stored}),
        deviations=tuple(deviations(model.family, model.facts, version.name)),
        notes=(*model.notes, *model_notes(model.family, model.facts)),
        unmapped_fields=tuple(Reading(model.family, model.facts).unread()),
        contradictions=(
            *find_contradictions(given, all_settings),
            *(model.fp8.contradictions(given) if model.fp8 else ()),
        ),
        invalid_settings=tuple(find_invalid_settings(given.declared, version.name)),
    )


def _config_location(source: Source, model: ObservedModel) -> str:
    """Return the location of a model's configuration, for errors."""
    location = source.metadata.location if isinstance(source, Tree) else str(source)
    return (
        model.location if model.stored or model.location != CONFIG or not location else f"{location}/{CONFIG}"
    )


def _observe_source(source: Source, like: str | None, family: str | None, read: ReadOptions) -> ObservedModel:
    if not isinstance(source, Tree):
        config_only = config_alone(source, read)
        if config_only is not None:
            return observe_config(read_json(config_only.require_exists()), str(config_only), family)
    return observe_model(opened(source, read), like, family)


def _storage_settings(model: ObservedModel, scan: bool | None) -> Iterator[ModelSetting]:
    """Yield the settings for how the checkpoint is stored, or will be stored.

    Raises:
        UsageError: The checkpoint is stored in another way than requested, or MaxText cannot scan it.
    """
    if not model.stored:
        family, flags = model.family, model.facts.flags
        towers = family.unscanned_with_towers and any(flags.get(tower) for tower in family.towers)
        extra_layers = family.layers_beyond_cycles(model.facts.lengths)
        is_scanned = not (family.no_scan_reason or towers or extra_layers) if scan is None else scan
        if is_scanned and extra_layers:
            raise UsageError(
                f"MaxText scans complete cycles of layers, and {plural(extra_layers, 'layer')} would be "
                "left over",
                hint=f"pass {option('scan', False)}",
            )
        if is_scanned:
            family.refuse_scanned(f"pass {option('scan', False)}", has_towers=bool(towers))
        yield ModelSetting(SCAN_LAYERS, is_scanned, "as it is converted")
        return
    for item in model.stored:
        if item.name == SCAN_LAYERS and scan not in (None, item.value):
            raise UsageError("the layers of this checkpoint are stored differently", got=str(item))
        yield item
