"""A Hugging Face tree as the one that MaxText's own converter makes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path as TreePath
from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import ConfigError, CoverageError, UsageError
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count, plural
from ckpttools.core.wording import option, quoted
from ckpttools.families.family import Family
from ckpttools.formats.base import ReadOptions
from ckpttools.mapping.mapped import Mapped
from ckpttools.mapping.table import Table
from ckpttools.maxtext import tying
from ckpttools.maxtext.agreement import own_rows
from ckpttools.maxtext.family_layouts import family_in
from ckpttools.maxtext.flavours import linen_state
from ckpttools.maxtext.layout import SCAN_AXES, SCAN_AXIS, SCAN_LAYERS
from ckpttools.maxtext.model import CONFIG, ModelOptions, check_choice, family_for, required, rope_flags
from ckpttools.maxtext.native import (
    HOW_LOADED,
    QUANTIZED,
    SCALE,
    KeptWeights,
    Quantized,
    kept_weights,
    misfits_remark,
    native_grids,
    refusing,
)
from ckpttools.maxtext.odd_dtypes import odd_dtypes, of_one_dtype
from ckpttools.maxtext.parts import refuse_lost
from ckpttools.maxtext.recognition import families_with_names_of
from ckpttools.maxtext.stacked_on import with_scan_axis
from ckpttools.maxtext.variables import as_variables
from ckpttools.maxtext.versions import NEWEST, version_called
from ckpttools.quantized.config import says_quantized, scheme
from ckpttools.quantized.decoding import Like
from ckpttools.quantized.refusals import refuse_quantized, refuse_unmappable
from ckpttools.transforms.cast import cast, cast_notes
from ckpttools.transforms.dequantize import dequantized
from ckpttools.transforms.unwrapped import patterns_of_others, unwrapped


@dataclass(frozen=True, slots=True)
class ToMaxText:
    """How a Hugging Face checkpoint becomes a MaxText one.

    Attributes:
        scan: stack the layers, as MaxText's `scan_layers=true` wants them.
        scan_axis: the axis on which they are stacked (MaxText's `param_scan_axis`).
        dtype: dtype of all floating-point arrays; None keeps those stored.
        exact: store in float32 what would otherwise not come back to the bit.
        maxtext: version whose layout is written, as `ckpttools.maxtext.versions.VERSIONS` names them.
        pad_vocab: rows that the embedding gets at least, zeros at the end; None for those of the model.
        model: what the user says of the model.
        drop: patterns of source arrays to leave out.
        text_only: leave out the towers (vision, audio).
        carry: keep what is not converted (prediction layers, towers that are left out) in the checkpoint,
            for the way back.
        leaves_out: leave out what MaxText has no place for, unasked: where nothing is written, nothing is
            lost.
        read: options for opening the source.
        dequantize_like: how products of quantised weights and their scales are rounded, as of
            `ckpttools.transforms.dequantize.Dequantize`.
        quantized: what becomes of quantised weights: "dequantize", or "keep" for FP8 as MaxText keeps it.
    """

    scan: bool = True
    scan_axis: int = SCAN_AXIS
    dtype: DType | None = None
    exact: bool = False
    maxtext: str = NEWEST
    pad_vocab: int | None = None
    model: ModelOptions = field(default_factory=ModelOptions)
    drop: Sequence[str] = ()
    text_only: bool = False
    carry: bool = False
    leaves_out: bool = False
    read: ReadOptions = field(default_factory=ReadOptions)
    dequantize_like: Like = "float32"
    quantized: Quantized = "dequantize"

    def __post_init__(self) -> None:
        if self.scan and self.scan_axis not in SCAN_AXES:
            wanted = " or ".join(map(str, SCAN_AXES))
            raise UsageError("layers cannot be stacked on this axis", got=self.scan_axis, wanted=wanted)
        version = version_called(self.maxtext)
        check_choice("way with quantised weights", self.quantized, QUANTIZED)
        if self.quantized == "keep" and not version.has_fp8:
            raise UsageError(
                f"MaxText {self.maxtext} has no quantised weights",
                got=option("quantized", "keep"),
                hint=f"leave it out, or {option('maxtext', NEWEST)}",
            )
        if self.exact and self.dtype is not None:
            raise UsageError(
                f"{option('exact', True)} chooses dtypes so that nothing is lost, "
                f"{option('dtype')} casts all",
                hint="leave one of them out",
            )


@dataclass(frozen=True)
class MaxTextState:
    """What a Hugging Face tree becomes.

    Attributes:
        state: the tree that MaxText's own converter makes.
        carried: arrays that MaxText has no place for and that are to be kept.
        spelling: how the source writes names.
        notes: what the user should know.
        dtypes: as of `ckpttools.maxtext.odd_dtypes.odd_dtypes`, for the way back.
    """

    state: Tree
    carried: Mapping[str, LazyArray]
    spelling: str
    notes: Notes
    dtypes: Mapping[str, str] = field(default_factory=dict)


def to_maxtext(tree: Tree, options: ToMaxText) -> MaxTextState:
    """A Hugging Face tree as the tree MaxText's own converter makes, and what the user should know.

    Raises:
        ConfigError: there is no configuration, or it is not one.
        CoverageError: the arrays do not match it, or a part of the model would be lost unasked.
        FormatError: weights are quantised in a way that is not read, or are not with their scales.
    """
    plain = unwrapped(tree, options.drop)
    try:
        return _to_maxtext(plain.tree, options, tree.metadata.notes + plain.notes)
    except CoverageError as error:
        others = patterns_of_others(plain.tree)
        if not others:
            raise
        leave = " ".join(quoted("drop", each) for each in others)
        raise error.at(hint=f"there is more than a model in it: {leave} leaves it out") from error


def _to_maxtext(tree: Tree, options: ToMaxText, noted: Notes) -> MaxTextState:
    kept, said = _unquantized(tree, options)
    said = noted + said
    tree = kept.tree
    arrays = by_name(tree.arrays)
    widened: tuple[str, ...] = ()
    if options.dtype is not None and options.scan:
        arrays, widened = of_one_dtype(arrays)
    family, table = _table(tree, arrays, options)
    config, place = tree.metadata.config, tree.metadata.place
    if not kept.scales:
        # Of all arrays: those that are left out may be the scales of others.
        refuse_quantized(arrays, config, place)
    spelling = family.spelling_of(arrays)
    head = tying.right_head(family, spelling)
    if options.model.tied == "materialize" and head and head.head not in arrays and head.embedding in arrays:
        arrays[head.head] = arrays[head.embedding]
    drop = options.drop
    if options.model.tied == "drop" and head and head.head in arrays:
        drop = (*drop, head.head)
    grids = native_grids(table, arrays, kept)
    with refusing(grids.problems, config, place):
        mapped = grids.table.to_left(arrays, drop, exact=options.exact)
    if config is not None:
        own_rows(
            options.model.family,
            config,
            place,
            lambda each: _bound(each, tree, arrays, options)[1].to_left(arrays, drop).arrays,
        )
    refuse_unmappable(_without(mapped.weights, grids.scales), config, place)
    homeless = table.left_out_of({**arrays, **kept.aside})
    homeless = {key: array for key, array in homeless.items() if not _is_in(key, drop)}
    if not (options.carry or options.text_only or options.leaves_out):
        refuse_lost(family, homeless, place)
    carried = homeless if options.carry else {}
    dtype = options.dtype
    made = {
        key: cast(array, dtype) if dtype and key not in grids.scales else array
        for key, array in mapped.arrays.items()
    }
    made |= {key + SCALE: scales for key, scales in grids.scales.items()}
    parameters: dict[TreePath, LazyArray] = {
        tuple(key.split(".")): array for key, array in sorted(made.items())
    }
    state = linen_state(parameters, 0, {SCAN_LAYERS: options.scan})
    if options.scan:
        state = as_variables(with_scan_axis(state, options.scan_axis), version_called(options.maxtext))
    towers = [name for tower in family.towers for name in _arrays_of(family, tower, homeless)]
    way = _way_back(family, options)
    lost = () if carried else [key for key in homeless if key not in towers]
    stale = () if kept.scales else _stale(says_quantized(config))
    misfits = filter(None, [misfits_remark(grids.misfits)])
    remarks = (*widened, *stale, *misfits, *_lost(lost), *_without_towers(towers, way))
    values = replace(
        mapped,
        arrays=_without(mapped.arrays, grids.scales),
        values=(*mapped.values, *grids.values),
    )
    notes = said + _notes(family, values, options, carried) + Notes(remarks=remarks)
    dtypes = {} if dtype else odd_dtypes(arrays, mapped.altered, spelling.plain)
    return MaxTextState(state, carried, spelling.name, notes, dtypes)


def _unquantized(tree: Tree, options: ToMaxText) -> tuple[KeptWeights, Notes]:
    """The tree without scales: weights dequantised, or as they are; and what to say of it."""
    if options.quantized == "keep":
        kept = kept_weights(tree)
        count = plural(len(kept.scales), "weight")
        said = f"{count} of the source are kept in FP8, with their scales: {HOW_LOADED}"
        return kept, Notes(remarks=(said,))
    plain = dequantized(tree, options.dtype, options.dequantize_like)
    return KeptWeights(plain.tree), plain.notes


def _without(arrays: Mapping[str, LazyArray], names: Collection[str]) -> dict[str, LazyArray]:
    return {key: array for key, array in arrays.items() if key not in names}


def _stale(said: Mapping[str, object] | None) -> Iterator[str]:
    """What to say of a configuration that calls plain weights quantised."""
    if said:
        yield f"{CONFIG} says {scheme(said)}, but no weight is quantised: they are taken as they are"


def _table(tree: Tree, arrays: Mapping[str, LazyArray], options: ToMaxText) -> tuple[Family, Table]:
    """The family and its rows, bound to the model in `tree`."""
    config = required(tree.metadata.config, tree.metadata.place)
    return _bound(_family(tree, config, options.model), tree, arrays, options)


def _bound(
    family: Family, tree: Tree, arrays: Mapping[str, LazyArray], options: ToMaxText
) -> tuple[Family, Table]:
    """A family in the version's layout, and its rows, bound to the model in `tree`."""
    place = tree.metadata.place
    config = required(tree.metadata.config, place)
    family = family_in(family, version_called(options.maxtext))
    spelling = family.spelling_of(arrays)
    head = tying.right_head(family, spelling)
    tied = tying.tied_flags(options.model.tied, head.head if head else None, arrays)
    table = family.table(
        config,
        CONFIG,
        scan_axis=options.scan_axis if options.scan else None,
        spelling=spelling,
        overrides={**rope_flags(family, options.model), **tied},
        without=family.towers if options.text_only else tuple(_dropped_towers(family, arrays, options.drop)),
    )
    _require_towers(family, table, arrays, place)
    if options.scan:
        _refuse_scanned(family, table)
    return family, replace(table, place=place, padded=_padded(table, options.pad_vocab))


def _refuse_scanned(family: Family, table: Table) -> None:
    """Refuses layers that MaxText does not scan; errors as `Family.refuse_scanned`."""
    has_towers = any(table.flags[tower].value for tower in family.towers)
    alone = "" if family.never_scanned else f"; {option('text_only', True)} leaves the towers out"
    hint = f"{option('scan', False)} keeps them apart, and MaxText runs them with scan_layers=false{alone}"
    family.refuse_scanned(hint, has_towers=has_towers)


def _require_towers(family: Family, table: Table, arrays: Mapping[str, LazyArray], place: str) -> None:
    """Refuses a model of which the configuration describes a tower that is not there at all.

    Raises:
        CoverageError: it does; where parts of a tower are missing, the rows tell which.
    """
    for tower in family.towers:
        flag = table.flags[tower]
        if flag.value and not _arrays_of(family, tower, arrays):
            raise CoverageError(
                f"the model has a tower ({tower}) of which no array is there",
                place=place,
                got=flag.source,
                wanted="all of the model's arrays",
                hint=f"check that all of its files are there, or {option('text_only', True)} "
                "converts the text model alone",
            )


def _arrays_of(family: Family, tower: str, arrays: Mapping[str, LazyArray]) -> Mapping[str, LazyArray]:
    """A tower's arrays in Hugging Face's files."""
    return Table((), {}, left_out=family.tower_patterns((tower,))).left_out_of(arrays)


def _dropped_towers(family: Family, arrays: Mapping[str, LazyArray], drop: Sequence[str]) -> Iterator[str]:
    """The towers that are left out by the names of all of their arrays."""
    for tower in family.towers if drop else ():
        names = _arrays_of(family, tower, arrays)
        if names and all(_is_in(name, drop) for name in names):
            yield tower


def _is_in(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


def _family(tree: Tree, config: Mapping[str, object], model: ModelOptions) -> Family:
    """The model's family. Where none has its type, the error names those that have its arrays' names."""
    try:
        return family_for(config, model, tree.metadata.place)
    except ConfigError as error:
        fitting = families_with_names_of(tree)
        own = option("family", "FILE.toml")
        hint = f"`ckpt families` lists what there is, none with these names: describe yours in a file, {own}"
        if len(fitting) == 1:
            (only,) = fitting
            chosen = option("family", only)
            hint = f"its arrays have the names of {only}: if the model computes alike, {chosen} converts it"
        elif fitting:
            chosen = option("family", "NAME")
            hint = (
                f"its arrays have the names of {', '.join(fitting)}, of which each makes values of its own: "
                f"{chosen}, of the one that computes as the model does"
            )
        raise error.at(hint=hint) from error


def _padded(table: Table, pad_vocab: int | None) -> dict[str, int]:
    if pad_vocab is None:
        return {}
    vocab = table.sizes.get("vocab")
    if vocab and pad_vocab < vocab.length:
        raise UsageError(
            "padding cannot take rows away",
            got=option("pad_vocab", pad_vocab),
            wanted=f"at least {vocab.length} ({vocab.source})",
            hint=f"leave it out, and {_vocab_setting(vocab.length)}",
        )
    return {"vocab": pad_vocab}


def _notes(family: Family, mapped: Mapped, options: ToMaxText, carried: Mapping[str, LazyArray]) -> Notes:
    inexact = [Note(each.key, each.reason) for each in mapped.values if not each.exact]
    values = [Note(each.key, each.reason) for each in mapped.values if each.exact]
    if options.dtype is not None:
        inexact += cast_notes(mapped.arrays, options.dtype)
    values += _vocab_notes(family, mapped.sizes.get("vocab"), options.pad_vocab)
    if carried:
        values.append(Note(f"{len(carried)} arrays", "carried along as they are, for the way back"))
    return Notes(tuple(inexact), tuple(values), tuple(key for key in mapped.dropped if key not in carried))


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
    if any(each.name == "text" for each in family.spellings):
        model += f", or writes the text model alone ({option('names', 'text')})"
    return f"are left out, also for the way back, {model}"


def _without_towers(towers: Collection[str], way: str) -> Iterator[str]:
    """What to say of towers that are left out."""
    if towers:
        yield f"as {option('text_only', True)} says, the towers {way}: {array_count(towers)}"


def _vocab_setting(rows: int) -> str:
    """How MaxText learns of the number of rows in the table of token embeddings."""
    where = "in MaxText's configs/models/*.yml, or on its command line"
    return f"set vocab_size={rows} (rows of the embedding) {where}"


def _vocab_notes(family: Family, vocab: int | None, pad_vocab: int | None) -> Iterator[Note]:
    """What is added to the vocabulary, and what MaxText's own configuration would rather have."""
    if vocab is None:
        return
    if pad_vocab:
        yield Note("vocabulary", f"padded with zeros from {vocab} rows to {pad_vocab}")
    wanted = family.maxtext_vocab.get(vocab, vocab)
    if wanted != vocab and wanted != pad_vocab:
        remedy = f"{option('pad_vocab', wanted)}, or " if wanted > vocab else ""
        text = f"{vocab} rows, {wanted} in MaxText's own configuration: {remedy}{_vocab_setting(vocab)}"
        yield Note("vocabulary", text)
