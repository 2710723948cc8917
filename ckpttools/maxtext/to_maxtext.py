"""Convert a Hugging Face tree to the tree that MaxText's own converter writes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.patterns import expand_branches, first_match, match_names, prefixes
from ckpttools.array.tree import Leaf, Tree, by_name, dotted
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, CoverageError, UsageError
from ckpttools.core.message_terms import action, option, repeated_option
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count, matches_any, plural
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.build import Mapped, notes_of
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.mapping.table import Table
from ckpttools.maxtext import tied_embeddings as tying
from ckpttools.maxtext.config.deviations import layers_with_other_kinds
from ckpttools.maxtext.config.model_facts import ModelFacts
from ckpttools.maxtext.config_differences import require_own_rows
from ckpttools.maxtext.conversion_options import ToMaxText
from ckpttools.maxtext.family_layouts import family_in
from ckpttools.maxtext.hub_names import (
    OTHER_MODELS_HINT,
    has_llama_names,
    hub_name,
    patterns_outside_model,
    with_family_names,
    with_hub_names,
)
from ckpttools.maxtext.model_config import refuse_lost_parts
from ckpttools.maxtext.model_options import ModelOptions, family_for, require_config, rope_flags
from ckpttools.maxtext.native_fp8 import (
    SCALE,
    KeptWeights,
    ScaleGrids,
    grid_mismatch_remark,
    native_grids,
    raise_for_problems,
    split_quantized,
)
from ckpttools.maxtext.original_dtypes import recorded_dtypes, with_uniform_dtypes
from ckpttools.maxtext.recognition import (
    backbone_hint,
    families_with_names_of,
    find_unowned_arrays,
    prefix_hint,
)
from ckpttools.maxtext.scan_axis import with_scan_axis
from ckpttools.maxtext.variables import with_variable_axes
from ckpttools.maxtext.versions import PARAMS, SCAN_LAYERS, version_called
from ckpttools.maxtext.view import linen_state
from ckpttools.model_families.family import Family, Spelling
from ckpttools.model_families.hf_defaults import default_fields, default_values
from ckpttools.quantized.config import declared_quantization, scheme
from ckpttools.quantized.unsupported_errors import refuse_few_bits, refuse_quantized, refuse_unmappable
from ckpttools.quantized.view import DequantizedTree, quantized_view
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import cast, cast_notes
from ckpttools.transforms.strip_wrappers import drop_states, strip_wrappers

if TYPE_CHECKING:
    from ckpttools.maxtext.stored_head import StoredHead

_FLAX_NAMES = (
    "these are Flax names, and Flax matrices have their inputs first: "
    f"rules for {action('remap')} change both"
)


@dataclass(frozen=True)
class MaxTextState:
    """The result of converting a Hugging Face tree.

    Attributes:
        state: The tree that MaxText's own converter writes.
        carried: Arrays without a counterpart in MaxText that are kept.
        spelling: The spelling of names in the source.
        notes: Notes for the user.
        dtypes: Dtypes for the reverse conversion; see `ckpttools.maxtext.original_dtypes.recorded_dtypes`.
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
        """Return only the parameters, below `params` as in the complete tree."""
        return {path: leaf for path, leaf in self.state.items() if path[0] == PARAMS}


