"""Load checkpoints into JAX arrays on their devices."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ckpttools.api.options import OPENING, RESOURCES
from ckpttools.api.prepared import command
from ckpttools.api.sources import (
    DEFAULT_MEMORY,
    Observe,
    Opening,
    Patterns,
    Scanning,
    Source,
    dtype_of,
    opened,
    part_of,
    patterns_of,
    read_options,
    text_of,
)
from ckpttools.array.fingerprint import sources
from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import (
    ConfigError,
    CoverageError,
    FormatError,
    PaddedVocabularyWarning,
    StorageError,
    UsageError,
)
from ckpttools.core.memory_limit import limit_memory
from ckpttools.core.message_terms import action, option, rename_option
from ckpttools.core.notes import Notes
from ckpttools.core.options import declare, parse_size_option
from ckpttools.maxtext.conversion_options import ToHuggingFace, ToMaxText
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.model_options import ModelOptions
from ckpttools.maxtext.recognition import families_with_names_of
from ckpttools.maxtext.source_checks import name_style, refuse_hugging_face, refuse_maxtext
from ckpttools.maxtext.stored_head import refuse_lost_head
from ckpttools.maxtext.to_hf import to_huggingface
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.maxtext.versions import EMBEDDING
from ckpttools.maxtext.vocabulary import refuse_learned_rows
from ckpttools.quantized.unsupported_errors import refuse_few_bits
from ckpttools.quantized.view import quantized_view
from ckpttools.sharding.loading import JobProgress
from ckpttools.sharding.mesh import parse_mesh
from ckpttools.sharding.rules import NamedArray, RulesLike, resolve_rules
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.fetching import fetch, observe_bytes
from ckpttools.stores.registry import LocationLike
from ckpttools.transforms.select import Select

if TYPE_CHECKING:
    from ckpttools.sharding.assignments import DeviceOptions
    from ckpttools.sharding.load_plan import LoadPlan
    from ckpttools.sharding.load_request import Request
    from ckpttools.sharding.templates import TreeTemplate


ObserveJob = Callable[[JobProgress], None]


class Loading(Scanning, total=False):
    """Types of the resources and callbacks of a load."""

    observe_job: ObserveJob


@dataclass(frozen=True, slots=True, repr=False)
class PreparedLoad:
    """A planned load. Only headers and indexes have been read.

    Attributes:
        plan: The devices and reads of the load.
        request: The arrays and their destinations.
        jobs, requests, observe, download, observe_job: See `load`.
    """

    plan: LoadPlan
    request: Request
    jobs: int | None = None
    requests: int | None = None
    observe: Observe = field(default=lambda done, total: None)
    download: bool = False
    observe_job: ObserveJob | None = None

    def run(self) -> Any:
        """Run the load.

        Returns:
            The result of `ckpttools.load`.

        Raises:
            CheckpointError: An array cannot be read.
        """
        from ckpttools.sharding.loading import execute_load

        if self.download:
            fetch(sources([leaf.array for leaf in self.request.arrays]), lambda done, total: None)
        observe = observe_bytes(self.observe, self.plan.bytes_in_memory)
        with use_concurrency(self.requests):
            return execute_load(
                self.request, self.plan, jobs=self.jobs, observe=observe, observe_job=self.observe_job
            )

    def __repr__(self) -> str:
        return f"PreparedLoad({self.plan!r})"


@command(Loading, returns="Any")
@declare(*OPENING, *RESOURCES)
def load(
    source: Source,
    *,
    like: Any = None,
    shardings: Any = None,
    rules: RulesLike | None = None,
    mesh: Any = None,
    to: Literal["maxtext", "hf"] | None = None,
    dtype: DType | str | None = None,
    keep: Patterns = (),
    drop: Patterns = (),
    memory_kind: str | None = None,
    max_over_read: float = 1.5,
    single_replica: bool = False,
    scan: bool | None = None,
    scan_axis: int | None = None,
    pad_vocab: int | None = None,
    family: LocationLike | None = None,
    model: LocationLike | None = None,
    rope_layout: Literal["halves", "interleaved"] | None = None,
    tied: Literal["keep", "drop", "materialize"] | None = None,
    padding_rows: Literal["keep", "drop"] | None = None,
    text_only: bool = False,
    **loading: Unpack[Loading],
) -> PreparedLoad:
    """Load a checkpoint as a pytree of `jax.Array`s, reading each byte once.

    Args:
        source: A file, item, step or run directory of any format in any store, or a tree.
        like: Template of the result: a pytree of `jax.ShapeDtypeStruct`s, arrays, PRNG keys and numbers, an
            `nnx.State`, or an `nnx.Module`, which is filled in place and returned. Names also match if the
            checkpoint nests them under one more key; other arrays are not read. None loads everything, as
            dictionaries and lists.
        shardings: A `jax.sharding.Sharding` for all arrays, or a pytree of shardings; without `like`, the
            pytree also selects the arrays to load. None for the shardings of `like`.
        rules: How to shard arrays over `mesh`: "maxtext", a file, or pairs of a logical axis and mesh axes,
            or of a path pattern and a `PartitionSpec`; see `ckpttools.sharding.rules`.
        mesh: A `jax.sharding.Mesh`, or text such as "fsdp=4,tensor=2" for a mesh of all devices. Without
            rules, the axis names of Flax variables are mesh axes.
        to: Framework whose names, layout and values the arrays get: "maxtext" for a Hugging Face model, "hf"
            for a MaxText checkpoint; None leaves them unchanged.
        dtype: Dtype of floating-point arrays, such as "bfloat16"; "like" for the dtypes of `like`; None for
            the stored dtypes. With a dtype or `to="maxtext"`, quantized weights are dequantized.
        keep, drop: Patterns of names to load or skip, after renaming; see `ckpttools.select`.
        memory_kind: Memory of the devices, such as "pinned_host"; None for that of the shardings.
        max_over_read: With several processes, the ratio of read to needed bytes above which each process
            reads one range of the array and the processes exchange the data.
        single_replica: With several processes that need the same array, whether one process reads it for all.
        scan, scan_axis, pad_vocab: For `to="maxtext"`, see `ckpttools.hf_to_maxtext`; None to match `like`.
        text_only: For `to="maxtext"`, whether to leave out the vision and audio towers.
        family, rope_layout, tied: For a conversion, see `ckpttools.hf_to_maxtext`.
        model, padding_rows: For `to="hf"`, `like` and `padding_rows` of `ckpttools.maxtext_to_hf`.
        observe: Called with the bytes loaded so far and the total; the first call has 0.
        observe_job: Called from time to time in process 0 if several processes load together, with the
            progress of each process and the processes that others wait for
            (`ckpttools.sharding.loading.JobProgress`).

    Returns:
        The tree. Arrays without a sharding are on the default device, and Python numbers remain numbers.

    Raises:
        CoverageError: Names, shapes or dtypes do not match, axes cannot be divided evenly, or JAX would
            convert 64-bit numbers to 32 bits. The message lists all of them.
        CheckpointError: The source cannot be read or converted, or does not fit into the memory.
        UsageError: Arguments contradict each other, or the dtype has too few bits for dequantized weights.
    """
    from ckpttools.sharding.assignments import is_abstract
    from ckpttools.sharding.load_plan import ReadSharing, plan_load
    from ckpttools.sharding.templates import flatten_template

    values = (rope_layout, tied, padding_rows)
    declared = Converting(scan, scan_axis, pad_vocab, text_of(family), model, *values, text_only or None)
    declared.check(to)
    memory = parse_size_option("memory", loading.get("memory", DEFAULT_MEMORY))
    expected = _tree_of(shardings) if like is None else like
    template = None if expected is None else flatten_template(expected)
    leaves = () if template is None else template.leaves
    is_cut = any(leaf.axes or is_abstract(leaf.sharding) for leaf in leaves)
    where = _combine_device_options(shardings, rules, mesh, memory_kind, is_cut=is_cut)
    with limit_memory(memory), use_concurrency(loading.get("requests")):
        tree = opened(source, read_options(part_of(loading, Opening)))
        plain = tree if dtype is None else _dequantize(tree, None if dtype == "like" else dtype_of(dtype))
        built, notes = converted(plain, to, template, declared, memory)
        if where.rules is not None:
            where.rules.check_names(built, [NamedArray(leaf.path, leaf.axes) for leaf in leaves])
        if keep or drop:
            built = built.pipe(Select(patterns_of(keep), patterns_of(drop)))
        result = _request(tree, built, template, where, dtype, to)
        plan = plan_load(result, ReadSharing(max_over_read, single_replica), memory=memory, notes=notes)
    return PreparedLoad(
        plan,
        result,
        loading.get("jobs"),
        loading.get("requests"),
        loading.get("observe") or (lambda done, total: None),
        loading.get("download", False),
        loading.get("observe_job"),
    )


def _dequantize(tree: Tree, dtype: DType | None) -> Tree:
    """Return a dequantized tree; `dtype` is that of the quantized weights."""
    view = quantized_view(tree)
    if view.is_described:
        stored = f"without {option('dtype')} quantized values and scales are loaded as stored"
        refuse_few_bits(dtype, tree.metadata.location, stored)
    return view.plain_where_possible(dtype).tree


def _request(
    source: Tree,
    tree: Tree,
    template: TreeTemplate | None,
    devices: DeviceOptions,
    dtype: DType | str | None,
    to: Literal["maxtext", "hf"] | None,
) -> Request:
    """Resolve the request. Errors name the conversion of `source` that would match."""
    from ckpttools.sharding.load_request import build_request

    try:
        target_dtype = dtype if dtype == "like" else dtype_of(dtype)
        return build_request(tree, template, devices, target_dtype, source.metadata.location)
    except CoverageError as error:
        if template is None or error.raw.hint is not None:
            raise
        raise error.at(hint=next_step(source, to, template)) from error


def _combine_device_options(
    shardings: Any, rules: RulesLike | None, mesh: Any, memory_kind: str | None, *, is_cut: bool
) -> Any:
    """Combine the device arguments.

    `is_cut` tells whether a template states how its arrays are sharded over a mesh.
    """
    import jax

    from ckpttools.sharding.assignments import DeviceOptions
    from ckpttools.sharding.templates import flatten_template

    if shardings is not None and rules is not None:
        raise UsageError(
            f"{option('shardings')} and {option('rules')} exclude each other", hint="leave one of them out"
        )
    declared = shardings
    if shardings is not None and not isinstance(shardings, jax.sharding.Sharding):
        leaves = flatten_template(shardings).leaves
        declared = {leaf.path: leaf.sharding for leaf in leaves if leaf.sharding is not None}
    devices = _mesh(mesh)
    result = None if rules is None else resolve_rules(rules)
    if devices is not None and shardings is None and result is None and not is_cut:
        raise UsageError(
            f"{option('mesh')} alone does not determine how arrays are sharded",
            hint=f"also give {option('rules', 'maxtext')}, or rules of your own",
        )
    return DeviceOptions(declared, result, devices, memory_kind)


def _mesh(mesh: Any) -> Any:
    """Create a mesh of all devices from text."""
    import jax

    if not isinstance(mesh, str):
        # The mesh that JAX uses when none is set. JAX ends the process if arrays are placed on it.
        if isinstance(mesh, jax.sharding.Mesh) and mesh.empty:
            raise UsageError("the mesh has no devices", hint="create one: jax.make_mesh((8,), ('fsdp',))")
        return mesh

    shape = parse_mesh(mesh)
    if shape.size != jax.device_count():
        raise UsageError(
            "the mesh does not have as many devices as the job",
            got=f"{mesh}, {shape.size}",
            expected=f"{jax.device_count()}",
        )
    kinds = (jax.sharding.AxisType.Auto,) * len(shape.axes)
    return jax.make_mesh(tuple(shape.axes.values()), tuple(shape.axes), axis_types=kinds)


def _tree_of(shardings: Any) -> Any:
    """Return shardings that form a tree; None if one sharding applies to all arrays."""
    import jax

    return None if isinstance(shardings, jax.sharding.Sharding) else shardings


Side = Literal["maxtext", "hf"]


@dataclass(frozen=True, slots=True)
class Converting:
    """Conversion options of `ckpttools.load`; None for options that are not given.

    Attributes:
        scan, scan_axis, pad_vocab, family, model, rope_layout, tied, padding_rows, text_only: See
            `ckpttools.load`.
    """

    scan: bool | None = None
    scan_axis: int | None = None
    pad_vocab: int | None = None
    family: str | None = None
    model: LocationLike | None = None
    rope_layout: str | None = None
    tied: str | None = None
    padding_rows: Literal["keep", "drop"] | None = None
    text_only: bool | None = None

    def check(self, to: str | None) -> None:
        """Reject options without effect.

        Raises:
            UsageError: An option requires a conversion, or the conversion in the other direction.
        """
        if to not in (None, "maxtext", "hf"):
            raise UsageError(f"unknown {option('to', to)}", expected='"maxtext", "hf" or None')
        for item in fields(self):
            value = getattr(self, item.name)
            sides = _ABOUT.get(item.name, ("maxtext", "hf"))
            if value is None or to in sides:
                continue
            choices = " or ".join(option("to", side) for side in sides)
            raise UsageError(
                f"{option(item.name, value)} applies only to conversions with {choices}",
                hint=f"leave it out, or pass {choices}",
            )

    @property
    def options(self) -> ModelOptions:
        return ModelOptions(self.family, self.rope_layout, self.tied)


# Options that apply to only one direction.
_ABOUT: Mapping[str, tuple[Side, ...]] = {
    "scan": ("maxtext",),
    "pad_vocab": ("maxtext",),
    "text_only": ("maxtext",),
    "padding_rows": ("hf",),
}


def converted(
    tree: Tree, to: str | None, template: TreeTemplate | None, declared: Converting, memory: int
) -> tuple[Tree, Notes]:
    """Return the converted tree and notes about it.

    Args:
        tree: The opened tree.
        to: Framework whose names the arrays get; None leaves them unchanged.
        template: The caller's template, which determines layers and vocabulary if the options do not.
        declared: The caller's options, already checked.
        memory: Maximum resident bytes.

    Raises:
        CheckpointError: The tree cannot be converted, or values would be lost.
    """
    if to == "maxtext":
        return _as_maxtext(tree, template, declared, memory)
    if to == "hf":
        return _as_hugging_face(tree, declared, memory)
    return tree, tree.metadata.notes


def next_step(tree: Tree, to: str | None, template: TreeTemplate) -> str:
    """Suggest `to`, or listing the names, if arrays of a template are missing.

    Args:
        tree: The opened tree, before conversion.
        to, template: See `converted`.
    """
    own = name_style(tree.arrays)
    expected = name_style([leaf.path for leaf in template.leaves])
    if to is None and own and expected and own != expected:
        whose = "MaxText's" if expected == "maxtext" else "Hugging Face's"
        model = f" and {option('model', 'HF_DIR')}" if expected == "hf" else ""
        return f"{option('like')} has {whose} names, into which {option('to', expected)}{model} converts"
    kind = (tree.metadata.config or {}).get("model_type")
    description = f"it is a model of type {kind}" if kind else "it may be another model"
    shown = (
        f": {action('inspect', tree.metadata.location)} lists its arrays" if tree.metadata.location else ""
    )
    return f"check whether {option('like')} describes this checkpoint; {description}{shown}"


def _as_maxtext(
    tree: Tree, template: TreeTemplate | None, conversion: Converting, memory: int
) -> tuple[Tree, Notes]:
    """Return the parameters of a Hugging Face model, nested as in MaxText's Linen trees."""
    with _reword_errors("maxtext"):
        refuse_maxtext(tree)
    if conversion.model is not None:
        with _reword_errors("model"):
            files = ModelFiles.of(tree, conversion.model)
        tree = tree.with_metadata(config=files.config)
    scan = _is_scanned(template) if conversion.scan is None else conversion.scan
    rows = _padding_rows_of_template(tree, template) if conversion.pad_vocab is None else conversion.pad_vocab
    axis = 1 if conversion.scan_axis is None else conversion.scan_axis
    expected = ToMaxText(
        scan=scan,
        scan_axis=axis,
        pad_vocab=rows,
        model=conversion.options,
        text_only=conversion.text_only is True,
        leaves_out=True,
    )
    result = to_maxtext(tree, expected)
    if result.lost_head is not None:
        refuse_lost_head(result.lost_head, tree, memory=memory)
    return Tree(result.parameters, result.state.metadata), result.notes


