"""Merge, convert and extract LoRA adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Unpack

from ckpttools.adapters.bases import Base, open_base
from ckpttools.adapters.extract import ExtractOptions, extract_low_rank
from ckpttools.adapters.factors import Adapter
from ckpttools.adapters.from_jax import adapter_of_jax, factor_pairs
from ckpttools.adapters.merge import merge_into_base
from ckpttools.adapters.peft import STEP_0, PeftFiles, is_peft, open_peft, to_peft, weights_file
from ckpttools.adapters.report import adapter_report
from ckpttools.adapters.to_maxtext import LoraLayout, ToMaxTextAdapter, to_maxtext_adapter
from ckpttools.api.convert import ChangedRun, write_changed
from ckpttools.api.options import WRITING_OPTIONS
from ckpttools.api.options.adapters import ADAPTER_TO_MAXTEXT, ADAPTER_TO_PEFT, EXTRACT_ADAPTER, MERGE_ADAPTER
from ckpttools.api.options.convert import CHANGING
from ckpttools.api.prepared import Prepared, StoredWriting, WriteRequest, Writing, command
from ckpttools.api.sources import (
    Size,
    Source,
    Storing,
    float_dtype_of,
    opened,
    part_of,
    read_options,
    text_of,
)
from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import FormatError, UsageError
from ckpttools.core.message_terms import action, option
from ckpttools.core.message_terms import location as called
from ckpttools.core.options import declare
from ckpttools.formats.adapters import ADAPTER, WEIGHTS_STEM, is_adapter
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.detect import is_checkpoint
from ckpttools.formats.orbax.options import STORAGE
from ckpttools.formats.registry import open_tree, writer_for, writer_options
from ckpttools.formats.safetensors.write import SafetensorsWriter
from ckpttools.formats.sidecar import Sidecars, WithSidecars
from ckpttools.maxtext.model_options import ModelOptions
from ckpttools.maxtext.versions import NEWEST
from ckpttools.model_families.registry import family_called
from ckpttools.quantized.unsupported_errors import require_numbers
from ckpttools.run.overlap_check import check_no_overlap
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.transforms.base import Transform, Transformed
from ckpttools.transforms.cast import CastMap


@command(ChangedRun, more=writer_options)
@declare(*MERGE_ADAPTER, *CHANGING)
def merge_adapter(
    source: Source,
    destination: LocationLike,
    *,
    adapter: LocationLike,
    scale: float = 1.0,
    alpha: float | None = None,
    dtype: DType | str | None = None,
    like: LocationLike | None = None,
    family: LocationLike | None = None,
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Merge a LoRA adapter into a model, keeping its format, names, shapes and dtypes.

    Products of factors are summed in float64, rounded to float32 and added in float32; the sum is rounded
    once to the dtype of the base. Arrays that the adapter does not change are copied bit for bit.

    Args:
        source: The model to adapt: a Hugging Face model or a MaxText checkpoint.
        destination: The directory to create. It appears only when everything is written.
        adapter: A directory saved by PEFT or its weights file, or a MaxText adapter checkpoint.

    Raises:
        FormatError: The adapter is of another kind or belongs to another model, or weights of the model are
            quantized and no dtype is given.
        CheckpointError: See `ckpttools.convert`.
    """
    check_no_overlap(adapter, parse(destination, is_written=True), called("adapter"))
    change = _Merge(adapter, scale, alpha, ModelOptions(text_of(family)), like)
    casts: list[Transform] = [] if dtype is None else [CastMap({}, float_dtype_of(dtype))]
    return write_changed([*casts, change], source, destination, common)


@dataclass(frozen=True)
class _Merge:
    """A transform that merges an adapter into a model. Attributes are arguments of `merge_adapter`."""

    adapter: LocationLike
    scale: float
    alpha: float | None
    model: ModelOptions
    like: LocationLike | None

    def __call__(self, tree: Tree) -> Transformed:
        require_numbers(tree, "an adapter can be merged only into plain weights")
        (base,) = _bases(self.model, self.like, tree)
        return merge_into_base(base, open_adapter(self.adapter, base, self.alpha), self.scale)


