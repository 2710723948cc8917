"""Convert a MaxText tree to a Hugging Face tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Metadata, Tree, by_name, dotted
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import ConfigError, CoverageError
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import sort_naturally
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.build import Mapped, ValueNote, notes_of
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.sizes import Size, lengths_of
from ckpttools.mapping.table import Table
from ckpttools.mapping.values import Fill
from ckpttools.maxtext import tied_embeddings as tying
from ckpttools.maxtext.bound_model import (
    BoundModel,
    UnboundModel,
    named_parameters,
    parameters_outside_model,
    unwanted_towers,
)
from ckpttools.maxtext.config.deviations import TIED_HEAD, VISION_TOWER, deviations
from ckpttools.maxtext.config.model_facts import ModelFacts
from ckpttools.maxtext.conversion_options import TEXT, ToHuggingFace
from ckpttools.maxtext.model_config import (
    WeightsConfig,
    absent_mtp_field,
    absent_towers,
    config_for_weights,
    drop_absent_parts,
    text_config,
)
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.native_fp8 import (
    Native,
    ScaleGrids,
    hugging_face_grids,
    native_parameters,
    raise_for_problems,
    with_quantization_config,
)
from ckpttools.maxtext.original_dtypes import main_dtype, restore_dtype
from ckpttools.maxtext.scan_axis import with_scan_axis
from ckpttools.maxtext.versions import EMBEDDING, VOCAB
from ckpttools.maxtext.vocabulary import Surplus
from ckpttools.model_families.family import Spelling
from ckpttools.model_families.hf_defaults import default_values
from ckpttools.quantized.scales import BLOCK_SCALE
from ckpttools.quantized.unsupported_errors import refuse_few_bits, refuse_quantized, refuse_unmappable
from ckpttools.quantized.view import quantized_view
from ckpttools.quantized.weights import find_weights
from ckpttools.transforms.cast import cast, cast_notes

if TYPE_CHECKING:
    from ckpttools.maxtext.stored_head import StoredHead


@dataclass(frozen=True)
class HuggingFaceModel:
    """The result of converting a MaxText tree.

    Attributes:
        tree: The arrays under their Hugging Face names.
        config: The content of `config.json`; None if unknown.
        notes: Notes for the user.
        has_text_model: Whether the family has a text model without towers.
        extra: Name -> rows of its source array that the model does not have; MaxText's name -> an array that
            only MaxText has.
        lost_head: The output head that is left out as a copy of the embedding. It has not been compared yet.
    """

    tree: Tree
    config: WeightsConfig | None
    notes: Notes
    has_text_model: bool = False
    extra: Mapping[str, Surplus] = field(default_factory=dict)
    lost_head: StoredHead | None = None


@dataclass(frozen=True)
class _ConvertedArrays:
    """The arrays that the rows produce from a source.

    Attributes:
        mapped: The mapped arrays without quantized weights.
        codes: The values of weights that stay quantized.
        grids: The scales of those weights, and rows that leave their values unchanged.
        plain: The arrays of `mapped`, with changed ones in the dtype of the original model.
    """

    mapped: Mapped
    codes: Mapping[str, LazyArray]
    grids: ScaleGrids
    plain: Mapping[str, LazyArray]

    @property
    def quantized(self) -> dict[str, LazyArray]:
        """Return the values and scales that stay quantized."""
        return {**self.codes, **{key + BLOCK_SCALE: scales for key, scales in self.grids.scales.items()}}


def to_huggingface(tree: Tree, options: ToHuggingFace, files: ModelFiles) -> HuggingFaceModel:
    """Convert a MaxText tree to a Hugging Face tree.

    Raises:
        ConfigError: The model is unknown, or its configuration contradicts the one in the checkpoint.
        CoverageError: The arrays do not match that model.
        FormatError: Weights are quantized, or the scan axis is unknown.
    """
    source = bind_source(tree, options, files)
    bound, files = source.bound, source.files
    converted = _convert(source)
    notes = Notes()
    if not converted.codes:
        files, notes = _with_plain_carried(files, source.options.dtype)
    left_out = bound.table.unmatched_right(files.weights)
    carried = _carried_arrays(left_out, source.options, files, quantized=bool(converted.codes))
    built = _build_arrays(source, converted, carried)
    config = _config(source, converted, built)
    missing = (
        *parameters_outside_model(source.tree, options.prefix),
        *source.head,
        *sorted(source.towers),
        *(key for key in {**files.carried, **left_out} if key not in carried),
    )
    copied = _head_to_copy(source, converted)
    copy_remarks = () if copied is None else (copied.copy_remark,)
    # Which arrays the model could provide is known only if it is available.
    lacking = bool(files.weights) and not left_out
    notes = (
        tree.metadata.notes
        + source.native.notes
        + notes
        + hf_value_notes(converted.mapped, converted.plain, source.options, missing)
        + notes_of(converted.grids.values)
        + Notes(remarks=(*copy_remarks, *config_remarks(config, built, lacking), *_deviations(bound, files)))
    )
    leaves: dict[TreePath, LazyArray] = {(key,): built[key] for key in sort_naturally(built)}
    return HuggingFaceModel(
        Tree(leaves, Metadata(location=source.location)),
        config,
        notes,
        has_text_model=any(spelling.name == TEXT for spelling in bound.family.spellings),
        extra=dict(_surplus_arrays(bound.table, source.expected, converted.mapped)),
        lost_head=source.lost_head,
    )


def _deviations(bound: BoundModel, files: ModelFiles) -> Iterator[str]:
    """Yield the deviations of transformers from the MaxText run that produced the arrays."""
    if files.config is None or not bound.family.settings.settings:
        return
    flags = {name: flag.value for name, flag in bound.table.flags.items()}
    facts = ModelFacts(files.config, lengths_of(bound.table.sizes), flags, default_values(files.config))
    for deviation in deviations(bound.family, facts):
        # Towers, and a head that is rounded like its stored values, have no measured effect on text.
        if deviation.effect and deviation.what not in (TIED_HEAD, VISION_TOWER):
            yield (
                "transformers computes this model differently from MaxText: "
                f"{deviation.what}: {deviation.reason}"
            )


def _convert(source: BoundSource) -> _ConvertedArrays:
    """Map the expected arrays, refusing those that contradict the model's configuration."""
    bound, files, expected = source.bound, source.files, source.expected
    grids = hugging_face_grids(bound.table, expected, source.native, (VOCAB,))
    with raise_for_problems(grids.problems, files.config, source.location):
        all_mapped = _map_arrays(replace(bound, table=grids.table), expected, source.options, files)
    codes = {key: array for key, array in all_mapped.arrays.items() if key in grids.scales}
    mapped = replace(
        all_mapped, arrays={key: array for key, array in all_mapped.arrays.items() if key not in codes}
    )
    source.unbound.require_agreement(bound, expected)
    refuse_unmappable(mapped.weights, source.tree.metadata.config, source.location)
    main = main_dtype(mapped.arrays, mapped.changed)
    return _ConvertedArrays(mapped, codes, grids, _restored_arrays(mapped, main, bound.spelling, files))


