"""Rewrite a checkpoint's chunks and shardings for a mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import field, fields, replace
from functools import cached_property
from typing import Unpack

from ckpttools.api.chunks import MeshReads, predict_mesh_reads
from ckpttools.api.convert import ChangedRun
from ckpttools.api.options.convert import CHANGING, RESHARD
from ckpttools.api.prepared import Prepared, WriteRequest, Writing, command
from ckpttools.api.sources import Opening, Size, Source, opened, part_of, read_options, rest_of
from ckpttools.api.tree_plan import plan_tree
from ckpttools.array.storage import Sharding
from ckpttools.array.tree import Path, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ShapeError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.core.options import declare, parse_size_option
from ckpttools.core.region import Shape
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.formats.registry import stored_shardings, writer_for, writer_options
from ckpttools.formats.zarr.chunking import GivenChunks
from ckpttools.run.events import Receipt
from ckpttools.sharding.mesh import MeshShape, Spec, mesh_chunk, parse_mesh, shard_shape
from ckpttools.sharding.rules import AppliedRules, RulesLike, resolve_rules
from ckpttools.stores.registry import LocationLike, parse


@dataclass(frozen=True, slots=True, repr=False)
class Resharded(Receipt):
    """The receipt of a finished reshard.

    Attributes:
        mesh_reads: Reads of the mesh's devices before and after.
    """

    mesh_reads: MeshReads | None = None


@dataclass(frozen=True, repr=False)
class PreparedReshard(Prepared):
    """A planned reshard.

    Attributes:
        asked: The source, mesh and rules.
        reading: How the source was opened.
    """

    asked: AppliedRules | None = None
    reading: ReadOptions = field(default_factory=ReadOptions)

    @cached_property
    def mesh_reads(self) -> MeshReads | None:
        """Return the mesh's reads of the source and of the result; see `predict_mesh_reads` for errors."""
        plan, rules = self.plan, self.asked
        return None if rules is None else predict_mesh_reads(rules, self.reading, plan.tree, plan.layout)

    def execute(
        self,
        planned: str = "",
        check_replaced: Callable[[], None] = lambda: None,
        finalize: Callable[[], None] = lambda: None,
    ) -> Resharded:
        """Run the reshard; see `Prepared.execute` for arguments and errors."""
        mesh_reads = self.mesh_reads  # Computed from the source, before anything is written.
        done = Prepared.execute(self, planned, check_replaced, finalize)
        return Resharded(
            **{item.name: getattr(done, item.name) for item in fields(done)}, mesh_reads=mesh_reads
        )


@command(ChangedRun, more=writer_options, returns="Resharded")
@declare(*RESHARD, *CHANGING)
def reshard(
    source: Source,
    destination: LocationLike,
    *,
    mesh: str,
    rules: RulesLike = "maxtext",
    subchunks: Size | None = None,
    **common: Unpack[ChangedRun],
) -> PreparedReshard:
    """Write an Orbax checkpoint in which each device of a mesh reads full chunks.

    The checkpoint also stores how the arrays are sharded over the mesh, and Orbax restores them that way
    unless the caller passes another sharding. No device is needed, and memory is limited as in any other
    conversion.

    Args:
        source: A file, item, step or run directory, or a tree.
        destination: The directory to create. It appears only when everything is written.

    Raises:
        UsageError: No mesh or no rules are given, the mesh lacks an axis, a pattern matches no array, or
            chunks are given as well.
        ShapeError: An axis cannot be divided evenly over the mesh. The message names the first one.
        CheckpointError: See `ckpttools.convert`.
    """
    opening, writing = part_of(common, Opening), part_of(common, Writing)
    write_options = rest_of(common, Opening, Writing)
    _check(write_options)
    devices, built = parse_mesh(mesh), resolve_rules(rules)
    limit = None if subchunks is None else parse_size_option("subchunks", subchunks)
    reading = read_options(opening)
    with WriteRequest(source, destination, **writing) as request:
        tree = opened(source, reading)
        writer = writer_for(
            tree, "orbax", parse(destination), keeps_names=True, **{**write_options, "reference": False}
        )
        if not isinstance(writer, OrbaxWriter):
            raise TypeError(f"{writer!r} does not write Orbax")
        applied = AppliedRules(built, tree, devices)
        grid = mesh_grid(applied, limit, jax_arrays=stored_shardings(tree))
        result = replace(writer, chunks=GivenChunks(exact=grid.chunks), shardings=grid.shardings)
        notes = tree.metadata.notes + Notes(remarks=tuple(applied.remarks()))
        tree = replace(tree, metadata=replace(tree.metadata, notes=notes))
        prepared = request.complete(plan_tree(tree, result, request.resources))
    declared = {item.name: getattr(prepared, item.name) for item in fields(prepared)}
    return PreparedReshard(**declared, asked=applied, reading=reading)