def to_maxtext(tree: Tree, options: ToMaxText) -> MaxTextState:
    """Convert a Hugging Face tree to the tree that MaxText's own converter writes.

    Raises:
        ConfigError: The configuration is missing or invalid.
        CoverageError: The arrays do not match the configuration, or a part of the model would be lost without
            a request.
        FormatError: Weights have an unsupported quantization scheme, or lack their scales.
    """
    drop = expand_branches(normalize_patterns(options.drop, tree), map(dotted, tree.arrays))
    bare = drop_states(tree, drop)
    recomputed = {dotted(path): array for path, array in tree.arrays.items() if path not in bare.tree.leaves}
    tree, noted = bare.tree, tree.metadata.notes + bare.notes
    body = strip_wrappers(tree, drop)
    named = with_family_names(body.tree, drop)
    plain = Transformed(named.tree, body.notes + named.notes)
    hub = with_hub_names(plain.tree)
    options = replace(options, drop=_hub_patterns(drop, tree, plain.tree, hub.tree))
    try:
        state = _to_maxtext(hub.tree, options, noted + plain.notes + hub.notes)
        return replace(state, recomputed=recomputed) if recomputed else state
    except UsageError as error:
        if error.raw.got is not None and error.raw.got in options.drop:
            expected = None if hub.tree is tree else "names of the source, or their converted names"
            from ckpttools.transforms.select import unmatched

            raise unmatched(error.raw.got, [*tree, *hub.tree], tree.metadata.location, expected) from error
        raise
    except CoverageError as error:
        if has_llama_names(map(dotted, hub.tree.arrays)):
            raise error.at(hint=OTHER_MODELS_HINT) from error
        if any(dotted(path).endswith(".kernel") for path in hub.tree.arrays):
            raise error.at(hint=_FLAX_NAMES) from error
        if others := patterns_outside_model(hub.tree, options.drop):
            hint = (
                f"the checkpoint contains arrays outside the model: leave them out with "
                f"{repeated_option('drop', others)}"
            )
            built = error.folded(others, hint) if isinstance(error, NotCoveredError) else error.at(hint=hint)
            raise built from error
        if (result := find_unowned_arrays(hub.tree)) and result.prefixes:
            raise error.at(hint=f"{prefix_hint(result.prefixes, hub.tree)}; convert the result") from error
        if isinstance(error, NotCoveredError):
            _refuse_kinds_of_layers(error, tree, options)
        if isinstance(error, NotCoveredError):
            is_renamed = named.tree is not body.tree
            advice = backbone_hint(tree.metadata.config, error.coverage, is_without_prefix=is_renamed)
            if advice:
                raise error.at(hint=advice) from error
        raise


def _refuse_kinds_of_layers(error: NotCoveredError, tree: Tree, options: ToMaxText) -> None:
    """Explain arrays that do not fit because MaxText has other kinds of layers at their indices.

    Raises:
        NotCoveredError: All arrays that do not fit belong to such layers.
    """
    config = tree.metadata.config or {}
    family = family_for(config, options.model, tree.metadata.location)
    silent = default_fields(config)
    flags = {name: rule.read(config, CONFIG, silent).value for name, rule in family.flags.items()}
    facts = ModelFacts(config, flags=flags, silent=default_values(config))
    layers, explanation = layers_with_other_kinds(family, facts)
    result = error.coverage
    keys = [*result.missing, *result.extra, *(item.key for item in result.misshapen)]
    if layers and all(layers & {int(part) for part in key.split(".") if part.isdecimal()} for key in keys):
        hint = f"{explanation}; MaxText cannot run this model"
        raise NotCoveredError(
            error.raw.message, result, location=error.location or "", hint=hint, is_unsupported=True
        )


def normalize_patterns(drop: Sequence[str], tree: Tree) -> list[str]:
    """Return patterns with dots between keys in place of the user's slashes."""
    names = {prefix for path in tree for prefix in prefixes(dotted(path), ".")}

    def is_joined(pattern: str) -> bool:
        return not match_names(names, (pattern,)) and any(first_match(path, (pattern,)) for path in tree)

    return [item.replace("/", ".") if "/" in item and is_joined(item) else item for item in drop]


def _hub_patterns(drop: Sequence[str], tree: Tree, plain: Tree, hub: Tree) -> tuple[str, ...]:
    """Return the patterns of dropped arrays under Hub names.

    Args:
        drop: Patterns of complete names of the source.
        tree, plain, hub: The source, the source without wrappers, and the latter under Hub names.
    """
    if not drop:
        return ()
    names, own = by_name(hub.arrays), by_name(tree.arrays)
    result = expand_branches(drop, names)
    of_source = [item for item in result if not match_names(names, [item]) and match_names(own, [item])]
    current_names = {id(leaf): dotted(path) for path, leaf in plain.items()}
    renamed = [current_names.get(id(own[name]), name) for name in match_names(own, of_source)]
    if hub is not plain:
        renamed = [hub_name(name) or name for name in renamed]
    # Arrays that no longer exist were left out together with the wrappers.
    literal = (name for name in renamed if name in names)
    return (*(item for item in result if item not in of_source), *literal)