@command(StoredWriting)
@declare(*ADAPTER_TO_MAXTEXT, *STORAGE, *WRITING_OPTIONS)
def adapter_to_maxtext(
    source: LocationLike,
    destination: LocationLike,
    *,
    base: Source,
    scan: bool | None = None,
    scan_axis: int | None = None,
    maxtext: str = NEWEST,
    layout: LoraLayout = "restore",
    scale: float = 1.0,
    like: LocationLike | None = None,
    family: LocationLike | None = None,
    rope_layout: Literal["halves", "interleaved"] | None = None,
    **common: Unpack[StoredWriting],
) -> Prepared:
    """Convert a PEFT LoRA adapter to the layout that MaxText restores.

    Args:
        source: A directory saved by PEFT, or its weights file.
        destination: The directory to create, with `0/items` in it. It appears only when everything is
            written.

    Raises:
        FormatError: The adapter does not match the base, or has parts that MaxText does not support. The
            message lists them with reasons.
        CheckpointError: The adapter cannot be read, or the work does not fit into the memory.
    """
    model = ModelOptions(text_of(family), rope_layout)
    writer = writer_for(
        Tree({}), "orbax", parse(destination, is_written=True), as_step=0, **part_of(common, Storing)
    )

    _check_base(base, destination)
    with WriteRequest(source, destination, **part_of(common, Writing)) as request:
        (known,) = _bases(model, like, opened(base))
        own = None if known.rows is None else known.rows.scan_axis
        scanned = scan if scan is not None else known.rows is None or own is not None
        axis = scan_axis if scan_axis is not None else 1 if own is None else own
        options = ToMaxTextAdapter(scanned, axis, maxtext, layout, scale)
        result = to_maxtext_adapter(known, _peft_alone(source), options)
        return request.complete(request.resources.plan(result.tree, writer, result.notes))


@command(Writing)
@declare(*ADAPTER_TO_PEFT, *WRITING_OPTIONS)
def adapter_to_peft(
    source: Source,
    destination: LocationLike,
    *,
    base: Source,
    alpha: float | None = None,
    scale: float = 1.0,
    base_name: str | None = None,
    like: LocationLike | None = None,
    family: LocationLike | None = None,
    rope_layout: Literal["halves", "interleaved"] | None = None,
    step: int | None = None,
    max_index_bytes: Size = "256MiB",
    **writing: Unpack[Writing],
) -> Prepared:
    """Convert a MaxText LoRA adapter to the layout that PEFT and vLLM load.

    Args:
        source: An adapter checkpoint or its tree, in any of MaxText's layouts: that of MaxText's own
            fine-tuning, Tunix (`model_params`), MaxText's converter or its inference engine.
        destination: The directory for `adapter_model.safetensors` and `adapter_config.json`.

    Raises:
        FormatError: The source has no factors, or they do not match the base.
        ConfigError: Alpha is unknown.
        CheckpointError: The adapter cannot be read, or the work does not fit into the memory.
    """
    model = ModelOptions(text_of(family), rope_layout)
    read = read_options({"step": step, "max_index_bytes": max_index_bytes})

    _check_base(base, destination)
    with WriteRequest(source, destination, **writing) as request:
        (known,) = _bases(model, like, opened(base))
        adapter = _open_maxtext_adapter(opened(source, read), known, alpha)
        result = to_peft(known, adapter, base_name, scale)
        return request.complete(request.resources.plan(result.tree, _writer(result), result.notes))