def _build_arrays(
    source: BoundSource, converted: _ConvertedArrays, carried: Mapping[str, LazyArray]
) -> dict[str, LazyArray]:
    """Return all arrays of the model: mapped, copied, carried and quantized ones."""
    result, dtype = dict(converted.plain), source.options.dtype
    head = _head_to_copy(source, converted)
    if head is not None:
        result[head.head] = result[head.embedding]
    result.update(carried)
    if dtype is not None:
        spared = _quantized_names(carried, source.files)
        result = {key: array if key in spared else cast(array, dtype) for key, array in result.items()}
    return result | converted.quantized


def _head_to_copy(source: BoundSource, converted: _ConvertedArrays) -> tying.Head | None:
    """Return the names of the embedding and of the head that is copied from it, or None."""
    head = _head(source)
    is_copied = source.options.model.tied == "materialize" and head and head.head not in converted.plain
    return head if is_copied else None


def _config(
    source: BoundSource, converted: _ConvertedArrays, arrays: Mapping[str, LazyArray]
) -> WeightsConfig | None:
    """Return the `config.json` for these arrays; None if no configuration is known."""
    head = _head(source)
    tied = None if head is None else head.head not in arrays
    config = config_to_write(source.bound, source.options, source.files, arrays, tied)
    if config is None or not converted.codes:
        return config
    declared, changes = with_quantization_config(config.config, arrays, converted.codes, source.native.block)
    return WeightsConfig(declared, (*config.changes, *changes))


