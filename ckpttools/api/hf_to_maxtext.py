"""Convert Hugging Face checkpoints to MaxText: open, map, plan, write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Unpack

from ckpttools.api.options import WRITING_OPTIONS
from ckpttools.api.options.convert import HF_TO_MAXTEXT
from ckpttools.api.output_checks import check_source
from ckpttools.api.prepared import Prepared, Resources, StoredWriting, WriteRequest, Writing, command
from ckpttools.api.sources import (
    Patterns,
    Size,
    Source,
    Storing,
    float_dtype_of,
    opened,
    part_of,
    patterns_of,
    read_options,
    text_of,
)
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import CoverageError
from ckpttools.core.options import declare
from ckpttools.formats.base import RECORD, SIDECARS, SupportsSidecars, Writer
from ckpttools.formats.orbax.options import STORAGE
from ckpttools.formats.origin import with_origin
from ckpttools.formats.registry import writer_for
from ckpttools.formats.sidecar import Sidecars, WithSidecars
from ckpttools.maxtext.conversion_options import ToMaxText
from ckpttools.maxtext.model_files import record_bytes, sidecars_of
from ckpttools.maxtext.model_options import ModelOptions
from ckpttools.maxtext.source_checks import refuse_maxtext
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.maxtext.versions import NEWEST
from ckpttools.quantized.config import Like
from ckpttools.stores.registry import LocationLike, parse


@command(StoredWriting)
@declare(*HF_TO_MAXTEXT, *STORAGE, *WRITING_OPTIONS)
def hf_to_maxtext(
    source: Source,
    destination: LocationLike,
    *,
    scan: bool = True,
    scan_axis: int = 1,
    dtype: DType | str | None = None,
    dequantize_like: Like = "float32",
    exact: bool = False,
    maxtext: str = NEWEST,
    pad_vocab: int | None = None,
    text_only: bool = False,
    carry: bool = False,
    drop: Patterns = (),
    family: LocationLike | None = None,
    rope_layout: Literal["halves", "interleaved"] | None = None,
    tied: Literal["keep", "drop", "materialize"] | None = None,
    quantized: Literal["dequantize", "keep"] = "dequantize",
    max_header_bytes: Size = "100MB",
    prefer_rank: int | Sequence[int] = (),
    **common: Unpack[StoredWriting],
) -> Prepared:
    """Convert a Hugging Face checkpoint to a MaxText checkpoint.

    Args:
        source: A directory with safetensors and `config.json`, one of its safetensors files, or its tree.
        destination: The directory to create, with `0/items` in it. It appears only when everything is
            written.

    Raises:
        CheckpointError: The source cannot be read or does not match its configuration, the work does not fit
            into the memory, or reading or writing fails.
    """
    options = ToMaxText(
        scan=scan,
        scan_axis=scan_axis,
        dtype=float_dtype_of(dtype),
        exact=exact,
        maxtext=maxtext,
        pad_vocab=pad_vocab,
        model=ModelOptions(text_of(family), rope_layout, tied),
        drop=patterns_of(drop),
        text_only=text_only,
        carry=carry,
        quantized=quantized,
        read=read_options({"max_header_bytes": max_header_bytes, "prefer_rank": prefer_rank}),
        dequantize_like=dequantize_like,
    )
    writer = writer_for(
        Tree({}), "orbax", parse(destination, is_written=True), as_step=0, **part_of(common, Storing)
    )
    with WriteRequest(source, destination, **part_of(common, Writing)) as request:
        return request.complete(plan_to_maxtext(source, options, request.resources, writer))


@validate_arguments
def plan_to_maxtext(
    source: Source,
    options: ToMaxText | None = None,
    resources: Resources | None = None,
    writer: Writer | None = None,
) -> Prepared:
    """Plan a conversion without reading arrays or writing.

    Args:
        source: A directory with safetensors and `config.json`, one of its safetensors files, or its tree.
        options: Conversion options.
        resources: Memory and workers that may be used.
        writer: How to store the output; None for `0/items` in one uncompressed data file.

    Raises:
        CheckpointError: The source cannot be read or does not match its configuration, or the work does not
            fit into the memory.
    """
    options, resources = options or ToMaxText(), resources or Resources()
    writer = writer or writer_for(Tree({}), "orbax", as_step=0)
    tree = opened(source, options.read)
    refuse_maxtext(tree)
    try:
        result = to_maxtext(tree, options)
    except CoverageError as error:
        from ckpttools.maxtext.stored_head import with_head_compared

        raise with_head_compared(error, tree, options, resources.memory) from error
    location = SIDECARS
    if isinstance(writer, SupportsSidecars):
        location = writer.sidecars_at(result.state, is_model=False)
    written_down = {
        RECORD: record_bytes(result.spelling, replace(options.model, tied=result.tied), result.dtypes)
    }
    sidecar_writer = WithSidecars(
        writer, Sidecars(sidecars_of(tree).files, result.carried), location, written_down
    )
    state = sidecar_writer.with_sidecars(with_origin(result.state, tree))
    prepared = resources.plan(state, sidecar_writer, result.notes + check_source(tree, ("layer-lists",)))
    # Whether a dropped head equals the embedding is visible only in its values. Planning comes first, because
    # it refuses models that do not fit in memory.
    if result.lost_head is not None:
        from ckpttools.maxtext.stored_head import refuse_lost_head

        refuse_lost_head(result.lost_head, tree, memory=resources.memory, reserved=prepared.plan.held_bytes)
    return prepared