def _to_maxtext(tree: Tree, options: ToMaxText, source_notes: Notes) -> MaxTextState:
    kept, plain = _split_quantized(tree, options)
    source = bind_hf_source(kept, options)
    mapped, grids = _map_source(source, options)
    unplaced_keys = source.unplaced_keys()
    if not (options.carry or options.text_only or options.leaves_out):
        refuse_lost_parts(source.family, unplaced_keys, source.location)
    carried = unplaced_keys if options.carry else {}
    values = replace(
        mapped,
        arrays=_drop_names(mapped.arrays, grids.scales),
        values=(*mapped.values, *grids.values),
    )
    remarks = Notes(remarks=tuple(maxtext_remarks(source, grids, options, unplaced_keys)))
    dropped = set(mapped.dropped) - carried.keys()
    declared = _kept_weight_notes(kept, dropped) if plain is None else plain.notes_without(dropped)
    notes = source_notes + declared + value_notes(source.family, values, options, carried) + remarks
    dtypes = {} if options.dtype else recorded_dtypes(source.arrays, mapped.altered, source.spelling.plain)
    state = _state(mapped, grids, options)
    lost, tied = source.lost_head, source.tied
    return MaxTextState(state, carried, source.spelling.name, notes, dtypes, lost, tied)


def _map_source(source: HuggingFaceSource, options: ToMaxText) -> tuple[Mapped, ScaleGrids]:
    """Return MaxText's arrays, and the scales of those that stay quantized.

    Raises:
        ConfigError: The user's family gives other values than the family of the configuration.
        CoverageError: The arrays do not match the model.
        FormatError: Weights are quantized in blocks that cannot be rearranged.
    """
    tree, arrays, drop, config = source.kept.tree, source.arrays, source.drop, source.config
    grids = native_grids(source.table, arrays, source.kept)
    with raise_for_problems(grids.problems, config, source.location), _named_family(options, config):
        mapped = grids.table.to_left(arrays, drop, exact=options.exact)
    if config is not None:
        require_own_rows(
            options.model.family,
            config,
            source.location,
            lambda item: bind_family(item, tree, arrays, options)[1].to_left(arrays, drop).arrays,
        )
    refuse_unmappable(_drop_names(mapped.weights, grids.scales), config, source.location)
    return mapped, grids


@contextmanager
def _named_family(options: ToMaxText, config: Mapping[str, Any] | None) -> Iterator[None]:
    """Name the user's choice of a family in an error about arrays that do not match it."""
    name, model_type = options.model.family, (config or {}).get("model_type")
    try:
        yield
    except NotCoveredError as error:
        if name is None or model_type is None:
            raise
        hint = f"leave out {option('family', name)}: config.json has model_type {model_type}"
        raise error.at(hint=f"{hint}. If {name} is right, {error.raw.hint}") from error


def _state(mapped: Mapped, grids: ScaleGrids, options: ToMaxText) -> Tree:
    """Return the tree of MaxText's state: cast arrays, unchanged quantized values, and scales."""
    result = {
        key: cast(array, options.dtype) if options.dtype and key not in grids.scales else array
        for key, array in mapped.arrays.items()
    }
    result |= {key + SCALE: scales for key, scales in grids.scales.items()}
    parameters: dict[TreePath, LazyArray] = {
        tuple(key.split(".")): array for key, array in sorted(result.items())
    }
    state = linen_state(parameters, 0, {SCAN_LAYERS: options.scan})
    if not options.scan:
        return state
    return with_variable_axes(with_scan_axis(state, options.scan_axis), version_called(options.maxtext))


def _split_quantized(tree: Tree, options: ToMaxText) -> tuple[KeptWeights, DequantizedTree | None]:
    """Return the tree without scales, with its weights either kept quantized or dequantized."""
    if options.quantized == "keep":
        refuse_few_bits(options.dtype, tree.metadata.location)
        return split_quantized(tree), None
    plain = quantized_view(tree).plain(options.dtype, options.dequantize_like)
    return KeptWeights(plain.tree), plain


