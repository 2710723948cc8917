"""Identify the model in a checkpoint: configuration, family, sizes, and the layout of its layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CoverageError
from ckpttools.core.message_terms import action, option
from ckpttools.core.text import plural
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.sizes import lengths_of
from ckpttools.maxtext import tied_embeddings as tying
from ckpttools.maxtext.config.model_facts import ModelFacts
from ckpttools.maxtext.config.report import Contradiction, ModelSetting
from ckpttools.maxtext.config.run_settings import GivenSettings, is_same_value
from ckpttools.maxtext.family_layouts import family_as_stored
from ckpttools.maxtext.hub_names import with_family_names
from ckpttools.maxtext.model_config import absent_towers
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.model_options import ModelOptions, family_for, require_config, rope_flags
from ckpttools.maxtext.native_fp8 import (
    CODES,
    IGNORED_SCALES_REMARK,
    block_of,
    native_parameters,
    scale_pairs,
    unread_grids,
)
from ckpttools.maxtext.scan_axis import stored_scan_axis
from ckpttools.maxtext.source_checks import refuse_adapters
from ckpttools.maxtext.versions import EMBEDDING, SCAN_AXIS, SCAN_LAYERS, VOCAB
from ckpttools.maxtext.view import MaxTextView, view_of
from ckpttools.model_families.family import Family
from ckpttools.model_families.hf_defaults import default_values
from ckpttools.quantized.view import quantized_view
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.mapping.blocks import Block

PARAM_SCAN_AXIS, LOAD_PARAMETERS = "param_scan_axis", "load_parameters_path"


@dataclass(frozen=True)
class ObservedModel:
    """The model of a checkpoint or a configuration.

    Attributes:
        family: The family whose rows the model has.
        facts: The known facts about the model.
        location: The location of the configuration, for messages.
        stored: Settings that describe how a MaxText checkpoint is stored; empty for other checkpoints.
        notes: Notes for the user.
        fp8: The weights of a MaxText checkpoint that have scales; None for other checkpoints.
    """

    family: Family
    facts: ModelFacts
    location: str
    stored: tuple[ModelSetting, ...] = ()
    notes: tuple[str, ...] = ()
    fp8: StoredFp8 | None = None


def observe_config(config: Mapping[str, Any], location: str, family: str | None) -> ObservedModel:
    """Return the model of a configuration without arrays.

    Raises:
        ConfigError: The configuration does not identify the model, or no family has its type.
        CheckpointError: The user's file does not describe a family.
    """
    result = family_for(config, ModelOptions(family=family), location)
    facts = _facts(config)
    table = result.table(config, location)
    flags = {name: flag.value for name, flag in table.flags.items()}
    return ObservedModel(result, replace(facts, lengths=lengths_of(table.sizes), flags=flags), location)


def _facts(config: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a configuration, with transformers' defaults for absent fields."""
    return ModelFacts(config, silent=default_values(config))


def observe_model(tree: Tree, like: str | None, family: str | None) -> ObservedModel:
    """Return the model of a checkpoint in Hugging Face's or MaxText's layout.

    Args:
        tree: The checkpoint.
        like: The directory of the original model, or a `config.json`; None uses the configuration in the
            checkpoint.
        family: The name of the family, or a file that describes one; None follows the configuration.

    Raises:
        FormatError: The checkpoint is an adapter.
        ConfigError: The model cannot be identified.
        CoverageError: The arrays contradict the configuration.
    """
    refuse_adapters(tree)
    view = view_of(tree)
    if like is not None:
        # Other checkpoints have their own configuration, but a typo must not go unnoticed.
        parse(like).require_exists()
    if view.is_maxtext:
        return _observe_maxtext(tree, view, ModelFiles.of(tree, like), family)
    config = require_config(tree.metadata.config, tree.metadata.location)
    arrays = by_name(tree.arrays)
    result = family_for(config, ModelOptions(family=family), tree.metadata.location)
    table = result.table(config, CONFIG, spelling=result.spelling_of(arrays))
    require_hugging_face(tree, result, config)
    lengths, flags = table.infer_known(arrays)
    return ObservedModel(
        result, replace(_facts(config), lengths=lengths, flags=flags, has_arrays=True), CONFIG
    )


