"""A Hugging Face tree as the one that MaxText's own converter makes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.patterns import first_match, matching, prefixes, whole_branches
from ckpttools.array.tree import Leaf, Tree, by_name, dotted
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CoverageError, UsageError
from ckpttools.core.message_terms import option, several
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count, plural
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.mapping.mapped import Mapped, notes_of
from ckpttools.mapping.scale_grids import ScaleGrids
from ckpttools.maxtext.agreement import own_rows
from ckpttools.maxtext.beside import patterns_beside
from ckpttools.maxtext.config.deviations import layers_of_other_kinds
from ckpttools.maxtext.config.facts import ModelFacts
from ckpttools.maxtext.flavours import linen_state
from ckpttools.maxtext.hf_source import (
    HuggingFaceSource,
    arrays_of,
    bound,
    hugging_face_source,
    vocab_setting,
)
from ckpttools.maxtext.layout import PARAMS, SCAN_LAYERS
from ckpttools.maxtext.llama_names import OF_OTHER_MODELS, has_llama_names, hub_name, with_hub_names
from ckpttools.maxtext.model import family_for
from ckpttools.maxtext.native import (
    SCALE,
    KeptWeights,
    kept_weights,
    misfits_remark,
    native_grids,
    refusing,
)
from ckpttools.maxtext.odd_dtypes import odd_dtypes
from ckpttools.maxtext.parts import refuse_lost
from ckpttools.maxtext.recognition import backbone_hint, below, strangers_in
from ckpttools.maxtext.stacked_on import with_scan_axis
from ckpttools.maxtext.stored_head import StoredHead
from ckpttools.maxtext.structural_names import with_family_names
from ckpttools.maxtext.to_maxtext_options import ToMaxText
from ckpttools.maxtext.variables import as_variables
from ckpttools.maxtext.versions import version_called
from ckpttools.model_families.family import Family
from ckpttools.model_families.hf_defaults import silent_fields, silent_values
from ckpttools.quantized.config import says_quantized, scheme
from ckpttools.quantized.dequantized_tree import Logical
from ckpttools.quantized.unsupported_errors import refuse_unmappable
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import cast, cast_notes
from ckpttools.transforms.dequantize import dequantized, refuse_few_bits
from ckpttools.transforms.select import unmatched
from ckpttools.transforms.strip_wrappers import unwrapped, without_states

_OF_FLAX = "these are names of Flax, whose matrices have inputs first: rules of `ckpt remap` mend both"


@dataclass(frozen=True)
class MaxTextState:
    """What a Hugging Face tree becomes.

    Attributes:
        state: the tree that MaxText's own converter makes.
        carried: arrays that MaxText has no place for and that are to be kept.
        spelling: how the source writes names.
        notes: what the user should know.
        dtypes: as of `ckpttools.maxtext.odd_dtypes.odd_dtypes`, for the way back.
        lost_head: The output head that is left out as a copy of the embedding. It has not been compared yet.
        tied: How the output head was handled; None if the configuration decided.
        recomputed: States of modules and buffers in the source, which are left out, by name.
    """

    state: Tree
    carried: Mapping[str, LazyArray]
    spelling: str
    notes: Notes
    dtypes: Mapping[str, str] = field(default_factory=dict)
    lost_head: StoredHead | None = None
    tied: str | None = None
    recomputed: Mapping[str, LazyArray] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[TreePath, Leaf]:
        """The parameters alone, below `params` as in the whole tree."""
        return {path: leaf for path, leaf in self.state.items() if path[0] == PARAMS}


def to_maxtext(tree: Tree, options: ToMaxText) -> MaxTextState:
    """A Hugging Face tree as the tree MaxText's own converter makes, and what the user should know.

    Raises:
        ConfigError: there is no configuration, or it is not one.
        CoverageError: the arrays do not match it, or a part of the model would be lost unasked.
        FormatError: weights are quantised in a way that is not read, or are not with their scales.
    """
    drop = whole_branches(with_dots(options.drop, tree), map(dotted, tree.arrays))
    bare = without_states(tree, drop)
    recomputed = {dotted(path): array for path, array in tree.arrays.items() if path not in bare.tree.leaves}
    tree, noted = bare.tree, tree.metadata.notes + bare.notes
    body = unwrapped(tree, drop)
    named = with_family_names(body.tree, drop)
    plain = Transformed(named.tree, body.notes + named.notes)
    hub = with_hub_names(plain.tree)
    options = replace(options, drop=_of_hub_names(drop, tree, plain.tree, hub.tree))
    try:
        state = _to_maxtext(hub.tree, options, noted + plain.notes + hub.notes)
        return replace(state, recomputed=recomputed) if recomputed else state
    except UsageError as error:
        if error.got is not None and error.got in options.drop:
            expected = None if hub.tree is tree else "names of the source, or those that they become"
            raise unmatched(error.got, [*tree, *hub.tree], tree.metadata.location, expected) from error
        raise
    except CoverageError as error:
        if has_llama_names(map(dotted, hub.tree.arrays)):
            raise error.at(hint=OF_OTHER_MODELS) from error
        if any(dotted(path).endswith(".kernel") for path in hub.tree.arrays):
            raise error.at(hint=_OF_FLAX) from error
        if others := patterns_beside(hub.tree, options.drop):
            hint = f"there is more than a model in it: leave that out with {several('drop', others)}"
            built = error.folded(others, hint) if isinstance(error, NotCoveredError) else error.at(hint=hint)
            raise built from error
        if (result := strangers_in(hub.tree)) and result.prefixes:
            raise error.at(hint=f"{below(result.prefixes, hub.tree)}; convert that") from error
        if isinstance(error, NotCoveredError):
            _refuse_kinds_of_layers(error, tree, options)
        if isinstance(error, NotCoveredError):
            is_renamed = named.tree is not body.tree
            advice = backbone_hint(tree.metadata.config, error.coverage, is_without_prefix=is_renamed)
            if advice:
                raise error.at(hint=advice) from error
        raise


def _refuse_kinds_of_layers(error: NotCoveredError, tree: Tree, options: ToMaxText) -> None:
    """Explain arrays that do not fit because MaxText has layers of other kinds at their numbers.

    Raises:
        NotCoveredError: All arrays that do not fit belong to such layers.
    """
    config = tree.metadata.config or {}
    family = family_for(config, options.model, tree.metadata.location)
    silent = silent_fields(config)
    flags = {name: rule.read(config, CONFIG, silent).value for name, rule in family.flags.items()}
    facts = ModelFacts(config, flags=flags, silent=silent_values(config))
    layers, why = layers_of_other_kinds(family, facts)
    result = error.coverage
    keys = [*result.missing, *result.extra, *(item.key for item in result.misshapen)]
    if layers and all(layers & {int(part) for part in key.split(".") if part.isdecimal()} for key in keys):
        hint = f"{why}; MaxText cannot run this model"
        raise NotCoveredError(
            error.message, result, location=error.location or "", hint=hint, is_unsupported=True
        )


def with_dots(drop: Sequence[str], tree: Tree) -> list[str]:
    """Patterns of names whose keys are joined by dots; the user may have joined them by slashes."""
    names = {prefix for path in tree for prefix in prefixes(dotted(path), ".")}

    def is_joined(pattern: str) -> bool:
        return not matching(names, (pattern,)) and any(first_match(path, (pattern,)) for path in tree)

    return [item.replace("/", ".") if "/" in item and is_joined(item) else item for item in drop]


def _of_hub_names(drop: Sequence[str], tree: Tree, plain: Tree, hub: Tree) -> tuple[str, ...]:
    """Patterns of what is dropped in names of the hub; the user may have written those of the source.

    Args:
        drop: patterns of whole names of the source.
        tree, plain, hub: the source, what it is without wrappers, and that in names of the hub.
    """
    if not drop:
        return ()
    names, own = by_name(hub.arrays), by_name(tree.arrays)
    result = whole_branches(drop, names)
    of_source = [item for item in result if not matching(names, [item]) and matching(own, [item])]
    now = {id(leaf): dotted(path) for path, leaf in plain.items()}
    renamed = [now.get(id(own[name]), name) for name in matching(own, of_source)]
    if hub is not plain:
        renamed = [hub_name(name) or name for name in renamed]
    # What is not there any more was left out with the names.
    literal = (name for name in renamed if name in names)
    return (*(item for item in result if item not in of_source), *literal)


def _to_maxtext(tree: Tree, options: ToMaxText, noted: Notes) -> MaxTextState:
    kept, plain = _unquantized(tree, options)
    source = hugging_face_source(kept, options)
    mapped, grids = _mapped(source, options)
    homeless = source.homeless()
    if not (options.carry or options.text_only or options.leaves_out):
        refuse_lost(source.family, homeless, source.location)
    carried = homeless if options.carry else {}
    values = replace(
        mapped,
        arrays=_without(mapped.arrays, grids.scales),
        values=(*mapped.values, *grids.values),
    )
    remarks = Notes(remarks=tuple(remarks_on(source, grids, options, homeless)))
    dropped = set(mapped.dropped) - carried.keys()
    declared = _said_of(kept, dropped) if plain is None else plain.notes_without(dropped)
    notes = noted + declared + value_notes(source.family, values, options, carried) + remarks
    dtypes = {} if options.dtype else odd_dtypes(source.arrays, mapped.altered, source.spelling.plain)
    state = _state(mapped, grids, options)
    lost, tied = source.lost_head, source.tied
    return MaxTextState(state, carried, source.spelling.name, notes, dtypes, lost, tied)


def _mapped(source: HuggingFaceSource, options: ToMaxText) -> tuple[Mapped, ScaleGrids]:
    """The arrays of MaxText, and the scales of those that stay quantised.

    Raises:
        ConfigError: the family that the user names makes other values than that of the configuration.
        CoverageError: the arrays are not those of the model.
        FormatError: weights are quantised in blocks that cannot be rearranged.
    """
    tree, arrays, drop, config = source.kept.tree, source.arrays, source.drop, source.config
    grids = native_grids(source.table, arrays, source.kept)
    with refusing(grids.problems, config, source.location):
        mapped = grids.table.to_left(arrays, drop, exact=options.exact)
    if config is not None:
        own_rows(
            options.model.family,
            config,
            source.location,
            lambda item: bound(item, tree, arrays, options)[1].to_left(arrays, drop).arrays,
        )
    refuse_unmappable(_without(mapped.weights, grids.scales), config, source.location)
    return mapped, grids


def _state(mapped: Mapped, grids: ScaleGrids, options: ToMaxText) -> Tree:
    """The tree of MaxText's state: arrays in the dtype that is expected, codes as they are, scales."""
    built = {
        key: cast(array, options.dtype) if options.dtype and key not in grids.scales else array
        for key, array in mapped.arrays.items()
    }
    built |= {key + SCALE: scales for key, scales in grids.scales.items()}
    parameters: dict[TreePath, LazyArray] = {
        tuple(key.split(".")): array for key, array in sorted(built.items())
    }
    state = linen_state(parameters, 0, {SCAN_LAYERS: options.scan})
    if not options.scan:
        return state
    return as_variables(with_scan_axis(state, options.scan_axis), version_called(options.maxtext))