def _check(declared: Mapping[str, object]) -> None:
    """Raise UsageError for options that contradict the mesh."""
    if declared.get("format") not in (None, "orbax"):
        raise UsageError(
            "only Orbax records how arrays are sharded over a mesh", got=option("format", declared["format"])
        )
    for name in ("chunks", "reference"):
        if declared.get(name):
            raise UsageError(
                f"{option(name)} and a mesh both determine how arrays are stored",
                hint=f"leave {option(name)} out: the mesh determines the chunks",
            )


@dataclass(frozen=True, slots=True)
class MeshGrid:
    """Chunks and shardings of arrays on a mesh.

    Attributes:
        chunks: Chunk shape of each array.
        shardings: Sharding of each array over the mesh.
    """

    chunks: Mapping[Path, Shape]
    shardings: Mapping[Path, Sharding]


# Without `jax_enable_x64`, JAX replaces these dtypes by dtypes of half the width.
_WIDE_DTYPES = frozenset(("int64", "uint64", "float64", "complex128"))


def mesh_grid(applied: AppliedRules, limit: int | None = None, jax_arrays: Collection[Path] = ()) -> MeshGrid:
    """Return the chunks and shardings of all arrays of a tree.

    Python numbers and 64-bit numpy arrays get chunks but no sharding: Orbax restores an array that has a
    sharding as a JAX array, in 32 bits unless `jax_enable_x64` is set.

    Args:
        applied: How rules shard the arrays that will be written; other arrays are replicated.
        limit: Maximum bytes of a chunk; None for 64 MiB.
        jax_arrays: Arrays that were saved from JAX arrays, so that 64-bit ones keep a sharding.

    Raises:
        UsageError: The pattern of a rule matches no array.
        ShapeError: An axis of an array cannot be divided evenly.
    """
    tree, mesh = applied.tree, applied.mesh
    applied.rules.check_names(tree)
    chunks: dict[Path, Shape] = {}
    shardings: dict[Path, Sharding] = {}
    axes = tuple(mesh.axes.items())
    for path, spec in applied.specs():
        array = tree.arrays[path]
        shard = _shard(path, array.shape, spec, mesh)
        is_wide = array.dtype.name in _WIDE_DTYPES and path not in jax_arrays
        if not is_wide and path not in tree.metadata.key_impls and path not in tree.metadata.scalars:
            shardings[path] = Sharding("NamedSharding", axes, _without_ends(spec))
        if array.size:
            stacked = array.stacked_axes
            chunks[path] = mesh_chunk(array.shape, shard, array.dtype.itemsize, stacked, limit)
    return MeshGrid(chunks, shardings)


def _shard(path: Path, shape: Shape, spec: Spec, mesh: MeshShape) -> Shape:
    try:
        return shard_shape(shape, spec, mesh)
    except ShapeError as error:
        raise error.at(
            keystr(path), hint="choose another mesh, or rules that do not shard this axis"
        ) from error


def _without_ends(spec: Spec) -> Spec:
    """Return the spec without trailing unsharded axes."""
    entries = list(spec)
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)
