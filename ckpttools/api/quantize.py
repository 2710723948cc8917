"""Quantize a model or training run to Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from shlex import quote
from typing import Any, Literal, Unpack

from ckpttools.api.maxtext_to_hf import plan_to_huggingface
from ckpttools.api.options import WRITING_OPTIONS
from ckpttools.api.options.convert import QUANTIZE, QUANTIZE_READING, SHARDS
from ckpttools.api.prepared import Prepared, Resources, WriteRequest, Writing, command
from ckpttools.api.sources import Patterns, Size, Source, dtype_of, opened, patterns_of, read_options
from ckpttools.api.tree_plan import plan_tree
from ckpttools.array.tree import Tree
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, UsageError, listing
from ckpttools.core.message_terms import action, option, repeated_option
from ckpttools.core.options import declare
from ckpttools.formats.adapters import refuse_adapter
from ckpttools.formats.base import ReadOptions, Writer
from ckpttools.formats.registry import writer_for
from ckpttools.maxtext.conversion_options import ToHuggingFace
from ckpttools.maxtext.hub_names import select_model
from ckpttools.maxtext.recognition import find_unowned_arrays, prefix_hint
from ckpttools.maxtext.source_checks import name_style
from ckpttools.stores.registry import LocationLike
from ckpttools.transforms.quantize import Quantize, refuse_quantized

# Number of names in a suggested command.
_MAX_SUGGESTED = 4


@command(Writing)
@declare(*QUANTIZE, *SHARDS, *QUANTIZE_READING, *WRITING_OPTIONS)
def quantize(
    source: Source,
    destination: LocationLike,
    *,
    scheme: Literal["fp8-block128", "mxfp4"] = "fp8-block128",
    exclude: Patterns = (),
    dtype: DType | str | None = None,
    like: LocationLike | None = None,
    carry: bool = False,
    max_shard_size: Size = "5GB",
    step: int | None = None,
    max_header_bytes: Size = "100MB",
    max_index_bytes: Size = "256MiB",
    prefer_rank: int | Sequence[int] = (),
    **writing: Unpack[Writing],
) -> Prepared:
    """Quantize a model and write safetensors with a matching `config.json`.

    `Receipt.errors` reports the quantization error of each array.

    Args:
        source: A Hugging Face model, a PyTorch trainer's checkpoint of one, or a MaxText checkpoint. The
            latter two are converted to Hub names.
        destination: The directory to create. It appears only when everything is written.

    Raises:
        UsageError: There is nothing to quantize, the scheme does not exist, a pattern matches nothing, or the
            dtype needs scales.
        FormatError: Weights are already quantized; the source is an adapter without its model, or contains
            more than a model; names are not Hub names or do not belong to the family in `config.json`; or,
            while running, an array contains NaN or infinity.
        CheckpointError: The source cannot be read or converted, or reading or writing fails.
    """
    change = Quantize(scheme, patterns_of(exclude), dtype_of(dtype))
    limits = {"max_header_bytes": max_header_bytes, "max_index_bytes": max_index_bytes}
    read = read_options({"step": step, "prefer_rank": prefer_rank, **limits})
    writer = writer_for(Tree({}), "safetensors", max_shard_size=max_shard_size)
    sidecar_options = {"like": like, "carry": carry}
    with WriteRequest(source, destination, like, **writing) as request:
        return request.complete(_plan(source, change, read, sidecar_options, request.resources, writer))


def _plan(
    source: Source,
    change: Quantize,
    read: ReadOptions,
    sidecar_options: Mapping[str, Any],
    resources: Resources,
    writer: Writer,
) -> Prepared:
    tree = opened(source, read)
    refuse_adapter(tree)
    if name_style(tree.arrays) == "maxtext":
        location = quote(tree.metadata.location or "SRC")
        refuse_quantized(
            tree, hint=f"{action('maxtext_to_hf', location, 'DST')} writes them unchanged, as FP8"
        )
        options = ToHuggingFace(**sidecar_options, read=read, quantized="dequantize")
        with _excluding_by_hub(change):
            return plan_to_huggingface(tree, options, resources, writer, change=change)
    if given := [option(name, value) for name, value in sidecar_options.items() if value]:
        raise UsageError(
            f"{given[0]} applies only to MaxText checkpoints",
            location=tree.metadata.location or None,
            hint="leave it out: the configuration next to the weights is used",
        )
    return plan_tree(_model_alone(tree).pipe(change), writer, resources)


@contextmanager
def _excluding_by_hub(change: Quantize) -> Iterator[None]:
    """Explain for a pattern without matches that it applies to Hub names."""
    try:
        yield
    except UsageError as error:
        if error.raw.got not in change.exclude:
            raise
        hint = "patterns are for the names that arrays get on the Hub, such as '*.q_proj.weight'"
        raise error.at(hint=hint) from error


def _model_alone(tree: Tree) -> Tree:
    """Return only a PyTorch model, under the names with which it is loaded.

    Raises:
        FormatError: The source contains more than a model, such as optimizer state, or has the names of
            Meta's own code and a configuration of another model than Llama.
    """
    leaving = (
        f"{action('select', 'SRC', 'MODEL')} with {{}} and {option('format', 'safetensors')} leaves it out"
    )
    hub = tree.pipe(
        partial(
            select_model,
            others="it contains more than a model, which loaders of quantized models do not read",
            leaving=leaving,
            names="loaders of quantized models do not know these names",
        )
    )
    refuse_quantized(hub, by_config=True)
    _refuse_unowned_arrays(hub)
    return hub


def _refuse_unowned_arrays(tree: Tree) -> None:
    """Reject arrays that do not belong to the configuration's model.

    Raises:
        FormatError: There are unknown arrays. The hint tells how to leave them out.
    """
    result = find_unowned_arrays(tree)
    if result is None or not result.names:
        return
    select = f"{action('select', 'SRC', 'MODEL')} with"
    if result.prefixes:
        hint = prefix_hint(result.prefixes, tree)
    elif len(result.names) <= _MAX_SUGGESTED:
        leave = repeated_option("drop", result.names)
        hint = f"{select} {leave} leaves them out, if the model computes without them"
    else:
        hint = (
            f"check that config.json belongs to these weights, or rename them by rules with {action('remap')}"
        )
    raise FormatError(
        "these arrays do not belong to the model in config.json, and its loaders do not read them:"
        + listing(result.names),
        location=tree.metadata.location or None,
        expected=f"names of the family {result.family}",
        hint=hint,
    )
