"""Create models without training: with random values, or from the parts of two models."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, elementwise, seeded_noise
from ckpttools.array.tree import Leaf, Metadata, Path, Tree, by_name
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import ConfigError, CoverageError, ShapeError, UsageError, listing
from ckpttools.core.message_terms import action
from ckpttools.core.notes import Notes
from ckpttools.core.region import Shape
from ckpttools.core.text import array_count, matches_any, sort_naturally
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import nested_value
from ckpttools.mapping.table import Table, right_shapes
from ckpttools.mapping.values import Shift, Whole
from ckpttools.maxtext.config.model_facts import ModelFacts
from ckpttools.maxtext.conversion_options import TEXT
from ckpttools.maxtext.model_config import text_config
from ckpttools.maxtext.model_options import ModelOptions, family_for
from ckpttools.maxtext.versions import DECODER, EMBEDDING
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import Family
from ckpttools.model_families.hf_defaults import default_values
from ckpttools.model_families.registry import family_of
from ckpttools.quantized.config import without_quantization
from ckpttools.transforms.cast import Convert

# transformers' default if a configuration does not state the value.
_DEFAULT_RANGE = 0.02
_RANGE_FIELD = "initializer_range"
# Ten of these standard deviations are still within the range of float16.
_MAX_SCALE = 6000
# Fields for which other values imply other arrays than the rows of the family.
_ARRAY_FIELDS = frozenset(
    (
        *("config.decoder_sparse_step", "config.mlp_only_layers", "config.moe_layer_freq"),
        *("config.attention_bias", "config.mlp_bias", "config.enable_moe_block", "config.attention_k_eq_v"),
        *("config.hidden_size_per_layer_input", "config.num_kv_shared_layers", "config.use_double_wide_mlp"),
    )
)
_NO_TOWERS = "towers are left out"


def shapes_of(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the names and shapes of a model's tensors in layer order.

    Raises:
        ConfigError, ShapeError: No family has the model's type, or the configuration lacks a size.
    """
    return _sort_naturally(right_shapes(_table(config, family_of(config, CONFIG))))


def _sort_naturally(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shapes[name] for name in sort_naturally(shapes)}


def synthetic_model(
    config: Mapping[str, Any], seed: int = 0, dtype: DType | None = None, location: str = ""
) -> Tree:
    """Return a Hugging Face model with randomly initialized weights.

    Args:
        config: The model's `config.json`, which must state all sizes.
        seed: The random seed; the same seed gives the same model.
        dtype: The dtype of the weights; None for bfloat16.
        location: The location of the configuration.

    Towers whose configuration does not state all sizes, as in Gemma 3, are left out with a note.

    Raises:
        ConfigError, ShapeError: As for `shapes_of`, or the configuration describes other arrays than the
            rows.
    """
    plain = without_quantization(config)
    family = family_of(plain, CONFIG)
    _refuse_other_arrays(plain, family, location)
    table, shapes, notes = _table_and_shapes(plain, family)
    scale = _scale(plain, location)
    dtype = dtype or DTYPES["bfloat16"]
    leaves: dict[Path, Leaf] = {}
    for name, shape in _sort_naturally(shapes).items():
        leaves[name,] = _array(name, shape, _row(name, table), (seed, scale), dtype)
    metadata = Metadata("safetensors", config=plain, location=location, notes=notes, is_other_model=True)
    return Tree(leaves, metadata)


def _scale(config: Mapping[str, Any], location: str) -> float:
    """Return the standard deviation of the weights."""
    declared = (nested_value(config, name) for name in (_RANGE_FIELD, f"text_config.{_RANGE_FIELD}"))
    result = next((item for item in declared if item is not None), _DEFAULT_RANGE)
    if isinstance(result, bool) or not isinstance(result, int | float) or not 0 <= result <= _MAX_SCALE:
        raise ConfigError(
            f"{_RANGE_FIELD} is not a standard deviation of weights",
            location=location or CONFIG,
            got=repr(result),
        )
    return float(result)


