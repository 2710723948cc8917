"""Two checkpoints paired as a conversion maps them: what `verify` and `hash` compare.

Unlike `ckpttools.compare.align`, which compares whatever it finds, this refuses what a conversion would
refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, by_name, dotted, keystr
from ckpttools.compare.unnamed_side import with_joints_of
from ckpttools.compare.widened import as_wide_as
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, UsageError
from ckpttools.core.text import array_count
from ckpttools.core.wording import option
from ckpttools.digest.canonical import Selection, per_layer
from ckpttools.digest.pairing import NamedArrays, Pairing, Remark, Side
from ckpttools.families.family import Family
from ckpttools.maxtext.direction import refuse_adapters
from ckpttools.maxtext.hf_source import arrays_of
from ckpttools.maxtext.layout import HEAD
from ckpttools.maxtext.model import ModelOptions, family_for
from ckpttools.maxtext.model_config import absent_towers
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.stacked_on import remarks_about_axis
from ckpttools.maxtext.to_hf import to_huggingface
from ckpttools.maxtext.to_hf_options import ToHuggingFace
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.maxtext.to_maxtext_options import ToMaxText
from ckpttools.maxtext.tying import right_head
from ckpttools.maxtext.view import view_of

_HEAD = keystr(HEAD)


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
        if said.drop:
            raise UsageError(
                f"{option('drop')} is for arrays of Hugging Face that were left out",
                got=f"{source.metadata.place}, which is MaxText's, as the source",
                hint="leave it out",
            )
        return _as_huggingface(source, made, said.model)
    there = per_layer(made)
    options = _options(there, said)
    family = family_for(source.metadata.config, said.model, source.metadata.place)
    if not family.towers_in(name.replace("/", ".") for name in there):
        options = replace(options, text_only=True)
    why_headless = (
        f"{option('tied', 'drop')} says so" if said.model.tied else f"{made.metadata.place} has none"
    )
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
        sides: tuple[tuple[Side, Tree], ...] = ("A", made), ("B", source)
        open_axes = [Remark(text, side) for side, tree in sides for text in remarks_about_axis(tree)]
        mine = selection.arrays(made)
        # What was made of nested keys remembers them; files of the hub have names with dots.
        return Pairing(mine, with_joints_of(selection.arrays(source), mine), tuple(open_axes))
    if not selection.layers:
        hint = f"leave out {option('per_layer', False)}"
        raise UsageError("a conversion is compared layer by layer", hint=hint)
    parameters = replace(selection, parameters=True)
    return Pairing(
        parameters.arrays(made),
        parameters.chosen(named.arrays, source.metadata.place),
        tuple(map(Remark, (*named.remarks, *_unproved_towers(made, source, named)))),
        maxtext="A" if view_of(made).is_maxtext else None,
        surplus=named.surplus,
    )


def _unproved_towers(made: Tree, source: Tree, named: NamedArrays[LazyArray]) -> Iterator[str]:
    """What to say of towers that only the result of a conversion has."""
    config = ModelFiles.of(made, None).config or made.metadata.config
    if config is None:
        return
    try:
        family = family_for(config, ModelOptions(), made.metadata.place)
    except CheckpointError:
        return
    if view_of(made).is_maxtext:
        there, theirs = (
            family.towers_in(name.replace("/", ".") for name in names)
            for names in (per_layer(made), named.arrays)
        )
    else:
        weights = by_name(made.arrays)
        there, theirs = (_towers_of(family, arrays) for arrays in (weights, named.arrays))
    for tower in there:
        if tower not in theirs:
            lacking = f"{source.metadata.place} has no {tower} tower"
            yield (
                f"{lacking}: whether that of the other is right, only the whole model says; "
                "the other way round, the text alone is compared"
            )


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
    made = to_maxtext(tree, replace(options, scan=False))
    family = family_for(tree.metadata.config, options.model, tree.metadata.place)
    parameters = Tree(made.parameters)
    head, remarks = _head(tree, options), []
    dropped = [name for name in made.notes.dropped if name != head]
    if dropped:
        towerless = "its towers are not there or " if options.text_only and family.towers else ""
        said = f" or {option('drop')} says so" if options.drop else ""
        why = f"{towerless}family {family.name} has no row for it{said}"
        remarks.append(f"left out, as {why}: {array_count(dropped)}")
    if head in made.notes.dropped:
        remarks.append(f"left out, as {why_headless}: the output head, {head}")
    return NamedArrays(per_layer(parameters), tuple(remarks))


def _head(tree: Tree, options: ToMaxText) -> str | None:
    """The name of the output head of a Hugging Face tree, if its family has one."""
    family = family_for(tree.metadata.config, options.model, tree.metadata.place)
    head = right_head(family, family.spelling_of([dotted(path) for path in tree.arrays]))
    return head.head if head else None


def _options(there: Mapping[str, LazyArray], said: ConversionOptions) -> ToMaxText:
    """The options that the conversion to `there` must have had."""
    model = said.model
    if model.tied is None:
        model = replace(model, tied="materialize" if _HEAD in there else "drop")
    return ToMaxText(model=model, drop=said.drop)


def _without_towers(
    source: Tree, made: Tree, known: ModelFiles, model: ModelOptions
) -> tuple[Tree, tuple[str, ...]]:
    """A MaxText tree without the towers that a Hugging Face one neither has nor promises, and a remark."""
    arrays = by_name(made.arrays)
    config = made.metadata.config
    if config is None or absent_towers(config, arrays):
        return source, ()
    # The text model alone may be of a family without towers.
    family = family_for(known.config or config, model, made.metadata.place)
    homes = view_of(source).homes
    absent = [tower for tower in family.towers if tower not in _towers_of(family, arrays)]
    unwanted = family.of_towers(map(dotted, homes), absent)
    if not unwanted:
        return source, ()
    kept = {home: source[home] for inner, home in homes.items() if dotted(inner) not in unwanted}
    remark = f"not compared, as {made.metadata.place} has no {' and no '.join(absent)} tower"
    return Tree(kept, source.metadata), (f"{remark}: {array_count(unwanted)}",)


def _as_huggingface(source: Tree, made: Tree, model: ModelOptions) -> NamedArrays[LazyArray]:
    weights = by_name(made.arrays)
    known = ModelFiles.of(source, None)
    config = made.metadata.config or known.config
    source, towerless = _without_towers(source, made, known, model)
    # Names are those of `made`, whatever is recorded about the model that `source` came from.
    files = replace(known, config=config, weights=weights, carried={}, spelling=None)
    options = ToHuggingFace(
        model=model if model.tied else replace(model, tied="keep"), scan_axis=view_of(source).scan_axis
    )
    converted = to_huggingface(source, options, files)
    carried = {name: array for name, array in known.carried.items() if name in weights}
    # A conversion with --like leaves them out, too.
    absent = known.carried.keys() - carried.keys()
    remark = f"left out, as it is carried along and not in {made.metadata.place}: {array_count(absent)}"
    arrays = by_name(converted.tree.arrays)
    remarks = (*remarks_about_axis(source), *towerless, *([remark] if absent else []))
    return NamedArrays({**arrays, **carried}, remarks, surplus=converted.surplus)
