"""A MaxText tree as a Hugging Face one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Metadata, Tree, by_name, dotted, spelled
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import CheckpointError, ConfigError, CoverageError, UsageError, did_you_mean
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import in_natural_order
from ckpttools.core.wording import option
from ckpttools.families.family import Family, Spelling
from ckpttools.families.registry import families
from ckpttools.formats.base import COMPANIONS, ReadOptions
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.sizes import Size
from ckpttools.mapping.table import Mapped, Table, ValueNote
from ckpttools.maxtext import tying
from ckpttools.maxtext.agreement import own_rows, same_family, same_values
from ckpttools.maxtext.config.back import SETTINGS, config_of_settings
from ckpttools.maxtext.family_layouts import family_as_stored
from ckpttools.maxtext.from_native import SCALE_INV, hugging_face_grids, native_of, notes_of, with_scheme
from ckpttools.maxtext.layer_notes import LayerNotes, with_layer_notes
from ckpttools.maxtext.model import CONFIG, ModelOptions, check_choice, family_for, rope_flags
from ckpttools.maxtext.model_config import (
    TrueConfig,
    absent_prediction,
    absent_towers,
    text_config,
    true_config,
)
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.native import QUANTIZED, Quantized, refusing
from ckpttools.maxtext.odd_dtypes import main_dtype, restored
from ckpttools.maxtext.parts import promising_less
from ckpttools.maxtext.stacked_on import stored_scan_axis, told_scan_axis, with_scan_axis
from ckpttools.maxtext.view import view_of
from ckpttools.maxtext.vocabulary import WAYS, Surplus
from ckpttools.quantized.refusals import refuse_quantized, refuse_unmappable
from ckpttools.quantized.weights import quantized
from ckpttools.stores.registry import Where, parse
from ckpttools.transforms.cast import cast, cast_notes

_VOCAB = "vocab"
# The spelling of a text model's names.
TEXT = "text"


@dataclass(frozen=True, slots=True)
class ToHuggingFace:
    """How a MaxText checkpoint becomes a Hugging Face one.

    Attributes:
        like: directory of the model it came from, or a `config.json`; None for what was carried along.
        dtype: dtype of all floating-point arrays; None keeps those stored.
        prefix: path of a model within a composite one, keys joined by "/"; only its arrays are written.
        spelling: how names are written, "hub", "transformers" or "text"; None as in the model it came from.
            "text" is the text model of a multimodal one as a model of its own, with its own configuration.
        scan_axis: the axis on which layers are stacked, where the arrays do not show it.
        model: what the user says of the model.
        carry: arrays that MaxText has no place for are taken from `like`.
        padding_rows: what becomes of rows beyond the vocabulary: "keep" writes them, with a vocabulary of so
            many, "drop" leaves them out, whatever they hold; None leaves out zeros and refuses others.
        read: options for opening the source.
        quantized: what becomes of FP8 weights: "keep" writes them with their scales, "dequantize" makes
            numbers of them; None keeps them unless there is a dtype.
        maxtext_config: settings of the run, as they are given to MaxText, of which `config.json` is made
            where none was carried along.
    """

    like: Where | None = None
    dtype: DType | None = None
    prefix: str | None = None
    spelling: str | None = None
    scan_axis: int | None = None
    model: ModelOptions = field(default_factory=ModelOptions)
    carry: bool = False
    padding_rows: str | None = None
    read: ReadOptions = field(default_factory=ReadOptions)
    maxtext_config: tuple[str, ...] = ()
    quantized: Quantized | None = None

    @property
    def dequantizes(self) -> bool:
        """Whether numbers are made of quantised weights."""
        return self.quantized == "dequantize" or (self.quantized is None and self.dtype is not None)

    def __post_init__(self) -> None:
        check_choice("way with quantised weights", self.quantized, QUANTIZED)
        check_choice("way with padding rows", self.padding_rows, WAYS)
        if self.carry and self.spelling == TEXT:
            raise UsageError(
                f"a text model alone has no place for what {option('carry', True)} takes from the model",
                hint=f"leave out {option('carry', True)}, or {option('names', TEXT)}",
            )


@dataclass(frozen=True)
class HuggingFaceModel:
    """What a MaxText tree becomes.

    Attributes:
        tree: the arrays under their Hugging Face names.
        config: what `config.json` says, None where none is known.
        notes: what the user should know.
        has_text_model: whether the family has a text model without towers.
        surplus: name -> rows of the array it was made from that the model has no place for; MaxText's name
            -> an array that it alone has.
    """

    tree: Tree
    config: TrueConfig | None
    notes: Notes
    has_text_model: bool = False
    surplus: Mapping[str, Surplus] = field(default_factory=dict)


def to_huggingface(tree: Tree, options: ToHuggingFace, files: ModelFiles) -> HuggingFaceModel:
    """A MaxText tree as a Hugging Face one, and what the user should know.

    Raises:
        ConfigError: nothing says which model it is, or its configuration contradicts the carried one.
        CoverageError: the arrays are not those of that model.
        FormatError: weights are quantised, or nothing shows on which axis layers are stacked.
    """
    tree = with_scan_axis(tree, options.scan_axis)
    arrays = _parameters(tree, options.prefix)
    numbers = options.dtype or DTYPES["bfloat16"] if options.dequantizes else None
    native = native_of(arrays, files.config, tree.metadata.place, numbers)
    arrays = dict(native.arrays)
    plain = {key: array for key, array in arrays.items() if key not in native.scales}
    refuse_quantized(plain, tree.metadata.config, tree.metadata.place)
    options = _on_its_axis(options, arrays, tree)
    files = _with_made_config(files, options, arrays)
    options = _as_it_was_made(options, files)
    source = _Unbound(arrays, tree.metadata.place, options, files)
    bound = source.bound()
    unwanted = _unwanted_head(bound, arrays, options.model.tied)
    towers = _unwanted_towers(bound.family, arrays, options)
    wanted = {key: array for key, array in arrays.items() if key not in (unwanted | towers)}
    if options.padding_rows == "keep":
        bound = _with_all_rows(bound, wanted)
    grids = hugging_face_grids(bound.table, wanted, native, (_VOCAB,))
    with refusing(grids.problems, files.config, tree.metadata.place):
        whole = _mapped(replace(bound, table=grids.table), wanted, options, files)
    codes = {key: array for key, array in whole.arrays.items() if key in grids.scales}
    mapped = replace(whole, arrays={key: array for key, array in whole.arrays.items() if key not in codes})
    source.require_agreement(bound, wanted)
    refuse_unmappable(mapped.weights, tree.metadata.config, tree.metadata.place)
    main = main_dtype(mapped.arrays, mapped.changed)
    as_before = _restored(mapped, main, bound.spelling, files)
    made = dict(as_before)
    head = tying.right_head(bound.family, bound.spelling)
    if options.model.tied == "materialize" and head and head.head not in made:
        made[head.head] = made[head.embedding]
    left_out = bound.table.left_out_of(files.weights)
    carried = _carried(left_out, options, files, quantized=bool(codes))
    made.update(carried)
    if options.dtype is not None:
        spared = _quantized_names(carried, files)
        made = {key: array if key in spared else cast(array, options.dtype) for key, array in made.items()}
    made |= codes | {key + SCALE_INV: scales for key, scales in grids.scales.items()}
    missing = (
        *_beside(tree, options.prefix),
        *unwanted,
        *sorted(towers),
        *(key for key in {**files.carried, **left_out} if key not in carried),
    )
    leaves: dict[TreePath, LazyArray] = {(key,): made[key] for key in in_natural_order(made)}
    place = Metadata(place=tree.metadata.place)
    tied = None if head is None else head.head not in made
    config = _config(bound, options, files, made, tied)
    if config is not None and codes:
        said, changes = with_scheme(config.config, made, codes, native.block)
        config = TrueConfig(said, (*config.changes, *changes))
    # Only of a model that is at hand it is known what it could give.
    lacking = bool(files.weights) and not left_out
    notes = (
        tree.metadata.notes
        + native.notes
        + _notes(mapped, as_before, options, missing)
        + notes_of(grids.values)
    )
    notes += Notes(remarks=tuple(_remarks(config, made, lacking)))
    has_text_model = any(each.name == TEXT for each in bound.family.spellings)
    surplus = dict(_surplus(bound.table, wanted, mapped))
    return HuggingFaceModel(Tree(leaves, place), config, notes, has_text_model, surplus)


@dataclass(frozen=True)
class ModelRows:
    """The parameters of a MaxText tree, and the rows of the model that they are of.

    Attributes:
        arrays: by dotted names.
        family, table, spelling: of the model; the rows are those of the layout that the tree has.
        scan_axis: the axis on which layers are stacked; None where none are.
        config: what the model's `config.json` says, None where none is known.
    """

    arrays: Mapping[str, LazyArray]
    family: Family
    table: Table
    spelling: Spelling
    scan_axis: int | None
    config: Mapping[str, object] | None

    def as_huggingface(self) -> Mapped:
        """The arrays under their Hugging Face names; raises CoverageError where they are not the model's."""
        return self.table.to_right(self.arrays, (_VOCAB,))


