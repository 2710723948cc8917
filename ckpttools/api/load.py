"""Load checkpoints into JAX arrays on their devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ckpttools.api.arguments import Patterns, dtype_of, patterns_of, text_of
from ckpttools.api.load_conversion import Converting, converted, next_step
from ckpttools.api.options import OPENING, RESOURCES
from ckpttools.api.prepared import command
from ckpttools.api.sources import (
    DEFAULT_MEMORY,
    Observe,
    Opening,
    Scanning,
    Source,
    opened,
    part_of,
    read_options,
)
from ckpttools.array.fingerprint import sources
from ckpttools.core.budget import limit_memory
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import CoverageError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.options import declare, parse_size_option
from ckpttools.quantized.unsupported_errors import refuse_few_bits
from ckpttools.quantized.view import quantized_view
from ckpttools.sharding.loading import JobProgress
from ckpttools.sharding.mesh import parse_mesh
from ckpttools.sharding.rules import RulesLike, resolve_rules
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.fetching import fetch
from ckpttools.stores.registry import LocationLike
from ckpttools.transforms.select import Select

if TYPE_CHECKING:
    from ckpttools.array.tree import Tree
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
        total, done = self.plan.bytes_in_memory, 0

        def observe(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self.observe(done, total)

        self.observe(0, total)
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
    where = _where(shardings, rules, mesh, memory_kind, is_cut=is_cut)
    with limit_memory(memory), use_concurrency(loading.get("requests")):
        tree = opened(source, read_options(part_of(loading, Opening)))
        plain = tree if dtype is None else _numbers(tree, None if dtype == "like" else dtype_of(dtype))
        built, notes = converted(plain, to, template, declared, memory)
        if where.rules is not None:
            where.rules.check_patterns([*built.arrays, *(leaf.path for leaf in leaves)])
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


def _numbers(tree: Tree, dtype: DType | None) -> Tree:
    """Return a dequantized tree; `dtype` is that of the quantized weights."""
    view = quantized_view(tree)
    if view.is_described:
        stored = f"without {option('dtype')} quantized values and scales are loaded as stored"
        refuse_few_bits(dtype, tree.metadata.location, stored)
    return view.plain_where_possible(dtype).tree


def _request(
    source: Tree,
    built: Tree,
    template: TreeTemplate | None,
    devices: DeviceOptions,
    dtype: DType | str | None,
    to: Literal["maxtext", "hf"] | None,
) -> Request:
    """Resolve the request. Errors name the conversion of `source` that would match."""
    from ckpttools.sharding.load_request import build_request

    try:
        chosen = dtype if dtype == "like" else dtype_of(dtype)
        return build_request(built, template, devices, chosen, source.metadata.location)
    except CoverageError as error:
        if template is None or error.raw.hint is not None:
            raise
        raise error.at(hint=next_step(source, to, template)) from error


def _where(
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
    built = None if rules is None else resolve_rules(rules)
    if devices is not None and shardings is None and built is None and not is_cut:
        raise UsageError(
            f"{option('mesh')} alone does not determine how arrays are sharded",
            hint=f"also give {option('rules', 'maxtext')}, or rules of your own",
        )
    return DeviceOptions(declared, built, devices, memory_kind)


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