def _head(source: BoundSource) -> tying.Head | None:
    return tying.right_head(source.bound.family, source.bound.spelling)


def _map_arrays(
    bound: BoundModel, arrays: Mapping[str, LazyArray], options: ToHuggingFace, files: ModelFiles
) -> Mapped:
    """Map the arrays by the model's table.

    Raises:
        CoverageError: The arrays do not match the model. The message is short if the user named the model.
    """
    try:
        return bound.table.to_right(arrays, (VOCAB,))
    except NotCoveredError as error:
        if options.like is None:
            raise
        raise CoverageError(
            f"the arrays do not match the model in {option('like')}" + error.coverage.summary(),
            location=error.location,
            got=files.location,
            expected="the model that this checkpoint came from",
            hint=f"leave {option('like')} out: the checkpoint carries a {CONFIG}"
            if files.overruled
            else f"check that this is the right model, and that the checkpoint is complete: {error.raw.hint}",
        ) from error


def _surplus_arrays(
    table: Table, arrays: Mapping[str, LazyArray], mapped: Mapped
) -> Iterator[tuple[str, Surplus]]:
    """Yield surplus rows that are left out, by the new name, and complete arrays by their own name."""
    for row in table.rows:
        name = str(row.left.key)
        if name in mapped.extra:
            vocabulary = mapped.sizes[VOCAB]
            yield str(row.right.key), Surplus.of(name, arrays[name], mapped.extra[name], vocabulary)
    # Without a configuration, only the arrays decide.
    known = table.flags
    reasons = {
        str(row.left.key): "; ".join(known[flag].source for flag in row.unless.split() if flag in known)
        for row in table.rows
        if isinstance(row.op, Fill) and row.unless.split()
    }
    for name, (array, number) in mapped.filled.items():
        yield name, Surplus(name, array, 0, 0, number, reasons.get(name, ""))


def _carried_arrays(
    left_out: Mapping[str, LazyArray], options: ToHuggingFace, files: ModelFiles, *, quantized: bool
) -> dict[str, LazyArray]:
    """Return the written arrays that MaxText does not support.

    Raises:
        FormatError: The arrays are quantized, unlike MaxText's arrays.
    """
    if options.spelling == TEXT:
        return {}
    carried = {**files.carried, **(left_out if options.carry else {})}
    if not quantized:
        refuse_quantized(carried, files.config, files.location)
    return carried


def _with_plain_carried(files: ModelFiles, dtype: DType | None) -> tuple[ModelFiles, Notes]:
    """Dequantize the carried arrays, like MaxText's arrays.

    Raises:
        FormatError: The arrays cannot be dequantized.
    """
    leaves: dict[TreePath, LazyArray] = {(name,): array for name, array in files.carried.items()}
    tree = Tree(leaves, Metadata(config=files.config, location=files.location))
    carried = quantized_view(tree).plain(dtype)
    return replace(files, carried=by_name(carried.tree.arrays)), carried.notes


def _quantized_names(carried: Mapping[str, LazyArray], files: ModelFiles) -> set[str]:
    """Return the names of carried quantized weights and their scales, which must not be cast."""
    result = find_weights(carried, files.config).values()
    return {name for item in result for name in (item.name, *item.sides)}


def require_towers(model: HuggingFaceModel, files: ModelFiles, location: str) -> None:
    """Raise an error if the configuration declares towers without arrays.

    Raises:
        ConfigError: The configuration declares towers without arrays.
    """
    names = [dotted(path) for path in model.tree]
    absent = absent_towers(model.config.config, names) if model.config else ()
    if absent:
        text_hint = f", or write the text model alone with {option('names', TEXT)}"
        raise ConfigError(
            "parts of the model have no arrays, so loaders would initialize them randomly",
            location=location,
            got=f"{' and '.join(absent)} in {files.location}",
            expected="all of the model's arrays, or the configuration of a model without these parts",
            hint=(
                f"copy them from the model with {copy_options_hint()}"
                + (text_hint if model.has_text_model else "")
            ),
        )