def rows_of(tree: Tree, options: ToHuggingFace, files: ModelFiles) -> ModelRows:
    """The rows of the model that a MaxText tree is of; errors as of `to_huggingface`."""
    tree = with_scan_axis(tree, options.scan_axis)
    arrays = _parameters(tree, options.prefix)
    refuse_quantized(arrays, tree.metadata.config, tree.metadata.place)
    options = _on_its_axis(options, arrays, tree)
    files = _with_made_config(files, options, arrays)
    options = _as_it_was_made(options, files)
    bound = _Unbound(arrays, tree.metadata.place, options, files).bound()
    axis = stored_scan_axis(bound.family, arrays, options.scan_axis)
    return ModelRows(arrays, bound.family, bound.table, bound.spelling, axis, files.config)


def _mapped(
    bound: _Bound, arrays: Mapping[str, LazyArray], options: ToHuggingFace, files: ModelFiles
) -> Mapped:
    """What a table makes of the arrays.

    Raises:
        CoverageError: they are not those of the model; of one that the user names in few lines.
    """
    try:
        return bound.table.to_right(arrays, (_VOCAB,))
    except NotCoveredError as error:
        if options.like is None:
            raise
        raise CoverageError(
            f"the arrays are not those of the model that {option('like')} names" + error.coverage.summary(),
            place=error.place,
            got=files.place,
            wanted="the model that this checkpoint came from",
            hint=f"leave {option('like')} out: the checkpoint carries a {CONFIG}"
            if files.overruled
            else f"check which model that is, and that all of the checkpoint is there: {error.hint}",
        ) from error