def _unquantized(tree: Tree, options: ToMaxText) -> tuple[KeptWeights, Logical | None]:
    """The tree without scales: weights as they are, or dequantised and by what."""
    if options.quantized == "keep":
        refuse_few_bits(options.dtype, tree.metadata.location)
        return kept_weights(tree), None
    plain = dequantized(tree, options.dtype, options.dequantize_like)
    return KeptWeights(plain.tree), plain


def _said_of(kept: KeptWeights, dropped: Collection[str]) -> Notes:
    """What to say of weights that stay quantised."""
    count = plural(len(kept.scales.keys() - dropped), "weight")
    return kept.notes + Notes(remarks=(f"kept in FP8, with their scales: {count} of the source",))


def _without(arrays: Mapping[str, LazyArray], names: Collection[str]) -> dict[str, LazyArray]:
    return {key: array for key, array in arrays.items() if key not in names}


def value_notes(
    family: Family, mapped: Mapped, options: ToMaxText, carried: Mapping[str, LazyArray]
) -> Notes:
    inexact = () if options.dtype is None else cast_notes(mapped.arrays, options.dtype)
    values = [*_vocab_notes(family, mapped.sizes.get("vocab"), options.pad_vocab)]
    if carried:
        values.append(Note.of_arrays(len(carried), "carried along, for the way back"))
    dropped = tuple(key for key in mapped.dropped if key not in carried)
    return notes_of(mapped.values) + Notes(tuple(inexact), tuple(values), dropped)


