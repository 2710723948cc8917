"""One model as it is seen in a checkpoint: configuration, family, sizes, and how its layers are stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dataclass import dataclass
from ckpttools.core.wording import option
from ckpttools.families.family import Family
from ckpttools.families.silent import silent_values
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.sizes import lengths_of
from ckpttools.maxtext import tying
from ckpttools.maxtext.config.facts import ModelFacts
from ckpttools.maxtext.config.fitting import require_hugging_face, require_maxtext
from ckpttools.maxtext.config.fp8 import StoredFp8
from ckpttools.maxtext.config.report import ModelSetting
from ckpttools.maxtext.direction import refuse_adapters
from ckpttools.maxtext.from_native import block_of, native_of, unread_grids
from ckpttools.maxtext.layout import EMBEDDING, SCAN_AXIS, SCAN_LAYERS, VOCAB
from ckpttools.maxtext.model import ModelOptions, family_for, required, rope_flags
from ckpttools.maxtext.model_config import absent_towers
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.native import scale_pairs
from ckpttools.maxtext.view import MaxTextView, view_of
from ckpttools.stores.registry import parse

PARAM_SCAN_AXIS, LOAD_PARAMETERS = "param_scan_axis", "load_parameters_path"


@dataclass(frozen=True)
class SeenModel:
    """One model.

    Attributes:
        family: whose rows it has.
        facts: what is known of it.
        place: where its configuration lies, for messages.
        stored: settings that say how the checkpoint is stored; none where it is not MaxText's.
        notes: what there is to know of it.
        fp8: its weights that have scales; None where it is not MaxText's.
    """

    family: Family
    facts: ModelFacts
    place: str
    stored: tuple[ModelSetting, ...] = ()
    notes: tuple[str, ...] = ()
    fp8: StoredFp8 | None = None


def seen_in_config(config: Mapping[str, Any], place: str, family: str | None) -> SeenModel:
    """The model of a configuration alone.

    Raises:
        ConfigError: it does not say which, or no family is of its type.
        CheckpointError: the user's file describes no family.
    """
    found = family_for(config, ModelOptions(family=family), place)
    facts = _facts(config)
    table = found.table(config, place)
    flags = {name: flag.value for name, flag in table.flags.items()}
    return SeenModel(found, replace(facts, lengths=lengths_of(table.sizes), flags=flags), place)


def _facts(config: Mapping[str, Any]) -> ModelFacts:
    """What a configuration says, and what transformers takes where it is silent."""
    return ModelFacts(config, silent=silent_values(config))


def seen_in(tree: Tree, like: str | None, family: str | None) -> SeenModel:
    """The model of a checkpoint, of either side.

    Args:
        tree: the checkpoint.
        like: directory of the model it came from, or a `config.json`; None for what it carries.
        family: name of the family, or a file with one; None as the configuration says.

    Raises:
        FormatError: it is an adapter.
        ConfigError: nothing says which model it is.
        CoverageError: its arrays contradict its configuration.
    """
    refuse_adapters(tree)
    view = view_of(tree)
    if view.is_maxtext:
        return _of_maxtext(tree, view, ModelFiles.of(tree, like), family)
    config = required(tree.metadata.config, tree.metadata.place)
    arrays = by_name(tree.arrays)
    found = family_for(config, ModelOptions(family=family), tree.metadata.place)
    table = found.table(config, CONFIG, spelling=found.spelling_of(arrays))
    require_hugging_face(tree, found, config)
    lengths, flags = table.known_of(arrays)
    return SeenModel(found, replace(_facts(config), lengths=lengths, flags=flags, has_arrays=True), CONFIG)


def _of_maxtext(tree: Tree, view: MaxTextView, files: ModelFiles, family: str | None) -> SeenModel:
    hint = f"name the directory of the model it came from: {option('like')} HF_DIR"
    config = required(files.config, tree.metadata.place, hint)
    options = ModelOptions(family, files.rope_layout)
    found = family_for(config, options, tree.metadata.place)
    arrays = view.named
    tied = tying.tied_flags("keep", tying.left_head(found), arrays)
    flags = {**rope_flags(found, options), **tied}
    table = found.table(config, CONFIG, scan_axis=view.scan_axis, overrides=flags)
    require_maxtext(view, tree.metadata.place, found, config, flags)
    lengths, seen = table.known_of(arrays, left=True)
    # As many rows as are stored, with those that fill up.
    rows = {VOCAB: view.parameters[EMBEDDING].shape[0]} if EMBEDDING in view.parameters else {}
    there = found.towers_in(arrays)
    towers = {each: each in there for each in found.towers}
    facts = replace(_facts(config), lengths={**lengths, **rows}, flags={**seen, **towers}, has_arrays=True)
    model = SeenModel(found, facts, CONFIG, tuple(_stored(tree, view)))
    native = native_of(arrays, config, tree.metadata.place)
    misfits = unread_grids(table, native.arrays, native, (VOCAB,)).misfits
    fp8 = _fp8(tree, view, config, misfits)
    return replace(model, notes=tuple(_notes(view, config, arrays, found, fp8)), fp8=fp8)


def _fp8(tree: Tree, view: MaxTextView, config: Mapping[str, Any], misfits: tuple[str, ...]) -> StoredFp8:
    pairs = {name: view.named[scale] for name, scale in scale_pairs(view.named).items()}
    dtypes = sorted({view.named[name].dtype.name for name in pairs})
    block = block_of(view.named, pairs, config)
    return StoredFp8(tree.metadata.place, len(pairs), tuple(dtypes), block, misfits)


def _stored(tree: Tree, view: MaxTextView) -> Iterator[ModelSetting]:
    source = "the arrays"
    yield ModelSetting(SCAN_LAYERS, view.is_stacked, source)
    if view.scan_axis not in (None, SCAN_AXIS):
        yield ModelSetting(PARAM_SCAN_AXIS, view.scan_axis, source)
    if view.optimizer is None and tree.metadata.place:
        # Orbax refuses relative paths.
        place = str(parse(tree.metadata.place).absolute())
        yield ModelSetting(LOAD_PARAMETERS, place, "where it lies")


def _notes(
    view: MaxTextView,
    config: Mapping[str, Any],
    names: Collection[str],
    family: Family,
    fp8: StoredFp8,
) -> Iterator[str]:
    if view.optimizer is not None:
        yield (
            "this is a training checkpoint: it goes on by base_output_directory and run_name, and "
            "`ckpt strip-optimizer` makes what load_parameters_path takes"
        )
    rule = family.flags.get("tied")
    head = tying.left_head(family)
    if rule is not None and head is not None and not rule.read(config, "").value and head not in names:
        yield "no output head is stored, though config.json promises one: the embedding is taken in its place"
    yield from fp8.notes()
    towers = absent_towers(config, names)
    if towers:
        yield f"text alone: the checkpoint has nothing of {', '.join(towers)}"
    there = [each for each in family.towers_in(names) if not family.settings.mentions(each)]
    if there:
        yield (
            f"with these settings MaxText runs the text model alone: towers ({', '.join(there)}) take "
            "use_multimodal=true and the model_name of one of its own models that has them"
        )