def _on_its_axis(options: ToHuggingFace, arrays: Mapping[str, LazyArray], tree: Tree) -> ToHuggingFace:
    """The options with the axis on which layers are stacked.

    Raises:
        FormatError: neither the user nor shapes nor a note say it.
    """
    if options.scan_axis is not None:
        return options
    leaves: dict[TreePath, LazyArray] = {tuple(key.split(".")): array for key, array in arrays.items()}
    noted = LayerNotes(scan_axis=view_of(tree).notes.scan_axis)
    alone = with_layer_notes(Tree(leaves, Metadata(place=tree.metadata.place)), noted)
    return replace(options, scan_axis=told_scan_axis(view_of(alone)))


def _with_made_config(
    files: ModelFiles, options: ToHuggingFace, arrays: Mapping[str, LazyArray]
) -> ModelFiles:
    """The files with a configuration made of MaxText's settings, where the user gives some.

    Raises:
        UsageError: there is a configuration.
        ConfigError: as `config_of_settings`.
    """
    if not options.maxtext_config:
        return files
    if files.config is not None:
        raise UsageError(
            "the model's own config.json is at hand: none is made of MaxText's settings",
            place=files.place,
            hint=f"leave out {option('maxtext_config')}",
        )
    config = config_of_settings(
        options.maxtext_config,
        arrays,
        scan_axis=options.scan_axis,
        family=options.model.family,
        text_alone=options.spelling == TEXT,
    )
    # Names as of the text model that it describes, whatever those of the model it came from were.
    return replace(files, config=config, place=SETTINGS, spelling=None)


def _with_all_rows(bound: _Bound, arrays: Mapping[str, LazyArray]) -> _Bound:
    """A table with a vocabulary of all the rows that are there."""
    there = [length for length, _ in bound.table.to_right(arrays, (_VOCAB,)).cut.values()]
    if not there:
        return bound
    sizes = {**bound.table.sizes, _VOCAB: Size(max(there), option("padding_rows", "keep"))}
    return replace(bound, table=replace(bound.table, sizes=sizes))


def _surplus(table: Table, arrays: Mapping[str, LazyArray], mapped: Mapped) -> Iterator[tuple[str, Surplus]]:
    """What is left out: of arrays by the name of what was made of the rest, else by its own."""
    for row in table.rows:
        name = str(row.left.key)
        if name in mapped.surplus:
            kept = mapped.sizes[_VOCAB]
            yield str(row.right.key), Surplus.of(name, arrays[name], mapped.surplus[name], kept)
    for name, (array, number) in mapped.filled.items():
        yield name, Surplus(name, array, 0, 0, number)


