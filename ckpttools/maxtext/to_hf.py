"""A MaxText tree as a Hugging Face one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Metadata, Tree, by_name, dotted
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import ConfigError, CoverageError
from ckpttools.core.notes import Notes
from ckpttools.core.text import in_natural_order
from ckpttools.core.wording import option
from ckpttools.families.family import Spelling
from ckpttools.families.silent import silent_values
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.mapping.fill import Fill
from ckpttools.mapping.mapped import Mapped, notes_of
from ckpttools.mapping.scale_grids import ScaleGrids
from ckpttools.mapping.sizes import lengths_of
from ckpttools.mapping.table import Table
from ckpttools.maxtext import tying
from ckpttools.maxtext.bound_model import BoundModel
from ckpttools.maxtext.bound_source import BoundSource, maxtext_source
from ckpttools.maxtext.config.deviations import TIED_HEAD, VISION_TOWER, deviations
from ckpttools.maxtext.config.facts import ModelFacts
from ckpttools.maxtext.config_to_write import config_to_write, remarks_about, with_model
from ckpttools.maxtext.from_native import hugging_face_grids, with_scheme
from ckpttools.maxtext.layout import VOCAB
from ckpttools.maxtext.model_config import TrueConfig, absent_towers
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.named_parameters import learned_elsewhere
from ckpttools.maxtext.native import refusing
from ckpttools.maxtext.notes_on_values import notes_on_values
from ckpttools.maxtext.odd_dtypes import in_first_dtype, main_dtype
from ckpttools.maxtext.stored_head import StoredHead
from ckpttools.maxtext.to_hf_options import TEXT, ToHuggingFace
from ckpttools.maxtext.vocabulary import Surplus
from ckpttools.quantized.refusals import refuse_quantized, refuse_unmappable
from ckpttools.quantized.scales import BLOCK_SCALE
from ckpttools.quantized.weights import quantized
from ckpttools.transforms.cast import cast
from ckpttools.transforms.dequantize import dequantized


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
        lost_head: The output head that is left out as a copy of the embedding. It has not been compared yet.
    """

    tree: Tree
    config: TrueConfig | None
    notes: Notes
    has_text_model: bool = False
    surplus: Mapping[str, Surplus] = field(default_factory=dict)
    lost_head: StoredHead | None = None


@dataclass(frozen=True)
class _Converted:
    """What rows make of a source.

    Attributes:
        mapped: without quantised weights.
        codes: the codes of weights that stay quantised.
        grids: their scales, and rows that leave the codes as they are.
        plain: the arrays of `mapped`; changed ones in the dtype that they had in the model.
    """

    mapped: Mapped
    codes: Mapping[str, LazyArray]
    grids: ScaleGrids
    plain: Mapping[str, LazyArray]

    @property
    def quantized(self) -> dict[str, LazyArray]:
        """What stays quantised: codes and scales."""
        return {**self.codes, **{key + BLOCK_SCALE: scales for key, scales in self.grids.scales.items()}}


def to_huggingface(tree: Tree, options: ToHuggingFace, files: ModelFiles) -> HuggingFaceModel:
    """A MaxText tree as a Hugging Face one, and what the user should know.

    Raises:
        ConfigError: nothing says which model it is, or its configuration contradicts the carried one.
        CoverageError: the arrays are not those of that model.
        FormatError: weights are quantised, or nothing shows on which axis layers are stacked.
    """
    source = maxtext_source(tree, options, files)
    bound, files = source.bound, source.files
    converted = _converted(source)
    notes = Notes()
    if not converted.codes:
        files, notes = _with_plain_carried(files, source.options.dtype)
    left_out = bound.table.left_out_of(files.weights)
    carried = _carried(left_out, source.options, files, quantized=bool(converted.codes))
    made = _written(source, converted, carried)
    config = _config(source, converted, made)
    missing = (
        *learned_elsewhere(source.tree, options.prefix),
        *source.head,
        *sorted(source.towers),
        *(key for key in {**files.carried, **left_out} if key not in carried),
    )
    copied = _head_to_copy(source, converted)
    copy_remarks = () if copied is None else (copied.copy_remark,)
    # Only of a model that is at hand it is known what it could give.
    lacking = bool(files.weights) and not left_out
    notes = (
        tree.metadata.notes
        + source.native.notes
        + notes
        + notes_on_values(converted.mapped, converted.plain, source.options, missing)
        + notes_of(converted.grids.values)
        + Notes(remarks=(*copy_remarks, *remarks_about(config, made, lacking), *_deviations(bound, files)))
    )
    leaves: dict[TreePath, LazyArray] = {(key,): made[key] for key in in_natural_order(made)}
    return HuggingFaceModel(
        Tree(leaves, Metadata(place=source.place)),
        config,
        notes,
        has_text_model=any(each.name == TEXT for each in bound.family.spellings),
        surplus=dict(_surplus(bound.table, source.wanted, converted.mapped)),
        lost_head=source.lost_head,
    )