def _restored_arrays(
    mapped: Mapped, main: DType | None, spelling: Spelling, files: ModelFiles
) -> dict[str, LazyArray]:
    """Return the mapped arrays, with changed ones in their original dtype."""
    return {
        key: restore_dtype(array, main, files.dtypes.get(spelling.plain(key)))
        if key in mapped.changed
        else array
        for key, array in mapped.arrays.items()
    }


def hf_value_notes(
    mapped: Mapped, arrays: Mapping[str, LazyArray], options: ToHuggingFace, dropped: tuple[str, ...]
) -> Notes:
    """Return notes about changed values for the user.

    Args:
        mapped: The arrays, and the effect of their rows on values.
        arrays: The same arrays, rounded to their original dtypes.
        options: The user's options.
        dropped: The arrays that are left out.
    """
    rounded = {
        key: arrays[key].dtype for key in mapped.changed if arrays[key].dtype != mapped.arrays[key].dtype
    }
    changed = [(item, _rounded_dtypes(item, rounded)) for item in mapped.values]
    inexact = [
        Note(item.key, item.reason) for item, is_restored in changed if not (item.exact or is_restored)
    ]
    values = [
        Note(item.key, f"{_operation(item)}, rounded back to {is_restored}" if is_restored else item.reason)
        for item, is_restored in changed
        if item.exact or is_restored
    ]
    for axis, (total, remaining) in mapped.cut.items():
        text = f"{total} in MaxText, {remaining} in the model: the last {total - remaining} are cut off"
        if options.padding_rows is None:
            values.append(Note(axis, f"{text}, all of which are zeros"))
        else:
            inexact.append(
                Note(axis, f"{text}, including values that are not zero ({option('padding_rows', 'drop')})")
            )
    if options.dtype is not None:
        inexact += cast_notes(mapped.arrays, options.dtype)
    return Notes(tuple(inexact), tuple(values), dropped)


def _rounded_dtypes(note: ValueNote, rounded: Mapping[str, DType]) -> str:
    """Return the dtypes to which the arrays of a row are rounded; "" if none are."""
    key = parse_key(note.key)
    return " and ".join(
        {dtype.name: None for name, dtype in rounded.items() if key.numbers(name) is not None}
    )


def _operation(note: ValueNote) -> str:
    """Return the operation on values, without its exactness."""
    return note.reason.partition(",")[0]


def config_to_write(
    bound: BoundModel,
    options: ToHuggingFace,
    files: ModelFiles,
    arrays: Mapping[str, LazyArray],
    tied: bool | None,
) -> WeightsConfig | None:
    """Return the configuration of the output, or None; raises the errors of `drop_absent_parts`."""
    if files.config is None:
        return None
    text = text_config(files.config, bound.spelling) if options.spelling == TEXT else None
    size = bound.table.sizes.get(VOCAB) if options.padding_rows == "keep" else None
    rule = bound.family.flags.get(tying.FLAG)
    vocab = size.length if size else None
    config = config_for_weights(text or files.config, arrays, tied, tied_by=rule, vocab=vocab)
    if text is None:
        return drop_absent_parts(bound.family, config, arrays, files.location)
    return replace(config, changes=("it describes only the text model", *config.changes))


def config_remarks(
    config: WeightsConfig | None, arrays: Mapping[str, LazyArray], model_lacks_parts: bool
) -> Iterator[str]:
    """Yield remarks on the configuration.

    Args:
        config: The configuration; None if there is none.
        arrays: The arrays that are written with the configuration.
        model_lacks_parts: Whether the available model does not have the missing arrays either.
    """
    if config is None:
        remedy = f"{option('like')} uses that of the original model"
        yield f"no {CONFIG} is written, because none is known: {remedy}"
        return
    yield from (f"{CONFIG}: {change}" for change in config.changes)
    prediction = absent_mtp_field(config.config, arrays)
    if prediction:
        remedy = (
            "nor in the model" if model_lacks_parts else f"{copy_options_hint()} copies them from the model"
        )
        yield (
            f"{CONFIG}: {prediction} is {config.config[prediction]}, but MTP layers "
            f"do not exist here{', ' if model_lacks_parts else '; '}{remedy}"
        )


