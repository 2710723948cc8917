"""A MaxText tree as a Hugging Face one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Metadata, Tree, dotted
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import ConfigError, CoverageError
from ckpttools.core.notes import Notes
from ckpttools.core.text import in_natural_order
from ckpttools.core.wording import option
from ckpttools.families.family import Family, Spelling
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.mapping.mapped import Mapped
from ckpttools.mapping.sizes import Size
from ckpttools.mapping.table import Table
from ckpttools.maxtext import tying
from ckpttools.maxtext.bound_model import (
    VOCAB,
    BoundModel,
    UnboundModel,
    as_it_was_made,
    on_its_axis,
    unwanted_towers,
    with_made_config,
)
from ckpttools.maxtext.config_to_write import config_to_write, remarks_about, with_model
from ckpttools.maxtext.from_native import SCALE_INV, hugging_face_grids, native_of, notes_of, with_scheme
from ckpttools.maxtext.model import CONFIG
from ckpttools.maxtext.model_config import (
    TrueConfig,
    absent_towers,
)
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.named_parameters import learned_elsewhere, named_parameters
from ckpttools.maxtext.native import refusing
from ckpttools.maxtext.notes_on_values import notes_on_values
from ckpttools.maxtext.odd_dtypes import main_dtype, restored
from ckpttools.maxtext.stacked_on import stored_scan_axis, with_scan_axis
from ckpttools.maxtext.to_hf_options import TEXT, ToHuggingFace
from ckpttools.maxtext.vocabulary import Surplus
from ckpttools.quantized.refusals import refuse_quantized, refuse_unmappable
from ckpttools.quantized.weights import quantized
from ckpttools.transforms.cast import cast


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
    arrays = named_parameters(tree, options.prefix)
    numbers = options.dtype or DTYPES["bfloat16"] if options.dequantizes else None
    native = native_of(arrays, files.config, tree.metadata.place, numbers)
    arrays = dict(native.arrays)
    plain = {key: array for key, array in arrays.items() if key not in native.scales}
    refuse_quantized(plain, tree.metadata.config, tree.metadata.place)
    options = on_its_axis(options, arrays, tree)
    files = with_made_config(files, options, arrays)
    options = as_it_was_made(options, files)
    source = UnboundModel(arrays, tree.metadata.place, options, files)
    bound = source.bound()
    unwanted = _unwanted_head(bound, arrays, options.model.tied)
    towers = unwanted_towers(bound.family, arrays, options)
    wanted = {key: array for key, array in arrays.items() if key not in (unwanted | towers)}
    if options.padding_rows == "keep":
        bound = _with_all_rows(bound, wanted)
    grids = hugging_face_grids(bound.table, wanted, native, (VOCAB,))
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
        *learned_elsewhere(tree, options.prefix),
        *unwanted,
        *sorted(towers),
        *(key for key in {**files.carried, **left_out} if key not in carried),
    )
    leaves: dict[TreePath, LazyArray] = {(key,): made[key] for key in in_natural_order(made)}
    place = Metadata(place=tree.metadata.place)
    tied = None if head is None else head.head not in made
    config = config_to_write(bound, options, files, made, tied)
    if config is not None and codes:
        said, changes = with_scheme(config.config, made, codes, native.block)
        config = TrueConfig(said, (*config.changes, *changes))
    # Only of a model that is at hand it is known what it could give.
    lacking = bool(files.weights) and not left_out
    notes = (
        tree.metadata.notes
        + native.notes
        + notes_on_values(mapped, as_before, options, missing)
        + notes_of(grids.values)
    )
    notes += Notes(remarks=tuple(remarks_about(config, made, lacking)))
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
        return self.table.to_right(self.arrays, (VOCAB,))


def rows_of(tree: Tree, options: ToHuggingFace, files: ModelFiles) -> ModelRows:
    """The rows of the model that a MaxText tree is of; errors as of `to_huggingface`."""
    tree = with_scan_axis(tree, options.scan_axis)
    arrays = named_parameters(tree, options.prefix)
    refuse_quantized(arrays, tree.metadata.config, tree.metadata.place)
    options = on_its_axis(options, arrays, tree)
    files = with_made_config(files, options, arrays)
    options = as_it_was_made(options, files)
    bound = UnboundModel(arrays, tree.metadata.place, options, files).bound()
    axis = stored_scan_axis(bound.family, arrays, options.scan_axis)
    return ModelRows(arrays, bound.family, bound.table, bound.spelling, axis, files.config)


def _mapped(
    bound: BoundModel, arrays: Mapping[str, LazyArray], options: ToHuggingFace, files: ModelFiles
) -> Mapped:
    """What a table makes of the arrays.

    Raises:
        CoverageError: they are not those of the model; of one that the user names in few lines.
    """
    try:
        return bound.table.to_right(arrays, (VOCAB,))
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


def _with_all_rows(bound: BoundModel, arrays: Mapping[str, LazyArray]) -> BoundModel:
    """A table with a vocabulary of all the rows that are there."""
    there = [length for length, _ in bound.table.to_right(arrays, (VOCAB,)).cut.values()]
    if not there:
        return bound
    sizes = {**bound.table.sizes, VOCAB: Size(max(there), option("padding_rows", "keep"))}
    return replace(bound, table=replace(bound.table, sizes=sizes))


def _surplus(table: Table, arrays: Mapping[str, LazyArray], mapped: Mapped) -> Iterator[tuple[str, Surplus]]:
    """What is left out: of arrays by the name of what was made of the rest, else by its own."""
    for row in table.rows:
        name = str(row.left.key)
        if name in mapped.surplus:
            kept = mapped.sizes[VOCAB]
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
            hint=f"take them from the model with {with_model()}{alone if model.has_text_model else ''}",
        )


def _unwanted_head(bound: BoundModel, arrays: Mapping[str, LazyArray], way: str | None) -> frozenset[str]:
    """The output head that the user leaves out, where there is one."""
    head = tying.left_head(bound.family)
    return frozenset((head,) if way == "drop" and head is not None and head in arrays else ())


def _restored(
    mapped: Mapped, main: DType | None, spelling: Spelling, files: ModelFiles
) -> dict[str, LazyArray]:
    """The arrays that are made; those whose values are changed in the dtype that they had in the model."""
    return {
        key: restored(array, main, files.dtypes.get(spelling.plain(key))) if key in mapped.changed else array
        for key, array in mapped.arrays.items()
    }
