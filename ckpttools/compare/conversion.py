"""Pair two checkpoints by the mapping of a conversion, as compared by `verify` and `hash`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.patterns import expand_branches
from ckpttools.array.tree import Tree, by_name, dotted, keystr
from ckpttools.compare.align import AlignOptions, align, as_maxtext, plain_names, with_joints_of, with_keys
from ckpttools.compare.padding import drop_computed_buffers, drop_equal_head
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, CoverageError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.text import array_count, matches_any
from ckpttools.digest.canonical import Selection, as_stored, parameters_among, per_layer
from ckpttools.digest.leaves import differing_leaves
from ckpttools.digest.pairing import NamedArrays, Pairing, Remark
from ckpttools.maxtext.conversion_options import ToHuggingFace, ToMaxText
from ckpttools.maxtext.model_config import absent_towers
from ckpttools.maxtext.model_files import ModelFiles, carried_arrays
from ckpttools.maxtext.model_options import ModelOptions, family_for
from ckpttools.maxtext.scan_axis import scan_axis_remarks
from ckpttools.maxtext.source_checks import refuse_adapters
from ckpttools.maxtext.tied_embeddings import LEFT_HEAD, Head, right_head
from ckpttools.maxtext.to_hf import to_huggingface
from ckpttools.maxtext.to_maxtext import arrays_of, normalize_patterns, to_maxtext
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import Family


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options of the conversion between two checkpoints.

    Attributes:
        model: Family, RoPE layout, and handling of an output head.
        drop: Patterns of Hugging Face arrays that were left out.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    drop: tuple[str, ...] = ()


def name_like_maxtext(
    tree: Tree, declared: ConversionOptions | None = None, *, is_strict: bool = True
) -> NamedArrays[LazyArray]:
    """Return the arrays of a tree under MaxText's names, with separate layers. Reads nothing.

    Arrays that MaxText does not have keep their own names, so that a comparison lists them.

    Args:
        tree: A MaxText checkpoint, or a Hugging Face checkpoint, which is converted.
        declared: Options of the conversion.
        is_strict: Whether to reject arrays that a conversion rejects. Otherwise, arrays are named as far as
            the mapping rows of the family allow.

    Raises:
        UsageError: Conversion options are given without a conversion.
        CheckpointError: See `to_maxtext`.
    """
    if view_of(tree).is_maxtext:
        require_none(declared, "the names are MaxText's")
        carried, config = carried_arrays(tree), tree.metadata.config
        unused = (
            family_for(config, ModelOptions(), tree.metadata.location).unused if carried and config else ()
        )
        arrays = {**carried, **per_layer(tree)}
        return NamedArrays(arrays, scan_axis_remarks(tree), head=LEFT_HEAD, unused=unused)
    refuse_adapters(tree)
    declared = declared or ConversionOptions()
    try:
        return _convert(tree, ToMaxText(model=declared.model, drop=declared.drop, carry=True, scan=False))
    except CoverageError:
        if is_strict:
            raise
    source, dropped = _drop_named(tree, declared.drop, declared.model) if declared.drop else (tree, ())
    options = AlignOptions(declared.model)
    named = as_maxtext(plain_names(source, source, options), options)
    return replace(named, remarks=(*dropped, *named.remarks))


def drop_implied_arrays(
    named: NamedArrays[LazyArray],
    names: Collection[str],
    config: Mapping[str, Any] | None,
    memory: int,
) -> NamedArrays[LazyArray]:
    """Leave out arrays that the other side lacks and that change nothing, with a remark. Reads buffers.

    Args:
        named: All arrays of one side.
        names: Names of the arrays on the other side.
        config: The model's configuration.
        memory: Peak memory limit in bytes.

    Raises:
        CheckpointError: A buffer cannot be read.
    """
    common = {name: array for name, array in named.arrays.items() if name in names}
    both = Pairing(named.arrays, common, head=named.head, configs=(config, None)).drop_unused(named.unused)
    left = drop_equal_head(drop_computed_buffers(both, memory), memory)
    return replace(named, arrays=left.a, remarks=(*named.remarks, *(remark.text for remark in left.remarks)))


def pair_conversion(
    built: Tree,
    source: Tree,
    selection: Selection,
    declared: ConversionOptions | None = None,
    padding_rows: str | None = None,
) -> Pairing[LazyArray]:
    """Pair the arrays of a checkpoint, A, with those of the one that it should equal, B. Reads no arrays.

    Names are mapped as by `ckpttools.compare.align` for `diff`, so that both find the same differences.

    Args:
        built: The result of a conversion, or a checkpoint with the same names.
        source: The checkpoint that was converted.
        selection: The arrays to compare.
        declared: Options of the conversion.
        padding_rows: How to treat rows beyond the vocabulary; only validated here.

    Raises:
        UsageError: Conversion options are given without a conversion, or no array is selected.
        CheckpointError: One of the checkpoints is an adapter.
    """
    built, source = with_keys(built), with_keys(source)
    declared = _check_options(built, source, selection, declared, padding_rows)
    if not selection.layers:
        carried_a, carried_b = ({**carried_arrays(tree), **as_stored(tree)} for tree in (built, source))
        # Trees with nested keys keep them, while names in Hugging Face files have dots.
        both: Pairing[LazyArray] = Pairing(carried_a, with_joints_of(carried_b, carried_a))
        if selection.parameters:
            both = Pairing(_parameters(both.a), _parameters(both.b))
        both = replace(both, leaves=differing_leaves(built, source, selection.parameters))
    else:
        dropped: tuple[str, ...] = ()
        if declared.drop and view_of(built).is_maxtext:
            source, dropped = _drop_named(source, declared.drop, declared.model)
        options = AlignOptions(
            declared.model, padding_rows=padding_rows, parameters=selection.parameters, lists_state=True
        )
        both = align(built, source, options)
        both = replace(both, remarks=(*both.remarks, *map(Remark, dropped)))
    matching = both.matching(selection.pattern)
    if not matching.a and not matching.b:
        selection.chosen(both.a or both.b, built.metadata.location)
    return matching


def _parameters(arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    names = parameters_among(arrays)
    return {name: array for name, array in arrays.items() if name in names}


def _check_options(
    tree: Tree,
    source: Tree,
    selection: Selection,
    options: ConversionOptions | None,
    padding_rows: str | None,
) -> ConversionOptions:
    """Return the options of the conversion. Raises UsageError for options that would be ignored."""
    if view_of(tree).is_maxtext == view_of(source).is_maxtext:
        require_none(options, "both sides have the same names")
        require_no_padding(padding_rows)
    elif not selection.layers:
        hint = f"leave out {option('per_layer', False)}"
        raise UsageError("a conversion is compared layer by layer", hint=hint)
    else:
        for item in (source, tree):
            refuse_adapters(item)
    return options or ConversionOptions()


def _drop_named(source: Tree, drop: Sequence[str], model: ModelOptions) -> tuple[Tree, tuple[str, ...]]:
    """Return a Hugging Face tree without the arrays that the user dropped by name, and remarks.

    Raises:
        UsageError: A pattern matches no array.
    """
    names = {path: dotted(path) for path in source.arrays}
    drop = expand_branches(normalize_patterns(drop, source), names.values())
    for pattern in drop:
        if not any(matches_any(name, (pattern,)) for name in names.values()):
            raise UsageError(
                f"no array of {source.metadata.location} matches this pattern",
                got=option("drop", pattern),
                hint=f"leave out {option('drop')} to see which arrays are missing",
            )
    dropped = {path for path, name in names.items() if matches_any(name, drop)}
    kept = {path: leaf for path, leaf in source.items() if path not in dropped}
    try:
        head = _head(source, ToMaxText(model=model))
    except CheckpointError:
        head = None  # The comparison itself identifies the model.
    heads = {path for path in dropped if head is not None and names[path] == head.head}
    reason, others = f"left out because of {option('drop')}", dropped - heads
    remarks = [f"{reason}: {array_count(others)}"] if others else []
    remarks += [f"{reason}: the output head, {names[path]}" for path in heads]
    return Tree(kept, source.metadata), tuple(remarks)


def as_huggingface(
    hub: Tree, maxtext: Tree, selection: Selection, options: ConversionOptions | None = None
) -> Pairing[LazyArray]:
    """Pair the parameters of a Hugging Face checkpoint, A, with those of a converted MaxText checkpoint, B.

    Conversions that round are exact in one direction only: converting a checkpoint to Hugging Face and back
    may not give the same MaxText arrays.

    Raises:
        UsageError: A pattern of `declared.drop` matches no array that `hub` lacks.
        CheckpointError: See `to_huggingface`.
    """
    options = options or ConversionOptions()
    hub, maxtext = with_keys(hub), with_keys(maxtext)
    hub = plain_names(hub, maxtext, AlignOptions(options.model))
    named = _leave_out_dropped(_as_huggingface(maxtext, hub, options.model), hub, options.drop)
    parameters = replace(selection, parameters=True)
    return Pairing(
        parameters.chosen(per_layer(hub), hub.metadata.location),
        parameters.chosen(named.arrays, maxtext.metadata.location),
        tuple(map(Remark, named.remarks)),
        extra=named.extra,
        head=named.head,
        configs=(hub.metadata.config, maxtext.metadata.config),
    ).drop_unused(named.unused)


def _leave_out_dropped(
    named: NamedArrays[LazyArray], tree: Tree, drop: Sequence[str]
) -> NamedArrays[LazyArray]:
    """Leave out arrays that the converted checkpoint lacks and that the user dropped by name.

    Raises:
        UsageError: A pattern does not match any array that the converted checkpoint lacks.
    """
    built_arrays = by_name(tree.arrays)
    absent = [name for name in named.arrays if name not in built_arrays]
    for pattern in drop:
        if not any(matches_any(name, (pattern,)) for name in absent):
            raise UsageError(
                f"the pattern does not match any array that {tree.metadata.location} lacks",
                got=option("drop", pattern),
                expected=f"a pattern for {array_count(absent)}"
                if absent
                else "no pattern: no array is missing",
                hint=f"leave out {option('drop')} to see which arrays are missing",
            )
    dropped = {name for name in absent if matches_any(name, drop)}
    if not dropped:
        return named
    remark = f"left out because of {option('drop')}: {array_count(dropped)}"
    arrays = {name: array for name, array in named.arrays.items() if name not in dropped}
    return replace(named, arrays=arrays, remarks=(*named.remarks, remark))


def _towers_of(family: Family, arrays: Mapping[str, LazyArray]) -> tuple[str, ...]:
    """Return the towers whose arrays a Hugging Face model has."""
    return tuple(tower for tower in family.towers if arrays_of(family, tower, arrays))


def require_none(options: ConversionOptions | None, reason: str) -> None:
    """Reject options that would be ignored.

    Args:
        options: Options of a conversion.
        reason: Why there is no conversion.

    Raises:
        UsageError: Options are set.
    """
    if options not in (None, ConversionOptions()):
        family, rope_layout, tied, drop = map(option, ("family", "rope_layout", "tied", "drop"))
        hint = f"leave out {family}, {rope_layout}, {tied} and {drop}"
        raise UsageError(f"nothing is converted: {reason}", hint=hint)


def require_no_padding(padding_rows: str | None) -> None:
    """Raise UsageError if an option for rows beyond the vocabulary is set but nothing is converted."""
    if padding_rows is not None:
        padding_option = option("padding_rows")
        raise UsageError(
            f"{padding_option} requires a conversion, but both sides have the same names",
            hint="leave it out",
        )


def _convert(tree: Tree, options: ToMaxText) -> NamedArrays[LazyArray]:
    """Convert a Hugging Face tree. Arrays that a conversion leaves out by default keep their own names."""
    result = to_maxtext(tree, options)
    family = family_for(tree.metadata.config, options.model, tree.metadata.location)
    dropped = {name for name in result.notes.dropped if matches_any(name, options.drop)}
    unmapped = {*result.notes.dropped} - dropped
    rest = {name: array for name, array in by_name(tree.arrays).items() if name in unmapped}
    remarks = [f"left out because of {option('drop')}: {array_count(dropped)}"] if dropped else []
    head = None if result.lost_head is None else Head(LEFT_HEAD.embedding, result.lost_head.names.head)
    arrays = {**rest, **result.recomputed, **result.carried, **per_layer(Tree(result.parameters))}
    return NamedArrays(arrays, tuple(remarks), head=head, unused=family.unused)


def _head(tree: Tree, options: ToMaxText) -> Head | None:
    """Return the names of output head and embedding of a Hugging Face tree, if its family has a head."""
    family = family_for(tree.metadata.config, options.model, tree.metadata.location)
    return right_head(family, family.spelling_of([dotted(path) for path in tree.arrays]))


def _split_off_towers(
    source: Tree, tree: Tree, known: ModelFiles, model: ModelOptions
) -> tuple[Tree, dict[str, LazyArray]]:
    """Split off the towers of a MaxText tree that the Hugging Face tree neither has nor declares.

    Returns:
        The rest of the tree, and the arrays of these towers by name.
    """
    arrays = by_name(tree.arrays)
    config = tree.metadata.config
    if config is None or absent_towers(config, arrays):
        return source, {}
    # The text model alone may belong to a family without towers.
    family = family_for(known.config or config, model, tree.metadata.location)
    tree_paths = view_of(source).homes
    absent = [tower for tower in family.towers if tower not in _towers_of(family, arrays)]
    unwanted = family.of_towers(map(dotted, tree_paths), absent)
    if not unwanted:
        return source, {}
    kept = {
        tree_path: source[tree_path]
        for inner, tree_path in tree_paths.items()
        if dotted(inner) not in unwanted
    }
    lost = {inner: tree_path for inner, tree_path in tree_paths.items() if dotted(inner) in unwanted}
    return Tree(kept, source.metadata), {
        keystr(inner): source.arrays[tree_path]
        for inner, tree_path in lost.items()
        if tree_path in source.arrays
    }


def _as_huggingface(source: Tree, tree: Tree, model: ModelOptions) -> NamedArrays[LazyArray]:
    weights = by_name(tree.arrays)
    known = ModelFiles.of(source, None)
    config = tree.metadata.config or known.config
    source, lost = _split_off_towers(source, tree, known, model)
    # Names are those of `built`, regardless of recorded facts about the model that `source` came from. If
    # rotary pairs are not in the order of the family, this counts as a difference in both directions, unless
    # requested.
    files = replace(known, config=config, weights=weights, carried={}, spelling=None, rope_layout=None)
    options = ToHuggingFace(
        model=replace(model, tied="materialize" if model.tied == "materialize" else "keep"),
        scan_axis=view_of(source).scan_axis,
    )
    converted = to_huggingface(source, options, files)
    arrays = by_name(converted.tree.arrays)
    remarks = scan_axis_remarks(source)
    family = family_for(config, model, tree.metadata.location) if config or model.family else None
    head = None if family is None else right_head(family, family.spelling_of(arrays))
    named = {**lost, **carried_arrays(source), **arrays}
    unused = () if family is None else family.unused
    return NamedArrays(named, remarks, extra=converted.extra, head=head, unused=unused)