def copy_options_hint() -> str:
    """Return the options that copy arrays from the original model."""
    return f"{option('like', 'HF_DIR')} {option('carry', True)}"


@dataclass(frozen=True)
class BoundSource:
    """A MaxText tree that is being converted, with the rows of its model.

    Attributes:
        tree: The tree, with its layers on the axis that the user chose.
        native: The parameters, with the scales of those that stay quantized.
        unbound: The parameters, with the user's options and the files of the model.
        bound: The rows of the model.
        head, towers: Names of parameters that are not converted: the output head, and towers.
    """

    tree: Tree
    native: Native
    unbound: UnboundModel
    bound: BoundModel
    head: frozenset[str]
    towers: frozenset[str]

    @property
    def location(self) -> str:
        return self.tree.metadata.location

    @property
    def options(self) -> ToHuggingFace:
        return self.unbound.options

    @property
    def files(self) -> ModelFiles:
        return self.unbound.files

    @property
    def lost_head(self) -> StoredHead | None:
        """Return the name of the output head if the user leaves it out; otherwise an empty set."""
        arrays, table = self.unbound.arrays, dotted(EMBEDDING)
        for name in self.head:
            if table in arrays:
                from ckpttools.maxtext.stored_head import StoredHead

                return StoredHead(tying.Head(table, name), arrays[name], arrays[table], is_transposed=True)
        return None

    @cached_property
    def expected(self) -> dict[str, LazyArray]:
        """Return the parameters that are converted."""
        unwanted = self.head | self.towers
        return {key: array for key, array in self.unbound.arrays.items() if key not in unwanted}


def bind_source(tree: Tree, options: ToHuggingFace, files: ModelFiles) -> BoundSource:
    """Identify the model of a tree; raises the errors of `to_huggingface`."""
    tree = with_scan_axis(tree, options.scan_axis)
    arrays = named_parameters(tree, options.prefix)
    numbers = options.dtype or DTYPES["bfloat16"] if options.dequantizes else None
    native = native_parameters(arrays, files.config, tree.metadata.location, numbers)
    if native.scales:
        refuse_few_bits(options.dtype, tree.metadata.location)
        declared = quantized_view(tree).check_scales()
        native = replace(native, notes=native.notes + declared)
    arrays = dict(native.arrays)
    plain = {key: array for key, array in arrays.items() if key not in native.scales}
    refuse_quantized(plain, tree.metadata.config, tree.metadata.location)
    unbound = UnboundModel.of(tree, arrays, options, files)
    bound, options = unbound.bind(), unbound.options
    head = _omitted_head(bound, arrays, options.model.tied)
    towers = frozenset(unwanted_towers(bound.family, arrays, options))
    source = BoundSource(tree, native, unbound, bound, head, towers)
    if options.padding_rows == "keep":
        return replace(source, bound=_with_all_rows(bound, source.expected))
    return source


def _with_all_rows(bound: BoundModel, arrays: Mapping[str, LazyArray]) -> BoundModel:
    """Return the model with a vocabulary of all stored rows."""
    lengths = [length for length, _ in bound.table.to_right(arrays, (VOCAB,)).cut.values()]
    if not lengths:
        return bound
    sizes = {**bound.table.sizes, VOCAB: Size(max(lengths), option("padding_rows", "keep"))}
    return replace(bound, table=replace(bound.table, sizes=sizes))


def _omitted_head(
    bound: BoundModel, arrays: Mapping[str, LazyArray], tied_mode: str | None
) -> frozenset[str]:
    """Return the name of the output head if the user leaves it out; otherwise an empty set."""
    head = tying.left_head(bound.family)
    return frozenset((head,) if tied_mode == "drop" and head is not None and head in arrays else ())