def _refuse_other_arrays(config: Mapping[str, Any], family: Family, location: str) -> None:
    facts = ModelFacts(config, silent=default_values(config))
    limits = (limit for limit in family.settings.limits if limit.expected.left.name in _ARRAY_FIELDS)
    unmet = [limit for limit in limits if not limit.conditions and not limit.holds(facts)]
    if unmet:
        raise ConfigError(
            f"this configuration describes other arrays than the rows of family {family.name}",
            location=location or CONFIG,
            got=", ".join(f"{facts.location_of(item.expected.left.name)}: {item.reason}" for item in unmet),
            expected=" and ".join(str(item.expected).replace("config.", "") for item in unmet),
        )


def has_omitted_towers(tree: Tree) -> bool:
    """Return whether towers of a randomly initialized model were left out."""
    return any(remark.startswith(_NO_TOWERS) for remark in tree.metadata.notes.remarks)


def text_model_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of the separate text model; None if there is none.

    Raises:
        ConfigError: No family has this model type.
    """
    spellings = family_of(config, CONFIG).spellings
    text = next((spelling for spelling in spellings if spelling.name == TEXT), None)
    return None if text is None else text_config(config, text)


def _table_and_shapes(config: Mapping[str, Any], family: Family) -> tuple[Table, dict[str, Shape], Notes]:
    """Return the rows and shapes that the configuration states, without towers if it lacks their sizes."""
    table = _table(config, family)
    try:
        return table, right_shapes(table), Notes()
    except ShapeError as error:
        text = _table(config, family, without=family.towers)
        if not family.towers or not any(table.flags[tower].value for tower in family.towers):
            raise
        remark = f"{_NO_TOWERS}: {error.raw.message} from the configuration"
        return text, right_shapes(text), Notes(remarks=(remark,))


def _table(config: Mapping[str, Any], family: Family, without: Collection[str] = ()) -> Table:
    spelling = family.spelling_for(config["model_type"])
    return family.table(config, CONFIG, spelling=spelling, without=without)


def _row(name: str, table: Table) -> Row | None:
    return next((row for row in table.rows if row.right.key.numbers(name) is not None), None)


def _array(
    name: str, shape: Shape, row: Row | None, size_and_number: tuple[int, float], dtype: DType
) -> LazyArray:
    """Return an array as `transformers` initializes it."""
    op = row.op if row else None
    if isinstance(op, Whole):
        return Constant(shape, DTYPES["int64"], bytes(8))
    last = name.rpartition(".")[2]
    if len(shape) == 1 and ("norm" in name or last == "layer_scalar") and last != "bias":
        # Norms that MaxText stores plus 1 are stored as offsets, so 0 is neutral.
        return _filled(shape, 0.0 if isinstance(op, Shift) else 1.0, dtype)
    if last == "bias" or last.endswith("_bias"):
        return _filled(shape, 0.0, dtype)
    array = seeded_noise(shape, size_and_number[0], name, size_and_number[1])
    return array if dtype == array.dtype else elementwise(array, Convert(dtype))


def _filled(shape: Shape, number: float, dtype: DType) -> LazyArray:
    import numpy as np

    return Constant(shape, dtype, np.array(number, np.float32).astype(dtype.numpy).tobytes())


_TEXT = (DECODER, EMBEDDING[0])
# Fields that determine how arrays of the same shape are split into heads.
_HEAD_FIELDS = ("config.num_attention_heads", "config.num_key_value_heads", "config.head_dim")
# Fields that affect values, which are kept from the configuration of the towers.
_VALUE_FIELDS = (
    *("rope.theta", "rope.type", "rope.factor", "config.rms_norm_eps", "config.hidden_act"),
    *("config.sliding_window", "config.num_experts_per_tok", "config.norm_topk_prob"),
)


def stitch_models(towers: Tree, decoder: Tree) -> Tree:
    """Return the model `towers` with the text model replaced by that of `decoder`.

    Both must be Hugging Face models, or both MaxText checkpoints. The files and the configuration are those
    of `towers`.

    Raises:
        UsageError: Only one is a MaxText checkpoint, there are no towers, or there is training state.
        CoverageError: The text models differ in names or shapes. The message lists all differences.
        ConfigError: A Hugging Face model has no configuration or an unknown one, or the text models split
            arrays of the same shape into different heads.
    """
    sides = [view_of(item).is_maxtext for item in (towers, decoder)]
    if sides[0] != sides[1]:
        raise UsageError(
            "one model is MaxText's and the other Hugging Face's",
            hint=f"convert one of them first: {action('convert')}",
        )
    if view_of(towers).optimizer or view_of(decoder).optimizer:
        raise UsageError(
            "the optimizer moments of one model do not belong to the other",
            location=towers.metadata.location or None,
            hint=f"first keep only the parameters with {action('strip_optimizer')}",
        )
    text, other = (_maxtext_arrays if sides[0] else _hugging_face_arrays)(towers, decoder)
    location = towers.metadata.location or None
    if len(text) == len(towers.arrays):
        raise UsageError(
            "the first model has no towers",
            location=location,
            expected="a multimodal model first, then the model with the new text model",
            hint="pass the models in this order",
        )
    _check_text_models(text, other, towers, decoder)
    config_remarks = _check_configs(towers, decoder)
    given = {path: other[name] for name, path in text.items()}
    leaves: dict[Path, Leaf] = {path: given.get(path, leaf) for path, leaf in towers.items()}
    remark = f"{array_count(given)} of the text model are those of {decoder.metadata.location or 'the other'}"
    notes = towers.metadata.notes + Notes(remarks=(remark, *config_remarks))
    return Tree(leaves, towers.metadata).with_metadata(notes=notes)


def _check_configs(towers: Tree, decoder: Tree) -> tuple[str, ...]:
    """Return remarks on fields that the kept configuration states differently.

    Raises:
        ConfigError: The arrays are split into different heads.
    """
    configs = [item.metadata.config for item in (towers, decoder)]
    if configs[0] is None or configs[1] is None:
        return ()
    kept, other = (
        ModelFacts(config, silent=default_values(config)) for config in configs if config is not None
    )
    mismatches = {
        name: f"{name.partition('.')[2]} is {json.dumps(ours)}, and {json.dumps(theirs)} in the decoder's"
        for name in (*_HEAD_FIELDS, *_VALUE_FIELDS)
        if None not in (ours := kept.field(name), theirs := other.field(name)) and ours != theirs
    }
    if cut := [text for name, text in mismatches.items() if name in _HEAD_FIELDS]:
        raise ConfigError(
            "the text models split arrays of the same shape into different heads",
            location=towers.metadata.location or None,
            got="; ".join(cut),
        )
    return tuple(f"{CONFIG}, which is kept: {text}" for text in mismatches.values())


TextArrays = tuple[Mapping[str, Path], Mapping[str, LazyArray]]
"""The paths of text arrays in the first model, and the text arrays of the second model, by common names."""


def _maxtext_arrays(towers: Tree, decoder: Tree) -> TextArrays:
    homes, others = view_of(towers).homes, view_of(decoder).homes
    own = by_name({inner: path for inner, path in homes.items() if inner[0] in _TEXT})
    return own, by_name({inner: decoder.arrays[path] for inner, path in others.items() if inner[0] in _TEXT})


def _hugging_face_arrays(towers: Tree, decoder: Tree) -> TextArrays:
    family = family_for(towers.metadata.config, ModelOptions(), towers.metadata.location or CONFIG)
    patterns = family.tower_patterns(family.towers)
    rest = (*family.unplaced_keys, *(key for part in family.parts.values() for key in part.keys))

    def text_of(tree: Tree) -> dict[str, Path]:
        names = by_name({path: path for path in tree.arrays})
        spelling = family.spelling_of(frozenset(names))
        patterns_left_out = [*map(str, patterns), *rest]
        return {spelling.plain(n): path for n, path in names.items() if not matches_any(n, patterns_left_out)}

    decoder_paths = text_of(decoder)
    return text_of(towers), {name: decoder.arrays[path] for name, path in decoder_paths.items()}


def _check_text_models(
    text: Mapping[str, Path], other: Mapping[str, LazyArray], towers: Tree, decoder: Tree
) -> None:
    mismatches = [f"{name}: missing" for name in text if name not in other]
    mismatches += [f"{name}: extra" for name in other if name not in text]
    mismatches += [
        f"{name}: {list(other[name].shape)}, expected {list(towers.arrays[path].shape)}"
        for name, path in text.items()
        if name in other and other[name].shape != towers.arrays[path].shape
    ]
    if mismatches:
        raise CoverageError(
            f"the text models do not match:{listing(mismatches)}",
            location=decoder.metadata.location or None,
            expected=f"the names and shapes of {towers.metadata.location or 'the other model'}",
        )
