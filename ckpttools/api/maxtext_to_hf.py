"""Convert MaxText checkpoints to Hugging Face: open, map, plan, write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

from ckpttools.api.options import WRITING_OPTIONS
from ckpttools.api.options.convert import MAXTEXT_TO_HF, SHARDS
from ckpttools.api.prepared import Prepared, Resources, WriteRequest, Writing, command
from ckpttools.api.sources import Size, Source, float_dtype_of, opened, read_options, text_of
from ckpttools.array.tree import Tree, by_name
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dtypes import DType
from ckpttools.core.notes import Notes
from ckpttools.core.options import declare
from ckpttools.formats.adapters import ADAPTER
from ckpttools.formats.base import Writer
from ckpttools.formats.origin import with_origin
from ckpttools.formats.registry import writer_for
from ckpttools.formats.sidecar import Sidecars, WithSidecars
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.conversion_options import TEXT, ToHuggingFace
from ckpttools.maxtext.model_files import ModelFiles, config_bytes, stale_file_notes, stale_files
from ckpttools.maxtext.model_options import ModelOptions
from ckpttools.maxtext.original_dtypes import narrower_dtype_advice
from ckpttools.maxtext.source_checks import refuse_hugging_face
from ckpttools.maxtext.to_hf import HuggingFaceModel, require_towers, to_huggingface
from ckpttools.maxtext.vocabulary import refuse_learned_rows
from ckpttools.stores.registry import LocationLike
from ckpttools.transforms.base import Transform

# Files that exist only for models with towers.
_TOWER_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@command(Writing)
@declare(*MAXTEXT_TO_HF, *SHARDS, *WRITING_OPTIONS)
def maxtext_to_hf(
    source: Source,
    destination: LocationLike,
    *,
    like: LocationLike | None = None,
    maxtext_config: Sequence[LocationLike] = (),
    dtype: DType | str | None = None,
    prefix: str | None = None,
    names: Literal["hub", "transformers", "text"] | None = None,
    scan_axis: int | None = None,
    carry: bool = False,
    padding_rows: Literal["keep", "drop"] | None = None,
    family: LocationLike | None = None,
    rope_layout: Literal["halves", "interleaved"] | None = None,
    tied: Literal["keep", "drop", "materialize"] | None = None,
    quantized: Literal["dequantize", "keep"] | None = None,
    max_shard_size: Size = "5GB",
    step: int | None = None,
    max_index_bytes: Size = "256MiB",
    **writing: Unpack[Writing],
) -> Prepared:
    """Convert a MaxText checkpoint to a model that transformers and vLLM load.

    Args:
        source: A run directory, step or item of any kind and flavor, or its tree.
        destination: The directory to create, with weights, `config.json` and the other files of the model. It
            appears only when everything is written.

    Raises:
        CheckpointError: See `ckpttools.plan_to_huggingface`; or reading or writing fails.
    """
    options = ToHuggingFace(
        like=like,
        maxtext_config=tuple(map(str, maxtext_config)),
        dtype=float_dtype_of(dtype),
        prefix=prefix,
        spelling=names,
        scan_axis=scan_axis,
        model=ModelOptions(text_of(family), rope_layout, tied),
        carry=carry,
        quantized=quantized,
        padding_rows=padding_rows,
        read=read_options({"step": step, "max_index_bytes": max_index_bytes}),
    )
    writer = writer_for(Tree({}), "safetensors", max_shard_size=max_shard_size)
    with WriteRequest(source, destination, like, **writing) as request:
        return request.complete(plan_to_huggingface(source, options, request.resources, writer))


@validate_arguments
def plan_to_huggingface(
    source: Source,
    options: ToHuggingFace | None = None,
    resources: Resources | None = None,
    writer: Writer | None = None,
    *,
    change: Transform | None = None,
) -> Prepared:
    """Plan a conversion without writing. Reads only the rows that will be dropped.

    Args:
        source: A run directory, step or item of any kind and flavor, or its tree.
        options: Conversion options.
        resources: Memory and workers that may be used.
        writer: How to split safetensors; None for shards of 5 GB.
        change: Transform to apply at the end to the Hugging Face tree and its configuration.

    Raises:
        CheckpointError: The source cannot be read, its model cannot be identified, its arrays do not match
            that model, declared towers do not exist, dropped rows are not zero, arrays of the original model
            are missing or damaged, or the work does not fit into the memory.
    """
    options, resources = options or ToHuggingFace(), resources or Resources()
    tree = opened(source, options.read)
    refuse_hugging_face(tree)
    files = ModelFiles.of(tree, options.like)
    if options.carry:
        files.require_weights()
    model = to_huggingface(tree, options, files)
    require_towers(model, files, tree.metadata.location)
    if change is not None:
        model = _transform_model(model, change, files.config)
    result = {} if model.config is None else {CONFIG: config_bytes(files, model.config)}
    unwanted = _TOWER_FILES if options.spelling == TEXT else ()
    config = None if model.config is None else model.config.config
    untrue = stale_files(files.sidecars, model.tree, files.config, config)
    dropped = (*result, *unwanted, *untrue, ADAPTER)
    copied = {name: file for name, file in files.sidecars.items() if name not in dropped}
    sidecar_writer = WithSidecars(
        writer or writer_for(Tree({}), "safetensors"), Sidecars(copied), built=result
    )
    notes = model.notes + stale_file_notes(untrue)
    if options.dtype is None and change is None:
        arrays = by_name(model.tree.arrays)
        notes += Notes(advice=narrower_dtype_advice(arrays, files.config, options.maxtext_config))
    prepared = resources.plan(with_origin(model.tree, tree), sidecar_writer, notes)
    # This is the only place where planning reads data: dropped rows are lost, and no header shows whether
    # they are padding. The check follows planning, which rejects models that do not fit into the memory.
    held_bytes, location = prepared.plan.held_bytes, tree.metadata.location
    refuse_learned_rows(
        model.extra, location, options.padding_rows, memory=resources.memory, reserved=held_bytes
    )
    if model.lost_head is not None:
        from ckpttools.maxtext.stored_head import refuse_lost_head

        refuse_lost_head(model.lost_head, tree, memory=resources.memory, reserved=held_bytes)
    return prepared


def _transform_model(
    model: HuggingFaceModel, change: Transform, original: Mapping[str, Any] | None
) -> HuggingFaceModel:
    """Return a transformed model and its updated configuration."""
    known = model.config
    tree = model.tree if known is None else model.tree.with_metadata(config=known.config)
    result = change(tree)
    config = result.tree.metadata.config
    if known is not None and config is not None and config != known.config:
        requantized = known.requantized(config, by_name(result.tree.arrays), original or {})
        stale = {f"{CONFIG}: {item}" for item in known.changes if item not in requantized.changes}
        remarks = tuple(remark for remark in model.notes.remarks if remark not in stale)
        known = requantized
        model = replace(model, notes=replace(model.notes, remarks=remarks))
    return replace(model, tree=result.tree, config=known, notes=model.notes + result.notes)