def _carried(
    left_out: Mapping[str, LazyArray], options: ToHuggingFace, files: ModelFiles, *, quantized: bool
) -> dict[str, LazyArray]:
    """The arrays that MaxText has no place for and that are written all the same.

    Raises:
        FormatError: they are quantised, unlike those that come from MaxText.
    """
    if options.spelling == TEXT:
        return {}
    carried = {**files.carried, **(left_out if options.carry else {})}
    if not quantized:
        refuse_quantized(carried, files.config, files.place)
    return carried


def _quantized_names(carried: Mapping[str, LazyArray], files: ModelFiles) -> set[str]:
    """The quantised weights among what is carried, and all that belongs to them: no cast may touch them."""
    found = quantized(carried, files.config).values()
    return {name for each in found for name in (each.name, *each.sides)}


def _config(
    bound: _Bound,
    options: ToHuggingFace,
    files: ModelFiles,
    made: Mapping[str, LazyArray],
    tied: bool | None,
) -> TrueConfig | None:
    """The configuration of what is written, None where there is none; errors as `promising_less`."""
    if files.config is None:
        return None
    text = text_config(files.config, bound.spelling) if options.spelling == TEXT else None
    size = bound.table.sizes.get(_VOCAB) if options.padding_rows == "keep" else None
    rule = bound.family.flags.get(tying.FLAG)
    vocab = size.length if size else None
    config = true_config(text or files.config, made, tied, tied_by=rule, vocab=vocab)
    if text is None:
        return promising_less(bound.family, config, made, files.place)
    return replace(config, changes=("it is that of the text model alone", *config.changes))


def _remarks(config: TrueConfig | None, made: Mapping[str, LazyArray], lacking: bool) -> Iterator[str]:
    """What to say of the configuration.

    Args:
        config: None where there is none.
        made: what is written beside it.
        lacking: whether the model at hand has nothing but what comes from MaxText.
    """
    if config is None:
        remedy = f"{option('like')} takes the one of the model it came from"
        yield f"no {CONFIG} is written, as none is known: {remedy}"
        return
    yield from (f"{CONFIG}: {change}" for change in config.changes)
    prediction = absent_prediction(config.config, made)
    if prediction:
        remedy = "nor in the model" if lacking else f"{_with_model()} takes them from the model"
        yield (
            f"{CONFIG}: {prediction} is {config.config[prediction]}, but layers that predict further tokens "
            f"are not there{', ' if lacking else '; '}{remedy}"
        )


def _with_model() -> str:
    """What takes arrays from the model that a checkpoint came from."""
    return f"{option('like', 'HF_DIR')} {option('carry', True)}"


def require_towers(model: HuggingFaceModel, files: ModelFiles, place: str) -> None:
    """Refuses a model of which transformers would make a part out of random numbers.

    Raises:
        ConfigError: it describes towers of which no array is there.
    """
    names = [dotted(path) for path in model.tree]
    absent = absent_towers(model.config.config, names) if model.config else ()
    if absent:
        alone = f", or write the text model alone with {option('names', TEXT)}"
        raise ConfigError(
            "the model has parts of which no array is there: what loads it would begin them anew, at random",
            place=place,
            got=f"{' and '.join(absent)} in {files.place}",
            wanted="all of the model's arrays, or the configuration of a model without these parts",
            hint=f"take them from the model with {_with_model()}{alone if model.has_text_model else ''}",
        )


def _unwanted_towers(
    family: Family, arrays: Mapping[str, LazyArray], options: ToHuggingFace
) -> frozenset[str]:
    """The arrays of towers, where the text model is written alone."""
    return family.of_towers(arrays) if options.spelling == TEXT else frozenset()


def _unwanted_head(bound: _Bound, arrays: Mapping[str, LazyArray], way: str | None) -> frozenset[str]:
    """The output head that the user leaves out, where there is one."""
    head = tying.left_head(bound.family)
    return frozenset((head,) if way == "drop" and head is not None and head in arrays else ())


def _parameters(tree: Tree, prefix: str | None) -> dict[str, LazyArray]:
    """The model's arrays by dotted names, without optimizer state and wrapping.

    Raises:
        UsageError: nothing lies below the prefix.
        FormatError: several would have one name.
    """
    return by_name({inner: view_of(tree).parameters[path] for path, inner in _below(tree, prefix).items()})