def _kept_weight_notes(kept: KeptWeights, dropped: Collection[str]) -> Notes:
    """Return notes on weights that stay quantized."""
    count = plural(len(kept.scales.keys() - dropped), "weight")
    return kept.notes + Notes(remarks=(f"kept in FP8, with their scales: {count} of the source",))


def _drop_names(arrays: Mapping[str, LazyArray], names: Collection[str]) -> dict[str, LazyArray]:
    return {key: array for key, array in arrays.items() if key not in names}


def value_notes(
    family: Family, mapped: Mapped, options: ToMaxText, carried: Mapping[str, LazyArray]
) -> Notes:
    inexact = () if options.dtype is None else cast_notes(mapped.arrays, options.dtype)
    values = [*_vocab_notes(family, mapped.sizes.get("vocab"), options.pad_vocab)]
    if carried:
        values.append(Note.of_arrays(len(carried), "kept for the reverse conversion"))
    dropped = tuple(key for key in mapped.dropped if key not in carried)
    return notes_of(mapped.values) + Notes(tuple(inexact), tuple(values), dropped)


def maxtext_remarks(
    source: HuggingFaceSource, grids: ScaleGrids, options: ToMaxText, unplaced_keys: Mapping[str, LazyArray]
) -> Iterator[str]:
    """Yield remarks on dtypes, quantized weights and unsupported arrays."""
    family = source.family
    towers = [name for tower in family.towers for name in arrays_of(family, tower, unplaced_keys)]
    yield from source.remarks
    if not source.kept.scales:
        yield from _stale_config_remarks(declared_quantization(source.config))
    if grids.misfits:
        yield grid_mismatch_remark(grids.misfits)
    if not (options.carry and unplaced_keys):
        yield from _lost_array_remarks(
            [key for key in unplaced_keys if key not in towers and key not in source.kept.aside]
        )
    yield from _tower_remarks(towers, _tower_handling(family, options))


def _stale_config_remarks(declared: Mapping[str, object] | None) -> Iterator[str]:
    """Yield a remark if a configuration declares plain weights to be quantized."""
    if declared:
        yield (
            f"{CONFIG} declares {scheme(declared)}, but no weight is quantized: the values are used unchanged"
        )


def _lost_array_remarks(names: Collection[str]) -> Iterator[str]:
    """Yield a remark on arrays that the reverse conversion will lack."""
    if names:
        again = f"with {option('carry', True)} the reverse conversion restores them"
        yield f"MaxText does not support {array_count(names)}; {again}"


def _tower_handling(family: Family, options: ToMaxText) -> str:
    """Describe how unconverted towers are handled."""
    if options.carry:
        return "are kept for the reverse conversion"
    model = "which copies them from the model"
    if any(spelling.name == "text" for spelling in family.spellings):
        model += f", or writes only the text model ({option('names', 'text')})"
    return f"are left out, also in the reverse conversion, {model}"


def _tower_remarks(towers: Collection[str], tower_mode: str) -> Iterator[str]:
    """Yield a remark on towers that are left out."""
    if towers:
        yield f"the towers {tower_mode} ({option('text_only', True)}): {array_count(towers)}"


def _vocab_notes(family: Family, vocab: int | None, pad_vocab: int | None) -> Iterator[Note]:
    """Yield notes on padding, and on the vocabulary size in MaxText's own configuration."""
    if vocab is None:
        return
    if pad_vocab:
        yield Note("vocabulary", f"padded with zeros from {vocab} rows to {pad_vocab}")
    expected = family.maxtext_vocab.get(vocab, vocab)
    if expected != vocab and expected != pad_vocab:
        remedy = f"{option('pad_vocab', expected)}, or " if expected > vocab else ""
        text = f"{vocab} rows, {expected} in MaxText's own configuration: {remedy}{vocab_setting(vocab)}"
        yield Note("vocabulary", text)