def _as_hugging_face(tree: Tree, conversion: Converting, memory: int) -> tuple[Tree, Notes]:
    """Return the arrays of a MaxText checkpoint under Hugging Face names. Fails if arrays would be lost."""
    with _reword_errors("hf"):
        refuse_hugging_face(tree)
    options = ToHuggingFace(
        like=conversion.model,
        scan_axis=conversion.scan_axis,
        model=conversion.options,
        padding_rows=conversion.padding_rows,
    )
    with _reword_errors("model"):
        files = ModelFiles.of(tree, conversion.model)
        with _name_matching_family(tree, files, conversion.family):
            result = to_huggingface(tree, options, files)
    refuse_learned_rows(
        result.extra, tree.metadata.location, conversion.padding_rows, memory=memory, reserved=0
    )
    if result.lost_head is not None:
        refuse_lost_head(result.lost_head, tree, memory=memory)
    config: Mapping[str, Any] | None = None if result.config is None else result.config.config
    return result.tree.with_metadata(config=config), result.notes


@contextmanager
def _reword_errors(subject: str) -> Iterator[None]:
    """Rewrite the hints of conversion errors raised inside the `with` for `load`."""
    try:
        yield
    except FormatError as error:
        if subject == "model":
            raise
        raise error.at(
            hint=f"leave out {option('to', subject)}: the arrays already have these names"
        ) from error
    except (ConfigError, StorageError) as error:
        # The conversion functions call the model `like`.
        raise error.at(hint=rename_option(error.raw.hint or "", "like", "model") or None) from error