def _observe_maxtext(tree: Tree, view: MaxTextView, files: ModelFiles, family: str | None) -> ObservedModel:
    hint = f"pass the directory of the original model: {option('like')} HF_DIR"
    config = require_config(files.config, tree.metadata.location, hint)
    options = ModelOptions(family, files.rope_layout)
    result = family_for(config, options, tree.metadata.location)
    arrays = view.named
    tied = tying.tied_flags("keep", tying.left_head(result), arrays)
    flags = {**rope_flags(result, options), **tied}
    table = result.table(config, CONFIG, scan_axis=view.scan_axis, overrides=flags)
    require_maxtext(view, tree.metadata.location, result, config, flags)
    lengths, known_flags = table.infer_known(arrays, left=True)
    # The number of stored rows includes padding.
    rows = {VOCAB: view.parameters[EMBEDDING].shape[0]} if EMBEDDING in view.parameters else {}
    present_towers = result.towers_in(arrays)
    towers = {tower: tower in present_towers for tower in result.towers}
    facts = replace(
        _facts(config), lengths={**lengths, **rows}, flags={**known_flags, **towers}, has_arrays=True
    )
    model = ObservedModel(result, facts, CONFIG, tuple(_storage_settings(tree, view)))
    native = native_parameters(arrays, config, tree.metadata.location)
    misfits = unread_grids(table, native.arrays, native, (VOCAB,)).misfits
    fp8 = _observe_fp8(tree, view, config, misfits)
    return replace(model, notes=tuple(_notes(view, config, arrays, result, fp8)), fp8=fp8)


def _observe_fp8(
    tree: Tree, view: MaxTextView, config: Mapping[str, Any], misfits: tuple[str, ...]
) -> StoredFp8:
    pairs = {name: view.named[scale] for name, scale in scale_pairs(view.named).items()}
    dtypes = sorted({view.named[name].dtype.name for name in pairs})
    block = block_of(view.named, pairs, config)
    return StoredFp8(tree.metadata.location, len(pairs), tuple(dtypes), block, misfits)


def _storage_settings(tree: Tree, view: MaxTextView) -> Iterator[ModelSetting]:
    source = "the arrays"
    yield ModelSetting(SCAN_LAYERS, view.is_stacked, source)
    if view.scan_axis not in (None, SCAN_AXIS):
        yield ModelSetting(PARAM_SCAN_AXIS, view.scan_axis, source)
    if view.optimizer is None and tree.metadata.location:
        # Orbax refuses relative paths.
        location = str(parse(tree.metadata.location).absolute())
        yield ModelSetting(LOAD_PARAMETERS, location, "the checkpoint's location")


def _notes(
    view: MaxTextView,
    config: Mapping[str, Any],
    names: Collection[str],
    family: Family,
    fp8: StoredFp8,
) -> Iterator[str]:
    if view.optimizer is not None:
        yield (
            "this is a training checkpoint, which resumes by base_output_directory and run_name; "
            f"{action('strip_optimizer')} writes parameters for load_parameters_path"
        )
    rule = family.flags.get("tied")
    head = tying.left_head(family)
    if rule is not None and head is not None and not rule.read(config, "").value and head not in names:
        yield (
            "no output head is stored, although config.json declares one: the embedding is used in its place"
        )
    yield from fp8.notes()
    towers = absent_towers(config, names)
    if towers:
        yield f"text only: the checkpoint does not contain {', '.join(towers)}"
    unsupported = [item for item in family.towers_in(names) if not family.settings.mentions(item)]
    if unsupported:
        yield (
            f"with these settings MaxText runs only the text model: towers ({', '.join(unsupported)}) need "
            "use_multimodal=true and the model_name of one of MaxText's own models that has them"
        )


def require_hugging_face(tree: Tree, family: Family, config: Mapping[str, Any]) -> None:
    """Raise an error if a Hugging Face model contradicts its configuration; reads no array data.

    Raises:
        CoverageError: The arrays contradict the configuration. Weights in an unsupported quantization scheme
            are not checked.
        FormatError: Two arrays have the same name, or quantized weights lack scales or have scales that do
            not fit.
    """
    view = quantized_view(tree)
    if view.is_described and view.weights_from_headers.is_whole:
        return
    arrays = by_name(with_family_names(view.plain(is_read=False).tree).tree.arrays)
    table = family.table(config, CONFIG, spelling=family.spelling_of(arrays))
    try:
        replace(table, location=tree.metadata.location).require_fit(arrays)
    except NotCoveredError as error:
        raise _contradiction_error(error) from error


def require_maxtext(
    view: MaxTextView, location: str, family: Family, config: Mapping[str, Any], flags: Mapping[str, Flag]
) -> None:
    """Raise an error if a MaxText checkpoint contradicts its configuration.

    Args:
        view: The view of the checkpoint.
        location: The location of the checkpoint.
        family: The model's family.
        config: The model's configuration.
        flags: The flags that follow from the arrays or from how they were created.
    """
    scales = set(scale_pairs(view.named).values())
    arrays = {name: array for name, array in view.named.items() if name not in scales}
    family = family_as_stored(family, arrays)
    absent = family.towers_not_in(arrays)
    try:
        axis = stored_scan_axis(family, arrays, view.scan_axis)
        table = family.table(config, CONFIG, scan_axis=axis, overrides=flags, without=absent)
        replace(table, location=location).require_fit(arrays, left=True, cut=(VOCAB,))
    except NotCoveredError as error:
        raise _contradiction_error(error) from error