@dataclass(frozen=True)
class HuggingFaceSource:
    """A Hugging Face tree and its model, before it is mapped.

    Attributes:
        kept: The tree without scales.
        arrays: The arrays by name, including a newly created output head.
        family, table, spelling: The family, rows and spelling of the model.
        drop: Patterns of arrays to leave out, including the name of an output head that is left out.
        remarks: Remarks on dtypes.
        lost_head: The output head that is left out although no pattern of the user names it.
        tied: How the output head is handled; None if the configuration decides.
    """

    kept: KeptWeights
    arrays: Mapping[str, LazyArray]
    family: Family
    table: Table
    spelling: Spelling
    drop: Sequence[str]
    remarks: tuple[str, ...]
    lost_head: StoredHead | None = None
    tied: str | None = None

    @property
    def config(self) -> Mapping[str, Any] | None:
        return self.kept.tree.metadata.config

    @property
    def location(self) -> str:
        return self.kept.tree.metadata.location

    def unplaced_keys(self) -> dict[str, LazyArray]:
        """Return the arrays without a counterpart in MaxText, except those that the user leaves out."""
        left = self.table.unmatched_right({**self.arrays, **self.kept.aside})
        return {key: array for key, array in left.items() if not matches_any(key, self.drop)}


def bind_hf_source(kept: KeptWeights, options: ToMaxText) -> HuggingFaceSource:
    """Identify the model of a tree, and add or remove its output head as requested."""
    tree, widened = kept.tree, tuple[str, ...]()
    arrays = by_name(tree.arrays)
    if options.dtype is not None and options.scan:
        arrays, widened = with_uniform_dtypes(arrays)
    family, table = _table(tree, arrays, options)
    if not kept.scales:
        # Use all arrays, because arrays that are left out may be scales of others.
        refuse_quantized(arrays, tree.metadata.config, tree.metadata.location)
    spelling = family.spelling_of(arrays)
    head, drop, lost = tying.right_head(family, spelling), options.drop, None
    head_mode = _head_handling(head, arrays, options)
    may_be_alias = head_mode is None and bool(table.flags[tying.FLAG].value)
    if head is not None and head.head in arrays and (may_be_alias or head_mode == "drop"):
        # Few tied models store a head.
        from ckpttools.maxtext.stored_head import StoredHead, is_alias

        if may_be_alias and is_alias(head, arrays):
            head_mode = "drop"
        if head_mode == "drop":
            if not matches_any(head.head, drop) and head.embedding in arrays:
                lost = StoredHead(head, arrays[head.head], arrays[head.embedding])
            drop = (*drop, head.head)
    if head_mode == "materialize" and head and head.head not in arrays and head.embedding in arrays:
        arrays[head.head] = arrays[head.embedding]
        widened = (*widened, head.copy_remark)
    return HuggingFaceSource(kept, arrays, family, table, spelling, drop, widened, lost, head_mode)


def _head_handling(
    head: tying.Head | None, arrays: Mapping[str, LazyArray], options: ToMaxText
) -> str | None:
    """Return how the output head is handled: the user's choice, or "drop" if it is dropped by name."""
    head_mode = options.model.tied
    if head_mode is None and head and head.head in arrays and matches_any(head.head, options.drop):
        return "drop"
    return head_mode


def _table(tree: Tree, arrays: Mapping[str, LazyArray], options: ToMaxText) -> tuple[Family, Table]:
    """Return the family and its rows, bound to the model in `tree`."""
    config = require_config(tree.metadata.config, tree.metadata.location)
    return bind_family(_family(tree, config, options.model), tree, arrays, options)