@contextmanager
def _name_matching_family(tree: Tree, files: ModelFiles, family: str | None) -> Iterator[None]:
    """Name the family that matches the arrays in coverage errors raised inside the `with`."""
    try:
        yield
    except CoverageError as error:
        families = families_with_names_of(tree)
        if not families:
            raise
        names = f"the arrays have the names of {' and '.join(families)}"
        if family is not None:
            raise error.at(hint=f"{names}: leave out {option('family', family)}") from error
        kind = f"{files.location} is of model_type {(files.config or {}).get('model_type')!r}"
        hint = f"{kind}, {names}: name the model they came from with {option('model')}"
        raise error.at(hint=hint) from error


def _is_scanned(template: TreeTemplate | None) -> bool:
    """Return whether a template's layers are stacked: no key below the decoder has a layer index."""
    names = [leaf.name for leaf in template.leaves] if template else []
    return not any(re.search(r"(^|/)decoder/(\w+_)?layers_\d+/", name) for name in names)


def _padding_rows_of_template(tree: Tree, template: TreeTemplate | None) -> int | None:
    """Return the template's number of embedding rows if it exceeds the vocabulary, with a warning."""
    config = tree.metadata.config or {}
    vocab = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    expected = [leaf.shape for leaf in template.leaves if leaf.path[-2:] == EMBEDDING] if template else []
    rows = expected[0][0] if expected and expected[0] else None
    if not rows or not isinstance(vocab, int) or rows <= vocab:
        return None
    text = (
        f"{option('like')} has {rows} rows of token embeddings, the model {vocab}: the other {rows - vocab} "
        f"are zeros, as with {option('pad_vocab', rows)}"
    )
    warnings.warn(text, PaddedVocabularyWarning, stacklevel=2)
    return rows