def _deviations(bound: BoundModel, files: ModelFiles) -> Iterator[str]:
    """Yield what transformers computes differently than the MaxText run that made the arrays."""
    if files.config is None or not bound.family.settings.settings:
        return
    flags = {name: flag.value for name, flag in bound.table.flags.items()}
    facts = ModelFacts(files.config, lengths_of(bound.table.sizes), flags, silent_values(files.config))
    for each in deviations(bound.family, facts):
        # Towers, and a head that is rounded as its stored values are, have no measured effect on text.
        if each.effect and each.what not in (TIED_HEAD, VISION_TOWER):
            yield f"transformers computes this model differently than MaxText: {each.what}: {each.reason}"


def _converted(source: BoundSource) -> _Converted:
    """Maps what is wanted, and refuses what contradicts the model's configuration."""
    bound, files, wanted = source.bound, source.files, source.wanted
    grids = hugging_face_grids(bound.table, wanted, source.native, (VOCAB,))
    with refusing(grids.problems, files.config, source.place):
        whole = _mapped(replace(bound, table=grids.table), wanted, source.options, files)
    codes = {key: array for key, array in whole.arrays.items() if key in grids.scales}
    mapped = replace(whole, arrays={key: array for key, array in whole.arrays.items() if key not in codes})
    source.unbound.require_agreement(bound, wanted)
    refuse_unmappable(mapped.weights, source.tree.metadata.config, source.place)
    main = main_dtype(mapped.arrays, mapped.changed)
    return _Converted(mapped, codes, grids, _restored(mapped, main, bound.spelling, files))


def _written(
    source: BoundSource, converted: _Converted, carried: Mapping[str, LazyArray]
) -> dict[str, LazyArray]:
    """All arrays of the model: mapped ones, an output head that is wanted, carried ones, quantised ones."""
    made, dtype = dict(converted.plain), source.options.dtype
    head = _head_to_copy(source, converted)
    if head is not None:
        made[head.head] = made[head.embedding]
    made.update(carried)
    if dtype is not None:
        spared = _quantized_names(carried, source.files)
        made = {key: array if key in spared else cast(array, dtype) for key, array in made.items()}
    return made | converted.quantized


def _head_to_copy(source: BoundSource, converted: _Converted) -> tying.Head | None:
    """Return the names of the head that is made from the embedding, and of the embedding; None if none is."""
    head = _head(source)
    is_copied = source.options.model.tied == "materialize" and head and head.head not in converted.plain
    return head if is_copied else None


def _config(source: BoundSource, converted: _Converted, made: Mapping[str, LazyArray]) -> TrueConfig | None:
    """What `config.json` says of these arrays; None where no configuration is known."""
    head = _head(source)
    tied = None if head is None else head.head not in made
    config = config_to_write(source.bound, source.options, source.files, made, tied)
    if config is None or not converted.codes:
        return config
    said, changes = with_scheme(config.config, made, converted.codes, source.native.block)
    return TrueConfig(said, (*config.changes, *changes))


def _head(source: BoundSource) -> tying.Head | None:
    return tying.right_head(source.bound.family, source.bound.spelling)


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


def _surplus(table: Table, arrays: Mapping[str, LazyArray], mapped: Mapped) -> Iterator[tuple[str, Surplus]]:
    """What is left out: of arrays by the name of what was made of the rest, else by its own."""
    for row in table.rows:
        name = str(row.left.key)
        if name in mapped.surplus:
            kept = mapped.sizes[VOCAB]
            yield str(row.right.key), Surplus.of(name, arrays[name], mapped.surplus[name], kept)
    # Without a configuration arrays alone decide.
    known = table.flags
    reasons = {
        str(row.left.key): "; ".join(known[flag].source for flag in row.unless.split() if flag in known)
        for row in table.rows
        if isinstance(row.op, Fill) and row.unless.split()
    }
    for name, (array, number) in mapped.filled.items():
        yield name, Surplus(name, array, 0, 0, number, reasons.get(name, ""))


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


def _with_plain_carried(files: ModelFiles, dtype: DType | None) -> tuple[ModelFiles, Notes]:
    """Numbers in the place of quantised weights that were carried along, as those that come from MaxText are.

    Raises:
        FormatError: of their scales no numbers can be made.
    """
    leaves: dict[TreePath, LazyArray] = {(name,): array for name, array in files.carried.items()}
    carried = dequantized(Tree(leaves, Metadata(config=files.config, place=files.place)), dtype)
    return replace(files, carried=by_name(carried.tree.arrays)), carried.notes


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


def _restored(
    mapped: Mapped, main: DType | None, spelling: Spelling, files: ModelFiles
) -> dict[str, LazyArray]:
    """The arrays that are made; those whose values are changed in the dtype that they had in the model."""
    return {
        key: in_first_dtype(array, main, files.dtypes.get(spelling.plain(key)))
        if key in mapped.changed
        else array
        for key, array in mapped.arrays.items()
    }