def bind_family(
    family: Family, tree: Tree, arrays: Mapping[str, LazyArray], options: ToMaxText
) -> tuple[Family, Table]:
    """Return a family in the version's layout and its rows, bound to the model in `tree`."""
    location = tree.metadata.location
    config = require_config(tree.metadata.config, location)
    family = family_in(family, version_called(options.maxtext))
    spelling = family.spelling_of(arrays)
    head = tying.right_head(family, spelling)
    head_mode = _head_handling(head, arrays, options)
    tied = tying.tied_flags(head_mode, head.head if head else None, arrays)
    table = family.table(
        config,
        CONFIG,
        scan_axis=options.scan_axis if options.scan else None,
        spelling=spelling,
        overrides={**rope_flags(family, options.model), **tied},
        without=family.towers if options.text_only else tuple(_dropped_towers(family, arrays, options.drop)),
    )
    _require_towers(family, table, arrays, location)
    if options.scan:
        _refuse_scanned(family, table)
    return family, replace(table, location=location, padded=_padded_lengths(table, options.pad_vocab))


def _refuse_scanned(family: Family, table: Table) -> None:
    """Raise an error if MaxText does not scan such layers; see `Family.refuse_scanned`."""
    has_towers = any(table.flags[tower].value for tower in family.towers)
    alone = "" if family.no_scan_reason else f"; {option('text_only', True)} leaves the towers out"
    hint = (
        f"{option('scan', False)} keeps them unscanned, and MaxText runs them with scan_layers=false{alone}"
    )
    family.refuse_scanned(hint, has_towers=has_towers)


def _require_towers(family: Family, table: Table, arrays: Mapping[str, LazyArray], location: str) -> None:
    """Raise an error if the configuration declares a tower without any arrays.

    Raises:
        CoverageError: A declared tower has no arrays. Partially missing towers are reported by the rows.
    """
    for tower in family.towers:
        flag = table.flags[tower]
        if flag.value and not arrays_of(family, tower, arrays):
            raise CoverageError(
                f"the arrays of the tower {tower} are missing",
                location=location,
                got=flag.source,
                expected="all of the model's arrays",
                hint=f"check that all of its files exist, or use {option('text_only', True)} "
                "to convert only the text model",
            )


def arrays_of(family: Family, tower: str, arrays: Mapping[str, LazyArray]) -> Mapping[str, LazyArray]:
    """Return a tower's arrays in Hugging Face files."""
    return Table((), {}, left_out=family.tower_patterns((tower,))).unmatched_right(arrays)


def _dropped_towers(family: Family, arrays: Mapping[str, LazyArray], drop: Sequence[str]) -> Iterator[str]:
    """Yield the towers whose arrays are all dropped by name."""
    for tower in family.towers if drop else ():
        names = arrays_of(family, tower, arrays)
        if names and all(matches_any(name, drop) for name in names):
            yield tower


def _family(tree: Tree, config: Mapping[str, object], model: ModelOptions) -> Family:
    """Return the model's family; for an unknown type, the error lists families with matching names."""
    try:
        return family_for(config, model, tree.metadata.location)
    except ConfigError as error:
        matching = families_with_names_of(tree)
        own = option("family", "FILE.toml")
        hint = (
            f"{action('families')} lists all families, but none has these names: describe yours in a "
            f"file, {own}"
        )
        if len(matching) == 1:
            (only,) = matching
            family_hint = option("family", only)
            hint = (
                f"its arrays have the names of {only}: if the model computes in the same way, {family_hint} "
                f"converts it"
            )
        elif matching:
            family_hint = option("family", "NAME")
            hint = (
                f"its arrays have the names of {', '.join(matching)}, which give different values: "
                f"choose the one that computes like the model with {family_hint}"
            )
        raise error.at(hint=hint) from error


def _padded_lengths(table: Table, pad_vocab: int | None) -> dict[str, int]:
    if pad_vocab is None:
        return {}
    vocab = table.sizes.get("vocab")
    if vocab and pad_vocab < vocab.length:
        raise UsageError(
            "padding cannot remove rows",
            got=option("pad_vocab", pad_vocab),
            expected=f"at least {vocab.length} ({vocab.source})",
            hint=f"leave it out, and {vocab_setting(vocab.length)}",
        )
    return {"vocab": pad_vocab}


def vocab_setting(rows: int) -> str:
    """Describe the MaxText setting for the number of embedding rows."""
    where = "in MaxText's configs/models/*.yml, or on its command line"
    return f"set vocab_size={rows} (rows of the embedding) {where}"
