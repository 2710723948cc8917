"""Two checkpoints paired as a conversion maps them: what `verify` and `hash` compare.

Unlike `ckpttools.compare.align`, which compares whatever it finds, this refuses what a conversion would
refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, by_name, dotted, keystr
from ckpttools.compare.align import align
from ckpttools.compare.unnamed_side import with_joints_of
from ckpttools.compare.widened import as_wide_as
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.text import array_count, matches_any
from ckpttools.core.wording import option
from ckpttools.digest.canonical import Selection, as_stored, parameters_among, per_layer
from ckpttools.digest.pairing import NamedArrays, Pairing, Remark, Side
from ckpttools.families.family import Family
from ckpttools.maxtext.direction import refuse_adapters
from ckpttools.maxtext.hf_source import arrays_of
from ckpttools.maxtext.model import ModelOptions, family_for
from ckpttools.maxtext.model_config import absent_towers
from ckpttools.maxtext.model_files import ModelFiles, carried_arrays
from ckpttools.maxtext.stacked_on import remarks_about_axis
from ckpttools.maxtext.to_hf import to_huggingface
from ckpttools.maxtext.to_hf_options import ToHuggingFace
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.maxtext.to_maxtext_options import ToMaxText
from ckpttools.maxtext.tying import LEFT_HEAD, Head, right_head
from ckpttools.maxtext.view import view_of


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options about the conversion between two checkpoints.

    Attributes:
        model: family, RoPE layout, and what became of an output head.
        drop: patterns of Hugging Face arrays that were left out.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    drop: tuple[str, ...] = ()


def in_maxtext_names(tree: Tree, said: ConversionOptions | None = None) -> NamedArrays[LazyArray]:
    """The arrays of a MaxText tree, layers one by one; for a Hugging Face tree those that it converts to.

    Raises:
        UsageError: there are options of a conversion, and there is none.
        CheckpointError: as `to_maxtext`.
    """
    if view_of(tree).is_maxtext:
        require_none(said, "the names are MaxText's")
        return NamedArrays(per_layer(tree), remarks_about_axis(tree))
    refuse_adapters(tree)
    said = said or ConversionOptions()
    return _converted(tree, ToMaxText(model=said.model, drop=said.drop), f"{option('tied', 'drop')} says so")


def as_converted(
    source: Tree, made: Tree, said: ConversionOptions | None = None
) -> NamedArrays[LazyArray] | None:
    """The parameters of `source` as a conversion to `made` names them; None if both have the same names.

    Options that a user may have chosen for that conversion are inferred from `made`: an output head, towers,
    and float32 for what would not come back exactly otherwise. Rows beyond the vocabulary are left to
    `ckpttools.compare.padding`.

    Args:
        source: what was converted.
        made: what came of it.
        said: what the user says of the conversion.

    Raises:
        UsageError: there are options that do not fit the conversion between these.
        CheckpointError: one cannot have been converted to the other; as `to_maxtext` and `to_huggingface`.
    """
    if view_of(made).is_maxtext == view_of(source).is_maxtext:
        require_none(said, "both sides spell names alike")
        return None
    for each in (source, made):
        refuse_adapters(each)
    said = said or ConversionOptions()
    if view_of(source).is_maxtext:
        return _without_dropped(_as_huggingface(source, made, said.model), made, said.drop)
    there = per_layer(made)
    options = _options(there, source, said)
    family = family_for(source.metadata.config, said.model, source.metadata.place)
    if not family.towers_in(name.replace("/", ".") for name in there):
        options = replace(options, text_only=True)
    # Arrays without a MaxText counterpart are carried, or lost.
    options, why_headless = replace(options, carry=True), f"{option('drop')} says so"
    wanted = _converted(source, options, why_headless)
    exact = replace(options, exact=True)
    arrays = as_wide_as(there, wanted.arrays, lambda: _converted(source, exact, why_headless).arrays)
    return replace(wanted, arrays=arrays)


def paired(
    made: Tree,
    source: Tree,
    selection: Selection,
    said: ConversionOptions | None = None,
    padding_rows: str | None = None,
) -> Pairing[LazyArray]:
    """The arrays of a checkpoint, A, and those of the one it should equal, B. Reads no array.

    Args:
        made: the result of a conversion, or a checkpoint with the same names.
        source: what was converted.
        selection: which arrays to compare.
        said: what the user says of the conversion.
        padding_rows: what to do with rows beyond the vocabulary; only checked here.

    Raises:
        UsageError: there are options of a conversion, and there is none; or no array is selected.
        CheckpointError: as `as_converted`.
    """
    named = as_converted(source, made, said)
    if named is None:
        require_no_padding(padding_rows)
        return _named_alike(made, source, selection)
    if not selection.layers:
        hint = f"leave out {option('per_layer', False)}"
        raise UsageError("a conversion is compared layer by layer", hint=hint)
    is_maxtext = view_of(made).is_maxtext
    mine = {**carried_arrays(made), **per_layer(made)} if is_maxtext else per_layer(made)
    parameters = replace(selection, parameters=True)
    state = _state_of(mine if is_maxtext else per_layer(source))
    return Pairing(
        parameters.chosen(mine, made.metadata.place),
        parameters.chosen(named.arrays, source.metadata.place),
        tuple(map(Remark, (*named.remarks, *state))),
        maxtext="A" if is_maxtext else None,
        surplus=named.surplus,
        head=LEFT_HEAD if is_maxtext else named.head,
    ).without_unused(named.unused)


def _named_alike(made: Tree, source: Tree, selection: Selection) -> Pairing[LazyArray]:
    """Pair two checkpoints without converting either.

    If their names differ, they are mapped by `ckpttools.compare.align`.
    """
    sides: tuple[tuple[Side, Tree], ...] = ("A", made), ("B", source)
    mine, theirs = ({**carried_arrays(tree), **_all_arrays(tree, selection)} for _, tree in sides)
    # Converted names keep nested keys, but Hub files have dotted names.
    theirs = with_joints_of(theirs, mine)
    remarks = [Remark(text, side) for side, tree in sides for text in remarks_about_axis(tree)]
    if selection.layers and mine.keys() != theirs.keys():
        both = align(made, source)
        names = [set(selection.names(each)) for each in (both.a, both.b)]
        if names[0] == names[1] and names[0] and not both.uncompared:
            mine, theirs, remarks = dict(both.a), dict(both.b), list(both.remarks)
    places = made.metadata.place, source.metadata.place
    chosen = map(selection.chosen, (mine, theirs), places)
    return Pairing(next(chosen), next(chosen), tuple(remarks))


def _all_arrays(tree: Tree, selection: Selection) -> dict[str, LazyArray]:
    return per_layer(tree) if selection.layers else as_stored(tree)


def _state_of(arrays: Mapping[str, LazyArray]) -> Iterator[str]:
    """Report training state, which a Hugging Face model cannot hold."""
    state = arrays.keys() - parameters_among(arrays) - {"step"}
    if state:
        yield f"not compared, as a Hugging Face model has no training state: {array_count(state)}"


def _without_dropped(
    named: NamedArrays[LazyArray], made: Tree, drop: Sequence[str]
) -> NamedArrays[LazyArray]:
    """Leave out arrays that the converted checkpoint lacks and that the user dropped by name.

    Raises:
        UsageError: A pattern does not match any array that the converted checkpoint lacks.
    """
    there = by_name(made.arrays)
    lacking = [name for name in named.arrays if name not in there]
    for pattern in drop:
        if not any(matches_any(name, (pattern,)) for name in lacking):
            raise UsageError(
                f"the pattern does not match any array that {made.metadata.place} lacks",
                got=option("drop", pattern),
                wanted=f"a pattern for {array_count(lacking)}"
                if lacking
                else "no pattern: no array is missing",
                hint=f"leave out {option('drop')} to see which arrays are missing",
            )
    dropped = {name for name in lacking if matches_any(name, drop)}
    if not dropped:
        return named
    remark = f"left out, as {option('drop')} says so: {array_count(dropped)}"
    arrays = {name: array for name, array in named.arrays.items() if name not in dropped}
    return replace(named, arrays=arrays, remarks=(*named.remarks, remark))


def _towers_of(family: Family, arrays: Mapping[str, LazyArray]) -> tuple[str, ...]:
    """The towers of which a Hugging Face model has arrays."""
    return tuple(tower for tower in family.towers if arrays_of(family, tower, arrays))


def require_none(said: ConversionOptions | None, why: str) -> None:
    """Refuses options that would be ignored.

    Args:
        said: options of a conversion.
        why: why there is none.

    Raises:
        UsageError: there are such options.
    """
    if said not in (None, ConversionOptions()):
        family, rope_layout, tied, drop = map(option, ("family", "rope_layout", "tied", "drop"))
        hint = f"leave out {family}, {rope_layout}, {tied} and {drop}"
        raise UsageError(f"nothing is converted: {why}", hint=hint)


def require_no_padding(padding_rows: str | None) -> None:
    """Raises UsageError if there is an option about rows beyond a vocabulary and nothing is converted."""
    if padding_rows is not None:
        what = option("padding_rows")
        raise UsageError(
            f"{what} is for a conversion, and there is none: both sides spell names alike",
            hint="leave it out",
        )


def _converted(tree: Tree, options: ToMaxText, why_headless: str) -> NamedArrays[LazyArray]:
    """Convert a Hugging Face tree. Carried arrays keep their own names."""
    made = to_maxtext(tree, replace(options, scan=False))
    family = family_for(tree.metadata.config, options.model, tree.metadata.place)
    parameters = Tree(made.parameters)
    head, remarks = _head(tree, options), []
    dropped = [name for name in made.notes.dropped if head is None or name != head.head]
    if dropped:
        towerless = "its towers are not there or " if options.text_only and family.towers else ""
        no_row = (
            "a model computes it" if options.carry else f"{towerless}family {family.name} has no row for it"
        )
        said = f" or {option('drop')} says so" if options.drop else ""
        remarks.append(f"left out, as {no_row}{said}: {array_count(dropped)}")
    if head is not None and head.head in made.notes.dropped:
        remarks.append(f"left out, as {why_headless}: the output head, {head.head}")
    arrays = {**made.carried, **per_layer(parameters)}
    return NamedArrays(arrays, tuple(remarks), unused=family.unused)


def _head(tree: Tree, options: ToMaxText) -> Head | None:
    """Return the names of output head and embedding in a Hugging Face tree, if its family has a head."""
    family = family_for(tree.metadata.config, options.model, tree.metadata.place)
    return right_head(family, family.spelling_of([dotted(path) for path in tree.arrays]))


def _options(there: Mapping[str, LazyArray], source: Tree, said: ConversionOptions) -> ToMaxText:
    """Infer the options of the conversion to `there`.

    The head of the source is always converted, unless the user drops it by name. `ckpttools.compare.padding`
    compares it with the embedding to decide whether it was lost.
    """
    model, options = said.model, ToMaxText(model=said.model, drop=said.drop)
    head = _head(source, options)
    names = {dotted(path) for path in source.arrays}
    if head is not None and matches_any(head.head, said.drop):
        model = replace(model, tied="drop")
    elif head is not None and head.head in names:
        model = replace(model, tied="keep")
    elif model.tied is None:
        model = replace(model, tied="materialize" if LEFT_HEAD.head in there else "drop")
    return replace(options, model=model)


def _without_towers(
    source: Tree, made: Tree, known: ModelFiles, model: ModelOptions
) -> tuple[Tree, dict[str, LazyArray]]:
    """Split off the towers of a MaxText tree that a Hugging Face tree neither has nor promises.

    Returns:
        The rest of the tree, and the arrays of those towers by name.
    """
    arrays = by_name(made.arrays)
    config = made.metadata.config
    if config is None or absent_towers(config, arrays):
        return source, {}
    # The text model alone may be of a family without towers.
    family = family_for(known.config or config, model, made.metadata.place)
    homes = view_of(source).homes
    absent = [tower for tower in family.towers if tower not in _towers_of(family, arrays)]
    unwanted = family.of_towers(map(dotted, homes), absent)
    if not unwanted:
        return source, {}
    kept = {home: source[home] for inner, home in homes.items() if dotted(inner) not in unwanted}
    lost = {inner: home for inner, home in homes.items() if dotted(inner) in unwanted}
    return Tree(kept, source.metadata), {
        keystr(inner): source.arrays[home] for inner, home in lost.items() if home in source.arrays
    }


def _as_huggingface(source: Tree, made: Tree, model: ModelOptions) -> NamedArrays[LazyArray]:
    weights = by_name(made.arrays)
    known = ModelFiles.of(source, None)
    config = made.metadata.config or known.config
    source, lost = _without_towers(source, made, known, model)
    # Names are those of `made`, whatever is recorded about the model that `source` came from.
    files = replace(known, config=config, weights=weights, carried={}, spelling=None)
    options = ToHuggingFace(
        model=replace(model, tied="materialize" if model.tied == "materialize" else "keep"),
        scan_axis=view_of(source).scan_axis,
    )
    converted = to_huggingface(source, options, files)
    arrays = by_name(converted.tree.arrays)
    remarks = remarks_about_axis(source)
    family = family_for(config, model, made.metadata.place) if config or model.family else None
    head = None if family is None else right_head(family, family.spelling_of(arrays))
    named = {**lost, **carried_arrays(source), **arrays}
    unused = () if family is None else family.unused
    return NamedArrays(named, remarks, surplus=converted.surplus, head=head, unused=unused)