def _below(tree: Tree, prefix: str | None) -> dict[TreePath, TreePath]:
    """The paths of the parameters below a prefix -> what follows that; errors as of `_parameters`."""
    found = view_of(tree).parameters
    keys: TreePath = tuple(key for key in (prefix or "").replace(".", "/").split("/") if key)
    below = {path: path[len(keys) :] for path in found if path[: len(keys)] == keys}
    if prefix is not None and not below:
        tops = sorted({str(path[0]) for path in found})
        raise UsageError(
            f"nothing lies below {prefix!r}",
            place=tree.metadata.place,
            wanted="one of " + ", ".join(tops[:20]),
            hint=did_you_mean(prefix, tops),
        )
    return below


def _beside(tree: Tree, prefix: str | None) -> list[str]:
    """What is learned and lies elsewhere than the model: other collections, other models, adapters."""
    view, below = view_of(tree), _below(tree, prefix)
    taken = {home for inner, home in view.homes.items() if inner in below}
    return [spelled(path) for path in view.of_role("parameter") if path in view.arrays and path not in taken]


@dataclass(frozen=True)
class _Bound:
    """A family, its table for one model, and how names are written."""

    family: Family
    table: Table
    spelling: Spelling


def _as_it_was_made(options: ToHuggingFace, files: ModelFiles) -> ToHuggingFace:
    """The options with what was chosen on the way to MaxText, unless the user says otherwise now."""
    chosen = options.model.rope_layout or files.rope_layout
    return replace(options, model=replace(options.model, rope_layout=chosen))


@dataclass(frozen=True)
class _Unbound:
    """What is converted: arrays of a tree, with what the user and the model's files say of them."""

    arrays: Mapping[str, LazyArray]
    place: str
    options: ToHuggingFace
    files: ModelFiles

    def bound(self) -> _Bound:
        """The family and its rows for this model, by configuration or option, else by the arrays alone."""
        if self.files.config is None and self.options.model.family is None:
            return self._only_fitting()
        return self._with(family_for(self.files.config, self.options.model, self.place))

    def _with(self, family: Family) -> _Bound:
        family = family_as_stored(family, self.arrays)
        spelling = _spelling(family, self.options.spelling, self.files)
        model = self.options.model
        # A head that is to be made is made in Hugging Face's spelling, once all is mapped.
        way = "keep" if model.tied == "materialize" else model.tied
        config = self.files.config
        if config is not None and self.options.spelling == TEXT:
            config = text_config(config, spelling) or config
        table = family.table(
            config,
            self.files.place,
            scan_axis=stored_scan_axis(family, self.arrays, self.options.scan_axis),
            spelling=spelling,
            overrides={
                **rope_flags(family, model),
                **tying.tied_flags(way, tying.left_head(family), self.arrays),
            },
            without=self._absent_towers(family),
        )
        return _Bound(family, replace(table, place=self.place), spelling)

    def _absent_towers(self, family: Family) -> tuple[str, ...]:
        """The towers that are not written; where nothing says which there are, their arrays do."""
        if self.options.spelling == TEXT:
            return family.towers
        there = family.towers_in(self.arrays)
        return tuple(tower for tower in family.towers if tower not in there)

    def _is_whole(self, family: Family) -> bool:
        """Whether all towers of a family are there."""
        return set(family.towers_in(self.arrays)) == set(family.towers)

    def require_agreement(self, bound: _Bound, arrays: Mapping[str, LazyArray]) -> None:
        """Refuses a configuration by which values come out otherwise than by the carried one.

        Raises:
            ConfigError: it is of another family, which no option names, or binds the family's rows otherwise.
        """
        config, carried = self.files.config, self.files.overruled
        if config is None:
            return
        own_rows(
            self.options.model.family,
            config if carried is None else carried,
            self.files.place if carried is None else self._carried_place,
            lambda each: self._with(each).table.to_right(arrays, (_VOCAB,)).arrays,
        )
        if carried is None:
            return
        if self.options.model.family is None:
            same_family(bound.family, config, self.files.place, carried)
        files = replace(self.files, config=carried, place=self._carried_place)
        options = replace(self.options, spelling=bound.spelling.name)
        other = replace(self, arrays=arrays, options=options, files=files)._with(bound.family)
        same_values(bound.table, other.table, arrays, self.files.place)

    @property
    def _carried_place(self) -> str:
        """Where the configuration lies that the checkpoint carries."""
        return str(parse(self.place) / COMPANIONS / CONFIG)

    def _only_fitting(self) -> _Bound:
        """The only family that takes exactly these arrays, where no configuration says which.

        Raises:
            ConfigError: none does, or several do.
        """
        fitting: dict[str, _Bound | None] = {}
        for family in families().values():
            try:
                bound = self._with(family)
                unwanted = _unwanted_towers(family, self.arrays, self.options)
                bound.table.to_right({key: self.arrays[key] for key in self.arrays if key not in unwanted})
                fitting[family.name] = bound
            except ConfigError:
                fitting[family.name] = None  # the arrays are there, but leave a choice open
            except CheckpointError:
                continue
        whole = [name for name in fitting if self._is_whole(families()[name])]
        likely = {name: bound for name, bound in fitting.items() if name in whole or not whole}
        only = next(iter(likely.values())) if len(likely) == 1 else None
        if only is not None:
            return only
        names = ", ".join(fitting)
        hint = f"name the directory of the model it came from: {option('like', 'HF_DIR')}"
        if fitting and None not in fitting.values():
            hint += f"; {option('family', 'NAME')} is enough for the arrays, but then no {CONFIG} is written"
        raise ConfigError(
            "nothing says which model this is",
            place=self.place,
            got=f"arrays as of {names}" if names else "arrays of no known family",
            wanted="its config.json",
            hint=hint,
        )