@command(Writing)
@declare(*EXTRACT_ADAPTER, *WRITING_OPTIONS)
def extract_adapter(
    source: Source,
    destination: LocationLike,
    *,
    base: Source,
    rank: int | None = None,
    error: float | None = None,
    dtype: DType | str = "float32",
    base_name: str | None = None,
    like: LocationLike | None = None,
    family: LocationLike | None = None,
    **writing: Unpack[Writing],
) -> Prepared:
    """Extract the changes of a fine-tuned model as a PEFT LoRA adapter, using the SVD of each difference.

    Only matrices of linear layers are extracted; other arrays that differ are listed and left out. Planning
    already reads both models and reports the remaining error of each difference.

    Args:
        source: The fine-tuned model: a Hugging Face model or a MaxText checkpoint.
        destination: The directory for `adapter_model.safetensors` and `adapter_config.json`.
        base: The model before fine-tuning, in either format.

    Raises:
        UsageError: Neither rank nor error is given, or all matrices are equal.
        MemoryBudgetError: The factors take more than half of the memory.
        CheckpointError: The models do not have the same weights, or cannot be read.
    """
    options = ExtractOptions(rank, error, float_dtype_of(dtype) or DTYPES["float32"])
    model = ModelOptions(text_of(family))

    _check_base(base, destination)
    with WriteRequest(source, destination, **writing) as request:
        resources = request.resources
        tuned, known = _bases(model, like, opened(source), opened(base))
        result = extract_low_rank(tuned, known, options, resources.memory // 2)
        files = to_peft(known, result.adapter, base_name)
        rest = replace(resources, memory=resources.memory - result.nbytes)
        return request.complete(rest.plan(files.tree, _writer(files), result.notes + files.notes))


def _bases(model: ModelOptions, like: LocationLike | None, *trees: Tree) -> list[Base]:
    """Return the bases of several models.

    Raises:
        FormatError: One of the models is an adapter.
        UnknownNameError: The user named a family that does not exist.
        UsageError: The user named the original model of MaxText checkpoints, but none of the models is a
            MaxText checkpoint.
    """
    for tree in trees:
        _refuse_adapter(tree)
    if model.family is not None:
        family_called(model.family)
    result = [open_base(tree, model, like) for tree in trees]
    if like is not None and all(item.rows is None for item in result):
        raise UsageError(
            f"{option('like')} names the original model of a MaxText checkpoint",
            location=trees[0].metadata.location or None,
            got="a Hugging Face model",
            hint="leave it out: its own config.json is used",
        )
    return result


def _refuse_adapter(tree: Tree) -> None:
    location = tree.metadata.location
    if adapter_report(tree) is not None:
        merging = action("merge_adapter", "BASE", "DST", adapter=location)
        raise FormatError(
            "this is an adapter, not a model",
            location=location,
            expected="the model that was adapted",
            hint=f"{merging} merges it into one",
        )


def _writer(files: PeftFiles) -> WithSidecars:
    """Return the writer of the files that PEFT loads."""
    writer = SafetensorsWriter(None, stem=WEIGHTS_STEM)
    return WithSidecars(writer, Sidecars(), built={ADAPTER: files.config})


def open_adapter(where: LocationLike, base: Base, alpha: float | None = None) -> Adapter:
    """Open an adapter of either kind under the names of the base's Hugging Face model.

    Raises:
        FormatError: The location does not contain an adapter.
        UsageError: `alpha` is given for a PEFT adapter, whose configuration declares it.
    """
    location = parse(where)
    if not is_peft(location):
        return _open_maxtext_adapter(open_tree(location, ReadOptions()), base, alpha)
    if alpha is not None:
        raise UsageError(
            f"{option('alpha')} applies only to MaxText's adapters",
            location=location,
            hint=f"leave it out: {ADAPTER} has it; {option('scale', 'X')} multiplies all",
        )
    if is_checkpoint(location / STEP_0):
        raise FormatError(
            "this directory has two adapters: one of PEFT and one of MaxText",
            location=location,
            hint=f"name one of them: {weights_file(location)} or {location / STEP_0}",
        )
    return open_peft(location)


def _open_maxtext_adapter(tree: Tree, base: Base, alpha: float | None) -> Adapter:
    location = tree.metadata.location
    if is_peft(parse(location)) and not factor_pairs(tree):
        raise FormatError(
            "this is already a PEFT adapter", location=location, expected="an adapter of MaxText or Tunix"
        )
    if not factor_pairs(tree):
        if is_adapter(tree):
            raise FormatError(
                f"these are arrays of a PEFT adapter without its {ADAPTER}",
                location=location,
                expected=f"{ADAPTER} next to them, which states alpha and ranks",
                hint=f"copy {ADAPTER} from the directory of the original arrays",
            )
        raise FormatError(
            "this is not an adapter",
            location=location,
            expected=f"factors named lora_a and lora_b, or a directory with {ADAPTER}, as PEFT saves it",
            hint=_describe_location(location),
        )
    return adapter_of_jax(base, tree, alpha)


def _peft_alone(where: LocationLike) -> Adapter:
    location = parse(where)
    if is_peft(location):
        return open_peft(location)
    open_tree(location)  # This call raises a more precise error, for example about several checkpoints.
    raise FormatError(
        "this is not a PEFT adapter",
        location=location,
        expected=f"a directory with {ADAPTER} and adapter_model.safetensors",
        hint=_describe_location(str(location)),
    )


def _describe_location(location: str) -> str:
    return f"{action('summary', location or 'PATH')} identifies it"


def _check_base(base: Source, destination: LocationLike) -> None:
    if not isinstance(base, Tree):
        check_no_overlap(base, parse(destination, is_written=True), called("base"))