def _contradiction_error(error: NotCoveredError) -> CoverageError:
    return CoverageError(
        "the arrays do not match the model in the configuration" + error.coverage.summary(),
        location=error.location,
        expected=f"the {CONFIG} of these arrays",
        hint=f"the hint of a conversion: {error.raw.hint}; or pass {CONFIG} itself, which is not compared "
        "with arrays",
    )


WEIGHT_DTYPE, BLOCK_SIZE, MODULES = "weight_dtype", "weight_block_size", "unquantized_modules"
# MaxText's own configurations of FP8 models use this default.
UNQUANTIZED = (
    *("token_embedder", "logits_dense", "gate", "shared_expert_gate", "conv1d", "in_proj_ba", "A_log"),
    *("dt_bias", "norm"),
)
_ARRAYS, _PLAIN = "the arrays", "bfloat16 or float32"
_WORD = re.compile(r"[^\s,\[\]'\"]+")


@dataclass(frozen=True)
class StoredFp8:
    """The weights of a checkpoint that have scales.

    Attributes:
        location: The location of the checkpoint.
        weights: The number of weights.
        dtypes: The sorted dtypes of the quantized values; at most two.
        block: The shape of a block; None if each weight has one scale.
        misfits: Reasons why MaxText cannot compute with some weights in FP8, one line for each kind.
    """

    location: str
    weights: int = 0
    dtypes: tuple[str, ...] = ()
    block: Block | None = None
    misfits: tuple[str, ...] = ()

    def notes(self) -> Iterator[str]:
        """Yield notes on how MaxText handles FP8 weights; none if there are no such weights."""
        if not self.weights:
            return
        yield (
            f"{plural(self.weights, 'array')} in FP8 ({' and '.join(self.dtypes)}) with scales: "
            "MaxText's training multiplies them when it loads them, into weight_dtype, by default "
            "float32"
        )
        yield (
            f"{IGNORED_SCALES_REMARK}; for these, dequantize first: "
            f"{action('cast', self.location or 'SRC', 'DST', dtype='bfloat16')}"
        )
        if self._misfit_reason:
            reason = self._misfit_reason
            yield f"MaxText cannot compute with them in FP8, so leave weight_dtype as it is: {reason}"
        else:
            yield f"MaxText computes with them in FP8 with the settings {' '.join(map(str, self.settings()))}"

    @property
    def _misfit_reason(self) -> str:
        """Return why no FP8 model of MaxText accepts the weights; empty if one does."""
        mixed = f"some are {' and some '.join(self.dtypes)}" if len(self.dtypes) > 1 else ""
        reasons = [*filter(None, [mixed]), *self.misfits]
        if len(reasons) < 2:
            return "".join(reasons)
        return f"{reasons[0]} (and {len(reasons) - 1} more like this)"

    def settings(self) -> tuple[ModelSetting, ...]:
        """Return the MaxText settings that keep the weights in FP8."""
        size = self.block[0] if self.block else None
        return (
            ModelSetting(WEIGHT_DTYPE, self.dtypes[0], _ARRAYS),
            ModelSetting(BLOCK_SIZE, size, _ARRAYS),
            ModelSetting(MODULES, list(UNQUANTIZED), "MaxText's own FP8 models"),
        )

    def contradictions(self, given: GivenSettings) -> Iterator[Contradiction]:
        """Yield contradictions if a run declares its model to be FP8."""
        declared = given.values.get(WEIGHT_DTYPE)
        if declared is None or declared.value not in CODES:
            return
        reason = self._misfit_reason if self.weights else "none is FP8 with a scale"
        if reason:
            yield Contradiction(WEIGHT_DTYPE, declared.value, declared.source, _PLAIN, f"{_ARRAYS}: {reason}")
            return
        for setting in self.settings():
            result = given.values.get(setting.name)
            if result is None and given.is_whole:
                result = ModelSetting(setting.name, None, "MaxText's default")
            if result is not None and not _is_equivalent_setting(setting, result.value):
                yield Contradiction(setting.name, result.value, result.source, setting.value, setting.source)


def _is_equivalent_setting(expected: ModelSetting, value: Any) -> bool:
    if expected.name == MODULES:
        return set(expected.value) <= set(_list_items(value))
    if expected.name == BLOCK_SIZE and isinstance(expected.value, int):
        sizes = _list_items(value)
        return bool(sizes) and all(is_same_value(size, expected.value) for size in sizes)
    return bool(value == expected.value) or (expected.value is None and value in ("", "null", "None"))


def _list_items(value: Any) -> list[str]:
    """Split a list as written in configuration files and on command lines."""
    if value is None:
        return []
    return _WORD.findall(" ".join(map(str, value)) if isinstance(value, list) else str(value))