def _spelling(family: Family, name: str | None, files: ModelFiles) -> Spelling:
    """How names are written: as asked for, as in the model it came from, or as usual for its type.

    Raises:
        UsageError: the family has no such spelling.
    """
    wanted = name or files.spelling
    if wanted is not None:
        found = next((each for each in family.spellings if each.name == wanted), None)
        if found is None and name is not None:
            raise UsageError(
                f"family {family.name} has no such way of writing names",
                got=name,
                wanted="one of " + ", ".join(each.name for each in family.spellings),
            )
        if found is not None:
            return found
    if files.weights:
        return family.spelling_of(files.weights)
    model_type = (files.config or {}).get("model_type")
    return family.spelling_for(model_type if isinstance(model_type, str) else None)


def _restored(
    mapped: Mapped, main: DType | None, spelling: Spelling, files: ModelFiles
) -> dict[str, LazyArray]:
    """The arrays that are made; those whose values are changed in the dtype that they had in the model."""
    return {
        key: restored(array, main, files.dtypes.get(spelling.plain(key))) if key in mapped.changed else array
        for key, array in mapped.arrays.items()
    }


def _notes(
    mapped: Mapped, made: Mapping[str, LazyArray], options: ToHuggingFace, dropped: tuple[str, ...]
) -> Notes:
    """What the user should know.

    Args:
        mapped: the arrays and what their rows do to values.
        made: the same, rounded to the dtypes that they had.
        options: what the user wants.
        dropped: what is left out.
    """
    rounded = {key: made[key].dtype for key in mapped.changed if made[key].dtype != mapped.arrays[key].dtype}
    changed = [(each, _of_row(each, rounded)) for each in mapped.values]
    inexact = [Note(each.key, each.reason) for each, back in changed if not (each.exact or back)]
    values = [
        Note(each.key, f"{_operation(each)}, rounded back to {back}" if back else each.reason)
        for each, back in changed
        if each.exact or back
    ]
    for axis, (there, kept) in mapped.cut.items():
        text = f"{there} in MaxText, {kept} in the model: the last {there - kept} are cut off"
        if options.padding_rows is None:
            values.append(Note(axis, f"{text}, all of them zeros"))
        else:
            inexact.append(
                Note(axis, f"{text}, whatever they hold, as {option('padding_rows', 'drop')} says")
            )
    if options.dtype is not None:
        inexact += cast_notes(mapped.arrays, options.dtype)
    return Notes(tuple(inexact), tuple(values), dropped)


def _of_row(note: ValueNote, rounded: Mapping[str, DType]) -> str:
    """The dtypes to which arrays of a row are rounded; "" where none is."""
    key = parse_key(note.key)
    return " and ".join(
        {dtype.name: None for name, dtype in rounded.items() if key.numbers(name) is not None}
    )


def _operation(note: ValueNote) -> str:
    """The first words of a note: what happens to values, without how exact that is."""
    return note.reason.partition(",")[0]