def remarks_on(
    source: HuggingFaceSource, grids: ScaleGrids, options: ToMaxText, homeless: Mapping[str, LazyArray]
) -> Iterator[str]:
    """What to say of dtypes, of quantised weights, and of what MaxText has no place for."""
    family = source.family
    towers = [name for tower in family.towers for name in arrays_of(family, tower, homeless)]
    yield from source.remarks
    if not source.kept.scales:
        yield from _stale(says_quantized(source.config))
    if grids.misfits:
        yield misfits_remark(grids.misfits)
    if not (options.carry and homeless):
        yield from _lost([key for key in homeless if key not in towers and key not in source.kept.aside])
    yield from _without_towers(towers, _way_back(family, options))


def _stale(declared: Mapping[str, object] | None) -> Iterator[str]:
    """What to say of a configuration that calls plain weights quantised."""
    if declared:
        yield f"{CONFIG} says {scheme(declared)}, but no weight is quantised: they are taken as they are"


def _lost(names: Collection[str]) -> Iterator[str]:
    """What to say of arrays that the way back will not have."""
    if names:
        again = f"with {option('carry', True)} the way back has them again"
        yield f"MaxText has no place for {array_count(names)}; {again}"


def _way_back(family: Family, options: ToMaxText) -> str:
    """What becomes of towers that are not converted."""
    if options.carry:
        return "are carried along, for the way back"
    model = "which takes them from the model"
    if any(spelling.name == "text" for spelling in family.spellings):
        model += f", or writes the text model alone ({option('names', 'text')})"
    return f"are left out, also for the way back, {model}"


def _without_towers(towers: Collection[str], way: str) -> Iterator[str]:
    """What to say of towers that are left out."""
    if towers:
        yield f"as {option('text_only', True)} says, the towers {way}: {array_count(towers)}"


def _vocab_notes(family: Family, vocab: int | None, pad_vocab: int | None) -> Iterator[Note]:
    """What is added to the vocabulary, and what MaxText's own configuration would rather have."""
    if vocab is None:
        return
    if pad_vocab:
        yield Note("vocabulary", f"padded with zeros from {vocab} rows to {pad_vocab}")
    expected = family.maxtext_vocab.get(vocab, vocab)
    if expected != vocab and expected != pad_vocab:
        remedy = f"{option('pad_vocab', expected)}, or " if expected > vocab else ""
        text = f"{vocab} rows, {expected} in MaxText's own configuration: {remedy}{vocab_setting(vocab)}"
        yield Note("vocabulary", text)
