"""Combine the towers of one model with the decoder of another."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Leaf, Path, Tree, by_name
from ckpttools.core.errors import ConfigError, CoverageError, UsageError, listing
from ckpttools.core.message_terms import action
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count, matches_any
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.config.model_facts import ModelFacts
from ckpttools.maxtext.layout import DECODER, EMBEDDING
from ckpttools.maxtext.model_options import ModelOptions, family_for
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.hf_defaults import default_values

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
    text, other = (_of_maxtext if sides[0] else _of_hugging_face)(towers, decoder)
    location = towers.metadata.location or None
    if len(text) == len(towers.arrays):
        raise UsageError(
            "the first model has no towers",
            location=location,
            expected="a multimodal model first, then the model with the new text model",
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
    odd = {
        name: f"{name.partition('.')[2]} is {json.dumps(ours)}, and {json.dumps(theirs)} in the decoder's"
        for name in (*_HEAD_FIELDS, *_VALUE_FIELDS)
        if None not in (ours := kept.field(name), theirs := other.field(name)) and ours != theirs
    }
    if cut := [text for name, text in odd.items() if name in _HEAD_FIELDS]:
        raise ConfigError(
            "the text models split arrays of the same shape into different heads",
            location=towers.metadata.location or None,
            got="; ".join(cut),
        )
    return tuple(f"{CONFIG}, which is kept: {text}" for text in odd.values())


TextArrays = tuple[Mapping[str, Path], Mapping[str, LazyArray]]
"""The paths of text arrays in the first model, and the text arrays of the second model, by common names."""


def _of_maxtext(towers: Tree, decoder: Tree) -> TextArrays:
    homes, others = view_of(towers).homes, view_of(decoder).homes
    own = by_name({inner: path for inner, path in homes.items() if inner[0] in _TEXT})
    return own, by_name({inner: decoder.arrays[path] for inner, path in others.items() if inner[0] in _TEXT})


def _of_hugging_face(towers: Tree, decoder: Tree) -> TextArrays:
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
    odd = [f"{name}: missing" for name in text if name not in other]
    odd += [f"{name}: extra" for name in other if name not in text]
    odd += [
        f"{name}: {list(other[name].shape)}, expected {list(towers.arrays[path].shape)}"
        for name, path in text.items()
        if name in other and other[name].shape != towers.arrays[path].shape
    ]
    if odd:
        raise CoverageError(
            f"the text models do not match:{listing(odd)}",
            location=decoder.metadata.location or None,
            expected=f"the names and shapes of {towers.metadata.location or 'the other model'}",
        )
